"""What one device holds and does in a step, under a full assignment: the plan's peak and its exposed communication.

The kernels (`search.lowered`, `search.combine`) are put in two kinds of orders (`search.schedule`). In program order
the least memory is used. XLA's latency-hiding scheduler puts kernels off into the windows of collectives, and holds more
meanwhile, as long as its budget allows: so the predicted peak is that of its order where that keeps to the cap, and
otherwise the cap, but never less than program order takes. The scheduler settles ties as it likes; the worst of ours
counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cost_model.gpu_targets import is_hopper_or_later
from search.combine import combined
from search.liveness import Liveness
from search.lowered import Lowered, lower
from search.pricing import Priced
from search.schedule import Ties, latency_hiding, program_order
from search.simulate import Peak, peak, seconds


@dataclass(frozen=True, eq=False)
class Simulated:
    """A step on one device; what is not asked for is not simulated.

    Attributes:
      lowered: its kernels.
      limit_bytes: the scheduler's budget for the whole device: the cap.
      is_rescheduled: whether the compiler's scheduler moves kernels for overlap.
    """

    lowered: Lowered
    limit_bytes: float
    is_rescheduled: bool

    @cached_property
    def least(self) -> Peak:
        """The peak if the scheduler spends no memory on overlap: what must fit."""
        return peak(self.lowered, self._plain)

    @cached_property
    def peak(self) -> Peak:
        """The peak of device memory."""
        highest = max(
            (peak(self.lowered, order) for order in self._overlapped),
            key=lambda p: p.num_bytes,
            default=self.least,
        )
        if highest.num_bytes <= self.least.num_bytes:
            return self.least
        if highest.num_bytes > self.limit_bytes:
            return replace(self.least, num_bytes=max(self.least.num_bytes, self.limit_bytes))
        return highest

    @cached_property
    def hidden_s(self) -> float:
        """Communication that runs behind computation."""
        alone_s = sum(kernel.seconds for kernel in self.lowered.kernels)
        return alone_s - min(seconds(self.lowered, order) for order in (self._plain, *self._overlapped))

    @cached_property
    def _plain(self) -> tuple[int, ...]:
        return program_order(self.lowered)

    @cached_property
    def _overlapped(self) -> tuple[tuple[int, ...], ...]:
        return tuple(latency_hiding(self.lowered, ties) for ties in Ties if self.is_rescheduled)


def simulate(priced: Priced, liveness: Liveness, labels: Sequence[int], limit_bytes: float) -> Simulated:
    """Runs the kernels of an assignment.

    Args:
      priced: the sketch on its mesh.
      liveness: of the same sketch.
      labels: one per node.
      limit_bytes: the scheduler's budget for the whole device: the cap.
    """
    mesh = priced.resharder.mesh
    lowered = combined(lower(priced, liveness, labels), mesh)
    return Simulated(lowered, limit_bytes, is_hopper_or_later(mesh.cluster.device.name))
