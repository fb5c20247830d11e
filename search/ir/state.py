"""State: the results that replace arguments in the next step.

A step takes its state and returns it, but does not declare which result replaces which argument, and may nest the state in
another way: `(p, o, x) -> ((p, o), loss)`. A wrong guess is worse than none: state is donated, and a batch that the user
wants to use a second time would be lost. So a subtree of the result, from the whole down to single leaves, is paired with a
subtree of the arguments only if three kinds of evidence agree:

* *Structure*: equal paths from the root to the leaves, and equal shapes. A list equals a tuple, and a dict's key equals an
  attribute of that name. Dtypes may differ, since an update may widen the state.
* *Dataflow*: some leaf continues its counterpart (`lineage`) and is not identical to it. A lone scalar is no evidence:
  a rate times a norm would continue the rate.
* *A sign of state*, one of four. The result depends on gradients (a gradient alone is no new parameter). It has names,
  within the subtree or equal to the argument's own. It was written into by index, as a cache is. It is a random key.

If several arguments fit, those with the most continued leaves fit best. An average of parameters continues both the average
and the parameters, but new parameters only the parameters. So a result that fits one argument only takes it, larger results
first, and the others choose among the rest. Then names decide, from the leaves outwards. If a set of results fits an equally
large set of arguments, position decides. All this is tried first with arguments of the result's own dtypes. A leaf that
changes its shape, and a counter beside it, are paired last, by their path in a tree whose other leaves are paired. Other
results are not paired. A warning names large ones, so that the user can declare the state.

Only a new leaf of the old one's shape and dtype can reuse its memory. Others are `retyped`: old and new are both held.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import jax

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.graph import Graph, Phase, Value
from autoshard.search.ir.lineage import NONE, Lineage, is_random, lineages, sources
from autoshard.search.ir.phases import takes_gradient


@dataclass(frozen=True, slots=True, eq=False)
class _Subtree:
    """A subtree of the arguments or of the results.

    Attributes:
      path: its keys from the root; an argument's name replaces its position.
      leaves: the numbers of its leaves.
      within: per leaf, the keys from the subtree's root.
    """

    path: tuple[Any, ...]
    leaves: range
    within: tuple[tuple[Any, ...], ...]

    @property
    def is_nested(self) -> bool:
        return self.within != ((),)


@dataclass(frozen=True, slots=True)
class Successors:
    """The pairs of results and the arguments that they replace in the next step.

    Attributes:
      replaces: per flat result, the flat argument of its shape and dtype that it replaces, or None.
      retyped: results that replace an argument of another shape or dtype, each with that argument.
      doubtful: results that may be state, each with the arguments that they may replace.
      read_only: arguments that the user declares as state and that the step does not change.
    """

    replaces: tuple[int | None, ...]
    retyped: tuple[tuple[int, int], ...] = ()
    doubtful: tuple[tuple[int, tuple[int, ...]], ...] = ()
    read_only: tuple[int, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All state: results with the arguments that they replace, of any type."""
        kept = ((o, i) for o, i in enumerate(self.replaces) if i is not None)
        return (*kept, *self.retyped)


def successors(
    graph: Graph,
    in_tree: Any,
    out_tree: Any,
    names: Sequence[str],
    certain: Mapping[int, int] = MappingProxyType({}),
    state: Sequence[str] = (),
) -> Successors:
    """Finds the results that replace arguments.

    Args:
      graph: the step's graph, with phases.
      in_tree: the pytree of `(args, kwargs)`.
      out_tree: the pytree of the result.
      names: the names of the flat arguments.
      certain: flat results that are known to be state, with their arguments.
      state: paths of arguments that the user declares as state.

    Raises:
      InputError: a declared argument does not exist, or results are computed from it and none has its structure and shapes.
    """
    arguments, results = _arguments(in_tree, names), _subtrees(out_tree)
    pairing = _Pairing(graph, arguments, results, dict(certain), set(certain.values()))
    for name in state:
        pairing.pair_named(name, names)
    pairing.pair_all()
    pairing.pair_by_siblings()
    found = [pairing.replaces.get(o) for o in range(out_tree.num_leaves)]
    replaces = (i if i is None or pairing.keeps_type(i, o) else None for o, i in enumerate(found))
    retyped = ((o, i) for o, i in enumerate(found) if i is not None and not pairing.keeps_type(i, o))
    return Successors(
        tuple(replaces), tuple(retyped), tuple(pairing.doubtful()), tuple(sorted(pairing.read_only))
    )


# --- subtrees


