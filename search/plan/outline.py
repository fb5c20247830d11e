"""The outline of a traced step: enough to say how another step differs.

A plan recognises its step by a fingerprint, and two fingerprints that differ tell a reader nothing. So a plan also holds its
step's outline: the type and the role of each argument, the type of each result, and the number of ops of each primitive,
inner graphs included (`search.plan.recognition` makes it). Results that replace an argument are left out: the role says
that the argument is state.

An outline says less than a fingerprint, which also covers parameters, factors and the order of ops. Nothing but a message
depends on it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.search.plan.bounds import Count
from autoshard.search.plan.text_table import few, plural


@dataclass(frozen=True, slots=True)
class Outline:
    """A traced step, as far as a plan keeps it.

    Attributes:
      arguments: type and role of each argument by pytree path: `float32[64,16] batch`.
      results: type of each result that replaces no argument, by pytree path: `float32[]`.
      ops: number of ops by primitive.
    """

    arguments: Mapping[str, str]
    results: Mapping[str, str]
    ops: Mapping[str, Count]

    def difference(self, other: "Outline") -> str:
        """The differences of this step from another one in words, as far as outlines tell."""
        found = (*_arguments(self, other), *_results(self, other), *_ops(self, other))
        return "; ".join(found) or (
            "arguments, results and the number of ops are as there; shapes, parameters or the order of ops differ"
        )


def _arguments(new: Outline, old: Outline) -> Iterator[str]:
    """The differences of arguments."""
    if _are_renamed(new.arguments, old.arguments):
        pairs = zip(new.arguments, old.arguments, strict=True)
        renamed = [f"{name} is called {before} there" for name, before in pairs if name != before]
        yield f"arguments have other names: {few(renamed)}"
        return
    yield from _counted(new.arguments, old.arguments, "it takes", "argument")
    both = [
        (name, new.arguments[name], old.arguments[name]) for name in new.arguments if name in old.arguments
    ]
    split = [(name, *text.rpartition(" ")[::2], *before.rpartition(" ")[::2]) for name, text, before in both]
    retyped = [f"{name} is {is_} instead of {was}" for name, is_, _, was, _ in split if is_ != was]
    recast = [
        f"the role of {name} is {role} instead of {before}"
        for name, is_, role, was, before in split
        if is_ == was and role != before
    ]
    yield from filter(None, (few(retyped), few(recast)))


def _are_renamed(new: Mapping[str, str], old: Mapping[str, str]) -> bool:
    """True if arguments differ in nothing but their names."""
    return [*new] != [*old] and [*new.values()] == [*old.values()]


def _results(new: Outline, old: Outline) -> Iterator[str]:
    """The differences of results."""
    yield from _counted(new.results, old.results, "it returns", "result")
    both = [name for name in new.results if name in old.results]
    retyped = [
        f"{name} is {new.results[name]} instead of {old.results[name]}"
        for name in both
        if new.results[name] != old.results[name]
    ]
    yield from filter(None, [few(retyped)])


def _counted(new: Mapping[str, str], old: Mapping[str, str], verb: str, noun: str) -> Iterator[str]:
    """The names on one side only: `it returns 1 result more: result[2] (float32[])`."""
    for ours, theirs, than in ((new, old, "more"), (old, new, "fewer")):
        alone = [f"{name} ({text.partition(' ')[0]})" for name, text in ours.items() if name not in theirs]
        if alone:
            yield f"{verb} {plural(len(alone), noun)} {than}: {few(alone)}"


def _ops(new: Outline, old: Outline) -> Iterator[str]:
    """The differences of ops."""
    changed = [
        f"{new.ops.get(name, 0)} {name} instead of {old.ops.get(name, 0)}"
        for name in sorted({*new.ops, *old.ops})
        if new.ops.get(name, 0) != old.ops.get(name, 0)
    ]
    if changed:
        yield f"it has {few(changed)}"
