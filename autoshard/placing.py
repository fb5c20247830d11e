"""Arguments on a program's devices, and the call of the program.

As a rule the arguments are in place: state comes from the last call, and `jax.jit` transfers a batch from NumPy itself.
Arguments with other shardings are moved before the call. A call that fails for another reason is not tried twice.

Moving newly created state once costs little. Arguments that must move in every call are worth a warning, such as a training
step's parameters in an evaluation that was planned separately.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.units import format_bytes
from autoshard.executors.jit import Program
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.executors.transfers import is_sent, sent, spread
from autoshard.planning import LARGE_BYTES, LARGE_SHARE
from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Role, Step
from autoshard.search.plan.text_table import few
from autoshard.user_warning import warn

FAILURES = (ValueError, TypeError, RuntimeError)
"""Errors of JAX for arguments with other shardings or donated ones, and for many other causes."""


_GIVEN = (Role.BATCH, Role.FROZEN, Role.KEY)
"""Roles of arguments that the step does not return: the caller passes them to every call."""


class RetracedError(Exception):
    """JAX began to trace the step for a signature that it was not planned for."""


def retraced() -> None:
    """The `on_retrace` of `executors.jit.build` and `executors.pipeline.build`."""
    raise RetracedError


def run(
    program: Program | PipelineProgram, args: tuple[Any, ...], step: Step, is_first: bool, advice: str
) -> tuple[Any, tuple[Any, ...]]:
    """Runs a program.

    Args:
      program: the step's program.
      args: the program's arguments; they are moved to its devices if need be.
      step: the traced step.
      is_first: whether the program has never run.
      advice: the end of a warning about arguments that move in every call.

    Returns:
      The program's results, and the arguments as it was called with them.
    """
    if not is_first and are_distinct(args):
        try:
            return called(program, args), args
        except (RetracedError, *FAILURES):
            if not is_refused(program, args, step):
                raise
    placed = _placed(program, args, step, advice)
    return called(program, placed), placed


def called(program: Program | PipelineProgram, args: tuple[Any, ...]) -> Any:
    """The results of a program, called without an ambient mesh."""
    with _jax.no_mesh():
        return program.fn(*args)


def is_refused(program: Program | PipelineProgram, args: tuple[Any, ...], step: Step) -> bool:
    """True if a failed call was refused because of its arguments, so that nothing ran.

    A program accepts arguments of its own pytree and shardings, and an array twice only if it donates none. JAX transfers
    uncommitted arrays and host values, except host values to devices of several processes.

    Raises:
      InputError: an argument is deleted; the message names it.
    """
    arrays, tree = jax.tree.flatten(args)
    wanted, own = jax.tree.flatten(program.shardings)
    if tree != own:
        return True
    _check_are_there(step, arrays)
    is_strict = isinstance(program, PipelineProgram)
    lies_elsewhere = any(
        x.committed and x.sharding != s and (is_strict or not x.sharding.is_equivalent_to(s, x.ndim))
        if isinstance(x, jax.Array)
        else not s.is_fully_addressable
        for x, s in zip(arrays, wanted, strict=True)
    )
    return lies_elsewhere or (bool(program.donated_leaves) and not are_distinct(args))


def _check_are_there(step: Step, arrays: Sequence[Any]) -> None:
    """Refuses arguments that are deleted.

    Raises:
      InputError: an argument is deleted; the message names it.
    """
    for argument, x in zip(step.arguments, arrays, strict=True):
        if isinstance(x, jax.Array) and x.is_deleted():
            raise InputError(
                f"{argument.name} is deleted: it was donated to an earlier call, or its owner deleted it. Pass the state "
                f"that {step.name} returned; if the old one is needed too, copy it beforehand (jax.tree.map(jnp.copy, ...))",
                section="a-donated-state",
            )


def are_distinct(args: tuple[Any, ...]) -> bool:
    """True if no array is passed twice: a donated array must not be read elsewhere in the call."""
    leaves = jax.tree.leaves(args)
    return len(set(map(id, leaves))) == len(leaves)


def _placed(
    program: Program | PipelineProgram, args: tuple[Any, ...], step: Step, advice: str
) -> tuple[Any, ...]:
    """The arguments on a program's devices. Uncommitted arguments that are new in every call stay as they are: JAX transfers
    them, and would trace and compile twice for arrays on a mesh and arrays without one. Those that rest on the host are
    placed."""
    leaves, tree = jax.tree.flatten(args)
    _check_are_there(step, leaves)
    shardings, seen = jax.tree.leaves(program.shardings), set[int]()
    moved: dict[int, Any] = {}
    for i, (x, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        is_given = step.arguments[i].role in _GIVEN and i not in program.donated_leaves
        is_new = is_given and sharding.memory_kind != "pinned_host"
        if is_new and not getattr(x, "committed", False) and sharding.is_fully_addressable:
            continue
        leaves[i] = jnp.copy(x) if isinstance(x, jax.Array) and id(x) in seen else x
        if getattr(x, "sharding", None) != sharding:
            moved[i] = leaves[i]
        seen.add(id(x))
    _warn_of_moves(program, step, moved, advice)
    there = [_own(x, shardings[i]) if i in program.donated_leaves else x for i, x in moved.items()]
    for i, x in zip(moved, put(there, [shardings[i] for i in moved]), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(tree, leaves)


def put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Arrays on shardings. An array for devices of several processes is assembled from each process's equal copy. JAX
    transfers PRNG keys there only as their key data."""
    there = [sent([s], x)[0] if is_sent(x, s) else x for x, s in zip(arrays, shardings, strict=True)]
    is_key = [_is_far_key(x, s) for x, s in zip(there, shardings, strict=True)]
    numbers = [jax.random.key_data(x) if k else x for x, k in zip(there, is_key, strict=True)]
    there = jax.device_put(numbers, list(shardings))
    return [
        jax.random.wrap_key_data(x, impl=jax.random.key_impl(key)) if k else x
        for x, key, k in zip(there, arrays, is_key, strict=True)
    ]


