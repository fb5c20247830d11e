"""The time and the messages of a pipeline that runs as one program.

Its parts run one after another, so their times add up. With p groups of devices, v stages on each and m microbatches,

    a loop over layers    takes v m + p - 1 ticks. A tick is as long as a stage's layers and the transfer of the carry;
                          a device without a microbatch computes, too;
    a segment             runs for m / p microbatches on each device, or for all m if p does not divide m. Before a
                          loop reads its results, they are gathered from all stages; results of a loop are scattered;
    once                  gradients are reduced, of layers over replicas and all others over all devices; prologue and
                          update run.

The ticks are those of the schedule in the simulator (`search.pipeline.simulator`), with the transfers inside the tasks.
Under `circular`, state rests in the order of layers, and each step sends it to its stages and back.

Kernel times come from the solution for a replica's devices, as for stages with programs of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.search.device.lowering import Kernel
from autoshard.search.ir.graph import Graph, Site
from autoshard.search.ir.spec import Spec, num_shards
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.part_kernels import PartKernels, Runs, length_of
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.plan.collective_totals import EqualCollectives, added_up
from autoshard.search.plan.spmd_resting import SpmdResting
from autoshard.search.plan.spmd_step import LayerLoop, Segment
from autoshard.search.plan.values import REPLICA, STAGE, Collective
from autoshard.search.problem.costs import COMBINED_BYTES

Part = Segment | LayerLoop | Graph
"""A part of a program: a segment or a loop, which run for microbatches, or the prologue or the epilogue."""

STAGE_AXIS, REPLICA_AXIS = 0, 1
"""The mesh axes of stages and of replicas. The axes of a replica's devices follow."""

