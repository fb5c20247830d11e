"""The arguments of a step by their shardings: hundreds of them in a few lines.

A step has hundreds of arguments, and most are sharded alike. Three foldings bring them to a few lines, and none says
more than the plan does:

* *Followers.* A subtree that repeats the leaves of another (an optimizer's moments repeat the parameters) is
  named once, and only those of its leaves are listed that are sharded differently. The subtree that is repeated, the
  *model*, is found by structure: the shallowest one with the most followers.
* *Boxes.* Arguments with one spec whose paths differ in one place become one line, again and again:
  `['block_*']` stands for all numbers that occur there, `['block_0-3']` for these, `['key'|'query']` for
  either. A line is always a full product.
* *The replicated rest* is summed up by the last names of its paths.

NNX's closing `.value` is left out of the paths; a plan's keys carry it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from autoshard.search.plan.argument_paths import Tokens, pieces
from autoshard.search.plan.number_ranges import ranges
from autoshard.search.plan.text_table import NAMES_IN_A_LINE, aligned, few, more_of, plural

_MAX_ARGUMENT_LINES = 16
"""Lines for the arguments of one section. Source: four sections and the rest still fit a tall terminal."""

_REPLICATED = "P()"


@dataclass(frozen=True, slots=True)
class _Section:
    """Arguments under one title, by their path below it.

    Attributes:
      title: the path or paths that they share; empty if the step has no other arguments.
      specs: the spec per path below.
      copies: number of arguments that each of these paths stands for.
      among: all paths from which these were taken.
    """

    title: str
    specs: Mapping[Tokens, str]
    copies: int
    among: Iterable[Tokens]


def argument_lines(arguments: Mapping[str, str]) -> list[str]:
    """Lines for a terminal: spec, how many arguments, their paths."""
    lines = [f"arguments ({plural(len(arguments), 'array')})"]
    for section in _sections({pieces(path): spec for path, spec in arguments.items()}):
        found, indent = _lines(section), 4 if section.title else 2
        rows = [(spec, f"{count}x", path) for spec, count, path in found[:_MAX_ARGUMENT_LINES]]
        more = more_of(sum(count for _, count, _ in found[_MAX_ARGUMENT_LINES:]), "array", indent)
        lines += [f"  {section.title}"] if section.title else []
        lines += [*aligned(rows, indent, right=(1,)), *more]
    return lines


def _sections(specs: Mapping[Tokens, str]) -> Iterator[_Section]:
    """The model, then the leaves of its followers that have other specs, then all other arguments."""
    below = _below(specs)
    model, followers = _model(below, len(specs))
    if not followers:
        yield _Section("", specs, 1, specs)
        return
    alike = sum(specs[q + tail] == specs[model + tail] for q in followers for tail in below[q])
    title = f"{''.join(model)} ({len(below[model])})"
    title += f"; {alike} sharded alike in {_names(followers)}" if alike else ""
    yield _Section(title, {tail: specs[model + tail] for tail in below[model]}, 1, below[model])
    for prefixes, tails in _otherwise(specs, model, {q: below[q] for q in followers}).items():
        title = f"{_names(prefixes)} ({len(prefixes) * len(tails)}, sharded differently)"
        yield _Section(title, tails, len(prefixes), below[model])
    rest = {
        path: spec
        for path, spec in specs.items()
        if not any(path[: len(p)] == p for p in (model, *followers))
    }
    if rest:
        yield _Section(f"others ({len(rest)})", rest, 1, rest)


def _otherwise(
    specs: Mapping[Tokens, str], model: Tokens, followers: Mapping[Tokens, Iterable[Tokens]]
) -> dict[tuple[Tokens, ...], dict[Tokens, str]]:
    """The leaves that do not lie as the model's: per group of followers that agree on them, their specs."""
    agreed: dict[tuple[Tokens, str], list[Tokens]] = {}
    for prefix, tails in followers.items():
        for tail in tails:
            if specs[prefix + tail] != specs[model + tail]:
                agreed.setdefault((tail, specs[prefix + tail]), []).append(prefix)
    groups: dict[tuple[Tokens, ...], dict[Tokens, str]] = {}
    for (tail, spec), prefixes in agreed.items():
        groups.setdefault(tuple(prefixes), {})[tail] = spec
    return groups


def _names(prefixes: Iterable[Tokens]) -> str:
    return ", ".join(map("".join, prefixes))


def _below(paths: Mapping[Tokens, str]) -> dict[Tokens, dict[Tokens, None]]:
    """For every prefix of a path: the paths below it, without the prefix."""
    below: dict[Tokens, dict[Tokens, None]] = {}
    for path in paths:
        for n in range(1, len(path)):
            below.setdefault(path[:n], {})[path[n:]] = None
    return below


def _model(below: Mapping[Tokens, Mapping[Tokens, None]], total: int) -> tuple[Tokens, list[Tokens]]:
    """The subtree with the most followers, and its followers; `((), [])` if none makes up most of the step."""
    best: tuple[tuple[int, int, bool], Tokens, list[Tokens]] = ((0, 0, False), (), [])
    for prefix, tails in below.items():
        if len(tails) * 8 < total or len(tails) < 2:
            continue
        followers = [q for q, others in below.items() if _follows(q, others, prefix, tails)]
        covered = sum(len(below[q]) for q in followers)
        if covered and 2 * len(tails) > total - covered:
            best = max(
                best, ((covered, -len(prefix), "param" in prefix[-1]), prefix, followers), key=lambda b: b[0]
            )
    return best[1], best[2]


