"""Which results replace which arguments in the next step, and what each argument is for.

A step is handed its state and hands it back, but nowhere says which result is which argument, and may nest it in another
way: `(p, o, x) -> ((p, o), loss)`. A wrong guess is worse than none: what is taken for state is donated, and a batch that
the user meant to use again would be gone. So a subtree of the result, from the whole down to single leaves, is paired with a
subtree of the arguments only on the evidence of all three:

* *Alike*: the same paths from its root to its leaves, the same shapes. A list and a tuple are alike, and so are a dict's
  key and an attribute of that name. An update may change a dtype: the state is widened, but state all the same.
* *Dataflow*: some leaf continues its counterpart (`lineage`), rather than handing it on. A lone scalar proves nothing:
  a rate times a norm would continue the rate.
* *A sign of state*: it depends on gradients (which alone are not new parameters), or it has names, within it or the
  argument's own, or it was written into by index, as a cache is, or it is a random key.

Where several arguments fit, those of which most leaves are continued fit best. An average of parameters continues both the
average and the parameters, new parameters only the parameters: a result that fits one argument takes it, the others choose
among the rest, larger ones first; then names decide, those nearest to the leaves. Where as many results are left as there
are arguments that they all fit, these are replaced in any case, and position says by which. All this is tried with arguments
of the result's own dtypes before others. A leaf that changes its shape, and a counter beside it, are found last: by their
path in a tree of which other leaves are paired. Else nothing is paired, and of large arrays it is said so: the user may name
the state.

Only a new leaf of the old one's shape and dtype can take its memory. Others are `retyped`: old and new are held both.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
      path: its keys from the root; of arguments, their names in place of their positions.
      leaves: the numbers of its leaves.
      within: for each leaf, the keys from here.
    """

    path: tuple[Any, ...]
    leaves: range
    within: tuple[tuple[Any, ...], ...]

    @property
    def is_nested(self) -> bool:
        return self.within != ((),)


@dataclass(frozen=True, slots=True)
class Successors:
    """What replaces what.

    Attributes:
      replaces: for each flat result, the flat argument of its shape and dtype that it replaces in the next step, or None.
      retyped: results that replace an argument of another shape or dtype, each with that argument.
      doubtful: results that may be state, each with the arguments that they may replace.
    """

    replaces: tuple[int | None, ...]
    retyped: tuple[tuple[int, int], ...] = ()
    doubtful: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All state: results with the arguments that they replace."""
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
    """Finds what replaces what.

    Args:
      graph: the step's, with phases.
      in_tree: the pytree of `(args, kwargs)`.
      out_tree: the pytree of the result.
      names: of the flat arguments.
      certain: flat results of which it is known, with their arguments.
      state: paths of arguments that come back, as their user says.

    Raises:
      InputError: there is no such argument, or nothing like it comes back.
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
    return Successors(tuple(replaces), tuple(retyped), tuple(pairing.doubtful()))


# --- subtrees


