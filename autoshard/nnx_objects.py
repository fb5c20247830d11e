"""Flax NNX objects among a step's arguments and results, and the step without them.

A step in NNX's style changes its model, optimizer and metrics in place and returns little. `nnx.jit` supports this. It
splits the objects into a static graph definition and arrays, runs the step on copies, splits these, and updates the caller's
objects: new arrays, but also attributes that were added, removed or changed, and references that are shared or form a cycle.
This module does so around a step that autoshard plans, with NNX's own `flatten`, `unflatten` and index of references:
`apart` before the call, `pure` for the traced function, `put_together` after the call.

Everything reachable from an argument is carried back, so no assignment is lost. Changed metadata of a variable and
references to mutable arrays cannot be carried back, and are refused by name. A variable that the step does not change is no
result, and is not donated.

An `nnx.State` is an ordinary pytree. Flax is only imported if the user has imported it before.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.in_place import InPlace


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class Variables:
    """The arrays of one object, which they replace in a pytree, with their paths inside the object."""

    paths: tuple[str, ...]
    values: tuple[Any, ...]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """The arrays with their paths."""
        return [(VariablePath(p), v) for p, v in zip(self.paths, self.values, strict=True)], self.paths

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The arrays."""
        return self.values, self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Sequence[Any]) -> "Variables":
        """The variables with these paths and arrays."""
        return cls(paths, tuple(values))


