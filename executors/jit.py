"""The jit executor: one program over the whole mesh, partitioned by XLA along the plan's constraints."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cost_model.errors import InputError
from cost_model.units import format_mesh
from executors.rewrite import evaluator
from search.ir.graph import Step, Value
from search.ir.sharding import StepSharding
from search.ir.spec import partition_spec


@dataclass(frozen=True, eq=False)
class Program:
    """What runs: a jitted function, and the arguments to lower it with.

    Attributes:
      fn: the jitted step. It takes the step's positional arguments, then its keyword arguments in
        alphabetical order.
      args: `jax.ShapeDtypeStruct` pytrees with their shardings: `fn.lower(*args)` is exactly what runs.
      mesh: the devices, or only their number along each axis.
      donated: for each of `args`, whether its buffers are reused for the new state.
      resting_bytes: what arguments and results take on a device; those that take over others' buffers once.
    """

    fn: Any
    args: tuple[Any, ...]
    mesh: Mesh | AbstractMesh
    donated: tuple[bool, ...]
    resting_bytes: int

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings of `args`, as pytrees."""
        return jax.tree.map(lambda s: s.sharding, self.args)


def build(
    step: Step,
    sharding: StepSharding,
    devices: Sequence[Any] | None,
    on_retrace: Callable[[], None] = lambda: None,
    compiler_options: Callable[[int], dict[str, str]] = lambda resting_bytes: {},
) -> Program:
    """Writes a sharding into a step and jits it.

    Args:
      step: the traced step.
      sharding: the specs to impose.
      devices: at least as many as the mesh has, in the cluster's order: real, simulated or compile-only; None for
        a program that is only lowered, over an abstract mesh.
      on_retrace: called when JAX traces the step for other shapes than those it was planned for; it should
        raise.
      compiler_options: what the compiler is told besides, given the program's `resting_bytes`.

    Raises:
      InputError: there are fewer devices than the mesh has.
    """
    mesh = _mesh(sharding, devices)
    names = sharding.axis_names

    def named(place: Any, value: Value) -> NamedSharding:
        route = sharding.specs.get(place)
        spec = partition_spec(route[-1], names) if route else PartitionSpec()
        return NamedSharding(mesh, spec, memory_kind="pinned_host" if value.is_on_host else None)

    graph = step.graph
    inputs = [named(("input", (), i), graph.values[v]) for i, v in enumerate(graph.inputs)]
    outputs = [
        named(("output", (), o), graph.value(a)) if r is None else inputs[r]
        for o, (a, r) in enumerate(zip(graph.outputs, step.replaces, strict=True))
    ]
    abstract = step.abstract_inputs()
    placed = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
        for a, s in zip(abstract, inputs, strict=True)
    ]
    args, kwargs = jax.tree_util.tree_unflatten(step.in_tree, placed)
    positional = (*args, *(kwargs[k] for k in sorted(kwargs)))
    evaluate = evaluator(graph, sharding, mesh)

    def run(*values: Any) -> Any:
        flat = jax.tree_util.tree_leaves(values)
        if [(tuple(x.shape), x.dtype) for x in flat] != [(a.shape, a.dtype) for a in abstract]:
            on_retrace()
        return jax.tree_util.tree_unflatten(step.out_tree, evaluate(flat))

    run.__name__ = run.__qualname__ = step.name
    donated, of_argument = _donated(step, positional)
    fresh = [o for o, r in enumerate(step.replaces) if r is None or not of_argument[r]]
    made = [(graph.value(graph.outputs[o]), outputs[o]) for o in fresh]
    there = [(graph.values[v], s) for v, s in zip(graph.inputs, inputs, strict=True)]
    resting_bytes = sum(_shard_bytes(value, s) for value, s in (*there, *made))
    fn = jax.jit(
        run,
        compiler_options=compiler_options(resting_bytes) or None,
        in_shardings=jax.tree.map(lambda s: s.sharding, positional),
        out_shardings=jax.tree_util.tree_unflatten(step.out_tree, outputs),
        donate_argnums=tuple(i for i, d in enumerate(donated) if d),
    )
    return Program(fn, positional, mesh, donated, resting_bytes)


def _shard_bytes(value: Value, sharding: NamedSharding) -> int:
    return 0 if value.is_on_host else math.prod(sharding.shard_shape(value.shape)) * value.itemsize


def _mesh(sharding: StepSharding, devices: Sequence[Any] | None) -> Mesh | AbstractMesh:
    if devices is None:
        automatic = (AxisType.Auto,) * len(sharding.axis_names)
        return AbstractMesh(sharding.mesh_shape, sharding.axis_names, axis_types=automatic)
    wanted = int(np.prod(sharding.mesh_shape))
    if len(devices) < wanted:
        raise InputError(
            f"the plan's mesh {format_mesh(sharding.mesh_shape)} needs {wanted} devices, and there are "
            f"{len(devices)}. Search again for the devices at hand, or run on more"
        )
    return Mesh(np.array(devices[:wanted]).reshape(sharding.mesh_shape), sharding.axis_names)


def _donated(step: Step, positional: tuple[Any, ...]) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """An argument is donated when every leaf of it is replaced by a result; for each argument, and for each leaf."""
    replaced = {r for r in step.replaces if r is not None}
    donated: list[bool] = []
    of_leaf: list[bool] = []
    for argument in positional:
        size, start = len(jax.tree_util.tree_leaves(argument)), len(of_leaf)
        donated.append(size > 0 and replaced.issuperset(range(start, start + size)))
        of_leaf += donated[-1:] * size
    return tuple(donated), tuple(of_leaf)
