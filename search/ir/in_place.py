"""Steps that change their arguments in place, as Flax NNX's may.

`nnx.jit` carries what a step does to a module or an optimizer back to the caller's. `jax.jit`, which autoshard needs, hands
the step a copy: what is not returned is dropped, and the step repeats its first loss for ever. So it is refused.

What was changed is read off the trace, in which the variables as the step leaves them are further results: one that is
neither the argument as it was nor a result of the step is lost.

Flax is not imported here: modules are told by where their classes are defined.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cost_model.errors import InputError
from search.ir.graph import Atom


def holds_modules(arguments: Any) -> bool:
    """Whether there are NNX modules, optimizers or variables in a pytree."""
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
    lost = [names[i] for i, v in left.items() if v != inputs[i] and v not in returned]
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise InputError(
            f"the step {step!r} changes {lost[0]}{more} in place and does not return it. Under jax.jit, which autoshard "
            "needs, the change is lost, and the step would not train. Either return what it changes and pass that to "
            "the next call, as in `return model, optimizer, loss`; or carry the state: `graphdef, state = "
            "nnx.split((model, optimizer))` outside, `model, optimizer = nnx.merge(graphdef, state)` at the step's "
            "beginning and `return nnx.state((model, optimizer)), loss` at its end"
        )


def _variables(arguments: Any) -> list[tuple[Any, Any]]:
    """The leaves of modules, optimizers and variables, with their paths."""
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
