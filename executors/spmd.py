"""The other pipeline executor: one program for all stages, on a mesh with an axis along which the layers are split.

A loop over layers becomes a loop over ticks, in which each stage runs its layers on another microbatch and hands the carry
on to the next stage (`ppermute`). With p stages of v runs of layers each, and m microbatches, the n-th of v m passes of the
stage at rank r is at tick n + r. What comes around goes into a buffer at the first stage, where it waits for its next round,
and where the results lie in the end. Ticks of which a stage has nothing to do write into a slot that nobody reads.

Only the axis of the stages is manual there (`shard_map`): along the other one XLA partitions as everywhere. What a forward
loop stacks up stays on its stage, in the order in which the backward loop reads it: [slots, layers of a round], a slot for
each of the v m passes and one for nothing. What is added up over microbatches is added up at once.

Source: the formulation as one program is that of Xu et al. 2021, "GSPMD", section 3.3.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost_model.errors import InputError
from executors.jit import Program, jitted
from executors.rewrite import evaluator
from search.ir.graph import Graph
from search.ir.sharding import StepSharding
from search.ir.spec import WHOLE, Spec, partition_spec
from search.plan.spmd_step import LayerLoop, Segment, SpmdStep

AXES = ("stage", "data")
"""Along the first lie the stages, each with its layers; along the second, in each stage, the examples."""

STAGE, DATA = AXES


def build(
    program: SpmdStep, devices: Sequence[Any], on_retrace: Callable[[], None] = lambda: None
) -> Program:
    """Jits a step as one program.

    Args:
      program: the step.
      devices: the stages' one after another: real, simulated or compile-only.
      on_retrace: as for `executors.jit.build`.

    Raises:
      InputError: the devices cannot be dealt to the stages.
    """
    if not devices or len(devices) % program.num_workers:
        raise InputError(
            f"{len(devices)} devices cannot be dealt to {program.num_workers} stages, as many to each. Use a multiple"
        )
    mesh = Mesh(np.array(devices).reshape(program.num_workers, -1), AXES)
    layout = _Layout(program, mesh)
    step, graph = program.step, program.step.graph
    inputs = [layout.named(v) for v in graph.inputs]
    outputs = [
        (layout.named(a) if isinstance(a, int) else NamedSharding(mesh, PartitionSpec()))
        if r is None
        else inputs[r]
        for a, r in zip(graph.outputs, step.replaces, strict=True)
    ]
    return jitted(step, lambda flat: _Run(program, layout).run(flat), mesh, inputs, outputs, on_retrace)


@dataclass(frozen=True, eq=False)
class _Layout:
    """How values lie on the mesh: layers along the stages, examples along all axes where these are no layers."""

    program: SpmdStep
    mesh: Mesh

    def named(self, v: int) -> NamedSharding:
        """How a value lies outside of the loops over layers."""
        return NamedSharding(self.mesh, partition_spec(self.spec(v), AXES))

    def spec(self, v: int) -> Spec:
        """The same, as a spec."""
        shape = self.program.values[v].shape
        if v in self.program.layered:
            return self._of_layers(shape), WHOLE
        dim = self.program.example_dims.get(v)
        if dim is None or shape[dim] % self.mesh.size:
            return (WHOLE, self.data_dim(v))
        return (dim, dim)

    def _of_layers(self, shape: tuple[int, ...]) -> int:
        """Which dim of a stack over layers is split along the stages: the layers, if those of a stage are neighbours; else
        one from which they get to their stages at once."""
        first = 0 if self.program.stages_per_worker == 1 else 1
        dims = (dim for dim in range(first, len(shape)) if shape[dim] % self.mesh.shape[STAGE] == 0)
        return next(dims, WHOLE)

    def constrained(self, x: Any, spec: Spec) -> Any:
        """A value as it is to lie."""
        sharding = NamedSharding(self.mesh, partition_spec(spec, AXES))
        return jax.lax.with_sharding_constraint(x, sharding)

    def data_dim(self, v: int) -> int:
        """Which dim is split inside of a stage."""
        dim, size = self.program.example_dims.get(v, WHOLE), self.mesh.shape[DATA]
        return dim if dim != WHOLE and self.program.values[v].shape[dim] % size == 0 else WHOLE

    def of_ops(self, graph: Graph) -> StepSharding:
        """What is imposed on what a graph makes for each example."""
        specs = {
            ("result", (i,), r): (self.spec(v),)
            for i, op in enumerate(graph.ops)
            for r, v in enumerate(op.outputs)
            if v in self.program.example_dims
        }
        return StepSharding(tuple(self.mesh.shape.values()), AXES, specs, {})

    def inside(self, x: Any, v: int, num_ahead: int = 0) -> Any:
        """A value of a loop over layers, with dims ahead of its own, split over a stage's devices."""
        if (dim := self.data_dim(v)) == WHOLE:
            return x
        spec = PartitionSpec(*(None,) * (dim + num_ahead), DATA)
        return jax.lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), spec))


