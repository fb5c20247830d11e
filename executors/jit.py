"""The jit executor: one program over the whole mesh, partitioned by XLA along the plan's constraints."""

import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.units import format_mesh
from autoshard.executors.rewrite import evaluator
from autoshard.search.ir._jax import is_weak, itemsize, on_mesh, with_weak_type
from autoshard.search.ir.graph import Step, Value
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import partition_spec


@dataclass(frozen=True, eq=False)
class Program:
    """A jitted function, and the arguments to lower it with.

    Attributes:
      name: the step's name, or the name of a pipeline stage's program: `forward 2`.
      fn: the jitted step. It takes the step's positional arguments, then its keyword arguments in alphabetical order.
      args: `jax.ShapeDtypeStruct` pytrees with their shardings: `fn.lower(*args)` lowers the program that runs.
      mesh: the devices, or only their number along each axis.
      donated_leaves: numbers of the flat arguments whose buffers are reused for results.
      resting_bytes: bytes of arguments and results on a device; a result in a donated buffer does not count twice.
    """

    name: str
    fn: Any
    args: tuple[Any, ...]
    mesh: Mesh | AbstractMesh
    donated_leaves: frozenset[int]
    resting_bytes: int

    @property
    def donated(self) -> tuple[bool, ...]:
        """For each of `args`, whether any of its buffers is donated."""
        return tuple(not self.donated_leaves.isdisjoint(span) for span in _spans(self.args))

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
    given_up: AbstractSet[int] = frozenset(),
) -> Program:
    """Writes a sharding into a step and jits it.

    Args:
      step: the traced step.
      sharding: the specs to impose.
      devices: at least as many as the mesh has, in the cluster's order: real, simulated or compile-only; None for a
        program that is only lowered, over an abstract mesh.
      on_retrace: called when JAX traces the step for shapes other than the planned ones; it should raise.
      compiler_options: further options for the compiler, given the program's `resting_bytes`.
      given_up: arguments besides the state whose buffers may be reused, for results of an equal type and sharding.

    Raises:
      InputError: there are fewer devices than the mesh has.
    """
    names = sharding.axis_names
    mesh = mesh_of(sharding.mesh_shape, names, devices)

    def named(place: Any, value: Value) -> NamedSharding:
        route = sharding.specs.get(place)
        spec = partition_spec(route[-1], names) if route else PartitionSpec()
        return NamedSharding(mesh, spec, memory_kind="pinned_host" if value.is_on_host else None)

    graph = step.graph
    inputs = [named(("input", (), i), graph.values[v]) for i, v in enumerate(graph.inputs)]
    outputs = [
        named(("output", (), o), graph.value(a)) if r is None else inputs[r]
        for o, (a, r) in enumerate(zip(graph.outputs, step.rests_as, strict=True))
    ]
    evaluate = evaluator(graph, sharding, mesh)
    return jitted(step, evaluate, mesh, inputs, outputs, on_retrace, compiler_options, given_up)


def jitted(
    step: Step,
    evaluate: Callable[[Sequence[Any]], Sequence[Any]],
    mesh: Mesh | AbstractMesh,
    inputs: Sequence[NamedSharding],
    outputs: Sequence[NamedSharding],
    on_retrace: Callable[[], None] = lambda: None,
    compiler_options: Callable[[int], dict[str, str]] = lambda resting_bytes: {},
    given_up: AbstractSet[int] = frozenset(),
) -> Program:
    """Jits a step that a given function evaluates.

    Args:
      step: the traced step.
      evaluate: maps the flat arguments to the flat results.
      mesh: the mesh that the step runs on.
      inputs: the shardings of its flat arguments.
      outputs: the shardings of its flat results; new state has the sharding of the argument that it replaces.
      on_retrace: called when JAX traces the step for other shapes; it should raise.
      compiler_options: further options for the compiler, given the program's `resting_bytes`.
      given_up: arguments besides the state whose buffers may be reused.
    """
    graph, abstract = step.graph, step.abstract_inputs()
    placed = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
        for a, s in zip(abstract, inputs, strict=True)
    ]
    args, kwargs = jax.tree_util.tree_unflatten(step.in_tree, placed)
    positional = (*args, *(kwargs[k] for k in sorted(kwargs)))

    def run(*values: Any) -> Any:
        flat = jax.tree_util.tree_leaves(values)
        if list(map(_type, flat)) != list(map(_type, abstract)):
            on_retrace()
        with on_mesh(mesh):
            results = [with_weak_type(x, o in step.weak_results) for o, x in enumerate(evaluate(flat))]
            return jax.tree_util.tree_unflatten(step.out_tree, results)

    run.__name__ = run.__qualname__ = step.name
    apart = {v for op in graph.ops if op.is_host_update for v in op.outputs}
    replaced = zip(graph.outputs, step.replaces, strict=True)
    reused = {
        o: r for o, (a, r) in enumerate(replaced) if r is not None and not (isinstance(a, int) and a in apart)
    }
    reused |= _reusable(step, inputs, outputs, given_up)
    donated = frozenset(reused.values())
    fresh = [o for o in range(len(outputs)) if o not in reused]
    made = [_placed(graph.value(graph.outputs[o]), outputs[o]) for o in fresh]
    resting_bytes = sum(map(shard_bytes, (*placed, *made)))
    options = {
        "compiler_options": compiler_options(resting_bytes) or None,
        "out_shardings": jax.tree_util.tree_unflatten(step.out_tree, outputs),
    }
    spans = _spans(positional)
    if all(donated.issuperset(span) or donated.isdisjoint(span) for span in spans):
        whole = tuple(i for i, span in enumerate(spans) if not donated.isdisjoint(span))
        shardings = jax.tree.map(lambda s: s.sharding, positional)
        fn = jax.jit(run, in_shardings=shardings, donate_argnums=given_away(*whole), **options)
    else:
        fn = LeafwiseJit.of(run, positional, donated, on_retrace, options)
    return Program(step.name, fn, positional, mesh, donated, resting_bytes)


