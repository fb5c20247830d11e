"""What one device holds and does in a step, under a full assignment: the plan's peak and its exposed communication.

The kernels (`search.lowered`, `search.combine`) are put in two kinds of orders (`search.schedule`). In program order
the least memory is used. XLA's latency-hiding scheduler puts kernels off into the windows of collectives, and holds more
meanwhile, as long as its budget allows: so the predicted peak is that of its order where that keeps to the cap, and
otherwise the cap, but never less than program order takes. The scheduler settles ties as it likes; the worst of ours
counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cost_model.gpu_targets import is_hopper_or_later
from search.combine import combined
from search.liveness import Liveness
from search.lowered import lower
from search.pricing import Priced
from search.schedule import Ties, latency_hiding, program_order
from search.simulate import Peak, peak, seconds


@dataclass(frozen=True, slots=True)
class Simulated:
    """A step on one device.

    Attributes:
      peak: of device memory.
      least: the peak if the scheduler spends no memory on overlap: what must fit.
      hidden_s: communication that runs behind computation.
    """

    peak: Peak
    least: Peak
    hidden_s: float


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
    plain = program_order(lowered)
    least = peak(lowered, plain)
    orders = (
        [latency_hiding(lowered, ties) for ties in Ties]
        if is_hopper_or_later(mesh.cluster.device.name)
        else []
    )
    highest = max((peak(lowered, order) for order in orders), key=lambda p: p.num_bytes, default=least)
    if highest.num_bytes <= least.num_bytes:
        found = least
    elif highest.num_bytes > limit_bytes:
        found = replace(least, num_bytes=max(least.num_bytes, limit_bytes))
    else:
        found = highest
    alone_s = sum(kernel.seconds for kernel in lowered.kernels)
    taken_s = min(seconds(lowered, order) for order in (plain, *orders))
    return Simulated(found, least, alone_s - taken_s)