class _Run:
    """One evaluation of a step.

    Attributes:
      env: by value, what it is; of one that is another in each microbatch, all of them: [microbatches, ...].
      stacks: by value that a loop has stacked up, how it lies there.
    """

    def __init__(self, program: SpmdStep, layout: _Layout) -> None:
        self.program, self.layout = program, layout
        self.env: dict[int, Any] = {}
        self.stacks: dict[int, Any] = {}

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """From the step's flat arguments to its flat results."""
        program = self.program
        self.env = dict(zip(program.prologue.inputs, flat, strict=True))
        self.env |= dict(zip(_values(program.prologue), self._evaluated(program.prologue, flat), strict=True))
        self.env[program.index] = jnp.arange(
            program.num_microbatches, dtype=program.values[program.index].dtype
        )
        for part in program.parts:
            if isinstance(part, Segment):
                self._segment(part)
            else:
                self._loop(part)
        reads = [self._read_once(v) for v in program.epilogue.inputs]
        return self._evaluated(program.epilogue, reads)

    def _evaluated(self, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
        return evaluator(graph, self.layout.of_ops(graph), self.layout.mesh)(inputs)

    def _read_once(self, v: int) -> Any:
        """What the epilogue reads."""
        if v not in self.program.pieces:
            return self.env[v]
        value, microbatch = self.program.pieces[v]
        return self._read(value)[microbatch]

    def _read(self, v: int) -> Any:
        """A value, as others than loops over layers read it."""
        if v not in self.env:
            self.env[v] = self._unstacked(v)
        return self.env[v]

    # --- what runs on all devices

    def _segment(self, part: Segment) -> None:
        """Runs all microbatches, one after another."""
        program = self.program
        each = [v for v in part.reads if v == program.index or v in program.of_microbatch]
        kept = [v for v in part.makes if v in part.wanted]
        totals = list(dict.fromkeys(part.sums.values()))

        def run(sums: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            known = dict(zip(each, xs, strict=True))
            made = self._evaluated(part.graph, [known[v] if v in known else self.env[v] for v in part.reads])
            of_value = dict(zip(part.makes, made, strict=True))
            term_of = {total: of_value[v] for v, total in part.sums.items()}
            return [jnp.add(x, term_of[t]) for x, t in zip(sums, totals, strict=True)], [
                of_value[v] for v in kept
            ]

        sums, stacks = jax.lax.scan(run, [self.env[t] for t in totals], [self._read(v) for v in each])
        self.env |= dict(zip(totals, sums, strict=True)) | dict(zip(kept, stacks, strict=True))

    # --- what goes from stage to stage

    def _loop(self, part: LayerLoop) -> None:
        op = part.op
        xs = op.inputs[sum(op.loop_counts) :]
        layers = {v: self._sliced(v) for v in xs if isinstance(v, int)}
        common = [v for v in (*part.reads, *op.inputs[: sum(op.loop_counts)]) if isinstance(v, int)]
        shared = {v: self._read(v) for v in dict.fromkeys(common) if v not in part.makes}
        ticks = _Ticks(self.program, self.layout, part)
        along = PartitionSpec(None, STAGE)
        run = jax.shard_map(
            ticks.run,
            mesh=self.layout.mesh,
            in_specs=(along, PartitionSpec()),
            out_specs=(PartitionSpec(), along, along),
            axis_names={STAGE},
            check_vma=False,
        )
        carries, stacks, sums = run(layers, shared)
        self.env |= carries
        self.stacks |= stacks
        for v, total in part.sums.items():
            term = jnp.sum(carries[v], axis=0) if v in carries else self._put_together(v, sums[v])
            self.env[total] = jnp.add(self.env[total], term)

    def _put_together(self, v: int, rounds: Any) -> Any:
        """A stack of all layers, of each round's: [rounds, layers of a round]."""
        spec = self.layout.spec(v)
        apart = (WHOLE if dim == WHOLE else dim + 1 for dim in spec)
        return jnp.reshape(self.layout.constrained(rounds, tuple(apart)), self.program.values[v].shape)

    def _sliced(self, v: int) -> Any:
        """What a loop slices: [rounds, layers of a round]; where each microbatch has its own, [slots, layers of a round]."""
        program = self.program
        rounds, count = program.stages_per_worker, program.num_microbatches
        if v in self.stacks:
            return self.stacks[v]
        x, shape = self._read(v), program.values[v].shape
        if v not in program.of_microbatch:
            return jnp.reshape(x, (rounds, shape[0] // rounds, *shape[1:]))
        apart = jnp.moveaxis(jnp.reshape(x, (count, rounds, shape[0] // rounds, *shape[1:])), 0, 1)
        return jnp.reshape(apart, (rounds * count, *apart.shape[2:]))

    def _unstacked(self, v: int) -> Any:
        """What a loop has stacked up, by microbatch."""
        program = self.program
        rounds, count = program.stages_per_worker, program.num_microbatches
        slots = self.stacks[v][: rounds * count]
        apart = jnp.moveaxis(jnp.reshape(slots, (rounds, count, *slots.shape[1:])), 1, 0)
        return jnp.reshape(apart, (count, *program.values[v].shape))


class _Ticks:
    """A loop over layers, as each stage runs it."""

    def __init__(self, program: SpmdStep, layout: _Layout, part: LayerLoop) -> None:
        self.program, self.layout, self.part, self.op = program, layout, part, part.op
        self.rounds, self.count = program.stages_per_worker, program.num_microbatches
        self.num_workers = program.num_workers
        self.num_consts, self.num_carry = part.op.loop_counts
        self.is_reversed = bool(part.op.params["reverse"])
        (self.body,) = part.op.bodies["jaxpr"]
        nothing = StepSharding(tuple(layout.mesh.shape.values()), AXES, {}, {})
        self.layer = evaluator(self.body, nothing, layout.mesh)
        self.ahead = evaluator(part.ahead, nothing, layout.mesh)
        self.carried = part.op.outputs[: self.num_carry]
        self.stacked = part.op.outputs[self.num_carry :]

    @property
    def num_passes(self) -> int:
        """Of each stage."""
        return self.rounds * self.count

    def run(self, layers: dict[int, Any], shared: dict[int, Any]) -> tuple[dict[int, Any], ...]:
        """What comes out of the last layer, what is stacked up, and what is added up.

        Args:
          layers: what the loop slices, of this stage: [rounds or slots, layers, ...].
          shared: what all stages have alike, of all microbatches.
        """
        values, op = self.program.values, self.op
        stage = jax.lax.axis_index(STAGE)
        rank = self.num_workers - 1 - stage if self.is_reversed else stage
        num_layers = int(op.params["length"]) // (self.num_workers * self.rounds)

        def empty(num: int, v: int, *ahead: int) -> Any:
            shape = values[v].shape[1:] if ahead else values[v].shape
            return self.layout.inside(jnp.zeros((num, *ahead, *shape), values[v].dtype), v, 1)

        waiting = [empty(self.count + 1, v) for v in self.carried]
        stacks = {v: empty(self.num_passes + 1, v, num_layers) for v in self.stacked if v in self.part.wanted}
        added = [v for v in self.stacked if v in self.part.sums]
        sums = {v: jnp.zeros((self.rounds, num_layers, *values[v].shape[1:]), values[v].dtype) for v in added}

        def tick(state: Any, t: Any) -> tuple[Any, None]:
            waiting, received, stacks, sums = state
            n = t - rank
            is_busy = (n >= 0) & (n < self.num_passes)
            nth, microbatch = jnp.divmod(jnp.clip(n, 0, self.num_passes - 1), self.count)
            round_ = self.rounds - 1 - nth if self.is_reversed else nth
            slot = round_ * self.count + microbatch
            consts, first = self._operands(shared, microbatch)
            carry = [
                jnp.where(rank == 0, jnp.where(nth == 0, one, around[microbatch]), before)
                for one, around, before in zip(first, waiting, received, strict=True)
            ]
            carry = [self.layout.inside(x, v) for x, v in zip(carry, self.carried, strict=True)]
            xs = [
                self._sliced(layers, a, slot, round_, num_layers)
                for a in op.inputs[self.num_consts + self.num_carry :]
            ]
            carry, ys = self._layers(consts, carry, xs, num_layers)
            of_value = dict(zip(self.stacked, ys, strict=True))
            target = jnp.where(is_busy, slot, self.num_passes)
            stacks = {v: _put(x, of_value[v], target) for v, x in stacks.items()}
            sums = {
                v: _put(x, x[round_] + jnp.where(is_busy, of_value[v], jnp.zeros_like(of_value[v])), round_)
                for v, x in sums.items()
            }
            received = [jax.lax.ppermute(x, STAGE, self._ring) for x in carry]
            arrived = t - (self.num_workers - 1)
            is_there = (rank == 0) & (arrived >= 0)
            place = jnp.where(is_there, arrived % self.count, self.count)
            waiting = [_put(around, x, place) for around, x in zip(waiting, received, strict=True)]
            return (waiting, received, stacks, sums), None

        received = [jnp.zeros(values[v].shape, values[v].dtype) for v in self.carried]
        ticks = jnp.arange(self.num_passes + self.num_workers - 1)
        (waiting, _, stacks, sums), _ = jax.lax.scan(tick, (waiting, received, stacks, sums), ticks)
        carries = {
            v: _from_the_first(rank, x[: self.count])
            for v, x in zip(self.carried, waiting, strict=True)
            if v in self.part.wanted or v in self.part.sums
        }
        return carries, stacks, sums

    @property
    def _ring(self) -> list[tuple[int, int]]:
        """Who hands on to whom."""
        num, step = self.num_workers, -1 if self.is_reversed else 1
        return [(i, (i + step) % num) for i in range(num)]

    def _operands(self, shared: dict[int, Any], microbatch: Any) -> tuple[list[Any], list[Any]]:
        """A microbatch's constants, and what its first layer begins with."""
        part, own = self.part, dict[int, Any]()
        for v, x in shared.items():
            is_own = v == self.program.index or v in self.program.of_microbatch
            own[v] = x[microbatch] if is_own else x
        own |= dict(zip(part.makes, self.ahead([own[v] for v in part.reads]), strict=True))
        atoms = self.op.inputs[: self.num_consts + self.num_carry]
        read = [own[a] if isinstance(a, int) else jnp.asarray(a.val, a.aval.dtype) for a in atoms]
        return read[: self.num_consts], read[self.num_consts :]

    def _sliced(self, layers: dict[int, Any], atom: Any, slot: Any, round_: Any, num_layers: int) -> Any:
        if not isinstance(atom, int):
            return jnp.full((num_layers,), atom.val, atom.aval.dtype)
        return layers[atom][slot if atom in self.program.of_microbatch else round_]

    def _layers(
        self, consts: list[Any], carry: list[Any], xs: list[Any], num_layers: int
    ) -> tuple[list[Any], list[Any]]:
        """A stage's layers of a round, one after another."""

        def one(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            made = self.layer([*consts, *carry, *xs])
            return made[: self.num_carry], made[self.num_carry :]

        unroll = min(int(self.op.params["unroll"]), num_layers)
        return jax.lax.scan(one, carry, xs, length=num_layers, reverse=self.is_reversed, unroll=unroll)


def _put(buffer: Any, x: Any, place: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(buffer, x, place, 0)


def _from_the_first(rank: Any, x: Any) -> Any:
    """What the first stage has, on all."""
    own = jnp.where(rank == 0, x, jnp.zeros_like(x))
    return jax.lax.psum(own, STAGE)


def _values(graph: Graph) -> list[int]:
    return [v for v in graph.outputs if isinstance(v, int)]
