"""A compiled program beside its plan's predictions, and the verdict.

The plan predicts its memory and its collectives. The compiler combines small collectives and merges equal ones, so their
counts are shown and their bytes are judged. The scheduler spends free memory as it likes. So the tolerance for a peak is
wider below the prediction than above it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla.stats import CompiledStats, Traffic
from autoshard.search.plan.plan import Collective, Plan
from autoshard.verification import table
from autoshard.verification.records import (
    FLOOR_BYTES,
    WHOLE,
    Copied,
    Extent,
    Footprint,
    Moved,
    compiled_footprint,
    paired,
)

PEAK_ABOVE = 0.03
"""Largest share by which the compiled peak may exceed the predicted one: the error that a plan at its cap can afford.
Source: a choice of ours."""

PEAK_BELOW = 0.12
"""Largest share by which the compiled peak may fall below the predicted one. It is larger than `PEAK_ABOVE`, as the error
costs speed and not the run. Source: a choice of ours."""

DIFFERS, DOES_NOT_FIT = 1, 3
"""Exit statuses; `DOES_NOT_FIT` is that of `InfeasibleError`."""


@dataclass(frozen=True, slots=True)
class Verification:
    """A plan's predictions beside the results of XLA's GPU compiler for its program.

    Attributes:
      step: the step function's name.
      cluster: the cluster's name.
      mesh: size of each mesh axis by name.
      cap_bytes: the plan's cap per device.
      host_cap_bytes: each device's share of its host's memory.
      predicted: the footprint in the plan.
      compiled: the footprint of the compiled program.
      collectives: every kind over every set of axes that either side has.
      host_copies: between device and host, compiled.
      extent: the part that was compiled. The rest is extrapolated: exactly, but for the device's peak.
      seconds: duration of the verification, by part.

    Example:
      >>> proof = verify(step, state, batch, plan=plan)  # doctest: +SKIP
      >>> proof.fits, proof.differences  # doctest: +SKIP
      (True, ())
    """

    step: str
    cluster: str
    mesh: Mapping[str, int]
    cap_bytes: int
    host_cap_bytes: int
    predicted: Footprint
    compiled: Footprint
    collectives: tuple[Moved, ...]
    host_copies: tuple[Copied, ...]
    extent: Extent
    seconds: Mapping[str, float] = field(compare=False)

    @property
    def is_extrapolated(self) -> bool:
        """Whether only some of the step's equal blocks were compiled; then the compiled peak is an estimate."""
        return self.extent.is_partial

    @property
    def compiled_cap_bytes(self) -> int:
        """The cap for the compiled peak."""
        return self.cap_bytes

    @property
    def overshoot_bytes(self) -> int:
        """Bytes by which the compiled peak exceeds the cap; 0 when it does not."""
        return max(0, self.compiled.peak_bytes - self.cap_bytes)

    @property
    def fits(self) -> bool:
        """Whether the compiled program keeps to the cap and to the host's memory."""
        return not self.overshoot_bytes and self.compiled.host_bytes <= self.host_cap_bytes

    @property
    def differences(self) -> tuple[str, ...]:
        """Exceeded limits and wrong predictions, one sentence each."""
        peaks = peak_difference(self.predicted.peak_bytes, self.compiled.peak_bytes)
        exceeded = misfits("the compiled program", self.compiled, self.cap_bytes, self.host_cap_bytes)
        sentences = [*exceeded, peaks, *map(moved_difference, self.collectives), *_copied(self)]
        return tuple(filter(None, sentences))

    @property
    def differing(self) -> tuple[Moved, ...]:
        """The collectives whose bytes differ."""
        return tuple(c for c in self.collectives if c.differs)

    @property
    def exit_status(self) -> int:
        """0 when it fits as predicted, 1 when something differs, 3 when it does not fit."""
        return exit_status(self.fits, self.differences)

    def to_json(self) -> dict[str, Any]:
        """The verification as JSON-ready values, the verdict included."""
        data = asdict(self)
        data["collectives"] = [{**c, "axes": list(c["axes"])} for c in data["collectives"]]
        data["host_copies"] = list(data["host_copies"])
        return data | {
            "is_extrapolated": self.is_extrapolated,
            "fits": self.fits,
            "differences": list(self.differences),
            "exit_status": self.exit_status,
        }

    def __str__(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        return table.text(
            [f"step {self.step} on {self.cluster}, mesh {mesh}", *table.extent(self.extent)],
            table.memory(self.predicted, self.compiled, self.cap_bytes, self.host_cap_bytes),
            table.residents("predicted residents at the peak", self.predicted.residents),
            table.residents("compiled residents at the peak", self.compiled.residents),
            table.collectives({"": self.collectives}),
            table.copies(self.host_copies),
            table.times(self.seconds),
            table.verdict(self.fits, self.differences),
        )


def compared(
    plan: Plan,
    cluster: Cluster,
    stats: CompiledStats,
    seconds: Mapping[str, float],
    extent: Extent = WHOLE,
) -> Verification:
    """A plan's predictions beside the compiled program's statistics."""
    estimates = plan.estimates
    return Verification(
        step=plan.step,
        cluster=cluster.name,
        mesh=plan.decisions.mesh,
        cap_bytes=plan.memory_bytes,
        host_cap_bytes=cluster.host_bytes_per_node // cluster.devices_per_node,
        predicted=Footprint(estimates.peak_bytes, estimates.host_bytes, estimates.residents),
        compiled=compiled_footprint(stats),
        collectives=beside(estimates.collectives, stats.collectives),
        host_copies=tuple(Copied(way, *traffic) for way, traffic in stats.host_copies.items()),
        extent=extent,
        seconds=seconds,
    )


def beside(collectives: Iterable[Collective], compiled: Mapping[Any, Traffic]) -> tuple[Moved, ...]:
    """The collectives of a plan beside those of a compiled program."""
    return paired({(c.kind, c.axes): (c.count, c.bytes) for c in collectives}, compiled)


def exit_status(fits: bool, differences: Sequence[str]) -> int:
    """The exit status of a verdict."""
    if not fits:
        return DOES_NOT_FIT
    return DIFFERS if differences else 0


def misfits(at_peak: str, compiled: Footprint, cap_bytes: int, host_cap_bytes: int) -> Iterator[str]:
    """Sentences on the caps that compiled programs exceed.

    Args:
      at_peak: the program that has the peak, in words.
      compiled: their footprint.
      cap_bytes: the cap of a device.
      host_cap_bytes: a device's share of its host's memory.
    """
    if compiled.peak_bytes > cap_bytes:
        yield (
            f"{at_peak} needs {format_bytes(compiled.peak_bytes)} a device, "
            f"{format_bytes(compiled.peak_bytes - cap_bytes)} more than the cap of {format_bytes(cap_bytes)}"
        )
    if compiled.host_bytes > host_cap_bytes:
        yield (
            f"{format_bytes(compiled.host_bytes)} of host memory a device are needed, and there are "
            f"{format_bytes(host_cap_bytes)}"
        )


def peak_difference(predicted: int, compiled: int) -> str:
    """A sentence on two peaks in bytes that differ; empty where they are near."""
    if -PEAK_BELOW * predicted <= compiled - predicted <= PEAK_ABOVE * predicted:
        return ""
    side = "above" if compiled > predicted else "below"
    return (
        f"the compiled peak, {format_bytes(compiled)}, lies {_percent(compiled, predicted)} {side} the predicted "
        f"{format_bytes(predicted)}"
    )


def moved_difference(moved: Moved) -> str:
    """A sentence on collectives whose bytes differ; empty for others."""
    if not moved.differs:
        return ""
    what = f"{moved.kind} over {', '.join(moved.axes)}"
    if not moved.predicted_bytes:
        return f"{what}: {format_bytes(moved.compiled_bytes)} compiled, none predicted"
    if not moved.compiled_bytes:
        return f"{what}: {format_bytes(moved.predicted_bytes)} predicted, none compiled"
    return (
        f"{what}: {format_bytes(moved.compiled_bytes)} compiled, {format_bytes(moved.predicted_bytes)} predicted "
        f"({_percent(moved.compiled_bytes, moved.predicted_bytes)} "
        f"{'more' if moved.compiled_bytes > moved.predicted_bytes else 'less'})"
    )


def _copied(v: Verification) -> Iterator[str]:
    total = sum(c.bytes for c in v.host_copies)
    if total > FLOOR_BYTES and not v.predicted.host_bytes:
        yield f"{format_bytes(total)} a device are copied to and from the host, and the plan keeps nothing there"


def _percent(found: int, wanted: int) -> str:
    share = abs(found - wanted) / wanted if wanted else 0.0
    return f"{100 * share:.3g}%" if share < 10 else f"{100 * share:,.0f}%"