def _follows(
    other: Tokens, others: Mapping[Tokens, None], prefix: Tokens, tails: Mapping[Tokens, None]
) -> bool:
    """Whether a subtree repeats most leaves of `prefix`, no others, and is not its neighbour in a list."""
    if len(other) < len(prefix) or not len(tails) < 2 * len(others) <= 2 * len(tails):
        return False
    nested = other[: len(prefix)] == prefix
    return not nested and _unnumbered(other) != _unnumbered(prefix) and others.keys() <= tails.keys()


def _lines(section: _Section) -> list[tuple[str, int, str]]:
    """(spec, number of arguments, their paths) of each line: the most common spec first, replicated arguments last."""
    universe = _universe(section.among)
    lines = [
        (spec, section.copies * prod(map(len, box)), _box_text(box, universe))
        for spec, box in _boxes(section.specs)
    ]
    split = sorted((line for line in lines if line[0] != _REPLICATED), key=lambda line: -line[1])
    replicated = [line for line in lines if line[0] == _REPLICATED]
    if len(replicated) <= 2:
        return split + replicated
    names = Counter(_last_name(path) for path, spec in section.specs.items() if spec == _REPLICATED)
    counted = few([f"{section.copies * count} {name}" for name, count in names.most_common()])
    return [*split, (_REPLICATED, section.copies * names.total(), counted)]


Box = tuple[tuple[str, ...], ...]
"""For each place in a path the tokens that may stand there: a product of paths."""


def _boxes(specs: Mapping[Tokens, str]) -> list[tuple[str, Box]]:
    """Merges paths of one spec that differ in one place: numbers first, from the left, then names."""
    boxes: list[tuple[str, Box]] = [(spec, tuple((token,) for token in path)) for path, spec in specs.items()]
    depth = max(map(len, specs), default=0)
    for place in range(depth):
        boxes = _merged(boxes, place, lambda tokens: re.sub(r"\d+", "*", tokens[0]))
    for place in reversed(range(depth)):
        boxes = _merged(boxes, place, lambda tokens: "")
    return boxes


def _merged(
    boxes: Sequence[tuple[str, Box]], place: int, kind: Callable[[Tokens], str]
) -> list[tuple[str, Box]]:
    groups: dict[Any, list[Box]] = {}
    for spec, box in boxes:
        deep = place < len(box)
        key = (spec, box[:place], kind(box[place]), box[place + 1 :]) if deep else (spec, box)
        groups.setdefault(key, []).append(box)
    merged: list[tuple[str, Box]] = []
    for (spec, *_), group in groups.items():
        tokens = (tuple(t for box in group for t in box[place]),) if place < len(group[0]) else ()
        merged.append((spec, (*group[0][:place], *tokens, *group[0][place + 1 :])))
    return merged


def _universe(paths: Iterable[Tokens]) -> dict[tuple[Tokens, str], set[str]]:
    """Tokens by their place: after a prefix, and for a token without its numbers, the tokens that occur."""
    found: dict[tuple[Tokens, str], set[str]] = {}
    for path in paths:
        for i, token in enumerate(path):
            found.setdefault((_unnumbered(path[:i]), re.sub(r"\d+", "*", token)), set()).add(token)
    return found


def _box_text(box: Box, universe: Mapping[tuple[Tokens, str], set[str]]) -> str:
    prefix = tuple(re.sub(r"\d+", "*", tokens[0]) for tokens in box)
    text = "".join(
        _choice_text(tokens, universe.get((prefix[:i], prefix[i]), set())) for i, tokens in enumerate(box)
    )
    return text.removesuffix(".value")


def _choice_text(tokens: tuple[str, ...], occurring: set[str]) -> str:
    if len(tokens) == 1:
        return tokens[0]
    template = _unnumbered(tokens[:1])[0]
    if template.count("*") == 1 and all(_unnumbered((t,))[0] == template for t in tokens):
        numbers = sorted(int(re.findall(r"\d+", t)[0]) for t in tokens)
        return template.replace("*", "*" if set(tokens) >= occurring else ranges(numbers))
    opening, closing = ("[", "]") if tokens[0].startswith("[") else (".", "")
    names = [t.removeprefix(opening).removesuffix(closing) for t in tokens]
    cut = [*names[:NAMES_IN_A_LINE], "..."] if len(names) > NAMES_IN_A_LINE else names
    return f"{opening if all(t.startswith(opening) for t in tokens) else ''}{'|'.join(cut)}{closing}"


def _unnumbered(tokens: Tokens) -> Tokens:
    return tuple(re.sub(r"\d+", "*", token) for token in tokens)


def _last_name(path: Tokens) -> str:
    named = [t for t in path if t != ".value" and not re.fullmatch(r"\[\d+\]", t)]
    return (named or list(path))[-1].strip("[].'\"")