def spread_out(state: Any, devices: Sequence[Any]) -> Any:
    """A state without arrays that one of several processes holds alone."""

    def spread_one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        sharding = spread(x.shape, x.sharding, devices)
        return x if sharding == x.sharding else sent([sharding], x)[0]

    return jax.tree.map(spread_one, state)


def _is_far_key(x: Any, sharding: Any) -> bool:
    is_key = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return is_key and not sharding.is_fully_addressable and x.sharding != sharding


def _own(x: Any, sharding: Any) -> Any:
    """An array to be moved and then donated. If each device will hold all of it, a shard may share the user's buffer, which
    donation would delete; the array is therefore copied."""
    return jnp.copy(x) if isinstance(x, jax.Array) and sharding.shard_shape(x.shape) == x.shape else x


def _warn_of_moves(
    program: Program | PipelineProgram, step: Step, moved: Mapping[int, Any], advice: str
) -> None:
    """Warns if many bytes have to move and are no state, so that each call moves them: arrays on several devices, and
    those that rest on the host."""
    wanted, state = jax.tree.leaves(program.shardings), {*program.donated_leaves, *step.replaces}
    again = {
        i: x
        for i, x in moved.items()
        if i not in state and (wanted[i].memory_kind == "pinned_host" or _lies_otherwise(x, wanted[i]))
    }
    num_bytes = sum(x.nbytes for x in again.values())
    everything = sum(step.graph.values[v].num_bytes for v in step.graph.inputs)
    if num_bytes >= max(LARGE_BYTES, LARGE_SHARE * everything):
        names = few([step.arguments[i].name for i in again])
        warn(
            f"{format_bytes(num_bytes)} of the arguments of {step.name} are not sharded as in its plan, and move "
            f"in each call: {names}. {advice}"
        )


def _lies_otherwise(x: Any, sharding: Any) -> bool:
    """True if an array on several devices has another sharding."""
    is_spread = isinstance(x, jax.Array) and len(x.sharding.device_set) > 1
    return is_spread and not x.sharding.is_equivalent_to(sharding, x.ndim)
