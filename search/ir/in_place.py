"""Steps that change their arguments in place.

`jax.jit`, which autoshard needs, passes a step copies of its arguments. Changes that are not returned are lost, and a step
that trains its arguments in place repeats its first loss for ever. There are two remedies:

* A caller that knows the objects splits them into arrays beforehand (`autoshard.nnx_objects`). The step then returns an
  `InPlace`: its own result, and its arguments' new values. An unchanged value is no result: in the trace it is the input
  itself.
* An `nnx.State` is an ordinary pytree, but its variables can be assigned to. A step that assigns to them and does not return
  them is refused. For this check, the variables are additional results of the trace.

Flax is not imported here: its variables are recognised by the module that defines their class.
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
    """The result of a step that changes its arguments in place, in a form without side effects.

    Attributes:
      result: the step's own result.
      left: the new values of its flat arguments, by their number.
      made: further arrays that it has put into the objects among its arguments and results.
      form: the static data from which the caller restores the objects.
    """

    result: Any
    left: dict[int, Any]
    made: tuple[Any, ...]
    form: Hashable

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Hashable]:
        """The children with their keys, and the static data."""
        key = jax.tree_util.GetAttrKey
        return ((key("result"), self.result), (key("left"), self.left), (key("made"), self.made)), self.form

    @classmethod
    def tree_unflatten(cls, form: Hashable, children: Sequence[Any]) -> "InPlace":
        """The value with this static data and these children."""
        result, left, made = children
        return cls(result, left, made, form)


def changed_only(graph: Graph, returned: InPlace) -> tuple[Graph, InPlace]:
    """The graph of a step that returns an `InPlace`, and that `InPlace`, without results that are unchanged arguments."""
    first = len(jax.tree.leaves(returned.result))
    at = {number: first + k for k, number in enumerate(sorted(returned.left))}
    same = {n for n, o in at.items() if graph.outputs[o] == graph.inputs[n]}
    dropped = {at[n] for n in same}
    outputs = tuple(a for o, a in enumerate(graph.outputs) if o not in dropped)
    left = {n: x for n, x in returned.left.items() if n not in same}
    return replace(graph, outputs=outputs), replace(returned, left=left)


def successors(returned: InPlace) -> dict[int, int]:
    """The flat results that are new values of arguments, each with the number of its argument."""
    first = len(jax.tree.leaves(returned.result))
    return {first + k: number for k, number in enumerate(sorted(returned.left))}


def holds_variables(arguments: Any) -> bool:
    """True if there are NNX variables in a pytree."""
    return any(map(_is_mutable, jax.tree.leaves(arguments, is_leaf=_is_mutable)))


def watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step with two results: its own, and the values of its arguments' variables after it, by the number of the flat
    argument."""

    @functools.wraps(step, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        number = {path: i for i, (path, _) in enumerate(jax.tree.leaves_with_path((args, kwargs)))}
        result = step(*args, **kwargs)
        return result, {number[path]: x for path, x in _variables((args, kwargs)) if path in number}

    return traced


def check(
    step: str, names: Sequence[str], inputs: Sequence[Atom], results: Sequence[Atom], left: dict[int, Atom]
) -> None:
    """Refuses a step that changes a variable and does not return it.

    Args:
      step: the step's name.
      names: the names of the flat arguments.
      inputs: the flat arguments.
      results: the step's own results.
      left: the values of variables after the step, by the number of the flat argument.

    Raises:
      InputError: a change would be lost.
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
    """True if a node is an NNX object; an `nnx.State` itself is an ordinary pytree."""
    homes = {c.__module__ for c in type(node).__mro__ if c.__module__.startswith("flax.nnx.")}
    return bool(homes) and "flax.nnx.statelib" not in homes
