"""What a pipeline that is one program takes: seconds and messages.

Its time is the sum of its parts', as nothing of one part runs beside another. With p groups of devices, v stages on each and
m microbatches,

    a loop over layers    takes v m + p - 1 ticks, each as long as a stage's layers and the sending of the carry: who has
                          nothing to do computes all the same;
    what stands between   runs for m / p microbatches on each device, or for all m where p does not divide them; what it
                          hands to a loop is gathered from all stages before, what it gets is scattered behind;
    once                  gradients are added up, of layers over replicas, of all else over all; prologue and update.

So the ticks are those of the schedule that all pipelines share (`search.pipeline.simulator`), with the sending in the tasks.
Under `circular`, state rests in the order of layers, and goes to its stages and back in each step.

What kernels take is known from the solution for a replica's devices, as for stages with programs of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.search.device.lowering import Kernel
from autoshard.search.ir.graph import Graph, Site
from autoshard.search.ir.spec import Spec
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.part_kernels import PartKernels, Runs, length_of
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.plan.plan import Collective
from autoshard.search.plan.spmd_resting import is_shared_out, mesh_shape, num_microbatches, resting_spec
from autoshard.search.plan.spmd_step import LayerLoop, Segment, SpmdSharding, SpmdStep
from autoshard.search.problem.costs import COMBINED_BYTES

Part = Segment | LayerLoop | Graph
"""Of a program: what runs for microbatches, or its prologue or epilogue."""

STAGE_AXIS, REPLICA_AXIS = 0, 1
"""Of the mesh; those of a replica's devices are behind."""

AXES = ("stage", "replica")
"""The first axes of the mesh: of groups of devices, and of the replicas in each."""


@dataclass(frozen=True, slots=True)
class Message:
    """A collective that a program says, and how often in a step.

    Attributes:
      kind: XLA's name.
      axes: of the whole mesh.
      count: in a step.
      num_bytes: of a device, each time.
      seconds: each time.
    """

    kind: str
    axes: tuple[int, ...]
    count: float
    num_bytes: float
    seconds: float

    @property
    def total_s(self) -> float:
        """In a step."""
        return self.count * self.seconds