@dataclass(frozen=True, slots=True)
class VariablePath:
    """A key of a pytree that stands for several attributes."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def slashed(self) -> str:
        """The path as in the `nnx.State` of the object: `blocks/0/kernel/value`."""
        return "/".join([*re.findall(r"\w+", self.path), "value"])


@dataclass(frozen=True, slots=True)
class ObjectsForm:
    """The static part of the objects in a pytree.

    Attributes:
      tree: the pytree's structure, with objects as leaves.
      graph: NNX's graph definition of all objects.
      paths: per leaf, the paths of the object's arrays that no earlier object holds; None if the leaf is no object.
    """

    tree: Any
    graph: Any
    paths: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Apart:
    """A pytree whose objects are split into graph and arrays.

    Attributes:
      form: the static part.
      pure: the pytree with `Variables` in place of objects.
      references: NNX's index of the objects and variables, by which the caller's objects are updated.
    """

    form: ObjectsForm
    pure: Any
    references: Any


@dataclass(frozen=True, slots=True)
class _Returned:
    """The static part of a step's results and of its arguments' objects after the step.

    Attributes:
      tree: the structure of the result, with objects as leaves.
      is_object: per leaf of the result, whether it is an object.
      num_given: the number of objects among the arguments.
      graph: NNX's graph definition of the arguments' objects after the step, followed by the objects in the result.
      values: the structure of all arrays in `graph`.
      sources: per array, the flat argument whose variable holds it; None for an array of a new variable.
    """

    tree: Any
    is_object: tuple[bool, ...]
    num_given: int
    graph: Any
    values: Any
    sources: tuple[int | None, ...]


def holds_objects(tree: Any) -> bool:
    """True if there are NNX objects in a pytree."""
    if "flax.nnx" not in sys.modules:
        return False
    is_object, is_whole = _kinds()
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_whole)))


def jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    """The `jax.jit` inside an `nnx.jit`; any other step itself."""
    return getattr(step, "jitted_fn", step) if type(step).__module__.startswith("flax.nnx.") else step


def apart(tree: Any, like: ObjectsForm | None = None) -> Apart:
    """Splits the objects in a pytree into graph and arrays.

    Args:
      tree: the pytree.
      like: a form that the pytree probably has; it is reused if it does.

    Raises:
      InputError: an object refers to a mutable array.
    """
    from flax import nnx

    is_object, is_whole = _kinds()
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_whole)
    references = nnx.graphlib.RefMap()
    objects = [x for x in leaves if is_object(x)]
    graph, values = nnx.flatten(objects, ref_index=references, with_paths=False, graph=True)
    if like is None or like.tree != structure or like.graph != graph:
        paths = _paths(objects)
        like = ObjectsForm(structure, graph, tuple(next(paths) if is_object(x) else None for x in leaves))
    given = iter(values)
    parts = [
        x if paths is None else Variables(paths, tuple(next(given) for _ in paths))
        for x, paths in zip(leaves, like.paths, strict=True)
    ]
    return Apart(like, jax.tree.unflatten(structure, parts), references)


def changed_attribute(was: ObjectsForm, now: ObjectsForm) -> str:
    """The first static attribute that differs, as `calls (0, now 1)`; empty if the objects also differ in another way."""
    pairs = list(zip(was.graph.attributes, now.graph.attributes, strict=False))
    differing = [(a, b) for a, b in pairs if a != b]
    if not differing or any(
        a[0] != b[0] or not _is_static(a[1]) or not _is_static(b[1]) for a, b in differing
    ):
        return ""
    (name, before), (_, after) = differing[0]
    return f"{name} ({before.value!r:.40}, now {after.value!r:.40})"


def statics(graph: Any) -> list[tuple[Any, Any]]:
    """The static attributes in a graph definition, by name."""
    return [(name, attribute.value) for name, attribute in graph.attributes if _is_static(attribute)]


def _is_static(attribute: Any) -> bool:
    from flax import nnx

    return isinstance(attribute, nnx.graphlib.Static)


def pure(step: Callable[..., Any], form: ObjectsForm) -> Callable[..., Any]:
    """The step as a function of `Variables` in place of objects, which returns an `InPlace`.

    Args:
      step: the step; it may change its arguments' objects.
      form: the form of its `(args, kwargs)`.
    """
    from flax import nnx

    @functools.wraps(step, updated=())
    def traced(*args: Any, **kwargs: Any) -> InPlace:
        given = (args, kwargs)
        references = nnx.graphlib.IndexMap()
        (args, kwargs), objects = _whole(form, given, references)
        before = _Snapshot.of(objects, _numbers(form, given))
        result = step(*args, **kwargs)
        return _returned(before, objects, result, nnx.graphlib.RefMap.from_indexmap(references))

    return traced


def put_together(returned: InPlace, given: Sequence[Any], references: Any) -> Any:
    """Updates the caller's objects after a step, and returns the step's result.

    Args:
      returned: the result of the pure step.
      given: the flat arguments of the call.
      references: the `references` of the arguments (`Apart`); None creates new objects only.
    """
    from flax import nnx

    form = returned.form
    assert isinstance(form, _Returned)
    made = iter(returned.made)
    arrays = [next(made) if n is None else returned.left.get(n, given[n]) for n in form.sources]
    values = jax.tree.unflatten(form.values, arrays)
    there = None if references is None else nnx.graphlib.IndexMap.from_refmap(references)
    objects = iter(nnx.unflatten(form.graph, values, outer_index_outer_ref=there)[form.num_given :])
    leaves = form.tree.flatten_up_to(returned.result)
    return form.tree.unflatten(
        next(objects) if is_object else x for x, is_object in zip(leaves, form.is_object, strict=True)
    )


@functools.cache
def _kinds() -> tuple[Callable[[Any], bool], Callable[[Any], bool]]:
    """Two predicates: a value is an object, or it is an object or a pytree of variables."""
    from flax import nnx

    objects, values = (nnx.Pytree, nnx.Variable), (nnx.State, nnx.GraphState)
    return (lambda x: isinstance(x, objects)), (lambda x: isinstance(x, (*objects, *values)))


def _paths(objects: Sequence[Any]) -> Iterator[tuple[str, ...]]:
    """Per object, the paths of its arrays that no earlier object holds."""
    from flax import nnx

    of_object: list[list[str]] = [[] for _ in objects]
    _, state = nnx.flatten(list(objects), graph=True)
    for keys, variable in state:
        number, path = (
            int(str(keys[0])),
            "".join(f".{k}" if isinstance(k, str) else f"[{k!r}]" for k in keys[1:]),
        )
        if isinstance(_value(variable), jax.Ref):
            raise InputError(
                f"{path.removeprefix('.') or 'the value'} of {type(objects[number]).__name__} refers to a mutable array "
                "(jax.Ref), which a step that is split over devices cannot hold. Make it an nnx.Variable of an array"
            )
        of_object[number].append(path)
    return map(tuple, of_object)


def _value(variable: Any) -> Any:
    """The raw value of a variable; an array that is an attribute itself."""
    from flax import nnx

    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _whole(form: ObjectsForm, given: Any, references: Any) -> tuple[Any, list[Any]]:
    """The pytree with newly created objects, and a list of these."""
    from flax import nnx

    leaves = form.tree.flatten_up_to(given)
    values = [v for x in leaves if isinstance(x, Variables) for v in x.values]
    objects = nnx.unflatten(form.graph, values, index_ref=references)
    made = iter(objects)
    return form.tree.unflatten(next(made) if isinstance(x, Variables) else x for x in leaves), objects


def _numbers(form: ObjectsForm, given: Any) -> list[Any]:
    """The objects' values, with each array replaced by its index among the flat arguments."""
    leaves, structure = jax.tree.flatten(given)
    parts = form.tree.flatten_up_to(jax.tree.unflatten(structure, range(len(leaves))))
    return [v for x in parts if isinstance(x, Variables) for v in x.values]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The objects' variables before the step: their indices and metadata, keyed by identity, or by path for an array that is
    an attribute itself. References to the variables are held so that no other variable can get their identity."""

    variables: tuple[Any, ...]
    number: dict[Any, Any]
    metadata: dict[Any, Any]

    @classmethod
    def of(cls, objects: Sequence[Any], numbers: Sequence[Any]) -> "_Snapshot":
        from flax import nnx

        _, state = nnx.flatten(list(objects), graph=True)
        keys = [_key(path, x) for path, x in state]
        variables = [x for _, x in state]
        metadata = {
            k: x.get_metadata() for k, x in zip(keys, variables, strict=True) if isinstance(x, nnx.Variable)
        }
        return cls(tuple(variables), dict(zip(keys, numbers, strict=True)), metadata)

    def numbers_of(self, path: Any, variable: Any) -> list[int | None]:
        """Per array of a variable after the step, the flat argument that the variable held before; None for new ones."""
        key, now = _key(path, variable), jax.tree.structure(_value(variable))
        self._check_metadata(path, key, variable)
        if key in self.number and jax.tree.structure(self.number[key]) == now:
            return jax.tree.leaves(self.number[key])
        return [None] * now.num_leaves

    def _check_metadata(self, path: Any, key: Any, variable: Any) -> None:
        if key in self.metadata and self.metadata[key] != (now := variable.get_metadata()):
            was = self.metadata[key]
            changed = next(k for k in (*now, *was) if now.get(k) != was.get(k) or (k in now) != (k in was))
            raise InputError(
                f"the step changes the metadata {changed!r} of {'.'.join(map(str, path[1:]))}, a "
                f"{type(variable).__name__}, which cannot be carried out of it. Change it outside the step"
            )


def _key(path: Any, variable: Any) -> Any:
    from flax import nnx

    return id(variable) if isinstance(variable, nnx.Variable) else path


def _returned(before: _Snapshot, objects: Sequence[Any], result: Any, references: Any) -> InPlace:
    """The step's result, and its arguments' objects after the step, as an `InPlace`."""
    from flax import nnx

    is_object, is_whole = _kinds()
    leaves, tree = jax.tree.flatten(result, is_leaf=is_whole)
    everything = [*objects, *filter(is_object, leaves)]
    graph, state = nnx.flatten(everything, ref_outer_index=references, graph=True)
    sources = [n for path, x in state for n in before.numbers_of(path, x)]
    arrays, values = jax.tree.flatten([_value(x) for _, x in state])
    left = {n: x for n, x in zip(sources, arrays, strict=True) if n is not None}
    made = tuple(x for n, x in zip(sources, arrays, strict=True) if n is None)
    form = _Returned(tree, tuple(map(is_object, leaves)), len(objects), graph, values, tuple(sources))
    return InPlace(tree.unflatten(None if is_object(x) else x for x in leaves), left, made, form)
