"""The SPMD pipeline executor: one program for all stages, on a mesh of stages, their replicas, and the devices of each
replica.

Microbatches run in one function of all replicas (`shard_map`), with explicit messages between replicas. The replicas of a
stage split the batch. Each replica runs its own microbatches from beginning to end, so replicas add nothing up before the
last one. Stages split the layers. Ops between the loops over layers have no stage: there, the stages split the
microbatches too, if their number allows it.

    activations   into a loop over layers: gathered from all stages; out of it: scattered from the stage where it ends;
    gradients     added up once in a step: of layers over a stage's replicas, others over all that split the microbatches;
    stacks        from a forward loop to the backward loop: stay on their stages.

The solution of a search problem says how the devices of a replica share its work. As in a plan of one program, its specs
are written in as constraints, and the partitioner makes the messages between these devices.

`executors.spmd_ticks` runs the loops.

Source: Xu et al. 2021, "GSPMD", section 3.3, formulates pipelines as one program.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autoshard.executors.jit import Program, jitted
from autoshard.executors.rewrite import evaluator
from autoshard.executors.spmd_layout import SpmdLayout
from autoshard.executors.spmd_ticks import NOTHING, Ticks
from autoshard.search.ir.graph import Graph
from autoshard.search.plan.spmd_step import LayerLoop, Segment, SpmdSharding, SpmdStep
from autoshard.search.plan.values import REPLICA, STAGE


def build(
    program: SpmdStep,
    sharding: SpmdSharding,
    devices: Sequence[Any] | None,
    on_retrace: Callable[[], None] = lambda: None,
    compiler_options: Callable[[int], dict[str, str]] = lambda resting_bytes: {},
    given_up: AbstractSet[int] = frozenset(),
) -> Program:
    """Jits a step as one program.

    Args:
      program: the step.
      sharding: the specs of values over the devices of a replica.
      devices: the devices of all stages, one stage after another: real, simulated or compile-only; None for a program that
        is only lowered, over an abstract mesh.
      on_retrace: called when JAX traces the step for other shapes; it should raise.
      compiler_options: further options for the compiler, given the program's `resting_bytes`.
      given_up: as for `executors.jit.build`.

    Raises:
      InputError: there are fewer devices than the mesh has.
    """
    step, layout = program.step, SpmdLayout.on(program, sharding, devices)
    inputs = [layout.resting(v) for v in step.graph.inputs]
    whole = NamedSharding(layout.mesh, PartitionSpec())
    outputs = [
        (layout.resting(a) if isinstance(a, int) else whole) if r is None else inputs[r]
        for a, r in zip(step.graph.outputs, step.rests_as, strict=True)
    ]
    run = _Run(program, layout).run
    return jitted(step, run, layout.mesh, inputs, outputs, on_retrace, compiler_options, given_up)


@dataclass(frozen=True, eq=False)
class _Run:
    """Evaluates a step."""

    program: SpmdStep
    layout: SpmdLayout

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """Maps the step's flat arguments to its flat results."""
        program, layout = self.program, self.layout
        env = dict(zip(program.prologue.inputs, flat, strict=True))
        made = zip(program.prologue.outputs, _evaluated(program.prologue, flat), strict=True)
        env |= {v: x for v, x in made if isinstance(v, int)}
        totals = {total for part in program.parts for total in part.sums.values()}
        layers = {v: layout.by_round(env[v], v) for v in program.read_layers}
        examples = {v: env[whole] for v, whole in program.examples.items()}
        once = {v: env[v] for v in _read_once(program) if v in env}
        run = jax.shard_map(
            lambda *given: _Replica(program, layout, *given).run(),
            mesh=layout.mesh,
            in_specs=(PartitionSpec(None, STAGE), PartitionSpec(REPLICA), PartitionSpec()),
            out_specs=(
                PartitionSpec(None, STAGE),
                PartitionSpec(),
                layout.parts,
                PartitionSpec(None, REPLICA, STAGE),
            ),
            axis_names={STAGE, REPLICA},
            check_vma=False,
        )
        try:
            of_layers, of_all, pieces, stacks = run(layers, examples, once)
        except FloatingPointError as e:  # JAX runs the replicas' function as one op
            raise FloatingPointError(
                f"{str(e).rstrip('.')} in a loop of the pipeline. A program per stage (executor=) names the line"
            ) from None
        for total in totals:
            term = of_all[total] if total in of_all else layout.put_together(of_layers[total], total)
            env[total] = jnp.add(env[total], term)
        pieces |= {v: self._by_part(x, v) for v, x in stacks.items()}
        env |= {piece: pieces[v][part] for piece, (v, part) in program.pieces.items()}
        return _evaluated(program.epilogue, [env[v] for v in program.epilogue.inputs])

    def _by_part(self, x: Any, v: int) -> Any:
        """A stack that loops made, [rounds, parts, layers of a round], as [parts, layers]."""
        return jnp.reshape(jnp.moveaxis(x, 0, 1), (self.program.num_parts, *self.program.values[v].shape))


