"""A plan as an expert would sum it up: what `print(plan)` shows.

A step has hundreds of arguments, and most lie alike. Three foldings bring them to a few lines, and none says
more than the plan does:

* *Followers.* A subtree that repeats the leaves of another (an optimizer's moments repeat the parameters) is
  named once, and only those of its leaves are listed that lie otherwise. The subtree that is repeated, the
  *model*, is found by structure: the shallowest one with the most followers.
* *Boxes.* Arguments with one spec whose paths differ in one place become one line, again and again:
  `['block_*']` stands for all numbers that occur there, `['block_0-3']` for these, `['key'|'query']` for
  either. A line is always a full product.
* *The replicated rest* is summed up by the last names of its paths.

NNX's closing `.value` is left out of the paths; a plan's keys carry it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from cost_model.cluster import Cluster
from cost_model.collectives import MeshModel
from cost_model.errors import InputError, PlanError
from cost_model.units import format_bytes, format_rate, format_seconds
from search.plan.plan import Estimates, Plan
from search.plan.text_table import aligned

_MAX_ARGUMENT_LINES = 16
"""Lines for the arguments of one section. Source: four sections and the rest still fit a tall terminal."""

_MAX_OP_LINES = 6
"""Lines for the heavy ops, as they are many and much alike. Source: a choice of ours."""

_MAX_NAMES = 6
"""Names in one list before it is cut short. Source: a choice of ours."""

_REPLICATED = "P()"

_HEAVY = re.compile(
    r"(?:^|[ /])(dot_general|ragged_dot\w*|conv_general_dilated|gather|scatter-add)(?: #\d+)?$"
)
"""Op names of a plan that end in a primitive which moves or multiplies much."""

Tokens = tuple[str, ...]
"""A pytree path in pieces: `("state", "['params']", "[0]", ".kernel")`."""


def summary(plan: Plan) -> str:
    """The plan in plain text: how things lie, what is communicated, the time and the memory predicted.

    Args:
      plan: from `search`, or loaded.

    Returns:
      Lines for a terminal, the same for the same plan but for the search time, which only fresh plans have.

    Raises:
      PlanError: a loaded plan's cluster does not make sense, or has not as many devices as the mesh.
    """
    try:
        cluster = Cluster.from_json(plan.cluster, "plan: cluster")
        model = MeshModel(cluster, tuple(plan.decisions.mesh.values()))
    except InputError as e:
        raise PlanError(str(e)) from e
    parts = [
        _head(plan, cluster, model),
        _arguments(plan.decisions.arguments),
        _ops(plan.decisions.ops),
        _collectives(plan.estimates),
        _time(plan.estimates),
        _memory(plan.estimates, plan.memory_bytes),
        _search(plan),
    ]
    return "\n".join("\n".join(lines) for lines in parts if lines)


# --- the parts


def _head(plan: Plan, cluster: Cluster, model: MeshModel) -> list[str]:
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    mesh = plan.decisions.mesh
    axes = [f"{name} {_lies(model, i)}" for i, (name, size) in enumerate(mesh.items()) if size > 1]
    rows = [
        ("step", f"{plan.step} (fingerprint {plan.fingerprint}, JAX {plan.jax})"),
        ("cluster", f"{cluster.name}: {nodes} of {cluster.devices_per_node} {cluster.device.name}"),
        (
            "mesh",
            " x ".join(f"{name}={size}" for name, size in mesh.items())
            + (f": {', '.join(axes)}" if axes else ""),
        ),
    ]
    given = ", ".join(f"{key} {value}" for key, value in plan.options.items())
    return aligned([*rows, ("given", given)] if given else rows, indent=0)


def _lies(model: MeshModel, axis: int) -> str:
    place = "across nodes" if model.group((axis,)).crosses_nodes else "inside a node"
    return f"{place} ({format_rate(model.axis_link(axis)[0])})"


def _ops(ops: Mapping[str, str]) -> list[str]:
    """How often each decision is taken for a kind of heavy op."""
    taken = Counter((found[1], text) for name, text in ops.items() if (found := _HEAVY.search(name)))
    rows = [(primitive, f"{count}x", text) for (primitive, text), count in taken.most_common()]
    if not rows:
        return []
    more = _more(sum(n for _, n in taken.most_common()[_MAX_OP_LINES:]), "kind")
    return [
        f"heavy ops ({_plural(taken.total(), 'kind')})",
        *aligned(rows[:_MAX_OP_LINES], right=(1,)),
        *more,
    ]


def _collectives(estimates: Estimates) -> list[str]:
    if not estimates.collectives:
        return ["collectives per step: none"]
    ordered = sorted(estimates.collectives, key=lambda c: -c.seconds)
    rows = [
        (c.kind, f"over {', '.join(c.axes)}", f"{c.count}x", format_bytes(c.bytes), format_seconds(c.seconds))
        for c in ordered
    ]
    count, num_bytes = sum(c.count for c in ordered), sum(c.bytes for c in ordered)
    total = (
        "total",
        "",
        f"{count}x",
        format_bytes(num_bytes),
        format_seconds(sum(c.seconds for c in ordered)),
    )
    return [
        "collectives per step (bytes per device)",
        *aligned([*rows, *[total] * (len(rows) > 1)], right=(2, 3, 4)),
    ]


def _time(estimates: Estimates) -> list[str]:
    parts = {"computation": estimates.compute_s}
    for c in estimates.collectives:
        parts[c.kind] = parts.get(c.kind, 0.0) + c.seconds
    if estimates.hidden_s > 1e-6 * estimates.step_s:
        parts["hidden behind computation"] = -estimates.hidden_s
    rows = [(name, format_seconds(s), _percent(s, estimates.step_s)) for name, s in parts.items()]
    return [f"predicted step time: {format_seconds(estimates.step_s)}", *aligned(rows, right=(1, 2))]


def _memory(estimates: Estimates, cap_bytes: int) -> list[str]:
    peak = estimates.peak_bytes
    residents = sorted(estimates.residents.items(), key=lambda item: -item[1])
    rows = [(kind.replace("_", " "), format_bytes(b), _percent(b, peak)) for kind, b in residents]
    of_cap = f"{format_bytes(cap_bytes)} per device ({_percent(peak, cap_bytes)})"
    title = f"predicted peak memory: {format_bytes(peak)} of {of_cap}"
    lines = [title, *aligned(rows, right=(1, 2)), f"  at {_short_source(estimates.peak_at)}"]
    return (
        [*lines, f"  on the host: {format_bytes(estimates.host_bytes)} per device"]
        if estimates.host_bytes
        else lines
    )


def _gap(gap: float | None) -> str:
    if gap is None:
        return "certified gap: none, as these decisions were edited by hand"
    is_proven = gap < 1e-9  # the solver's own rounding
    within = "it is the fastest" if is_proven else f"within {100 * gap:.2g}% of the fastest"
    return f"certified gap: {within} plan of its search space, by this cost model"


def _search(plan: Plan) -> list[str]:
    lines = [_gap(plan.gap)]
    if plan.search_s:
        split = ", ".join(f"{name} {format_seconds(s)}" for name, s in plan.search_s.items())
        lines.append(f"search time: {format_seconds(sum(plan.search_s.values()))} ({split})")
    return lines


# --- arguments


@dataclass(frozen=True, slots=True)
class _Section:
    """Arguments under one title, by their path below it.

    Attributes:
      title: what they have in common; empty when they are all there is.
      specs: per path below.
      copies: how many arguments each of these paths stands for.
      among: the paths from which these were taken.
    """

    title: str
    specs: Mapping[Tokens, str]
    copies: int
    among: Iterable[Tokens]


def _arguments(arguments: Mapping[str, str]) -> list[str]:
    lines = [f"arguments ({_plural(len(arguments), 'array')})"]
    for section in _sections({_tokens(path): spec for path, spec in arguments.items()}):
        found, indent = _lines(section), 4 if section.title else 2
        rows = [(spec, f"{count}x", path) for spec, count, path in found[:_MAX_ARGUMENT_LINES]]
        more = _more(sum(count for _, count, _ in found[_MAX_ARGUMENT_LINES:]), "array", indent)
        lines += [f"  {section.title}"] if section.title else []
        lines += [*aligned(rows, indent, right=(1,)), *more]
    return lines


def _sections(specs: Mapping[Tokens, str]) -> Iterator[_Section]:
    """The model, what of its followers lies otherwise, then everything else."""
    below = _below(specs)
    model, followers = _model(below, len(specs))
    if not followers:
        yield _Section("", specs, 1, specs)
        return
    alike = sum(specs[q + tail] == specs[model + tail] for q in followers for tail in below[q])
    title = f"{''.join(model)} ({len(below[model])})"
    title += f"; {alike} lie alike in {_names(followers)}" if alike else ""
    yield _Section(title, {tail: specs[model + tail] for tail in below[model]}, 1, below[model])
    for prefixes, tails in _otherwise(specs, model, {q: below[q] for q in followers}).items():
        title = f"{_names(prefixes)} ({len(prefixes) * len(tails)}, unlike their parameters)"
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
    """The subtree repeated most, and what repeats it; `((), [])` if none makes up most of the step."""
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
    """(spec, number of arguments, their paths) of each line: most common first, what is replicated last."""
    universe = _universe(section.among)
    lines = [
        (spec, section.copies * _size(box), _box_text(box, universe)) for spec, box in _boxes(section.specs)
    ]
    split = sorted((line for line in lines if line[0] != _REPLICATED), key=lambda line: -line[1])
    replicated = [line for line in lines if line[0] == _REPLICATED]
    if len(replicated) <= 2:
        return split + replicated
    names = Counter(_last_name(path) for path, spec in section.specs.items() if spec == _REPLICATED)
    shown = [f"{section.copies * count} {name}" for name, count in names.most_common(_MAX_NAMES)]
    text = ", ".join([*shown, *["..."] * (len(names) > len(shown))])
    return [*split, (_REPLICATED, section.copies * names.total(), text)]


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


def _merged(boxes: Sequence[tuple[str, Box]], place: int, kind: Any) -> list[tuple[str, Box]]:
    groups: dict[Any, list[Box]] = {}
    for spec, box in boxes:
        deep = place < len(box)
        key = (spec, box[:place], kind(box[place]), box[place + 1 :]) if deep else (spec, box)
        groups.setdefault(key, []).append(box)
    merged = []
    for (spec, *_), group in groups.items():
        tokens = (tuple(t for box in group for t in box[place]),) if place < len(group[0]) else ()
        merged.append((spec, (*group[0][:place], *tokens, *group[0][place + 1 :])))
    return merged


def _universe(paths: Iterable[Tokens]) -> dict[tuple[Tokens, str], set[str]]:
    """What occurs where: after a prefix, for a token but for its numbers, the tokens."""
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
        return template.replace("*", "*" if set(tokens) >= occurring else _ranges(numbers))
    opening, closing = ("[", "]") if tokens[0].startswith("[") else (".", "")
    names = [t.removeprefix(opening).removesuffix(closing) for t in tokens]
    cut = [*names[:_MAX_NAMES], "..."] if len(names) > _MAX_NAMES else names
    return f"{opening if all(t.startswith(opening) for t in tokens) else ''}{'|'.join(cut)}{closing}"


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,7` of 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _size(box: Box) -> int:
    size = 1
    for tokens in box:
        size *= len(tokens)
    return size


def _tokens(path: str) -> Tokens:
    pieces = re.findall(r"\['(?:[^'\\]|\\.)*'\]|\[\"(?:[^\"\\]|\\.)*\"\]|\[[^\]'\"]*\]|\.?[^.\[\]]+", path)
    return tuple(pieces) if "".join(pieces) == path else (path,)


def _unnumbered(tokens: Tokens) -> Tokens:
    return tuple(re.sub(r"\d+", "*", token) for token in tokens)


def _last_name(path: Tokens) -> str:
    named = [t for t in path if t != ".value" and not re.fullmatch(r"\[\d+\]", t)]
    return (named or list(path))[-1].strip("[].'\"")


# --- text


def _more(count: int, what: str, indent: int = 2) -> list[str]:
    return [f"{' ' * indent}... and {count} more {what}{'' if count == 1 else 's'}"] if count else []


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _percent(part: float, whole: float) -> str:
    if whole <= 0:
        return "-"
    return "<1%" if 0 < part < 0.005 * whole else f"{100 * part / whole:.0f}%"


def _short_source(where: str) -> str:
    """With the file's last two folders only."""

    def short(match: re.Match[str]) -> str:
        return f"({'/'.join(PurePath(match[1]).parts[-2:])}:{match[2]})"

    return re.sub(r"\((\S[^()]*):(\d+)\)$", short, where)
