"""The kernels that a scheduler puts in order together: a loop's body, or a step.

Each region is put in order by itself. An inner loop is one *unit* there, as is any other kernel: it stays together.
"""

from collections.abc import Sequence

from autoshard.search.device.lowering import TRANSFERS, Kernel, Loops, Lowered


class Region:
    """The kernels of one loop's body, or of the step.

    Attributes:
      lowered: all kernels.
      units: kernel numbers, unit by unit.
      loops_of: for units that are loops, the loops that they are in, their own included.
      before: by unit, the units that it depends on.
    """

    def __init__(self, lowered: Lowered, members: Sequence[int], loops: Loops) -> None:
        self.lowered, self.kernels = lowered, lowered.kernels
        self.units: list[list[int]] = []
        self.loops_of: dict[int, Loops] = {}
        unit_of: dict[int, int] = {}
        for k in members:
            unit_of[k] = self._unit(k, loops)
            self.units[unit_of[k]].append(k)
        made_by = {b: k for k in members for b in self.kernels[k].makes}
        self.before: list[dict[int, None]] = [{} for _ in self.units]
        for k in members:
            kernel = self.kernels[k]
            needed = [made_by[b] for b in kernel.reads if b in made_by]
            needed += [n for n in kernel.after if n in unit_of]
            self.before[unit_of[k]] |= dict.fromkeys(unit_of[n] for n in needed if unit_of[n] != unit_of[k])

    def _unit(self, k: int, loops: Loops) -> int:
        """The unit of a kernel, made where the kernel is its first."""
        own = self.kernels[k].loops
        if len(own) > len(loops):
            inner = own[len(own) - len(loops) - 1 :]
            last = len(self.units) - 1
            if self.loops_of.get(last) == inner:
                return last
            self.loops_of[len(self.units)] = inner
        self.units.append([])
        return len(self.units) - 1

    def makes(self, unit: int) -> dict[int, None]:
        """The buffers that a unit makes."""
        return dict.fromkeys(b for k in self.units[unit] for b in self.kernels[k].makes)

    def reads(self, unit: int) -> dict[int, None]:
        """The buffers that a unit reads and does not make."""
        makes = self.makes(unit)
        return dict.fromkeys(b for k in self.units[unit] for b in self.kernels[k].reads if b not in makes)

    def kernel(self, unit: int) -> Kernel | None:
        """The kernel that a unit is; None if it is a loop."""
        return None if unit in self.loops_of else self.kernels[self.units[unit][0]]

    def occupies(self, unit: int) -> frozenset[str]:
        """Whether a unit, or a loop inside, has `collectives` or `transfers` between the device and its host."""
        moved = (self.kernels[k].collective for k in self.units[unit])
        kinds = {what.kind for what in moved if what is not None}
        return frozenset("transfers" if kind in TRANSFERS else "collectives" for kind in kinds)