@dataclass(frozen=True, eq=False)
class SpmdCosts:
    """A pipeline that is one program, priced.

    Attributes:
      program: what runs.
      sharding: how the devices of a replica share it.
      intra_op: the solution that says so.
      step: the step in parts that the program was written from.
      cluster: where it runs.
    """

    program: SpmdStep
    sharding: SpmdSharding
    intra_op: IntraOp
    step: PipelineStep
    cluster: Cluster

    # --- seconds

    def pass_s(self, is_backward: bool) -> float:
        """Of a stage's layers on one microbatch, and of handing on what they make."""
        return sum(
            (
                self._kernel_s(loop) / self.program.num_parts + sum(m.seconds for m in self._sent(loop))
                for loop in self.loops
                if bool(loop.op.params["reverse"]) == is_backward
            ),
            0.0,
        )

    @cached_property
    def between_s(self) -> float:
        """Of what stands between the loops, in a step, and of taking values there and back."""
        segments = [part for part in self.program.parts if isinstance(part, Segment)]
        own_s = sum(self._kernel_s(part) for part in segments) * self.num_own / self.program.num_parts
        return own_s + sum(message.total_s for message in self._into_and_out_of_loops())

    @cached_property
    def once_s(self) -> float:
        """Of what is done once in a step."""
        kernels = (self._once_s(kernel) for part in self._once for kernel, _ in self.kernels.kernels(part))
        return sum(kernels) + sum(message.total_s for message in (*self._once_said(), *self._entering()))

    def _kernel_s(self, part: Part) -> float:
        """Of a part's kernels for all parts of the batch, of a loop in one stage."""
        return self._seen * sum(share * kernel.time.seconds for kernel, share in self.kernels.kernels(part))

    def _once_s(self, kernel: Kernel) -> float:
        return self._seen * kernel.time.seconds * self._share_of_layers(kernel)

    def _share_of_layers(self, kernel: Kernel) -> float:
        """A stage's, of what is done once: of what works on layers, each does its own."""
        site = self.kernels.outermost(self.kernels.ops[kernel.position])
        return 1 / self.program.num_workers if site in self._of_layers else 1.0

    @cached_property
    def _seen(self) -> float:
        """What of the kernels' time does not run beside others."""
        busy_s = sum(k.time.seconds for k in self.intra_op.device.lowered.kernels)
        hidden_s = self.intra_op.on_mesh.hiding.hidden_s(self.intra_op.labels)
        return max(1 - hidden_s / busy_s, 0.0) if busy_s else 1.0

    @cached_property
    def _of_layers(self) -> frozenset[Site | None]:
        """What works on values that carry the layers."""
        ops = (op for graph in self._once for op in graph.ops)
        layered = self.program.layered
        return frozenset(self.step.site_of(op) for op in ops if not layered.isdisjoint(op.outputs))

    # --- messages

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All of a step, by kind and axes."""
        names = (*AXES, *self.sharding.axis_names)
        total: dict[tuple[str, tuple[str, ...]], tuple[float, float, float]] = {}
        for m in self._said():
            key = m.kind, tuple(names[a] for a in m.axes)
            before = total.get(key, (0.0, 0.0, 0.0))
            total[key] = before[0] + m.count, before[1] + m.count * m.num_bytes, before[2] + m.total_s
        return tuple(
            Collective(kind, axes, round(count), round(num_bytes), seconds)
            for (kind, axes), (count, num_bytes, seconds) in sorted(total.items())
        )

    def _said(self) -> Iterator[Message]:
        yield from self._inside()
        yield from self._entering()
        for loop in self.loops:
            yield from self._sent(loop)
        yield from self._into_and_out_of_loops()
        yield from self._once_said()

    def _inside(self) -> Iterator[Message]:
        """Between a replica's devices: of a loop in each tick, of what stands between for each own microbatch."""
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
        """How often a part runs, for each part of the batch."""
        if isinstance(part, Graph):
            return 1.0
        runs = self.num_ticks if isinstance(part, LayerLoop) else self.num_own
        return runs / self.program.num_parts

    def _entering(self) -> Iterator[Message]:
        """Between a replica's devices, for what all microbatches read otherwise than it rests."""
        loop = self.step.step.graph.ops[self.step.loop]
        for kernel in self.kernels.all_collectives:
            what = kernel.collective
            if what is None or not self._enters(kernel):
                continue
            ((_, _, i), *_) = self.kernels.ops[kernel.position].result_places[0]
            share = 1 / self.program.num_workers if loop.inputs[i] in self.program.layered else 1.0
            axes = tuple(a + len(AXES) for a in what.axes)
            yield Message(
                what.kind, axes, 1, share * what.num_bytes, share * self._seen * kernel.time.seconds
            )

    def _enters(self, kernel: Kernel) -> bool:
        """Whether it brings what all microbatches read into their loop."""
        op = self.kernels.ops[kernel.position]
        return op.name == "enter" and op.site == (self.step.loop,)

    def _sent(self, loop: LayerLoop) -> Iterator[Message]:
        """From stage to stage, in each tick."""
        for v in loop.op.outputs[: loop.op.loop_counts[1]]:
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
            carried = part.op.outputs[: part.op.loop_counts[1]]
            leaving = [v for v in carried if v in part.wanted or v in part.sums]
            made |= {*leaving}
            for v in leaving:
                kind = "reduce-scatter" if self.is_shared_out else "all-reduce"
                yield from self._across_stages(kind, v, self.num_microbatches)

    def _across_stages(self, kind: str, v: int, num_given: int) -> Iterator[Message]:
        """Of all microbatches' values, of which each device gives so many. The partitioner does that with whole values: what
        a replica's devices have in parts, they gather first."""
        whole, names = (
            self.program.values[v].num_bytes,
            range(len(AXES), len(AXES) + len(self.sharding.mesh_shape)),
        )
        split = tuple(a for a, dim in zip(names, self.sharding.spec(v), strict=True) if dim >= 0)
        yield from self._message("all-gather", split, num_given * whole)
        yield from self._message(kind, (STAGE_AXIS,), self.num_microbatches * whole)

    def _once_said(self) -> Iterator[Message]:
        """Sums over replicas, and of what is no layer over stages; examples on their way to their replicas, and, under
        `circular`, layers to their stages."""
        everyone = (STAGE_AXIS, REPLICA_AXIS) if self.is_shared_out else (REPLICA_AXIS,)
        of_layers = [
            total for loop in self.loops for v, total in loop.sums.items() if self._is_stack(loop, v)
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
            resting = resting_spec(self.program, self.sharding, v)
            if resting[REPLICA_AXIS] >= 0:  # each replica takes every so many-th example
                sizes = zip(resting, self._mesh.shape, strict=True)
                num_bytes = self.program.values[v].num_bytes / prod(n for d, n in sizes if d >= 0)
                yield from self._message("all-to-all", (REPLICA_AXIS,), num_bytes)
        if self.program.stages_per_worker > 1:
            for v in (*self.read_layers, *of_layers):
                is_split = resting_spec(self.program, self.sharding, v)[STAGE_AXIS] >= 0
                kind, whole = ("all-to-all", stages) if is_split else ("all-gather", 1)
                if is_split or v in of_layers:
                    yield from self._message(kind, (STAGE_AXIS,), self.bytes_of(v) / whole)

    def _message(
        self, kind: str, axes: tuple[int, ...], num_bytes: float, count: float = 1
    ) -> Iterator[Message]:
        """One, if there is anybody to talk to; of many that the compiler joins, unless it waits for the one before."""
        if there := tuple(a for a in axes if self._mesh.shape[a] > 1):
            joined_bytes = 0.0 if kind == "collective-permute" else COMBINED_BYTES
            seconds = float(self._mesh.time_s(kind, there, num_bytes, joined_bytes))
            yield Message(kind, there, count, num_bytes, seconds)

    @cached_property
    def _mesh(self) -> MeshModel:
        return MeshModel(self.cluster, mesh_shape(self.program, self.sharding))

    # --- what is what

    @property
    def num_microbatches(self) -> int:
        """Of each replica."""
        return num_microbatches(self.program, self.sharding)

    @property
    def is_shared_out(self) -> bool:
        """Whether stages split microbatches between loops over layers."""
        return is_shared_out(self.program, self.sharding)

    @property
    def num_own(self) -> int:
        """Microbatches that a stage has between loops."""
        return self.num_microbatches // (self.program.num_workers if self.is_shared_out else 1)

    @property
    def num_ticks(self) -> int:
        """Of a loop."""
        return self.program.stages_per_worker * self.num_microbatches + self.program.num_workers - 1

    @cached_property
    def loops(self) -> tuple[LayerLoop, ...]:
        """In program order."""
        return tuple(part for part in self.program.parts if isinstance(part, LayerLoop))

    @cached_property
    def read_layers(self) -> tuple[int, ...]:
        """What loops slice that is the same for all parts of the batch."""
        xs = (
            a for loop in self.loops for a in loop.op.inputs[sum(loop.op.loop_counts) :] if isinstance(a, int)
        )
        return tuple(v for v in dict.fromkeys(xs) if v not in self.program.of_microbatch)

    @staticmethod
    def _is_stack(loop: LayerLoop, v: int) -> bool:
        return v in loop.op.outputs[loop.op.loop_counts[1] :]

    @property
    def _once(self) -> tuple[Graph, Graph]:
        return self.program.prologue, self.program.epilogue

    def bytes_of(self, v: int) -> float:
        """Of a value, on a device, were its replica's stages one."""
        return self._under(self.sharding.spec(v), v)

    def entry_bytes_of(self, v: int) -> float:
        """The same of a value that is the same for all microbatches, where parts read it."""
        return self._under(self.sharding.entry_spec(v), v)

    def _under(self, spec: Spec, v: int) -> float:
        sizes = zip(spec, self.sharding.mesh_shape, strict=True)
        return self.program.values[v].num_bytes / prod(size for dim, size in sizes if dim >= 0)

    @cached_property
    def kernels(self) -> PartKernels[Part]:
        """By part."""
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