def _subtrees(tree: Any) -> list[_Subtree]:
    """All subtrees with leaves, outer ones before inner ones."""
    leaves: list[Any] = jax.tree.leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    paths = [tuple(map(_key, path)) for path, _ in leaves]
    spans: dict[tuple[Any, ...], list[int]] = {}
    for i, path in enumerate(paths):
        for depth in range(len(path) + 1):
            spans.setdefault(path[:depth], []).append(i)
    return [
        _Subtree(path, range(span[0], span[-1] + 1), tuple(paths[i][len(path) :] for i in span))
        for path, span in spans.items()
    ]


def _key(key: Any) -> Any:
    """A key of a pytree's path as a name or a number, independent of the container's type."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _arguments(in_tree: Any, names: Sequence[str]) -> list[_Subtree]:
    """The subtrees of the arguments, with their names in the paths."""
    found: list[_Subtree] = []
    for subtree in _subtrees(in_tree):
        called = re.match(r"\w+", names[subtree.leaves[0]])
        if called and len(subtree.path) > 1:
            found.append(replace(subtree, path=(called[0], *subtree.path[2:])))
    return found


def _num_keys_shared(path: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """The number of equal keys, counted from the leaves."""
    pairs = zip(reversed(path), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda keys: keys[0] == keys[1], pairs))


def _same_places(
    path: tuple[Any, ...], trees: Mapping[tuple[Any, ...], tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """The paths of a result leaf's possible counterparts: its path inside each enclosing tree, from the root of the paired
    tree of arguments; nearest trees first."""
    for depth in reversed(range(len(path))):
        if path[:depth] in trees and any(isinstance(key, str) for key in path[depth:]):
            yield (*trees[path[:depth]], *path[depth:])


def _num_names_shared(argument: _Subtree, result: _Subtree) -> int:
    """The number of equal names, counted from the subtrees outwards."""
    count = 0
    for a, r in zip(reversed(argument.path), reversed(result.path), strict=False):
        if a != r or not isinstance(a, str):
            break
        count += 1
    return count


# --- pairing


@dataclass(frozen=True, eq=False)
class _Pairing:
    """The results that are paired so far.

    Attributes:
      graph: the step's graph.
      arguments: all subtrees of the arguments.
      results: all subtrees of the result, the whole first.
      replaces: the argument that each paired flat result replaces.
      taken: the arguments that are paired.
      read_only: the declared arguments that no result replaces.
    """

    graph: Graph
    arguments: list[_Subtree]
    results: list[_Subtree]
    replaces: dict[int, int]
    taken: set[int]
    read_only: set[int] = field(default_factory=set[int])

    def pair_all(self) -> None:
        """Pairs all results that the evidence allows."""
        while units := self._units(self.results[0]) if self.results else {}:
            if not self._pair_some(units):
                break

    def pair_by_siblings(self) -> None:
        """Pairs a leaf with the argument at its named place in a paired tree, if the leaf is computed from that argument."""
        old = {a.path: a for a in self.arguments if not a.is_nested}
        trees = self._paired_trees(old)
        for result in self.results:
            paths = () if result.is_nested else _same_places(result.path, trees)
            argument = next((old[path] for path in paths if path in old), None)
            if argument and self._is_free(argument, result) and self._is_made_of(argument, result):
                self._set(argument, result)

    def _paired_trees(self, old: Mapping[Any, _Subtree]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """The paths of result trees with a paired leaf, each with the path of the corresponding tree of arguments."""
        argument_at = {a.leaves.start: path for path, a in old.items()}
        found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for result in self.results:
            if not result.is_nested and result.leaves.start in self.replaces:
                path = argument_at.get(self.replaces[result.leaves.start], ())
                for n in range(1, _num_keys_shared(path, result.path) + 1):
                    found.setdefault(result.path[:-n], path[:-n])
        return {new: path for new, path in found.items() if path}

    def pair_named(self, name: str, names: Sequence[str]) -> None:
        """Pairs an argument that the user declares as state; one of which no result is a new value is read only."""
        named = [i for i, n in enumerate(names) if n == name or n.startswith((f"{name}[", f"{name}."))]
        whole = [a for a in self.arguments if named and list(a.leaves) == named]
        if not whole:
            tops = dict.fromkeys(n.partition("[")[0].partition(".")[0] for n in names)
            raise InputError(
                f"state {name!r} is no argument; they are {', '.join(tops)}. Name one by its pytree path",
                section="a-wrong-name",
            )
        alike = [(a, r) for a in whole for r in self.results if self._is_free(a, r) and self._are_alike(a, r)]
        fits = [(a, r) for a, r in alike if self._may_replace(a, r)]
        if not fits and self._is_read_only(named):
            self.read_only.update(named)
            return
        if not fits:
            raise InputError(
                f"state {name!r} does not come back: no result has its structure and shapes. Return it as it came"
            )
        self._set(
            *max(
                fits,
                key=lambda p: (
                    self._num_continued(*p),
                    self._keep_types(*p),
                    _num_names_shared(*p),
                    -p[1].leaves.start,
                ),
            )
        )

    def _may_replace(self, argument: _Subtree, result: _Subtree) -> bool:
        """False if a result is the new value of another argument, and depends on this one through gradients at most."""
        old = sum(1 << i for i in argument.leaves)
        made = [self.graph.outputs[o] for o in result.leaves if self._is_value(o)]
        is_of_another = any(self._lineages.get(v, NONE).continued & ~old for v in made)
        return not is_of_another or any(self._sources.get(v, 0) & old for v in made)

    def _is_read_only(self, arguments: Sequence[int]) -> bool:
        """True if arguments have dims and no result continues any."""
        continued = 0
        for v in self.graph.made:
            continued |= self._lineages.get(v, NONE).continued
        return all(
            self.graph.values[self.graph.inputs[i]].shape and not continued >> i & 1 for i in arguments
        )

    def doubtful(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Unpaired results, each with the unpaired arguments of its type that it continues; other evidence is missing."""
        for o, new in enumerate(self.graph.outputs):
            if o not in self.replaces and isinstance(new, int):
                found = self._lineages.get(new, NONE).continued
                old = [
                    i
                    for i, v in enumerate(self.graph.inputs)
                    if found >> i & 1 and v != new and i not in self.taken
                ]
                old = [i for i in old if self._type(self.graph.inputs[i]) == self._type(new)]
                if old:
                    yield o, tuple(old)

    def _units(self, result: _Subtree) -> dict[_Subtree, list[_Subtree]]:
        """The largest subtrees of a result that fit some argument, each with the arguments that fit best."""
        if self.replaces.keys() >= set(result.leaves):
            return {}
        if fitting := self._fitting(result):
            return {result: fitting}
        return {
            unit: fits
            for child in self._children.get(result.path, ())
            for unit, fits in self._units(child).items()
        }

    def _fitting(self, result: _Subtree) -> list[_Subtree]:
        """The free arguments with a sign of state of which the result continues the most leaves."""
        free = [a for a in self._alike(result) if self._is_free(a, result) and self._has_sign(a, result)]
        counts = [self._num_continued(a, result) for a in free]
        return [a for a, n in zip(free, counts, strict=True) if n == max(counts) > 0]

    def _pair_some(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        """Pairs at least one result if its argument is unambiguous, with arguments of its own types first; False if none."""
        same = {r: [a for a in fits if self._keep_types(a, r)] for r, fits in units.items()}
        certain = {r: fits for r, fits in same.items() if fits == units[r]}
        return (
            self._pair_unique(certain)
            or self._pair_fitting({r: fits for r, fits in same.items() if fits})
            or self._pair_fitting(units)
        )

    def _pair_fitting(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        return self._pair_unique(units) or self._pair_by_name(units) or self._pair_by_position(units)

    def _pair_unique(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        """Pairs the results that fit one argument only, the largest first."""
        unique = [r for r, fits in units.items() if len(fits) == 1]
        for result in sorted(unique, key=lambda r: (-len(r.leaves), r.leaves.start)):
            if self._is_free(units[result][0], result):
                self._set(units[result][0], result)
        return bool(unique)

    def _pair_by_name(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        """Pairs one result with the argument that shares the most names with it, if there is only one such."""
        for result, fits in units.items():
            shared = [_num_names_shared(a, result) for a in fits]
            if max(shared) > 0 and shared.count(max(shared)) == 1:
                self._set(fits[shared.index(max(shared))], result)
                return True
        return False

    def _pair_by_position(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        """Pairs results with their arguments in order, if equally many results and arguments fit one another."""
        for fits in units.values():
            rivals = [r for r in units if units[r] == fits]
            if len(rivals) == len(fits):
                for argument, result in zip(fits, rivals, strict=True):
                    self._set(argument, result)
                return True
        return False

    def _set(self, argument: _Subtree, result: _Subtree) -> None:
        self.replaces.update(zip(result.leaves, argument.leaves, strict=True))
        self.taken.update(argument.leaves)

    # --- evidence

    def _is_free(self, argument: _Subtree, result: _Subtree) -> bool:
        return self.taken.isdisjoint(argument.leaves) and self.replaces.keys().isdisjoint(result.leaves)

    def _are_alike(self, argument: _Subtree, result: _Subtree) -> bool:
        return self._shape_of(argument, self.graph.inputs) == self._shape_of(result, self.graph.outputs)

    def _keep_types(self, argument: _Subtree, result: _Subtree) -> bool:
        return all(map(self.keeps_type, argument.leaves, result.leaves))

    def keeps_type(self, argument: int, result: int) -> bool:
        """True if a result has its argument's shape and dtype."""
        return self._type(self.graph.inputs[argument]) == self._type(self.graph.outputs[result])

    def _alike(self, result: _Subtree) -> list[_Subtree]:
        """The arguments with the result's structure and shapes; empty for a lone scalar that is no random key."""
        lone = not result.is_nested and self.graph.value(self.graph.outputs[result.leaves[0]])
        if isinstance(lone, Value) and lone.shape == () and not is_random(lone):
            return []
        return self._by_shape.get(self._shape_of(result, self.graph.outputs), [])

    def _has_sign(self, argument: _Subtree, result: _Subtree) -> bool:
        """True if there is a sign of state: a name, a gradient, a write by index, or a random key."""
        has_names = any(isinstance(k, str) for keys in result.within for k in keys)
        return (
            has_names
            or _num_names_shared(argument, result) > 0
            or any(self.graph.outputs[o] in self._trained for o in result.leaves if self._is_value(o))
            or any(self._is_written(i, o) for i, o in zip(argument.leaves, result.leaves, strict=True))
            or self._are_random(argument, result)
        )

    def _are_random(self, argument: _Subtree, result: _Subtree) -> bool:
        old, new = self.graph.inputs[argument.leaves[0]], self.graph.outputs[result.leaves[0]]
        return is_random(self.graph.value(old)) and is_random(self.graph.value(new))

    def _num_continued(self, argument: _Subtree, result: _Subtree) -> int:
        """The number of leaves that continue their counterparts and are not identical to them."""
        pairs = zip(argument.leaves, result.leaves, strict=True)
        return sum(
            self.graph.outputs[o] != self.graph.inputs[i] and bool(self._lineage(o).continued >> i & 1)
            for i, o in pairs
        )

    def _is_made_of(self, argument: _Subtree, result: _Subtree) -> bool:
        """True if a result leaf is computed from the argument other than through gradients."""
        old, new = self.graph.inputs[argument.leaves[0]], self.graph.outputs[result.leaves[0]]
        return (
            old != new and isinstance(new, int) and bool(self._sources.get(new, 0) >> argument.leaves[0] & 1)
        )

    def _is_written(self, argument: int, result: int) -> bool:
        return bool(self._lineage(result).written >> argument & 1)

    def _lineage(self, result: int) -> Lineage:
        return self._lineages.get(self.graph.outputs[result], NONE) if self._is_value(result) else NONE

    def _is_value(self, result: int) -> bool:
        return isinstance(self.graph.outputs[result], int)

    def _type(self, atom: Any) -> Any:
        value = self.graph.value(atom)
        return value.shape, value.dtype

    def _shape_of(self, subtree: _Subtree, atoms: Sequence[Any]) -> Any:
        return tuple(
            (keys, self.graph.value(atoms[i]).shape)
            for keys, i in zip(subtree.within, subtree.leaves, strict=True)
        )

    @cached_property
    def _by_shape(self) -> dict[Any, list[_Subtree]]:
        found: dict[Any, list[_Subtree]] = {}
        for argument in self.arguments:
            found.setdefault(self._shape_of(argument, self.graph.inputs), []).append(argument)
        return found

    @cached_property
    def _children(self) -> dict[tuple[Any, ...], list[_Subtree]]:
        found: dict[tuple[Any, ...], list[_Subtree]] = {}
        for result in self.results:
            if result.path:
                found.setdefault(result.path[:-1], []).append(result)
        return found

    @cached_property
    def _lineages(self) -> dict[Any, Lineage]:
        return lineages(self.graph)

    @cached_property
    def _sources(self) -> dict[int, int]:
        return sources(self.graph)

    @cached_property
    def _trained(self) -> set[int]:
        """The values that depend on a gradient."""
        found: set[int] = set()
        for op in self.graph.ops:
            if op.phase is Phase.BACKWARD or takes_gradient(op) or not found.isdisjoint(op.operands):
                found.update(op.outputs)
        return found
