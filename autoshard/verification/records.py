"""Records of a verification: footprints, collectives, copies, stages, each with what the plan says and the compiler made.

Results (`verification.result`, `verification.pipeline_result`) hold them; tables show them.

The compiler combines small collectives and merges equal ones, so their counts are shown and their bytes are judged. The
scheduler spends free memory as it likes. So the tolerance for a peak is wider below the prediction than above it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla.stats import CompiledStats, Traffic
from autoshard.search.pipeline.stage_sharding import MIN_BYTES
from autoshard.search.plan.plan import Collective

FLOOR_BYTES = MIN_BYTES
"""Largest difference in bytes that never counts: losses, norms and the like, which XLA merges or moves as it likes.
Derived: a link's latency is as long as it takes to move so much."""

TRAFFIC_SHARE = 0.01
"""Largest difference that does not count, as a share of a kind's bytes over its axes. Source: a choice of ours; where the
model is right, both sides agree to the byte."""


PEAK_ABOVE = 0.03
"""Largest share by which the compiled peak may exceed the predicted one: the error that a plan at its cap can afford.
Source: a choice of ours."""

PEAK_BELOW = 0.12
"""Largest share by which the compiled peak may fall below the predicted one. It is larger than `PEAK_ABOVE`, as the error
costs speed and not the run. Source: a choice of ours."""

DIFFERS, DOES_NOT_FIT = 1, 3
"""Exit statuses; `DOES_NOT_FIT` is that of `InfeasibleError`."""


def exit_status(fits: bool, differences: Sequence[str]) -> int:
    """The exit status of a verdict."""
    if not fits:
        return DOES_NOT_FIT
    return DIFFERS if differences else 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one device at its highest.

    Attributes:
      peak_bytes: on the device.
      host_bytes: pinned, on the host.
      residents: the parts of the peak, in bytes by name.
    """

    peak_bytes: int
    host_bytes: int
    residents: Mapping[str, int]


def compiled_footprint(stats: CompiledStats) -> Footprint:
    """The footprint of a compiled program."""
    residents = {
        "arguments": stats.argument_bytes,
        "outputs not aliased": stats.fresh_output_bytes,
        "temporaries": stats.temporary_bytes,
    }
    return Footprint(stats.peak_bytes, stats.host_bytes, residents)


@dataclass(frozen=True, slots=True)
class Moved:
    """Traffic of one kind of collective over one set of mesh axes in one step, predicted and compiled.

    Attributes:
      kind: XLA's name for it.
      axes: names of mesh axes.
      predicted_count: number of collectives in the plan.
      predicted_bytes: per device.
      compiled_count: number of arrays that the compiled program moves; one collective may move several.
      compiled_bytes: per device.
    """

    kind: str
    axes: tuple[str, ...]
    predicted_count: int
    predicted_bytes: int
    compiled_count: int
    compiled_bytes: int

    @property
    def differs(self) -> bool:
        """Whether the difference in bytes exceeds both tolerances."""
        largest = max(self.predicted_bytes, self.compiled_bytes)
        return abs(self.compiled_bytes - self.predicted_bytes) > max(FLOOR_BYTES, TRAFFIC_SHARE * largest)


def paired(predicted: Mapping[Any, Traffic], compiled: Mapping[Any, Traffic]) -> tuple[Moved, ...]:
    """Pairs of predicted and compiled collectives, by kind and mesh axes."""
    nothing = (0, 0)
    return tuple(
        Moved(kind, axes, *predicted.get((kind, axes), nothing), *compiled.get((kind, axes), nothing))
        for kind, axes in sorted({**predicted, **compiled})
    )


def beside(collectives: Iterable[Collective], compiled: Mapping[Any, Traffic]) -> tuple[Moved, ...]:
    """The collectives of a plan beside those of a compiled program."""
    return paired({(c.kind, c.axes): (c.count, c.bytes) for c in collectives}, compiled)


@dataclass(frozen=True, slots=True)
class Copied:
    """Copies between each device and its host in one step of the compiled program.

    Attributes:
      direction: `to host` or `from host`.
      count: number of copies.
      bytes: per device.
    """

    direction: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """The part of a step that was compiled.

    Attributes:
      compiled_blocks: number of compiled blocks in the stacks that were shortened.
      num_blocks: number of blocks in these stacks of the whole step.
      reason: why the whole step was compiled although that takes its time; else empty.
    """

    compiled_blocks: int = 0
    num_blocks: int = 0
    reason: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether only some of the step's equal blocks were compiled."""
        return self.compiled_blocks < self.num_blocks


WHOLE = Extent()
"""All of the step was compiled."""


@dataclass(frozen=True, slots=True)
class ProgramProof:
    """A compiled program of a stage.

    Attributes:
      name: the program's name: `forward 2`.
      stage: its stage.
      worker: the worker whose devices run it.
      count: number of its runs in a step.
      held_bytes: most bytes on a device when it is dispatched: its operands, and all other arrays there.
      fresh_bytes: its results that take over no operand's buffer.
      temporary_bytes: the temporaries of its run.
    """

    name: str
    stage: int
    worker: int
    count: int
    held_bytes: int
    fresh_bytes: int
    temporary_bytes: int

    @property
    def peak_bytes(self) -> int:
        """A device's peak while the program runs."""
        return self.held_bytes + self.fresh_bytes + self.temporary_bytes


@dataclass(frozen=True, slots=True)
class StageProof:
    """A stage: its memory and its collectives, predicted and compiled.

    Attributes:
      predicted: the predicted peak of its devices.
      compiled: the compiled peak of its devices.
      peak_at: the name of the program that has the compiled peak.
      cap_bytes: the cap of its devices.
      host_cap_bytes: a device's share of its host's memory.
      collectives: of all its programs in one step: every kind over every set of axes that either side has.
    """

    predicted: Footprint
    compiled: Footprint
    peak_at: str
    cap_bytes: int
    host_cap_bytes: int
    collectives: tuple[Moved, ...]

    @property
    def fits(self) -> bool:
        """Whether the compiled programs keep to both caps."""
        on_device, on_host = self.compiled.peak_bytes, self.compiled.host_bytes
        return on_device <= self.cap_bytes and on_host <= self.host_cap_bytes

    @property
    def fullness(self) -> float:
        """The compiled peak as a share of the cap."""
        return self.compiled.peak_bytes / self.cap_bytes

    @property
    def differences(self) -> tuple[str, ...]:
        """Exceeded caps and wrong predictions, one sentence each."""
        peaks = peak_difference(self.predicted.peak_bytes, self.compiled.peak_bytes)
        return tuple(filter(None, (*self._misfits(), peaks, *map(moved_difference, self.collectives))))

    def _misfits(self) -> Iterator[str]:
        """Sentences on the caps that compiled programs exceed."""
        compiled = self.compiled
        if compiled.peak_bytes > self.cap_bytes:
            yield (
                f"{self.peak_at} needs {format_bytes(compiled.peak_bytes)} a device, "
                f"{format_bytes(compiled.peak_bytes - self.cap_bytes)} more than the cap of {format_bytes(self.cap_bytes)}"
            )
        if compiled.host_bytes > self.host_cap_bytes:
            yield (
                f"{format_bytes(compiled.host_bytes)} of host memory a device are needed, and there are "
                f"{format_bytes(self.host_cap_bytes)}"
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


def _percent(found: int, wanted: int) -> str:
    share = abs(found - wanted) / wanted if wanted else 0.0
    return f"{100 * share:.3g}%" if share < 10 else f"{100 * share:,.0f}%"
