"""The other pipeline executor: one program for all stages, on a mesh of stages and of the devices of each.

What runs for microbatches is one function of all devices (`shard_map`), in which every message is said: nothing is left to
the partitioner. The devices of a stage split the batch: each has microbatches of its own, from beginning to end, so that
nothing is added up between them before the last one. Stages split the layers. What stands between the loops over layers has
no stage: there, the stages split the microbatches too, if their number allows it.

    activations   into a loop over layers: gathered from all stages; out of it: scattered from where it ends;
    gradients     added up once in a step: of layers over the devices of a stage, of all else over all;
    stacks        of what a forward loop leaves to the backward loop: stay where they are.

`executors.spmd_ticks` runs the loops.

Source: the formulation of pipelines as one program is that of Xu et al. 2021, "GSPMD", section 3.3.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cost_model.errors import InputError
from executors.jit import Program, jitted
from executors.rewrite import evaluator
from executors.spmd_ticks import STAGE, Ticks
from search.ir.graph import Graph
from search.ir.sharding import StepSharding
from search.plan.spmd_step import LayerLoop, Segment, SpmdStep

DATA = "data"
AXES = (STAGE, DATA)
"""Along the first lie the stages, along the second the devices of each."""

EVERY = PartitionSpec((DATA, STAGE))
"""Parts of the batch, split over all devices: those of one device of each stage are neighbours."""


def build(
    program: SpmdStep,
    devices: Sequence[Any] | int,
    on_retrace: Callable[[], None] = lambda: None,
) -> Program:
    """Jits a step as one program.

    Args:
      program: the step.
      devices: the stages' one after another: real, simulated or compile-only; of a program that is only lowered, how many.
      on_retrace: as for `executors.jit.build`.

    Raises:
      InputError: the devices cannot be dealt to the stages, or the batch to the devices.
    """
    mesh = _mesh(program, devices)
    step, layout = program.step, _Layout(program, mesh)
    inputs = [layout.resting(v) for v in step.graph.inputs]
    outputs = [
        (layout.resting(a) if isinstance(a, int) else layout.named()) if r is None else inputs[r]
        for a, r in zip(step.graph.outputs, step.replaces, strict=True)
    ]
    return jitted(step, _Run(program, layout).run, mesh, inputs, outputs, on_retrace)


def _mesh(program: SpmdStep, devices: Sequence[Any] | int) -> Mesh | AbstractMesh:
    num, stages = devices if isinstance(devices, int) else len(devices), program.num_workers
    if not num or num % stages or program.num_parts % (num // stages):
        raise InputError(
            f"{num} devices cannot be dealt to {stages} stages that go through the batch in {program.num_parts} parts, as "
            "many to each. Use a multiple of the one whose quotient divides the other"
        )
    if isinstance(devices, int):
        return AbstractMesh((stages, num // stages), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Mesh(np.array(devices).reshape(stages, -1), AXES)


@dataclass(frozen=True, eq=False)
class _Layout:
    """How values lie outside of the loops over microbatches."""

    program: SpmdStep
    mesh: Mesh | AbstractMesh

    @property
    def num_microbatches(self) -> int:
        """Of each device."""
        return self.program.num_parts // self.mesh.shape[DATA]

    @property
    def is_shared_out(self) -> bool:
        """Whether stages split microbatches between loops over layers."""
        return self.num_microbatches % self.mesh.shape[STAGE] == 0

    @property
    def parts(self) -> PartitionSpec:
        """How parts of the batch lie between loops over layers."""
        return EVERY if self.is_shared_out else PartitionSpec(DATA)

    def named(self, *spec: Any) -> NamedSharding:
        """A spec on this mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def resting(self, v: int) -> NamedSharding:
        """Layers along the stages, examples along the devices of each, where they divide."""
        shape = self.program.values[v].shape
        if v in self.program.layered:
            return self.named(*self.of_layers(v))
        is_split = (
            v in self.program.batch and shape[0] % (self.program.num_parts * self.mesh.shape[DATA]) == 0
        )
        return self.named(DATA) if is_split else self.named()

    def of_layers(self, v: int) -> PartitionSpec:
        """How a stack over layers rests: by layers, if those of a stage are neighbours; else by a dim from which they get to
        their stages at once."""
        shape, stages = self.program.values[v].shape, self.mesh.shape[STAGE]
        first = 0 if self.program.stages_per_worker == 1 else 1
        dim = next((d for d in range(first, len(shape)) if shape[d] % stages == 0), None)
        return PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, STAGE)