def _subtrees(tree: Any) -> list[_Subtree]:
    """All subtrees with leaves, outer before inner."""
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
    """A key of a pytree's path, whatever the container: a name or a number."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)


def _arguments(in_tree: Any, names: Sequence[str]) -> list[_Subtree]:
    """The subtrees of the arguments, called by their names."""
    found: list[_Subtree] = []
    for subtree in _subtrees(in_tree):
        called = re.match(r"\w+", names[subtree.leaves[0]])
        if called and len(subtree.path) > 1:
            found.append(replace(subtree, path=(called[0], *subtree.path[2:])))
    return found


def _num_keys_shared(path: tuple[Any, ...], other: tuple[Any, ...]) -> int:
    """How many keys, counted from the leaves, are the same."""
    pairs = zip(reversed(path), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda keys: keys[0] == keys[1], pairs))


def _same_places(
    path: tuple[Any, ...], trees: Mapping[tuple[Any, ...], tuple[Any, ...]]
) -> Iterator[tuple[Any, ...]]:
    """In the trees that are paired with those around a leaf, the nearest first, the paths of leaves called as it is."""
    for depth in reversed(range(len(path))):
        if path[:depth] in trees and any(isinstance(key, str) for key in path[depth:]):
            yield (*trees[path[:depth]], *path[depth:])


def _num_names_shared(argument: _Subtree, result: _Subtree) -> int:
    """How many names, counted from the subtrees outwards, are the same."""
    count = 0
    for a, r in zip(reversed(argument.path), reversed(result.path), strict=False):
        if a != r or not isinstance(a, str):
            break
        count += 1
    return count


# --- pairing


@dataclass(frozen=True, eq=False)
class _Pairing:
    """Results paired so far.

    Attributes:
      graph: the step's.
      arguments: all subtrees of the arguments.
      results: all subtrees of the result, the whole first.
      replaces: by flat result, the argument that it replaces.
      taken: those arguments.
    """

    graph: Graph
    arguments: list[_Subtree]
    results: list[_Subtree]
    replaces: dict[int, int]
    taken: set[int]

    def pair_all(self) -> None:
        """Pairs as far as the evidence goes."""
        while units := self._units(self.results[0]) if self.results else {}:
            if not self._pair_some(units):
                break

    def pair_by_siblings(self) -> None:
        """Pairs leaves that are made of the argument at the same named place of a tree of which others are paired."""
        old = {a.path: a for a in self.arguments if not a.is_nested}
        trees = self._paired_trees(old)
        for result in self.results:
            paths = () if result.is_nested else _same_places(result.path, trees)
            argument = next((old[path] for path in paths if path in old), None)
            if argument and self._is_free(argument, result) and self._is_made_of(argument, result):
                self._set(argument, result)

    def _paired_trees(self, old: Mapping[Any, _Subtree]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """By path of a tree in the results: that of the tree among the arguments of which a leaf is paired with its own."""
        argument_at = {a.leaves.start: path for path, a in old.items()}
        found: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        for result in self.results:
            if not result.is_nested and result.leaves.start in self.replaces:
                path = argument_at.get(self.replaces[result.leaves.start], ())
                for n in range(1, _num_keys_shared(path, result.path) + 1):
                    found.setdefault(result.path[:-n], path[:-n])
        return {new: path for new, path in found.items() if path}

    def pair_named(self, name: str, names: Sequence[str]) -> None:
        """Pairs what the user says is state."""
        named = [i for i, n in enumerate(names) if n == name or n.startswith((f"{name}[", f"{name}."))]
        whole = [a for a in self.arguments if named and list(a.leaves) == named]
        if not whole:
            tops = dict.fromkeys(n.partition("[")[0].partition(".")[0] for n in names)
            raise InputError(
                f"state {name!r} is no argument; they are {', '.join(tops)}. Name one by its pytree path"
            )
        fits = [(a, r) for a in whole for r in self.results if self._is_free(a, r) and self._are_alike(a, r)]
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

    def doubtful(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Results that continue an argument that nothing replaces, alike but for what says that they are state."""
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
        """The largest subtrees of a result that fit some argument, with those that fit best."""
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
        """The arguments that fit best, with a sign that the result is state."""
        free = [a for a in self._alike(result) if self._is_free(a, result) and self._has_sign(a, result)]
        counts = [self._num_continued(a, result) for a in free]
        return [a for a, n in zip(free, counts, strict=True) if n == max(counts) > 0]

    def _pair_some(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        """Pairs at least one result, if it is clear with which argument: of its own types, if there are such."""
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
        """Pairs those results that fit one argument only, the largest first."""
        unique = [r for r, fits in units.items() if len(fits) == 1]
        for result in sorted(unique, key=lambda r: (-len(r.leaves), r.leaves.start)):
            if self._is_free(units[result][0], result):
                self._set(units[result][0], result)
        return bool(unique)

    def _pair_by_name(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        """Pairs a result with the argument whose names are most like its own."""
        for result, fits in units.items():
            shared = [_num_names_shared(a, result) for a in fits]
            if max(shared) > 0 and shared.count(max(shared)) == 1:
                self._set(fits[shared.index(max(shared))], result)
                return True
        return False

    def _pair_by_position(self, units: dict[_Subtree, list[_Subtree]]) -> bool:
        """Pairs results that all fit the same arguments, as many as they are, in their order."""
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
        """Whether a leaf comes back in its shape and dtype."""
        return self._type(self.graph.inputs[argument]) == self._type(self.graph.outputs[result])

    def _alike(self, result: _Subtree) -> list[_Subtree]:
        """The arguments alike; none of a lone scalar."""
        lone = not result.is_nested and self.graph.value(self.graph.outputs[result.leaves[0]])
        if isinstance(lone, Value) and lone.shape == () and not is_random(lone):
            return []
        return self._by_shape.get(self._shape_of(result, self.graph.outputs), [])

    def _has_sign(self, argument: _Subtree, result: _Subtree) -> bool:
        """Whether anything but dataflow says that it is state."""
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
        """How many leaves are made from their counterparts, rather than handed on."""
        pairs = zip(argument.leaves, result.leaves, strict=True)
        return sum(
            self.graph.outputs[o] != self.graph.inputs[i] and bool(self._lineage(o).continued >> i & 1)
            for i, o in pairs
        )

    def _is_made_of(self, argument: _Subtree, result: _Subtree) -> bool:
        """Whether a leaf is computed from another, gradients aside."""
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
        """What depends on a gradient."""
        found: set[int] = set()
        for op in self.graph.ops:
            if op.phase is Phase.BACKWARD or takes_gradient(op) or not found.isdisjoint(op.operands):
                found.update(op.outputs)
        return found
