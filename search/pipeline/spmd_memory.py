"""The memory of a device of a pipeline that runs as one program, part by part.

Arguments lie there throughout, and a result of the prologue until its last reader. A value of the microbatches lies
there for those microbatches that a stage has between loops; once it is gathered, for all. A forward loop stacks
residuals for all microbatches, with one more slot that nobody reads. A loop also needs the carries of all microbatches,
the sums, and the temporaries of its layers (`part_kernels`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.ir.spec import num_shards
from autoshard.search.pipeline.spmd_costs import REPLICA_AXIS, Part, SpmdCosts
from autoshard.search.plan.spmd_step import LayerLoop, Segment


@dataclass(frozen=True, eq=False)
class SpmdMemory:
    """The memory of a device, in bytes.

    Attributes:
      costs: the time and the messages of the pipeline.
      limit_bytes: the memory that the compiler's scheduler may use.
    """

    costs: SpmdCosts
    limit_bytes: float

    @cached_property
    def peak_bytes(self) -> float:
        """The peak of a device."""
        return max(self.by_part)

    @cached_property
    def held_bytes(self) -> float:
        """A lower bound on the peak: all but the temporaries of kernels. It is quick to compute."""
        return max(map(self._held, range(len(self.costs.program.parts))))

    @cached_property
    def by_part(self) -> tuple[float, ...]:
        """The bytes while each part runs; the last one is the update."""
        parts = self.costs.program.parts
        needed = (self.costs.kernels.temporary_bytes(part, self._room_bytes) for part in parts)
        return (*(self._held(n) + more for n, more in enumerate(needed)), self._at_the_end)

    @cached_property
    def residual_bytes(self) -> float:
        """The residuals of a microbatch in one stage, from its forward to its backward pass."""
        stacks = {v for loop in self.costs.program.loops for v in self._stacks(loop)}
        return sum(self._of_stage(v) for v in sorted(stacks)) / self.costs.program.stages_per_worker

    @cached_property
    def resting_bytes(self) -> float:
        """The bytes of the step's arguments."""
        return sum(map(self._resting, self.costs.program.step.graph.inputs))

    # --- while parts run

    def _held(self, n: int) -> float:
        held = sum(num_bytes for first, last, num_bytes in self._ranges if first <= n <= last)
        return self.resting_bytes + held + self._own_bytes(self.costs.program.parts[n])

    @property
    def _room_bytes(self) -> float:
        return max(self.limit_bytes - self.resting_bytes, 0.0)

    def _own_bytes(self, part: Part) -> float:
        """The bytes of a loop's carries: those that wait at the first stage, a slot that nobody reads, and the one that is
        received; 0 for other parts."""
        if not isinstance(part, LayerLoop):
            return 0.0
        carried = part.op.carried
        return (self.costs.num_microbatches + 2) * sum(self.costs.bytes_of(v) for v in carried)

    @cached_property
    def _ranges(self) -> tuple[tuple[int, int, float], ...]:
        """The live ranges of values that several parts use: first part, last part and bytes."""
        parts, end = self.costs.program.parts, len(self.costs.program.parts)
        read: dict[int, list[int]] = {}
        for n, part in enumerate(parts):
            for v in dict.fromkeys((*part.reads, *(part.op.operands if isinstance(part, LayerLoop) else ()))):
                read.setdefault(v, []).append(n)
        for v in (v for v, _ in self.costs.program.pieces.values()):
            read.setdefault(v, []).append(end)
        found = [(0, max(read[v]), num_bytes) for v, num_bytes in self._prepared() if v in read]
        for n, part in enumerate(parts):
            found += [(n, max(read.get(v, [n])), num_bytes) for v, num_bytes in self._made_by(part)]
            found += [(n, end, num_bytes) for num_bytes in self._sums_of(part)]
        return (*found, *self._gathered(read))

    def _prepared(self) -> Iterator[tuple[int, float]]:
        """Results of the prologue, and copies of values that loops read in another spec or order, with their bytes."""
        costs, program = self.costs, self.costs.program
        examples = {*program.examples.values()}
        made = {*program.prologue.made} - {*program.prologue.inputs}
        totals = {total for part in program.parts for total in part.sums.values()}
        by_value = {whole: v for v, whole in program.examples.items()}
        for v in sorted(made - totals):
            if v in examples:
                yield (
                    by_value[v],
                    program.values[v].num_bytes / costs.mesh_shape[REPLICA_AXIS],
                )
            else:
                yield v, self._of_stage(v) if v in program.layered else costs.bytes_of(v)
        copied = {v for v in costs.sharding.entering if v not in examples}
        copied |= {*program.read_layers} if program.stages_per_worker > 1 else set[int]()
        for v in sorted(copied):
            yield v, costs.entry_bytes_of(v) / (program.num_workers if v in program.layered else 1)

    def _made_by(self, part: Part) -> Iterator[tuple[int, float]]:
        """The values that a part leaves for later parts, with their bytes."""
        num_own = self.costs.num_own
        if isinstance(part, Segment):
            yield from ((v, num_own * self.costs.bytes_of(v)) for v in part.makes if v in part.exported)
        elif isinstance(part, LayerLoop):
            carried = part.op.carried
            yield from ((v, num_own * self.costs.bytes_of(v)) for v in carried if v in part.exported)
            slots = self.costs.program.stages_per_worker * self.costs.num_microbatches + 1
            yield from ((v, slots * self._of_pass(v)) for v in self._stacks(part))

    def _sums_of(self, part: Part) -> Iterator[float]:
        """The bytes of the sums that a part adds to, which lie there until the update."""
        if isinstance(part, Segment | LayerLoop):
            for v, total in part.sums.items():
                is_stack = isinstance(part, LayerLoop) and v in part.op.stacked
                yield self._of_stage(total) if is_stack else self.costs.bytes_of(total)

    def _gathered(self, read: dict[int, list[int]]) -> Iterator[tuple[int, int, float]]:
        """The values that are gathered for loops: the first and the last loop that reads each, and bytes."""
        if not self.costs.is_shared_out:
            return
        loops = {n for n, part in enumerate(self.costs.program.parts) if isinstance(part, LayerLoop)}
        made = {v for part in self.costs.program.parts if isinstance(part, Segment) for v in part.makes}
        made |= {v for loop in self.costs.program.loops for v in loop.op.carried}
        for v in sorted(made & read.keys()):
            if at := [n for n in read[v] if n in loops]:
                yield min(at), max(at), self.costs.num_microbatches * self.costs.bytes_of(v)

    # --- at the end

    @cached_property
    def _at_the_end(self) -> float:
        """The bytes while the update runs, in which a stage updates its own layers."""
        end = len(self.costs.program.parts)
        sums = sum(num_bytes for _, last, num_bytes in self._ranges if last >= end)
        needed = self.costs.kernels.temporary_bytes(self.costs.program.epilogue, self.limit_bytes)
        return self.resting_bytes + sums + needed * self._share_of_state

    @cached_property
    def _share_of_state(self) -> float:
        """A stage's share of the state of a replica's devices: the mean over the arguments."""
        inputs = self.costs.program.step.graph.inputs
        return self.resting_bytes / max(sum(map(self.costs.bytes_of, inputs)), 1.0)

    # --- of values

    def _resting(self, v: int) -> float:
        parts = num_shards(self.costs.resting_spec(v), self.costs.mesh_shape)
        return self.costs.program.values[v].num_bytes / parts

    def _of_stage(self, v: int) -> float:
        """The bytes of a stack of layers in one group of devices."""
        return self.costs.bytes_of(v) / self.costs.program.num_workers

    def _of_pass(self, v: int) -> float:
        return self._of_stage(v) / self.costs.program.stages_per_worker

    def _stacks(self, loop: LayerLoop) -> Iterable[int]:
        """The stacks of a loop that other parts read."""
        return [v for v in loop.op.stacked if v in loop.exported]