@dataclass(frozen=True, eq=False)
class _Run:
    """Evaluates a step."""

    program: SpmdStep
    layout: _Layout

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """From the step's flat arguments to its flat results."""
        program, layout = self.program, self.layout
        env = dict(zip(program.prologue.inputs, flat, strict=True))
        made = zip(program.prologue.outputs, _evaluated(program.prologue, flat), strict=True)
        env |= {v: x for v, x in made if isinstance(v, int)}
        totals = {total for part in program.parts for total in part.sums.values()}
        layers = {v: self._by_round(env[v], v) for v in _layers(program)}
        dealt = {v: env[whole] for v, whole in program.examples.items()}
        once = {v: env[v] for v in _read_once(program) if v in env}
        run = jax.shard_map(
            lambda *given: _Device(program, layout, *given).run(),
            mesh=layout.mesh,
            in_specs=(PartitionSpec(None, STAGE), PartitionSpec(DATA), PartitionSpec()),
            out_specs=(
                PartitionSpec(None, STAGE),
                PartitionSpec(),
                layout.parts,
                PartitionSpec(None, DATA, STAGE),
            ),
            check_vma=False,
        )
        of_layers, of_all, pieces, stacks = run(layers, dealt, once)
        for total in totals:
            term = of_all[total] if total in of_all else self._put_together(of_layers[total], total)
            env[total] = jnp.add(env[total], term)
        pieces |= {v: self._by_part(x, v) for v, x in stacks.items()}
        env |= {piece: pieces[v][part] for piece, (v, part) in program.pieces.items()}
        return _evaluated(program.epilogue, [env[v] for v in program.epilogue.inputs])

    def _by_round(self, x: Any, v: int) -> Any:
        """A stack over layers as [rounds, layers of a round]."""
        rounds, shape = self.program.stages_per_worker, self.program.values[v].shape
        return jnp.reshape(x, (rounds, shape[0] // rounds, *shape[1:]))

    def _put_together(self, rounds: Any, v: int) -> Any:
        """The stack again."""
        apart = self.layout.named(None, *self.layout.of_layers(v))
        lying = jax.lax.with_sharding_constraint(rounds, apart)
        return jnp.reshape(lying, self.program.values[v].shape)

    def _by_part(self, x: Any, v: int) -> Any:
        """What loops have stacked up, [rounds, parts, layers of a round], as [parts, layers]."""
        return jnp.reshape(jnp.moveaxis(x, 0, 1), (self.program.num_parts, *self.program.values[v].shape))


def _evaluated(graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    nothing = StepSharding((), (), {}, {})
    return evaluator(graph, nothing, AbstractMesh((), ()))(inputs)


def _layers(program: SpmdStep) -> list[int]:
    """What loops slice that is the same for all parts of the batch."""
    loops = [part.op for part in program.parts if isinstance(part, LayerLoop)]
    xs = dict.fromkeys(a for op in loops for a in op.inputs[sum(op.loop_counts) :] if isinstance(a, int))
    return [v for v in xs if v not in program.of_microbatch]


def _read_once(program: SpmdStep) -> list[int]:
    """What else is read that is the same for all."""
    read: dict[int, None] = {}
    for part in program.parts:
        read |= dict.fromkeys(part.reads)
        if isinstance(part, LayerLoop):
            read |= dict.fromkeys(a for a in part.op.inputs[: sum(part.op.loop_counts)] if isinstance(a, int))
    return [v for v in read if v not in program.of_microbatch]


class _Device:
    """What one device runs for its microbatches.

    Attributes:
      own: by value that is another in each microbatch, those that this stage has between loops: [microbatches, ...].
      all: the same of all microbatches.
      stacks: by value that a loop has stacked up: [slots, layers of a round, ...], of this stage's layers.
      of_layers: by sum over a loop's layers, what this device's microbatches add to it.
      of_all: by other sum, what those that this stage has between loops add to it.
    """

    def __init__(
        self,
        program: SpmdStep,
        layout: _Layout,
        layers: dict[int, Any],
        dealt: dict[int, Any],
        once: dict[int, Any],
    ) -> None:
        self.program, self.layout, self.layers, self.once = program, layout, layers, once
        self.count = layout.num_microbatches
        first = jax.lax.axis_index(DATA) * self.count
        index = program.values[program.index]
        numbers = (first + jnp.arange(self.count)).astype(index.dtype)
        self.all: dict[int, Any] = {program.index: numbers, **dealt}
        self.own: dict[int, Any] = {}
        self.stacks: dict[int, Any] = {}
        self.of_layers: dict[int, Any] = {}
        self.of_all: dict[int, Any] = {}

    def run(self) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any], dict[int, Any]]:
        """What is added up of layers and of all else; what is handed out for each microbatch, and of that, stacks."""
        for part in self.program.parts:
            if isinstance(part, Segment):
                self._segment(part)
            else:
                self._loop(part)
        everyone = AXES if self.layout.is_shared_out else (DATA,)
        handed_out = dict.fromkeys(v for v, _ in self.program.pieces.values())
        return (
            jax.lax.psum(self.of_layers, DATA),
            jax.lax.psum(self.of_all, everyone),
            {v: self._own(v) for v in handed_out if v not in self.stacks},
            {v: self._by_round(v) for v in handed_out if v in self.stacks},
        )

    def _segment(self, part: Segment) -> None:
        """Runs this stage's microbatches, one after another."""
        each = [v for v in part.reads if v not in self.once]
        kept = [v for v in part.makes if v in part.wanted]

        def run(sums: dict[int, Any], xs: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
            made = _evaluated(part.graph, [xs[v] if v in xs else self.once[v] for v in part.reads])
            of_value = dict(zip(part.makes, made, strict=True))
            terms = {total: of_value[v] for v, total in part.sums.items()}
            return jax.tree.map(jnp.add, sums, terms), {v: of_value[v] for v in kept}

        values = self.program.values
        sums = {total: jnp.zeros(values[total].shape, values[total].dtype) for total in part.sums.values()}
        sums, made = jax.lax.scan(run, sums, {v: self._own(v) for v in each})
        self.of_all |= sums
        self.own |= made

    def _loop(self, part: LayerLoop) -> None:
        atoms = [a for a in (*part.reads, *part.op.inputs[: sum(part.op.loop_counts)]) if isinstance(a, int)]
        shared = [v for v in dict.fromkeys(atoms) if v not in part.makes]
        slots = [a for a in part.op.inputs[sum(part.op.loop_counts) :] if isinstance(a, int)]
        carries, stacks, sums = Ticks(self.program, part, self.count).run(
            {v: self.layers[v] if v in self.layers else self._slots(v) for v in slots},
            {v: self.once[v] for v in shared if v in self.once},
            {v: self._all(v) for v in shared if v not in self.once},
        )
        self.own |= {v: self._scattered(x) for v, x in carries.items()}
        self.stacks |= stacks
        for v, total in part.sums.items():
            if v in sums:
                self.of_layers[total] = sums[v]
            else:
                self.of_all[total] = jnp.sum(self.own[v], axis=0)

    # --- microbatches of this stage, and of all stages

    def _own(self, v: int) -> Any:
        """A value of the microbatches that this stage has between loops."""
        if v not in self.own:
            x = self._all(v)
            num = self.count // self.program.num_workers
            first = jax.lax.axis_index(STAGE) * num
            is_shared_out = self.layout.is_shared_out
            self.own[v] = jax.lax.dynamic_slice_in_dim(x, first, num) if is_shared_out else x
        return self.own[v]

    def _all(self, v: int) -> Any:
        """A value of all microbatches."""
        if v not in self.all:
            if v in self.stacks:
                rounds = jax.lax.all_gather(self._by_round(v), STAGE, axis=2, tiled=True)
                self.all[v] = jnp.reshape(
                    jnp.moveaxis(rounds, 0, 1), (self.count, *self.program.values[v].shape)
                )
            elif self.layout.is_shared_out:
                self.all[v] = jax.lax.all_gather(self.own[v], STAGE, tiled=True)
            else:
                self.all[v] = self.own[v]
        return self.all[v]

    def _scattered(self, x: Any) -> Any:
        """Of what one stage has and all others have as zero: each stage's microbatches."""
        if self.layout.is_shared_out:
            return jax.lax.psum_scatter(x, STAGE, scatter_dimension=0, tiled=True)
        return jax.lax.psum(x, STAGE)

    # --- stacks over layers

    def _by_round(self, v: int) -> Any:
        """What a loop has stacked up: [rounds, microbatches, layers of a round]."""
        x, rounds = self.stacks[v], self.program.stages_per_worker
        return jnp.reshape(x[: rounds * self.count], (rounds, self.count, *x.shape[1:]))

    def _slots(self, v: int) -> Any:
        """What a loop slices of which each microbatch has its own: [slots, layers of a round]."""
        if v in self.stacks:
            return self.stacks[v]
        program, rounds, stages = self.program, self.program.stages_per_worker, self.program.num_workers
        shape = program.values[v].shape
        num = shape[0] // (rounds * stages)
        apart = jnp.reshape(self._all(v), (self.count, rounds, stages, num, *shape[1:]))
        mine = jax.lax.dynamic_index_in_dim(apart, jax.lax.axis_index(STAGE), 2, keepdims=False)
        return jnp.reshape(jnp.moveaxis(mine, 0, 1), (rounds * self.count, num, *shape[1:]))
