"""The line of a step that makes a NaN or an infinity, under `jax_debug_nans` and `jax_debug_infs`.

If a program's results have such a value, JAX runs the program's function again, op by op, and raises a `FloatingPointError`
at the first op that makes one. Under `jax.jit` the traceback leads to the user's line. Executors bind ops outside the user's
code, so the line has to come from the op. A loop is one op: its body runs here once more, in turn.
"""

from collections.abc import Sequence
from typing import Any

from autoshard.search.ir._jax import Literal, bind, jaxpr_consts, open_jaxpr, scan_counts, source_line


def located(
    error: FloatingPointError,
    source_info: Any,
    primitive: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
) -> FloatingPointError:
    """The error of an op with its line; of a loop, with the line in its body."""
    inner = _in_loop(operands, params) if primitive.name == "scan" else None
    where = source_line(source_info)
    return inner or FloatingPointError(f"{str(error).rstrip('.')} at {where}" if where else str(error))


def _in_loop(operands: Sequence[Any], params: dict[str, Any]) -> FloatingPointError | None:
    """The error of the first op of a `scan` that makes a bad value; None if none does so."""
    num_consts, num_carry = scan_counts(params)
    consts, carry = operands[:num_consts], list(operands[num_consts : num_consts + num_carry])
    xs, steps = operands[num_consts + num_carry :], range(params["length"])
    for i in reversed(steps) if params["reverse"] else steps:
        results = _in_turn(params["jaxpr"], [*consts, *carry, *(x[i] for x in xs)])
        if isinstance(results, FloatingPointError):
            return results
        carry = results[:num_carry]
    return None


def _in_turn(jaxpr: Any, operands: Sequence[Any]) -> list[Any] | FloatingPointError:
    """The results of a jaxpr, run op by op; or the error of the first op that makes a bad value."""
    body = open_jaxpr(jaxpr)
    env = dict(
        zip((*body.invars, *jaxpr_consts(jaxpr)[0]), (*operands, *jaxpr_consts(jaxpr)[1]), strict=True)
    )

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [a.val if isinstance(a, Literal) else env[a] for a in atoms]

    for eqn in body.eqns:
        values = read(eqn.invars)
        try:
            env.update(zip(eqn.outvars, bind(eqn.primitive, values, eqn.params), strict=True))
        except FloatingPointError as e:
            return located(e, eqn.source_info, eqn.primitive, values, eqn.params)
    return read(body.outvars)
