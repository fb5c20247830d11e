"""Copies of a part's operands and results in the layouts that its products need.

`search.device.handed_over` says which products need which layout. Here the copies become kernels of the part, for their
memory alone: they take no time, as the compiler's scheduler overlaps nothing with them.
"""

from collections.abc import Mapping
from dataclasses import replace

from autoshard.search.device.handed_over import TurnedCopy
from autoshard.search.device.kernel_times import KernelTime
from autoshard.search.device.lowering import Buffer, Copies, Kernel, Loops, Lowered, renumbered
from autoshard.search.device.workspace import SLICED_WORKSPACE_BYTES
from autoshard.search.problem.layouts import Order
from autoshard.search.problem.live_ranges import Resident
from autoshard.search.problem.workspaces import WORKSPACE_BYTES

NO_TIME = KernelTime(0.0, 0.0)
"""The time of a copy: the scheduler overlaps nothing with it."""


def with_copies(part: Lowered, handed: frozenset[int]) -> Lowered:
    """A part's kernels, with those that write such copies.

    Args:
      part: the part's kernels.
      handed: the buffers that it gets or hands on.
    """
    copying = _Copying(part, handed)
    for k, kernel in enumerate(part.kernels):
        copying.take(k, kernel)
    return copying.lowered()


class _Copying:
    """One walk over a part's kernels.

    Attributes:
      before: copies that are made ahead of a loop, which stand before all kernels.
      kernels: the kernels so far, other copies included.
      number: by kernel of the part, its index in `kernels`.
    """

    def __init__(self, part: Lowered, handed: frozenset[int]) -> None:
        self.part, self.handed = part, handed
        self.buffers: list[Buffer] = list(part.buffers)
        self.before: list[Kernel] = []
        self.kernels: list[Kernel] = []
        self.number: dict[int, int] = {}
        self.made: dict[tuple[int, Order, Loops], int] = {}
        self.order_of: dict[int, Order] = {}

    def take(self, k: int, kernel: Kernel) -> None:
        """Appends a kernel, and the copies that it reads."""
        read: dict[int, int] = {}
        for copy in kernel.turned:
            if copy.buffer in self.handed:
                read[copy.buffer] = self._copied(kernel, copy)
        self.number[k] = len(self.kernels)
        self.kernels.append(self._reading(kernel, read) if read else kernel)

    def _copied(self, kernel: Kernel, copy: TurnedCopy) -> int:
        """The buffer that holds an operand of a product in the layout that it needs."""
        loops = kernel.loops
        if copy.is_part and loops and self.order_of.setdefault(copy.buffer, copy.order) == copy.order:
            return self._made(self.before, kernel, copy, loops[1:], copy.num_parts * copy.num_bytes)
        return self._made(self.kernels, kernel, copy, loops, copy.num_bytes)

    def _made(
        self, kernels: list[Kernel], kernel: Kernel, copy: TurnedCopy, loops: Loops, num_bytes: float
    ) -> int:
        key = copy.buffer, copy.order, loops
        if key not in self.made:
            self.made[key] = made = len(self.buffers)
            self.buffers.append(Buffer(num_bytes, Resident.TEMPORARIES, False, loops))
            reads, root = (copy.buffer,), Copies(copy.order)
            kernels.append(Kernel(kernel.position, reads, (made,), (), None, 0.0, NO_TIME, loops, None, root))
        return self.made[key]

    def _reading(self, kernel: Kernel, instead: Mapping[int, int]) -> Kernel:
        """A product that reads copies. A copied layer is no slice any more."""
        num_left = len(kernel.loops)
        sliced = tuple(
            b for b in kernel.sliced if b not in instead or len(self.buffers[instead[b]].loops) < num_left
        )
        workspace_bytes = kernel.workspace_bytes
        if kernel.sliced and not sliced and workspace_bytes == SLICED_WORKSPACE_BYTES:
            workspace_bytes = WORKSPACE_BYTES
        reads = tuple(dict.fromkeys(instead.get(b, b) for b in kernel.reads))
        return replace(kernel, reads=reads, sliced=sliced, workspace_bytes=workspace_bytes)

    def lowered(self) -> Lowered:
        """The part with its copies."""
        number = {k: len(self.before) + n for k, n in self.number.items()}
        kernels = (*self.before, *renumbered(self.kernels, number))
        return Lowered(kernels, tuple(self.buffers))
