"""Meshes that the step itself names, as in code that was parallelized by hand.

A step for autoshard is the code of one device, and the plan shards its values over a mesh that the search chooses. A step
may name another mesh for three purposes:

* *Sharding values*: `with_sharding_constraint`, `device_put` to a sharding, `jit` with shardings, `out_sharding=`. These do
  not change any number. They are left out of the graph, so that the compiled program has no constraints but the plan's, and
  their source lines are recorded for a warning. A memory kind stays: it is part of a value's type.
* *Code per device*: `shard_map` and `pmap`. Their collectives and shards belong to the mesh that they name, so no other mesh
  can be planned. They are refused.
* *Collectives*: `psum` and the like over an axis of a mesh or of `pmap`. Outside of `shard_map` and `pmap` the axis does not
  exist, and JAX raises an error. They are refused, too. An axis of `vmap` is allowed: it belongs to one device's code.
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
"""The public functions behind primitives that shard values. Other primitives shard their results by `out_sharding=`."""


def placements(jaxpr: Any) -> tuple[str, ...]:
    """The sharding annotations in a jaxpr that name a mesh, each with its source line.

    Raises:
      InputError: the jaxpr holds code per device (`shard_map`, `pmap`).
    """
    found: dict[str, None] = {}
    for eqn, source in _equations(jaxpr, None):
        where = f"at {line}" if (line := _jax.source_line(source)) else "in the step"
        if eqn.primitive.name == "shard_map":
            raise InputError(
                f"jax.shard_map (or jax.pmap) {where} is code of several devices, on the mesh "
                f"{dict(eqn.params['mesh'].shape)}, and a step for autoshard is the code of one, which it splits itself. "
                "Call the mapped function on whole arrays, its collectives left out; if the compiler cannot split it, wrap "
                "it in jax.experimental.custom_partitioning with a sharding_rule",
                section="a-step-that-names-devices",
            )
        if _jax.names_a_mesh(eqn):
            name = eqn.primitive.name
            found[f"{_CALLED.get(name, f'out_sharding= of {name}')} {where}"] = None
    return tuple(found)


def refusal(step: str, error: BaseException, where: str) -> InputError | None:
    """The error for a step that names an axis of a mesh; None if JAX failed for another reason.

    Args:
      step: the step's name.
      error: JAX's error while the step was traced.
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
    """All equations, inner ones included, each with its source: the caller's, if it has no line of its own."""
    for eqn in _jax.open_jaxpr(jaxpr).eqns:
        source = eqn.source_info if caller is None or _jax.has_source(eqn.source_info) else caller
        yield eqn, source
        for inner in _jax.inner_jaxprs(eqn):
            yield from _equations(inner, source)
