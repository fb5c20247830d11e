"""The collectives of a step added up, as a plan says them: one line for each kind over each set of axes."""

from collections.abc import Iterable
from dataclasses import dataclass

from autoshard.search.plan.values import Collective


@dataclass(frozen=True, slots=True)
class EqualCollectives:
    """Equal collectives of a step.

    Attributes:
      kind: XLA's name.
      axes: names of mesh axes.
      count: number in a step.
      num_bytes: bytes of a device, of all together.
      seconds: duration of all together.
    """

    kind: str
    axes: tuple[str, ...]
    count: float
    num_bytes: float
    seconds: float


def added_up(equal: Iterable[EqualCollectives]) -> tuple[Collective, ...]:
    """All collectives by kind and axes, sorted by these."""
    total: dict[tuple[str, tuple[str, ...]], tuple[float, float, float]] = {}
    for one in equal:
        count, num_bytes, seconds = total.get((one.kind, one.axes), (0, 0.0, 0.0))
        total[one.kind, one.axes] = count + one.count, num_bytes + one.num_bytes, seconds + one.seconds
    return tuple(
        Collective(kind, axes, round(count), round(num_bytes), seconds)
        for (kind, axes), (count, num_bytes, seconds) in sorted(total.items())
    )
