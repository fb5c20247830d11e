"""Memory traffic of keeping and of recomputing residuals.

Light ops run in fused kernels (`search.problem.kernels`), which take as long as their reads and writes. A value that only
the backward phase reads as an array is written for that phase alone, and read by each kernel there. If it is recomputed,
those kernels compute it on the fly, and read its sources unless they do so anyway. A tanh that a GELU's gradient reads
beside its input costs nothing to recompute, and two passes to keep.

Some values must be arrays in the backward phase too: a product or a loop reads them, they are sums, or they have more
sources than one kernel reads. Then a kernel of their own computes them. Random values, such as a mask of dropout, are arrays
too, and expensive to recompute.

A loop's stack is filled with zeros, written and read for the residual alone. It is copied besides where a product makes or
reads the residual (`search.problem.kernels`).
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from autoshard.cost_model.compute import kernel_s, pass_s_per_byte
from autoshard.search.ir.graph import Phase
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.fusion import LIBRARIES, MAX_FUSION_SOURCES, Fusion, is_part, is_view

DRAWN_BYTES = 24.0
"""Memory traffic of recomputing one random element: six passes of a 32-bit number, in kernels that do not fuse with its
readers. Source: traffic of XLA's kernels for a GPT with dropout on an A100, with its masks recomputed and without."""


@dataclass(frozen=True, eq=False)
class Passes:
    """Seconds of a step in which a device's memory serves the results of a light op.

    Attributes:
      costed: the step on a mesh.
      fusion: the values that the step stores.
      num_bytes: bytes of an array on one device.
    """

    costed: CostedGraph
    fusion: Fusion
    num_bytes: Callable[[int], float]

    @property
    def _ops(self) -> tuple[FlatOp, ...]:
        return self.fusion.program.ops

    def keep_s(self, v: int) -> float:
        """Seconds to keep a value for the backward phase: a write, if no other kernel reads it before, and a read for each
        backward kernel that would otherwise compute it on the fly."""
        position, _ = self.fusion.program.maker[v]
        others = self._readers[Phase.FORWARD].get(v, set()) - {self._kernel(position)}
        passes = (not others) + (0 if self._is_array(position) else len(self._behind(position)))
        runs = self._ops[position].count
        return runs * passes * pass_s_per_byte(self.costed.device) * self.num_bytes(v)

    def stacking_s_per_byte(self, v: int) -> float:
        """Seconds per byte to stack a value in a loop and to read it later. The passes are: one for zeros; one to write, two
        beside a library call; one to read, two for a library call. (A library's result that no library reads counts no read:
        its recomputation writes and reads it as well.)"""
        ops, uses = self._ops, self.fusion.uses
        stacks = [r for u in uses.get(v, ()) if ops[u].name == "stack" for r in ops[u].results]
        parts = [
            r for stack in stacks for u in uses.get(stack, ()) if is_part(ops[u]) for r in ops[u].results
        ]
        is_made_by_library = ops[self.fusion.maker[v][0]].name in LIBRARIES
        written = 2 if self.fusion.is_at_library(v) else 1
        read = 2 if any(map(self.fusion.is_read_by_library, parts)) else 0 if is_made_by_library else 1
        return (1 + written + read) * pass_s_per_byte(self.costed.device)

    def recompute_s(self, position: int) -> float:
        """Seconds to recompute a light op that makes arrays."""
        op, device = self._ops[position], self.costed.device
        if self._is_array(position):
            kernel = self._made_by[self.costed.kernels.first[position]]
            own_bytes, num_bytes = kernel[position], sum(kernel.values())
            return op.count * float(kernel_s(device, num_bytes)) * own_bytes / max(num_bytes, 1.0)
        made_of = self._made_of(position)
        besides = (made_of - self._arrays[kernel] for kernel in self._behind(position))
        num_bytes = sum(self.num_bytes(v) for arrays in besides for v in arrays)
        return op.count * pass_s_per_byte(device) * num_bytes

    @cached_property
    def _made_by(self) -> dict[int, dict[int, float]]:
        """By kernel: the bytes that each op moves there, for ops whose results are arrays in the backward phase too. Ops
        that share a source share its read."""
        arrays = defaultdict[int, list[int]](list)
        for position, kernel in self.costed.kernels.first.items():
            if self._is_array(position):
                arrays[kernel].append(position)
        found = dict[int, dict[int, float]]()
        for kernel, positions in arrays.items():
            readers = Counter(v for position in positions for v in self._made_of(position))
            found[kernel] = {}
            for p in positions:
                read_bytes = sum(self.num_bytes(v) / readers[v] for v in self._made_of(p))
                written_bytes = sum(map(self.num_bytes, self._ops[p].results))
                found[kernel][p] = read_bytes + written_bytes + DRAWN_BYTES * self._drawn(self._ops[p])
        return found

    def _made_of(self, position: int) -> frozenset[int]:
        """The stored values from which an op's results are computed."""
        return frozenset[int]().union(*(self.fusion.sources[v] for v in self._ops[position].operands))

    def _drawn(self, op: FlatOp) -> float:
        """The number of random elements that a device draws for an op's results, unless the random bits are stored."""
        drawn = {*op.results, *(v for v in op.operands if not self.fusion.is_stored(v))}
        if self.fusion.random_bits.isdisjoint(drawn):
            return 0.0
        return max(self.num_bytes(v) / self.fusion.program.values[v].itemsize for v in op.results)

    def _is_array(self, position: int) -> bool:
        """True if an op's results are arrays in the backward phase too."""
        is_sum = self.fusion.is_reduction[self.fusion.folded.class_of[position]]
        is_made_of_many = len(self._made_of(position)) > MAX_FUSION_SOURCES
        if is_sum or is_made_of_many or self._drawn(self._ops[position]):
            return True
        return not self._fused.issuperset(readers := self._behind(position)) or not readers

    def _behind(self, position: int) -> set[int]:
        """The kernels of the backward phase that read an op's results."""
        results = self._ops[position].results
        return set[int]().union(*(self._readers[Phase.BACKWARD].get(v, ()) for v in results))

    @cached_property
    def _readers(self) -> dict[Phase, dict[int, set[int]]]:
        """By phase and stored value, the kernels that read it, by their first ops. All phases but the backward one count as
        forward."""
        found = {
            Phase.BACKWARD: defaultdict[int, set[int]](set),
            Phase.FORWARD: defaultdict[int, set[int]](set),
        }
        for at, op in enumerate(self._ops):
            if (kernel := self._kernel(at)) is not None:
                phase = Phase.BACKWARD if op.phase is Phase.BACKWARD else Phase.FORWARD
                for v in op.operands:
                    for source in self.fusion.sources[v]:
                        found[phase][source].add(kernel)
        return {phase: dict(readers) for phase, readers in found.items()}

    @cached_property
    def _arrays(self) -> dict[int, set[int]]:
        """By kernel of the backward phase, the values that it reads."""
        found = defaultdict[int, set[int]](set)
        for v, kernels in self._readers[Phase.BACKWARD].items():
            for kernel in kernels:
                found[kernel].add(v)
        return dict(found)

    def _kernel(self, position: int) -> int | None:
        """The first op of the kernel that computes an op; None if its readers compute it on the fly."""
        op = self._ops[position]
        if position in self.costed.kernels.alone or (op.is_boundary and not is_view(op)):
            return position
        return self.costed.kernels.first.get(position)

    @cached_property
    def _fused(self) -> frozenset[int]:
        """The kernels of light ops, by their first ops."""
        return frozenset(self.costed.kernels.first.values())
