"""The peak in program order that is left if some ops are recomputed, or their results offloaded, before the step is
rewritten.

A residual leaves memory between its last read in the forward phase and its first read in the backward phase. At all other
moments the device holds as much as before. So the sum of all residuals overestimates the saved bytes if the step holds
nearly as much at another moment. A step of few layers does so in the backward phase of each layer.

The operands of recomputed ops may live longer than before. They are not counted, so that a step without loops holds at
least this much under the strategies for which it is asked. A loop's iteration keeps its values until they are stacked;
these still count.
"""

from collections.abc import Iterator, Sequence, Set
from functools import cached_property

import numpy as np

from autoshard.search.ir.graph import Phase, Site
from autoshard.search.problem.flat_program import FlatProgram
from autoshard.search.problem.fusion import Fusion
from autoshard.search.problem.live_ranges import LiveRange, Resident
from autoshard.search.problem.memory_rows import Memory

Stretch = tuple[int, int, float]
"""The first and the last position at which an array is in memory for the backward phase alone, and its bytes."""


class PeakLeft:
    """The peak of a step under some strategies, by the ops whose results are not kept.

    Args:
      memory: the step's memory on a mesh.
      fusion: the arrays from which each value is computed.
      strategies: the strategy of each node.
    """

    def __init__(self, memory: Memory, fusion: Fusion, strategies: Sequence[int]) -> None:
        self._items, self._program = memory.items, memory.costed.graph.folded.program
        self._held, self._profile = memory.held(strategies), memory.profile(strategies)
        self._last_forward = last_reads(self._program, fusion, Phase.FORWARD)
        self._first_backward = first_reads(self._program, fusion, Phase.BACKWARD)

    def num_bytes(self, sites: Set[Site]) -> float:
        """Bytes per device if the results of the ops at these sites are not kept for the backward phase."""
        change = np.zeros(len(self._profile) + 1)
        for site in sorted(sites & self._stretches.keys()):
            for first, last, num_bytes in self._stretches[site]:
                change[first] -= num_bytes
                change[last + 1] += num_bytes
        return float((self._profile + np.cumsum(change)[:-1]).max(initial=0.0))

    @cached_property
    def _stretches(self) -> dict[Site, list[Stretch]]:
        """The residuals' stretches, by the site of the op that makes each."""
        found = dict[Site, list[Stretch]]()
        for item, num_bytes in zip(self._items, self._held.tolist(), strict=True):
            first, last = self._unread(item)
            if item.resident is Resident.RESIDUALS and first <= last:
                found.setdefault(self._site(item.position), []).append((first, last, num_bytes))
        return found

    def _site(self, position: int) -> Site:
        """The site of the op that makes an array; for a loop's stack, of the op in its body."""
        op = self._program.ops[position]
        while op.name == "stack" and op.operands:
            op = self._program.ops[self._program.maker[op.operands[0]][0]]
        return op.site

    def _unread(self, item: LiveRange) -> tuple[int, int]:
        """The part of a live range that lies between both phases' reads. An array that stands for those of other blocks, and
        a loop's stack, is unread throughout."""
        op = self._program.ops[item.position]
        if item.start != item.position or op.name == "stack":
            return item.start, item.end
        forward = (self._last_forward[v] for v in op.results if v in self._last_forward)
        backward = (self._first_backward[v] for v in op.results if v in self._first_backward)
        return max(forward, default=item.start) + 1, min(backward, default=item.end + 1) - 1


def last_reads(program: FlatProgram, fusion: Fusion, phase: Phase) -> dict[int, int]:
    """By array, the position of its last read in a phase, including reads by ops computed on the fly."""
    return {v: at for at, v in _reads(program, fusion, phase)}


def first_reads(program: FlatProgram, fusion: Fusion, phase: Phase) -> dict[int, int]:
    """By array, the position of its first read in a phase."""
    return {v: at for at, v in reversed([*_reads(program, fusion, phase)])}


def _reads(program: FlatProgram, fusion: Fusion, phase: Phase) -> Iterator[tuple[int, int]]:
    """The reads of arrays in one phase, as (position, array), in program order."""
    for at, op in enumerate(program.ops):
        if op.phase is phase and op.name not in ("input", "output"):
            for operand in op.operands:
                yield from ((at, v) for v in fusion.sources[operand])
