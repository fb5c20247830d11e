"""Meshes that the step itself names, as code does that was parallelized by hand.

A plan says how the values of one device's code lie on a mesh of the search's own. A step may name another mesh:

* *to say how values lie*: `with_sharding_constraint`, `device_put` to a sharding, `jit` with shardings, `out_sharding=`. No
  number depends on that. It is left out of the graph, so that no constraint of which the plan knows nothing is in the
  compiled program, and the step says where it stood, for a warning. A memory kind stays: it is part of a value's type;
* *to say what each device computes*: `shard_map` and `pmap`. Their collectives and shares are those of the mesh that they
  name, so no other can be planned for them. They are refused;
* *to communicate*: `psum` and the like over an axis of a mesh or a former `pmap`. Outside of these, no such axis exists, and
  JAX says so. They are refused, too. An axis of `vmap` is one of one device's code.
"""

from collections.abc import Iterator
from typing import Any

from autoshard.cost_model.errors import InputError
from autoshard.search.ir import _jax

_CALLED = {
    "sharding_constraint": "jax.lax.with_sharding_constraint",
    "device_put": "jax.device_put",
    "jit": "jax.jit with shardings",
    "pjit": "jax.jit with shardings",
    "reshard": "jax.sharding.reshard",
}
"""What users call the primitives that say how values lie. Others do so by `out_sharding=`."""


def placements(jaxpr: Any) -> tuple[str, ...]:
    """What in a jaxpr says how values lie on devices, each with its source line.

    Raises:
      InputError: something says what each device computes.
    """
    found: dict[str, None] = {}
    for eqn, source in _equations(jaxpr, None):
        where = f"at {line}" if (line := _jax.source_line(source)) else "in the step"
        if eqn.primitive.name == "shard_map":
            raise InputError(
                f"jax.shard_map (or jax.pmap) {where} is code of several devices, on the mesh "
                f"{dict(eqn.params['mesh'].shape)}, and a step for autoshard is the code of one, which it splits itself. "
                "Call the mapped function on whole arrays, its collectives left out; if the compiler cannot split it, wrap "
                "it in jax.experimental.custom_partitioning with a sharding_rule"
            )
        if _jax.names_a_mesh(eqn):
            name = eqn.primitive.name
            found[f"{_CALLED.get(name, f'out_sharding= of {name}')} {where}"] = None
    return tuple(found)


def refusal(step: str, error: BaseException, where: str) -> InputError | None:
    """Why a step that names an axis of a mesh cannot be traced; None if that is not what an error says.

    Args:
      step: its name.
      error: what JAX raised while it was traced.
      where: the line in the user's code, in brackets.
    """
    if (axis := _jax.foreign_axis(error)) is None:
        return None
    named = f"the axis {axis!r}" if axis.strip() else "axes"
    return InputError(
        f"the step {step!r} names {named} of a mesh or of jax.pmap{where}, and a step for autoshard is the code of one "
        "device, which has none. Leave out what names it (psum, pmean, all_gather, axis_index, explicit shardings): the "
        "plan adds the collectives that it needs. An axis that jax.vmap names may stay"
    )


def _equations(jaxpr: Any, caller: Any) -> Iterator[tuple[Any, Any]]:
    """All equations, inner ones included, each with its source: the caller's, where it knows no line."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        source = eqn.source_info if caller is None or _jax.has_source(eqn.source_info) else caller
        yield eqn, source
        for inner in _jax.inner_jaxprs(eqn):
            yield from _equations(inner, source)
