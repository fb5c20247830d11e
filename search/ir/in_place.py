"""Steps that change their arguments in place.

`jax.jit`, which autoshard needs, hands a step a copy of its arguments: what is not returned is dropped, and a step that
trains its arguments in place repeats its first loss for ever. There are two remedies:

* Whoever knows the objects that a step changes takes them apart beforehand, and has the step return an `InPlace`: its own
  result and, beside it, what it leaves of its arguments. What it leaves as it was is no result: the trace tells, as the
  step hands the same value on.
* An `nnx.State` is a value like any other pytree, but holds variables that can be assigned to. A step that does so and
  does not return them is refused. They too are further results of the trace, for as long as that takes.

Flax is not imported here: its variables are told by where their classes are defined.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.graph import Atom, Graph


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class InPlace:
    """What a step returns that changes its arguments in place, written without side effects.

    Attributes:
      result: its own result.
      left: what it leaves of its flat arguments, by their number.
      made: what else it has put into the objects among its arguments and results.
      form: how all this is put together again, to whom has taken it apart.
    """

    result: Any
    left: dict[int, Any]
    made: tuple[Any, ...]
    form: Hashable

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Hashable]:
        """The children with their keys, and what is static."""
        key = jax.tree_util.GetAttrKey
        return ((key("result"), self.result), (key("left"), self.left), (key("made"), self.made)), self.form

    @classmethod
    def tree_unflatten(cls, form: Hashable, children: Sequence[Any]) -> "InPlace":
        """The inverse."""
        result, left, made = children
        return cls(result, left, made, form)


def changed_only(graph: Graph, returned: InPlace) -> tuple[Graph, InPlace]:
    """The graph of a step that returns an `InPlace`, and what it returns, without what it leaves as it was."""
    first = len(jax.tree.leaves(returned.result))
    at = {number: first + k for k, number in enumerate(sorted(returned.left))}
    same = {n for n, o in at.items() if graph.outputs[o] == graph.inputs[n]}
    dropped = {at[n] for n in same}
    outputs = tuple(a for o, a in enumerate(graph.outputs) if o not in dropped)
    left = {n: x for n, x in returned.left.items() if n not in same}
    return replace(graph, outputs=outputs), replace(returned, left=left)


def successors(returned: InPlace) -> dict[int, int]:
    """By flat result, the argument that it certainly replaces: what the step leaves of it."""
    first = len(jax.tree.leaves(returned.result))
    return {first + k: number for k, number in enumerate(sorted(returned.left))}


def holds_variables(arguments: Any) -> bool:
    """Whether there are NNX variables in a pytree."""
    return any(map(_is_mutable, jax.tree.leaves(arguments, is_leaf=_is_mutable)))


def watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step with two results: its own, and its arguments' variables afterwards, by their number among the flat
    arguments."""

    @functools.wraps(step, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        number = {path: i for i, (path, _) in enumerate(jax.tree.leaves_with_path((args, kwargs)))}
        result = step(*args, **kwargs)
        return result, {number[path]: x for path, x in _variables((args, kwargs)) if path in number}

    return traced


def check(
    step: str, names: Sequence[str], inputs: Sequence[Atom], results: Sequence[Atom], left: dict[int, Atom]
) -> None:
    """Refuses a step that changes what it does not return.

    Args:
      step: its name.
      names: of the flat arguments.
      inputs: the flat arguments.
      results: what it returns.
      left: what it leaves of some arguments, by number.

    Raises:
      InputError: something is lost.
    """
    returned = {v for v in results if isinstance(v, int)}
    lost = [
        names[i] for i, v in left.items() if v != inputs[i] and not (isinstance(v, int) and v in returned)
    ]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise InputError(
            f"the step {step!r} changes {lost[0]}{more}, part of an nnx.State, in place and does not return it: the change "
            "would be lost, and the step would not train. Either return the new state, as in `return nnx.state((model, "
            "optimizer)), loss`, and pass it to the next call; or pass the modules and optimizers themselves, which are "
            "changed in place"
        )


def _variables(arguments: Any) -> list[tuple[Any, Any]]:
    """The leaves of variables, with their paths."""
    nodes = jax.tree.leaves_with_path(arguments, is_leaf=_is_mutable)
    return [
        ((*path, *inner), leaf)
        for path, node in nodes
        if _is_mutable(node)
        for inner, leaf in jax.tree.leaves_with_path(node)
    ]


def _is_mutable(node: Any) -> bool:
    """Whether a node is an NNX object; an `nnx.State` is a value like any other pytree."""
    homes = {c.__module__ for c in type(node).__mro__ if c.__module__.startswith("flax.nnx.")}
    return bool(homes) and "flax.nnx.statelib" not in homes
