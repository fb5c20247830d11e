"""A compiled program beside its plan's predictions, and the verdict.

One program is judged as a pipeline's stage is (`verification.records.StageProof`). Besides, its copies to and from the host
are known, and it may be compiled in part.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.search.plan.plan import Plan
from autoshard.verification import table
from autoshard.verification.records import (
    FLOOR_BYTES,
    WHOLE,
    Copied,
    Extent,
    Footprint,
    Moved,
    StageProof,
    beside,
    compiled_footprint,
    exit_status,
)


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
    def _proof(self) -> StageProof:
        """The program as the stage that it is."""
        return StageProof(
            self.predicted,
            self.compiled,
            "the compiled program",
            self.cap_bytes,
            self.host_cap_bytes,
            self.collectives,
        )

    @property
    def fits(self) -> bool:
        """Whether the compiled program keeps to the cap and to the host's memory."""
        return self._proof.fits

    @property
    def differences(self) -> tuple[str, ...]:
        """Exceeded limits and wrong predictions, one sentence each."""
        copied_bytes = sum(c.bytes for c in self.host_copies)
        if copied_bytes <= FLOOR_BYTES or self.predicted.host_bytes:
            return self._proof.differences
        copied = f"{format_bytes(copied_bytes)} a device are copied to and from the host"
        return (*self._proof.differences, f"{copied}, and the plan keeps nothing there")

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
