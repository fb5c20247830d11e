"""NNX objects in an ejected file: whether a file can split and join them as the plan's program does.

A file of plain JAX and Flax splits the objects by `nnx.split`, calls a function of states, and updates the objects by
`nnx.update`. That carries new arrays of known variables, and nothing else. A step that gives its objects new variables,
changes their static attributes or returns objects is refused, with the reason.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from autoshard.calls import Call
from autoshard.ejection.layout import path_text
from autoshard.nnx_objects import VariablePath, Variables, statics
from autoshard.search.ir.graph import Step


def fault(call: Call, args: Sequence[Any], step: Step) -> str:
    """Why a step with objects among its arguments has no whole file, as a clause; empty if it has one.

    Args:
      call: the step's call, with its objects split.
      args: the call's positional arguments as they were given.
      step: the traced step.
    """
    if call.kwargs or call.static or len(args) != len(call.args):
        return "it takes static or keyword arguments"
    if any(not isinstance(x, Variables) and _holds(x) for x in call.args):
        return "objects are inside other containers"
    assert call.apart is not None
    form = jax.tree.unflatten(step.out_tree, range(step.out_tree.num_leaves)).form
    if any(form.is_object):
        return "it returns objects"
    if None in form.sources:
        return "it gives its objects new variables"
    if statics(call.apart.form.graph) != statics(form.graph):
        return "it changes static attributes of its objects"
    return (
        "" if [*_split_paths(call, args)] == [*_own_paths(call)] else "variables are shared in another order"
    )


def _holds(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Variables))
    return any(isinstance(x, Variables) for x in leaves)


def _own_paths(call: Call) -> Iterator[tuple[int, str]]:
    """The arrays of the objects in the order of the plan's program: the number of the object, and the path."""
    for number, x in enumerate(x for x in call.args if isinstance(x, Variables)):
        yield from ((number, VariablePath(path).slashed) for path in x.paths)


def _split_paths(call: Call, args: Sequence[Any]) -> Iterator[tuple[int, str]]:
    """The arrays of the objects in the order in which a file has them."""
    from flax import nnx

    objects = [x for x, pure in zip(args, call.args, strict=True) if isinstance(pure, Variables)]
    _, state = nnx.split(tuple(objects))
    for number in range(len(objects)):
        for path, _ in jax.tree.leaves_with_path(state.get(number, nnx.State({}))):
            yield number, path_text(path)