def _evaluated(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    return evaluator(graph, NOTHING, AbstractMesh((), ()))(inputs)


def _read_once(program: SpmdStep) -> list[int]:
    """All other values that parts read and that all parts of the batch share."""
    read: dict[int, None] = {}
    for part in program.parts:
        read |= dict.fromkeys(part.reads)
        if isinstance(part, LayerLoop):
            read |= dict.fromkeys(a for a in part.op.inputs[: sum(part.op.loop_counts)] if isinstance(a, int))
    return [v for v in read if v not in program.of_microbatch]


class _Replica:
    """The work of one replica of a stage for its microbatches.

    Attributes:
      own: by value that differs between microbatches, its values for this stage's microbatches between loops:
        [microbatches, ...].
      all: by value that differs between microbatches, its values for all of the replica's microbatches: [microbatches, ...].
      stacks: by value that a loop has stacked up, the part of this stage's layers: [slots, layers of a round, ...].
      of_layers: by sum over a loop's layers, the terms of this replica's microbatches.
      of_all: by other sum, the terms of this stage's microbatches between loops.
    """

    def __init__(
        self,
        program: SpmdStep,
        layout: SpmdLayout,
        layers: dict[int, Any],
        examples: dict[int, Any],
        once: dict[int, Any],
    ) -> None:
        self.program, self.layout = program, layout
        self.layers = {v: layout.entered(x, v) for v, x in layers.items()}
        self.once = {v: layout.entered(x, v, 0) for v, x in once.items()}
        self.count = layout.num_microbatches
        first = jax.lax.axis_index(REPLICA) * self.count
        index = program.values[program.index]
        numbers = (first + jnp.arange(self.count)).astype(index.dtype)
        self.all: dict[int, Any] = {program.index: numbers}
        self.all |= {v: layout.held(x, v) for v, x in examples.items()}
        self.own: dict[int, Any] = {}
        self.stacks: dict[int, Any] = {}
        self.of_layers: dict[int, Any] = {}
        self.of_all: dict[int, Any] = {}

    def run(self) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]:
        """Sums of layers; all other sums; the values that the epilogue reads of each microbatch; and those of them that
        loops stacked up."""
        for part in self.program.parts:
            if isinstance(part, Segment):
                self._segment(part)
            else:
                self._loop(part)
        everyone = (STAGE, REPLICA) if self.layout.is_shared_out else (REPLICA,)
        handed_out = dict.fromkeys(v for v, _ in self.program.pieces.values())
        return (
            {v: _added_up(x, (REPLICA,)) for v, x in self.of_layers.items()},
            {v: _added_up(x, everyone) for v, x in self.of_all.items()},
            {v: self._own(v) for v in handed_out if v not in self.stacks},
            {v: self._by_round(v) for v in handed_out if v in self.stacks},
        )

    def _segment(self, part: Segment) -> None:
        """Runs a segment on this stage's microbatches, one after another."""
        each = [v for v in part.reads if v not in self.once]
        kept = [v for v in part.makes if v in part.exported]
        evaluate = evaluator(part.graph, self.layout.sharding.of_part(part), self.layout.own_mesh)

        def run(sums: dict[int, Any], xs: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
            made = evaluate([xs[v] if v in xs else self.once[v] for v in part.reads])
            of_value = dict(zip(part.makes, made, strict=True))
            terms = {total: of_value[v] for v, total in part.sums.items()}
            return jax.tree.map(jnp.add, sums, terms), {v: of_value[v] for v in kept}

        sums, made = jax.lax.scan(
            run, {total: self._zero(total) for total in part.sums.values()}, {v: self._own(v) for v in each}
        )
        self.of_all |= sums
        self.own |= {v: self.layout.held(x, v) for v, x in made.items()}

    def _zero(self, v: int) -> Any:
        return self.layout.zeros(v, self.program.values[v].shape, 0)

    def _loop(self, part: LayerLoop) -> None:
        atoms = [a for a in (*part.reads, *part.op.inputs[: sum(part.op.loop_counts)]) if isinstance(a, int)]
        shared = [v for v in dict.fromkeys(atoms) if v not in part.makes]
        slots = [a for a in part.op.sliced if isinstance(a, int)]
        carries, stacks, sums = Ticks(self.layout, part).run(
            {v: self.layers[v] if v in self.layers else self._slots(v) for v in slots},
            {v: self.once[v] for v in shared if v in self.once},
            {v: self._all(v) for v in shared if v not in self.once},
        )
        self.own |= {v: self.layout.held(self._scattered(x), v) for v, x in carries.items()}
        self.stacks |= stacks
        for v, total in part.sums.items():
            if v in sums:
                self.of_layers[total] = sums[v]
            else:
                self.of_all[total] = jnp.sum(self.own[v], axis=0)

    # --- microbatches of this stage, and of all stages

    def _own(self, v: int) -> Any:
        """A value of this stage's microbatches between loops."""
        if v not in self.own:
            x = self._all(v)
            num = self.count // self.program.num_workers
            first = jax.lax.axis_index(STAGE) * num
            is_shared_out = self.layout.is_shared_out
            self.own[v] = jax.lax.dynamic_slice_in_dim(x, first, num) if is_shared_out else x
        return self.own[v]

    def _all(self, v: int) -> Any:
        """A value of all microbatches of the replica."""
        if v not in self.all:
            if v in self.stacks:
                rounds = jax.lax.all_gather(self._by_round(v), STAGE, axis=2, tiled=True)
                self.all[v] = jnp.reshape(
                    jnp.moveaxis(rounds, 0, 1), (self.count, *self.program.values[v].shape)
                )
            elif self.layout.is_shared_out:
                self.all[v] = self.layout.held(jax.lax.all_gather(self.own[v], STAGE, tiled=True), v)
            else:
                self.all[v] = self.own[v]
        return self.all[v]

    def _scattered(self, x: Any) -> Any:
        """Each stage's microbatches of an array that is zero on all stages but one; all microbatches, if stages do not
        split them."""
        if self.layout.is_shared_out:
            return _in_32_bits(lambda x: jax.lax.psum_scatter(x, STAGE, scatter_dimension=0, tiled=True), x)
        return _added_up(x, (STAGE,))

    # --- stacks over layers

    def _by_round(self, v: int) -> Any:
        """A stack that a loop made, as [rounds, microbatches, layers of a round]."""
        x, rounds = self.stacks[v], self.program.stages_per_worker
        return jnp.reshape(x[: rounds * self.count], (rounds, self.count, *x.shape[1:]))

    def _slots(self, v: int) -> Any:
        """An operand that a loop slices and that differs between microbatches, as [slots, layers of a round]."""
        if v in self.stacks:
            return self.stacks[v]
        program, rounds, stages = self.program, self.program.stages_per_worker, self.program.num_workers
        shape = program.values[v].shape
        num = shape[0] // (rounds * stages)
        apart = jnp.reshape(self._all(v), (self.count, rounds, stages, num, *shape[1:]))
        mine = jax.lax.dynamic_index_in_dim(apart, jax.lax.axis_index(STAGE), 2, keepdims=False)
        slots = jnp.reshape(jnp.moveaxis(mine, 0, 1), (rounds * self.count, num, *shape[1:]))
        return self.layout.held(slots, v)


def _added_up(x: Any, axes: tuple[str, ...]) -> Any:
    """The sum over the devices of some axes."""
    return _in_32_bits(lambda x: jax.lax.psum(x, axes), x)


def _in_32_bits(added_up: Callable[[Any], Any], x: Any) -> Any:
    """Adds up over devices; on CPUs, floats of fewer than 32 bits are added in 32 bits, as XLA:CPU does. Without this
    conversion, XLA:CPU aborts ("Invalid binary instruction opcode copy") where the partitioner handles other axes of the
    mesh."""

    def converted(x: Any) -> Any:
        return added_up(x.astype(jnp.float32)).astype(x.dtype)

    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < jnp.float32.dtype.itemsize
    return jax.lax.platform_dependent(x, cpu=converted, default=added_up) if is_narrow else added_up(x)
