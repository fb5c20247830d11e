"""Flax NNX objects among a step's arguments and results, and the step without them.

A step in NNX's style changes its model, optimizer and metrics in place and returns little. `nnx.jit` lets it: it takes the
objects apart into a graph definition, which is static, and arrays, runs the step on copies, takes these apart again, and
puts what has become of them into the caller's objects: new arrays, but also attributes that came, went or changed, and
references that several objects share or that form a cycle. This is done here too, with NNX's own `flatten` and `unflatten`
and their index of references, around a step that autoshard plans: `apart` before it, `pure` for what is traced,
`put_together` behind.

What is carried back is all that is reachable from an argument, so that no assignment can be lost. What cannot be carried
(metadata of a variable, references to mutable arrays) is refused by name. A variable that the step leaves as it was
is no result, and is not donated.

An `nnx.State` is a value like any other pytree. Flax is imported where a user has imported it before.
"""

import functools
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
    """The arrays of one object, in its place: with the paths by which the object reaches them."""

    paths: tuple[str, ...]
    values: tuple[Any, ...]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """The arrays with their paths."""
        return [(_Path(p), v) for p, v in zip(self.paths, self.values, strict=True)], self.paths

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[str, ...]]:
        """The arrays."""
        return self.values, self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], values: Sequence[Any]) -> "Variables":
        """The inverse."""
        return cls(paths, tuple(values))


@dataclass(frozen=True, slots=True)
class _Path:
    """A key of a pytree that stands for several attributes."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Form:
    """What is static about objects in a pytree.

    Attributes:
      tree: the pytree, its objects being leaves.
      graph: NNX's definition of all of them.
      paths: for each leaf, the paths of the arrays that no object before it has; None of what is no object.
    """

    tree: Any
    graph: Any
    paths: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Apart:
    """A pytree without objects.

    Attributes:
      form: what is static.
      pure: the pytree with `Variables` in place of objects.
      references: NNX's index of the objects and variables, to find them again.
    """

    form: Form
    pure: Any
    references: Any


@dataclass(frozen=True, slots=True)
class _Returned:
    """What is static about what a step returns and leaves.

    Attributes:
      tree: the pytree of its result, objects being leaves.
      is_object: for each leaf of that, whether it is one.
      num_given: how many objects it was given.
      graph: NNX's definition of those, as the step leaves them, and of the objects in the result.
      values: the pytree of all their arrays.
      sources: for each array, the flat argument that it may have been, or None where it is made anew.
    """

    tree: Any
    is_object: tuple[bool, ...]
    num_given: int
    graph: Any
    values: Any
    sources: tuple[int | None, ...]


def holds_objects(tree: Any) -> bool:
    """Whether there are NNX objects in a pytree."""
    if "flax.nnx" not in sys.modules:
        return False
    is_object, is_whole = _kinds()
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_whole)))


def jitted(step: Callable[..., Any]) -> Callable[..., Any]:
    """The `jax.jit` inside an `nnx.jit`; any other step itself."""
    return getattr(step, "jitted_fn", step) if type(step).__module__.startswith("flax.nnx.") else step


def apart(tree: Any, like: Form | None = None) -> Apart:
    """Takes the objects in a pytree apart.

    Args:
      tree: the pytree.
      like: the form that it probably has, which then need not be made again.

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
        like = Form(structure, graph, tuple(next(paths) if is_object(x) else None for x in leaves))
    given = iter(values)
    parts = [
        x if paths is None else Variables(paths, tuple(next(given) for _ in paths))
        for x, paths in zip(leaves, like.paths, strict=True)
    ]
    return Apart(like, jax.tree.unflatten(structure, parts), references)


def changed_attribute(was: Form, now: Form) -> str:
    """The first attribute without arrays that differs, `calls (0, now 1)`, or nothing where objects differ otherwise."""
    pairs = list(zip(was.graph.attributes, now.graph.attributes, strict=False))
    differing = [(a, b) for a, b in pairs if a != b]
    if not differing or any(
        a[0] != b[0] or not _is_static(a[1]) or not _is_static(b[1]) for a, b in differing
    ):
        return ""
    (name, before), (_, after) = differing[0]
    return f"{name} ({before.value!r:.40}, now {after.value!r:.40})"


def _is_static(attribute: Any) -> bool:
    from flax import nnx

    return isinstance(attribute, nnx.graphlib.Static)


def pure(step: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """A step of the arguments without objects, which returns an `InPlace`.

    Args:
      step: the step; it may change the objects that it is given.
      form: of its `(args, kwargs)`.
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
    """Puts what a step leaves of its arguments into the objects there, and gives its result.

    Args:
      returned: what the pure step returned.
      given: the flat arguments that it was called with.
      references: of those arguments (`Apart`); None for new objects all through.
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
    """Whether something is an object, and whether it is one or a value that holds variables."""
    from flax import nnx

    objects, values = (nnx.Pytree, nnx.Variable), (nnx.State, nnx.GraphState)
    return (lambda x: isinstance(x, objects)), (lambda x: isinstance(x, (*objects, *values)))


def _paths(objects: Sequence[Any]) -> Iterator[tuple[str, ...]]:
    """For each object, the paths of the arrays that none before it has."""
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
    """What a variable holds; what is no variable is an array itself."""
    from flax import nnx

    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _whole(form: Form, given: Any, references: Any) -> tuple[Any, list[Any]]:
    """The pytree with new objects in it, and these."""
    from flax import nnx

    leaves = form.tree.flatten_up_to(given)
    values = [v for x in leaves if isinstance(x, Variables) for v in x.values]
    objects = nnx.unflatten(form.graph, values, index_ref=references)
    made = iter(objects)
    return form.tree.unflatten(next(made) if isinstance(x, Variables) else x for x in leaves), objects


def _numbers(form: Form, given: Any) -> list[Any]:
    """The values of all objects, each array being its number among the flat arguments."""
    leaves, structure = jax.tree.flatten(given)
    parts = form.tree.flatten_up_to(jax.tree.unflatten(structure, range(len(leaves))))
    return [v for x in parts if isinstance(x, Variables) for v in x.values]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The objects' variables as the step finds them: their numbers and metadata, by identity, or by path where an array is
    an attribute itself. The variables are held, so that no other can take an identity."""

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
        """For each array that a variable holds now, the flat argument that it has been, if any."""
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
    """What the step returns, and what it leaves."""
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