def given_away(*argnums: int) -> tuple[int, ...]:
    """The arguments that a program donates; none under `jax_debug_infs`, where JAX runs a failed program's ops again, one by
    one. Under `jax_debug_nans` JAX itself donates none."""
    return () if jax.config.jax_debug_infs else argnums  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class LeafwiseJit:
    """A jitted function that donates some leaves of an argument and keeps others. `jax.jit` donates whole arguments, so
    the inner function takes two: the donated leaves and the other leaves."""

    jitted: Any
    tree: Any
    is_donated: tuple[bool, ...]
    on_retrace: Callable[[], None]

    @classmethod
    def of(
        cls,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        donated: AbstractSet[int],
        on_retrace: Callable[[], None],
        options: dict[str, Any],
    ) -> "LeafwiseJit":
        """Jits a function of positional arguments.

        Args:
          run: the function.
          args: its arguments, as shapes with shardings.
          donated: numbers of the flat leaves that are donated.
          on_retrace: called when the arguments form another pytree; it should raise.
          options: further arguments of `jax.jit`.
        """
        leaves, tree = jax.tree.flatten(args)
        is_donated = tuple(i in donated for i in range(len(leaves)))

        def run_leaves(given_up: list[Any], kept: list[Any]) -> Any:
            sources = iter(given_up), iter(kept)
            return run(*jax.tree.unflatten(tree, [next(sources[not d]) for d in is_donated]))

        run_leaves.__name__ = run_leaves.__qualname__ = run.__name__
        parts = _parted([s.sharding for s in leaves], is_donated)
        jitted = jax.jit(run_leaves, in_shardings=parts, donate_argnums=given_away(0), **options)
        return cls(jitted, tree, is_donated, on_retrace)

    def __call__(self, *args: Any) -> Any:
        """Runs the function."""
        return self.jitted(*self._parts(args))

    def lower(self, *args: Any) -> Any:
        """Lowers the function, as `jax.jit(...).lower` does."""
        return self.jitted.lower(*self._parts(args))

    def trace(self, *args: Any) -> Any:
        """Traces the function, as `jax.jit(...).trace` does."""
        return self.jitted.trace(*self._parts(args))

    def _parts(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        leaves, tree = jax.tree.flatten(args)
        if tree != self.tree:
            self.on_retrace()
            raise TypeError(f"wanted arguments as {self.tree}, got {tree}")
        return _parted(leaves, self.is_donated)


def _parted(leaves: Sequence[Any], is_donated: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Splits leaves into the donated ones and the others."""
    pairs = list(zip(leaves, is_donated, strict=True))
    return [x for x, d in pairs if d], [x for x, d in pairs if not d]


def _reusable(
    step: Step, inputs: Sequence[NamedSharding], outputs: Sequence[NamedSharding], given_up: AbstractSet[int]
) -> dict[int, int]:
    """By result that is not state, a donated argument whose buffer it may take: of an equal value and sharding."""
    graph, taken = step.graph, set(step.replaces)
    found: dict[int, int] = {}
    for o, (made, sharding) in enumerate(zip(graph.outputs, outputs, strict=True)):
        value = graph.value(made)
        fitting = (
            i
            for i in sorted(given_up - taken)
            if step.replaces[o] is None and graph.values[graph.inputs[i]] == value and inputs[i] == sharding
        )
        if (argument := next(fitting, None)) is not None:
            found[o] = argument
            taken.add(argument)
    return found


def _type(x: Any) -> Any:
    """Shape, dtype and weak type: `jax.jit` makes one program for each combination."""
    return tuple(x.shape), x.dtype, is_weak(x)


def shard_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on each of its devices; 0 if it lies on the host."""
    assert x.sharding is not None, f"an array of shape {x.shape} lies nowhere"
    if x.sharding.memory_kind == "pinned_host":
        return 0
    return math.prod(x.sharding.shard_shape(x.shape)) * itemsize(x.dtype)


def _placed(value: Value, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)


def mesh_of(
    shape: tuple[int, ...], names: tuple[str, ...], devices: Sequence[Any] | None
) -> Mesh | AbstractMesh:
    """The mesh of the first of these devices; an abstract one without devices.

    Raises:
      InputError: there are fewer devices than the mesh has.
    """
    if devices is None:
        return AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    wanted = math.prod(shape)
    if len(devices) < wanted:
        raise InputError(
            f"the plan's mesh {format_mesh(shape)} needs {wanted} devices, and there are {len(devices)}. Search again for "
            "the devices at hand, or run on more"
        )
    return Mesh(np.array(devices[:wanted]).reshape(shape), names)


def _spans(args: tuple[Any, ...]) -> list[range]:
    """For each argument, the numbers of its leaves."""
    spans, start = [], 0
    for argument in args:
        spans.append(range(start, start + len(jax.tree_util.tree_leaves(argument))))
        start = spans[-1].stop
    return spans