AXES = (STAGE, REPLICA)
"""The names of these axes."""


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of the program.

    Attributes:
      kind: XLA's name.
      axes: axes of the whole mesh.
      count: number in a step.
      num_bytes: bytes of a device, for each.
      seconds: duration of each.
    """

    kind: str
    axes: tuple[int, ...]
    count: float
    num_bytes: float
    seconds: float

    @property
    def total_s(self) -> float:
        """Seconds of all in a step."""
        return self.count * self.seconds


@dataclass(frozen=True, eq=False)
class SpmdCosts(SpmdResting):
    """The costs of a pipeline that runs as one program.

    Attributes:
      intra_op: the solution that decides the specs of values on a replica's devices.
      step: the step in parts from which the program was written.
      cluster: the devices.
    """

    intra_op: IntraOp
    step: PipelineStep
    cluster: Cluster

    # --- seconds

    def pass_s(self, is_backward: bool) -> float:
        """Seconds of a stage's layers on one microbatch, and of sending the carry to the next stage."""
        return sum(
            (
                self._kernel_s(loop) / self.program.num_parts + sum(m.seconds for m in self._sent(loop))
                for loop in self.program.loops
                if bool(loop.op.params["reverse"]) == is_backward
            ),
            0.0,
        )

    @cached_property
    def between_s(self) -> float:
        """Seconds of a step in segments, and in gathering and scattering their values."""
        segments = [part for part in self.program.parts if isinstance(part, Segment)]
        own_s = sum(self._kernel_s(part) for part in segments) * self.num_own / self.program.num_parts
        return own_s + sum(message.total_s for message in self._into_and_out_of_loops())

    @cached_property
    def once_s(self) -> float:
        """Seconds of all that runs once in a step."""
        kernels = (self._once_s(kernel) for part in self._once for kernel, _ in self.kernels.kernels(part))
        return sum(kernels) + sum(message.total_s for message in (*self._once_messages(), *self._entering()))

    def _kernel_s(self, part: Part) -> float:
        """Seconds of a part's kernels for all parts of the batch; for a loop, in one stage."""
        return self.intra_op.seen_share * sum(
            share * kernel.time.seconds for kernel, share in self.kernels.kernels(part)
        )

    def _once_s(self, kernel: Kernel) -> float:
        return self.intra_op.seen_share * kernel.time.seconds * self._share_of_layers(kernel)

    def _share_of_layers(self, kernel: Kernel) -> float:
        """The share of a kernel that one stage runs, of those that run once: each stage runs its own layers, and all
        other ops."""
        return 1 / self.program.num_workers if self.kernels.site_of(kernel) in self._of_layers else 1.0

    @cached_property
    def _of_layers(self) -> frozenset[Site | None]:
        """The ops of the prologue and the epilogue whose results are stacks of layers."""
        ops = (op for graph in self._once for op in graph.ops)
        layered = self.program.layered
        return frozenset(self.step.site_of(op) for op in ops if not layered.isdisjoint(op.outputs))

    # --- messages

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step, by kind and axes."""
        names = (*AXES, *self.sharding.axis_names)
        return added_up(
            EqualCollectives(
                m.kind, tuple(names[a] for a in m.axes), m.count, m.count * m.num_bytes, m.total_s
            )
            for m in self._messages()
        )

    def _messages(self) -> Iterator[Message]:
        yield from self._inside()
        yield from self._entering()
        for loop in self.program.loops:
            yield from self._sent(loop)
        yield from self._into_and_out_of_loops()
        yield from self._once_messages()

    def _inside(self) -> Iterator[Message]:
        """Collectives between a replica's devices: for a loop in each tick, for a segment for each of the stage's
        microbatches."""
        for part in (*self._once, *self.program.parts):
            for kernel, what, num, share in self.kernels.collectives(part):
                if self._enters(kernel):
                    continue
                axes = tuple(a + len(AXES) for a in what.axes)
                seconds, is_once = kernel.time.seconds / max(num, 1), isinstance(part, Graph)
                one = self._share_of_layers(kernel) if is_once else 1.0
                times = num * share * self._times(part)
                yield Message(what.kind, axes, times, one * what.num_bytes, one * seconds)

    def _times(self, part: Part) -> float:
        """How often a part runs, per part of the batch."""
        if isinstance(part, Graph):
            return 1.0
        runs = self.num_ticks if isinstance(part, LayerLoop) else self.num_own
        return runs / self.program.num_parts

    def _entering(self) -> Iterator[Message]:
        """Collectives between a replica's devices for values that all microbatches read in another spec than they rest
        in."""
        loop = self.step.step.graph.ops[self.step.loop]
        for kernel in self.kernels.all_collectives:
            what = kernel.collective
            if what is None or not self._enters(kernel):
                continue
            ((_, _, i), *_) = self.kernels.ops[kernel.position].result_places[0]
            share = 1 / self.program.num_workers if loop.inputs[i] in self.program.layered else 1.0
            axes = tuple(a + len(AXES) for a in what.axes)
            seconds = share * self.intra_op.seen_share * kernel.time.seconds
            yield Message(what.kind, axes, 1, share * what.num_bytes, seconds)

    def _enters(self, kernel: Kernel) -> bool:
        """True if a kernel brings such a value into the loop over microbatches."""
        op = self.kernels.ops[kernel.position]
        return op.name == "enter" and op.site == (self.step.loop,)

    def _sent(self, loop: LayerLoop) -> Iterator[Message]:
        """The carry's transfers from stage to stage, in each tick."""
        for v in loop.op.carried:
            yield from self._message("collective-permute", (STAGE_AXIS,), self.bytes_of(v), self.num_ticks)

    def _into_and_out_of_loops(self) -> Iterator[Message]:
        made, gathered = set[int](), set[int]()
        for part in self.program.parts:
            if isinstance(part, Segment):
                made |= {*part.makes}
                continue
            entering = sorted(made.intersection((*part.reads, *part.op.operands)) - gathered - {*part.makes})
            gathered |= {*entering}
            for v in entering if self.is_shared_out else ():
                yield from self._across_stages("all-gather", v, self.num_own)
            carried = part.op.carried
            leaving = [v for v in carried if v in part.exported or v in part.sums]
            made |= {*leaving}
            for v in leaving:
                kind = "reduce-scatter" if self.is_shared_out else "all-reduce"
                yield from self._across_stages(kind, v, self.num_microbatches)

    def _across_stages(self, kind: str, v: int, num_given: int) -> Iterator[Message]:
        """Collectives over stages for a value of all microbatches, `num_given` of which each device has before. The
        partitioner handles whole values: parts on a replica's devices are gathered first."""
        whole, names = (
            self.program.values[v].num_bytes,
            range(len(AXES), len(AXES) + len(self.sharding.mesh_shape)),
        )
        split = tuple(a for a, dim in zip(names, self.sharding.spec(v), strict=True) if dim >= 0)
        yield from self._message("all-gather", split, num_given * whole)
        yield from self._message(kind, (STAGE_AXIS,), self.num_microbatches * whole)

    def _once_messages(self) -> Iterator[Message]:
        """Reductions over replicas, and for sums that are no stacks of layers over stages, too; the exchange of
        examples between replicas; under `circular`, the exchange of layers between stages."""
        everyone = (STAGE_AXIS, REPLICA_AXIS) if self.is_shared_out else (REPLICA_AXIS,)
        of_layers = [
            total for loop in self.program.loops for v, total in loop.sums.items() if self._is_stack(loop, v)
        ]
        others = [
            total for part in self.program.parts for total in part.sums.values() if total not in of_layers
        ]
        stages = self.program.num_workers
        for v in of_layers:
            yield from self._message("all-reduce", (REPLICA_AXIS,), self.bytes_of(v) / stages)
        for v in others:
            yield from self._message("all-reduce", everyone, self.bytes_of(v))
        for v in sorted(self.program.batch):
            resting = self.resting_spec(v)
            if resting[REPLICA_AXIS] >= 0:  # each replica takes every so many-th example
                num_bytes = self.program.values[v].num_bytes / num_shards(resting, self._mesh.shape)
                yield from self._message("all-to-all", (REPLICA_AXIS,), num_bytes)
        if self.program.stages_per_worker > 1:
            for v in (*self.program.read_layers, *of_layers):
                is_split = self.resting_spec(v)[STAGE_AXIS] >= 0
                kind, whole = ("all-to-all", stages) if is_split else ("all-gather", 1)
                if is_split or v in of_layers:
                    yield from self._message(kind, (STAGE_AXIS,), self.bytes_of(v) / whole)

    def _message(
        self, kind: str, axes: tuple[int, ...], num_bytes: float, count: float = 1
    ) -> Iterator[Message]:
        """One collective, if its axes have several devices. It is priced as one of many that the compiler combines;
        only a collective-permute is not, as it waits for the one before."""
        if there := tuple(a for a in axes if self._mesh.shape[a] > 1):
            joined_bytes = 0.0 if kind == "collective-permute" else COMBINED_BYTES
            seconds = float(self._mesh.time_s(kind, there, num_bytes, joined_bytes))
            yield Message(kind, there, count, num_bytes, seconds)

    @cached_property
    def _mesh(self) -> MeshModel:
        return MeshModel(self.cluster, self.mesh_shape)

    # --- numbers and values

    @property
    def num_own(self) -> int:
        """Microbatches of a stage between loops."""
        return self.num_microbatches // (self.program.num_workers if self.is_shared_out else 1)

    @property
    def num_ticks(self) -> int:
        """Ticks of a loop."""
        return self.program.stages_per_worker * self.num_microbatches + self.program.num_workers - 1

    @staticmethod
    def _is_stack(loop: LayerLoop, v: int) -> bool:
        return v in loop.op.stacked

    @property
    def _once(self) -> tuple[Graph, Graph]:
        return self.program.prologue, self.program.epilogue

    def bytes_of(self, v: int) -> float:
        """Bytes of a value on a device, before it is split over stages."""
        return self._under(self.sharding.spec(v), v)

    def entry_bytes_of(self, v: int) -> float:
        """Bytes on a device of a value that all microbatches read, in the spec in which parts read it."""
        return self._under(self.sharding.entry_spec(v), v)

    def _under(self, spec: Spec, v: int) -> float:
        return self.program.values[v].num_bytes / num_shards(spec, self.sharding.mesh_shape)

    @cached_property
    def kernels(self) -> PartKernels[Part]:
        """The kernels of each part."""
        return PartKernels(self.intra_op, self.intra_op.device, self.step, self._of_site(), is_program=False)

    def _of_site(self) -> dict[Site, dict[Part, Runs]]:
        found: dict[Site, dict[Part, Runs]] = {}
        stages = self.program.num_workers * self.program.stages_per_worker
        for part in (self.program.prologue, *self.program.parts, self.program.epilogue):
            is_loop = isinstance(part, LayerLoop)
            ops = (part.op,) if is_loop else part.graph.ops if isinstance(part, Segment) else part.ops
            for op in ops:
                if (site := self.step.site_of(op)) is not None:
                    whole = length_of(self.step, site)
                    num = whole // stages if is_loop else whole
                    runs = Runs(num, whole, is_loop, self.program.stages_per_worker)
                    found.setdefault(site, {})[part] = runs
        return found
