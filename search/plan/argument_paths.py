"""Paths of arguments: in pieces, folded to stand for several, and the same leaf in another step.

Plans call arguments by their pytree paths. A summary folds these (`search.plan.argument_lines`):
`['blocks'][*]['w*']` has a `*` where numbers stand, `['block_0-3']` some of them, `['key'|'query']` either name. `unfolded`
reads such a path as it was printed: without its beginning, which stands in a title, and without NNX's closing `.value`.
A path may also end early, and stand for the subtree there (`within`).

Two steps on the same state call it differently: `state.params['head']['kernel']` here is `params['head']['kernel']` there,
or `variables['params']['head']['kernel']`. `Counterparts` finds one's arguments among the other's: by the same path, or by a
path that is the same from some argument's name on, the longest first. A number alone is no name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from autoshard.search.plan.number_ranges import numbers_of

Tokens = tuple[str, ...]
"""A pytree path in pieces: `("state", "['params']", "[0]", ".kernel")`."""

_TOKEN = re.compile(
    r"\['(?:[^'\\]|\\.)*'(?:\|'(?:[^'\\]|\\.)*')*\]|\[\"(?:[^\"\\]|\\.)*\"\]|\[[^\]'\"]*\]|\.?[^.\[\]]+"
)
"""A key, several keys of which one is meant, a number, or an attribute."""

_BOX = ".value"
"""The end that NNX adds to the path of a variable."""


def pieces(path: str) -> Tokens:
    """A path in pieces; one that is no path is one piece."""
    found = _TOKEN.findall(path)
    return tuple(found) if path and "".join(found) == path else (path,)


def ending_in(path: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names that are a path, or end in it."""
    if path in names:
        return (path,)
    wanted = pieces(path.removesuffix(_BOX))
    return tuple(
        n for n in names if pieces(n.removesuffix(_BOX))[-len(wanted) :] in (wanted, _dotted(wanted))
    )


def unfolded(path: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names that a folded path stands for."""
    wanted = [re.compile(_pattern(piece)) for piece in pieces(path.removesuffix(_BOX))]
    return tuple(name for name in names if _ends_so(pieces(name.removesuffix(_BOX)), wanted))


def within(path: str, names: Sequence[str]) -> dict[str, Tokens]:
    """The names in the subtree that a path stands for, each with its own path up to there: those below this very path; or
    below one that ends in it; or below all that it stands for, if it is folded."""
    wanted = pieces(path.removesuffix(_BOX))
    patterns = [re.compile(_pattern(piece)) for piece in wanted]
    own = {name: pieces(name.removesuffix(_BOX)) for name in names}

    def below(is_named: Callable[[Tokens], bool]) -> dict[str, Tokens]:
        ends = {name: [e for e in range(1, len(p)) if is_named(p[:e])] for name, p in own.items()}
        return {name: own[name][: found[0]] for name, found in ends.items() if found}

    return (
        below(lambda start: start == wanted)
        or below(lambda start: start[-len(wanted) :] in (wanted, _dotted(wanted)))
        or below(lambda start: _ends_so(start, patterns))
    )


def near(path: str, names: Sequence[str]) -> list[str]:
    """Paths of arguments or subtrees that a mistyped one may mean, the nearest first."""
    length = len(pieces(path))
    runs = {
        "".join(own[end - length : end]): "".join(own[:end])
        for own in map(pieces, names)
        for end in range(length, len(own) + 1)
    }
    return list(dict.fromkeys(runs[run] for run in get_close_matches(path, runs)))


def _dotted(path: Tokens) -> Tokens:
    """A path that goes on from an attribute, as it stands behind another piece."""
    return (f".{path[0].removeprefix('.')}", *path[1:])


def _ends_so(path: Tokens, wanted: Sequence[re.Pattern[str]]) -> bool:
    end = path[len(path) - len(wanted) :]
    return len(wanted) <= len(path) and all(w.fullmatch(p) for w, p in zip(wanted, end, strict=True))


def _pattern(token: str) -> str:
    """A piece as a regular expression: `['w*']`, `['block_0-3,7']`, `['key'|'query']`, `.a|b`, `[0-3]`."""
    opening, closing = (r"\[", r"\]") if token.startswith("[") else (r"\.?", "")
    names = token.removeprefix("[").removesuffix("]").removeprefix(".").split("|")
    return f"{opening}(?:{'|'.join(map(_either, names))}){closing}"


def _either(name: str) -> str:
    """One name, its numbers folded."""
    parts = re.split(r"(\*|\d+(?:-\d+|,\d+)+(?:-\d+|,\d+)*)", name)
    return "".join(_numbers(p) if i % 2 else re.escape(p) for i, p in enumerate(parts))


def _numbers(text: str) -> str:
    """`*`, or `0-3,7`, as a regular expression."""
    if text == "*":
        return r"\d+"
    return f"(?:{'|'.join(map(str, numbers_of(text)))})"


# --- the same leaf in another step


@dataclass(frozen=True, eq=False)
class Counterparts:
    """The arguments of another step, to find one's own among them.

    Attributes:
      shapes: shape of each by its path; None if it is not known.
    """

    shapes: Mapping[str, tuple[int, ...] | None]

    def of(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """Those that an argument may be: one as a rule, several where paths do not tell, none where there is none."""
        if name in self.shapes:
            return (name,) if self.shapes[name] in (None, shape) else ()
        words = _words(name)
        for start in range(len(words)):
            tail = words[start:]
            found = [other for other in self._by_tail.get(tail, ()) if self._may_be(other, name, tail, shape)]
            if found:
                return tuple(found)
        return ()

    def _may_be(self, other: str, name: str, tail: Tokens, shape: tuple[int, ...]) -> bool:
        is_all_but_the_argument = len(tail) >= min(len(_words(name)), len(_words(other))) - 1
        has_name = any(not word.isdigit() for word in tail)
        return is_all_but_the_argument and has_name and self.shapes[other] in (None, shape)

    @cached_property
    def _by_tail(self) -> dict[Tokens, list[str]]:
        """The others by each end of their paths."""
        found: dict[Tokens, list[str]] = {}
        for name in self.shapes:
            words = _words(name)
            for start in range(len(words)):
                found.setdefault(words[start:], []).append(name)
        return found


def _words(name: str) -> Tokens:
    """A path without the signs of its containers, because an attribute of one step may be a key of the other."""
    return tuple(token.strip("[].'\"") for token in pieces(name.removesuffix(_BOX)))
