"""The search for a pipeline: over microbatches, replicas, and what is recomputed, the best of what is proposed for each.

How many microbatches there are decides over the bubble and over how much of a device's rate a replica's part can use; how
many replicas, over how much is communicated in each microbatch and how much once in a step. For each pair of numbers a bound
says what any pipeline takes at least: all devices at work all the time, each at the rate of the best mesh of a replica. The
search goes through them in the order of their bounds, and ends where a bound is above the best pipeline.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.units import format_bytes
from search.ir.graph import Step
from search.memory.batch_states import NotSplittableError
from search.memory.microbatches import batch_divisors
from search.pipeline.proposals import Parts, Proposal, Wanted, num_workers, propose
from search.pipeline.stage_plan import NoCut

PER_STAGE = (2, 4, 8)
"""Times as many microbatches as stages, where nobody says how many. Source: GPipe (Huang et al. 2019, section 2.3) finds the
bubble negligible from four times as many on."""

FEW_EXAMPLES = (1, 2, 4)
"""Of a replica's part, where many devices want many microbatches. Source: those of published trainings of large models."""

MAX_MICROBATCHES = 1024
"""Source: a choice of ours; schedules have tasks for each of them on each stage."""

MANY_STAGES = 16
"""Where nobody says how many stages there are, microbatches are chosen for up to so many. Source: a choice of ours."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What is asked for.

    Attributes:
      memory_bytes: the cap per device.
      stages: in how many the step is cut; None to search it.
      schedule: the family's name; None to search it.
      microbatches: in how many the step goes through its batch; None to search it.
      mesh: of each stage: how many replicas it has, then the mesh of a replica's devices; None to search it.
      remat: "never" to recompute nothing; None to search it.
    """

    memory_bytes: int
    stages: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    mesh: tuple[int, ...] | None = None
    remat: str | None = None

    @property
    def wanted(self) -> Wanted:
        """What a proposal has to be."""
        return Wanted(self.memory_bytes, self.stages, self.schedule)


Shapes = tuple[tuple[int, ...], ...]


class PipelineSearch:
    """One search.

    Attributes:
      best: the best pipeline so far.
      nearest: the cut that misses the cap by least, where none fits.
    """

    def __init__(
        self,
        step: Step,
        marks: Sequence[str],
        cluster: Cluster,
        options: PipelineOptions,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.step, self.marks, self.cluster = step, marks, cluster
        self.options, self.progress = options, progress
        self.known: dict[int, Parts] = {}
        self.best: Proposal | None = None
        self.nearest = NoCut(())

    def run(self, cutoff_s: float = inf) -> Proposal | NoCut:
        """The fastest pipeline, or why there is none that fits and takes less than the cutoff."""
        bounds = sorted(self._bounds(), key=lambda one: one[0])
        for bound_s, parts, num_replicas, shapes in bounds:
            if bound_s >= min(self._best_s, cutoff_s):
                break
            said = f"{parts.count // num_replicas} microbatches, {num_replicas} replicas of each stage"
            self.progress(said)
            if not self._try(parts, num_replicas, shapes) and self.options.remat != "never":
                for sites in parts.choices(shapes[-1]):
                    self.progress(f"{said}, recomputing {len(sites)} ops")
                    if self._try(parts.recomputing(sites), num_replicas, shapes):
                        break
        return self.best or self.nearest

    @property
    def _best_s(self) -> float:
        return self.best.step_s if self.best else inf

    def _try(self, parts: Parts, num_replicas: int, shapes: Shapes) -> bool:
        """Looks for a better pipeline; whether any fits."""
        found = propose(parts, num_replicas, shapes, self.options.wanted)
        if isinstance(found, NoCut):
            if found.over_bytes < self.nearest.over_bytes:
                self.nearest = found
            return False
        if found.step_s < self._best_s:
            self.best = found
        return True

    def _bounds(self) -> Iterator[tuple[float, Parts, int, Shapes]]:
        """What pipelines take at least, by numbers of microbatches and replicas."""
        refused: list[NotSplittableError] = []
        found = 0
        for num_replicas, shapes in self._meshes():
            for count in self._counts(num_replicas):
                try:
                    parts = self._parts(count * num_replicas)
                except NotSplittableError as e:
                    refused.append(e)
                    continue
                found += 1
                self._check_layers(parts)
                device_s = min(parts.ledger(s).microbatch_s * num_replicas * prod(s) for s in shapes)
                yield count * device_s / self.cluster.num_devices, parts, num_replicas, shapes
        if not found:
            raise refused[0] if refused else self._indivisible()

    def _parts(self, count: int) -> Parts:
        if count not in self.known:
            self.progress(f"the step in {count} parts")
            self.known[count] = Parts.of(self.step, self.marks, self.cluster, count)
        return self.known[count]

    def _check_layers(self, parts: Parts) -> None:
        """That there is as much to cut as is asked for."""
        if (stages := self.options.stages or 0) > (num_layers := parts.layers.num_layers):
            raise InputError(
                f"wanted {stages} stages, but the step's forward phase has {num_layers} ops, or layers of a loop, that "
                "compute much for a microbatch. Ask for fewer stages"
            )

    # --- what to try

    def _meshes(self) -> Iterator[tuple[int, Shapes]]:
        """Numbers of replicas, and the meshes that each may have: of devices that stages can have so many of."""
        if self.options.mesh is not None:
            num_replicas, *shape = self.options.mesh
            self._check_mesh()
            yield num_replicas, (tuple(shape),)
            return
        total, sizes = self.cluster.num_devices, self._sizes
        for num_replicas in (n for n in range(total, 0, -1) if total % n == 0):
            shapes = tuple((size // num_replicas,) for size in sizes if size % num_replicas == 0)
            shapes = tuple(s for s in shapes if self.cluster.devices_per_node % s[0] == 0)
            if shapes:
                yield num_replicas, shapes

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Of how many devices stages may be, if as many as are asked for shall have all devices together.

        Raises:
          InputError: there is no such number.
        """
        total, stages = self.cluster.num_devices, self.options.stages
        if self.options.wanted.shares_workers and stages is not None:
            size, rest = divmod(total, num_workers(self.options.schedule or "", stages))
            if rest or not size:
                raise self._undealt()
            return (size,)
        per_node = self.cluster.devices_per_node
        may = [n for n in range(1, total + 1) if _stands(n, per_node)]
        if stages is None:
            return tuple(may)
        reached = [_sums(may, n, total) for n in range(stages + 1)]
        sizes = tuple(n for n in may if total - n in reached[stages - 1])
        if not sizes:
            raise self._undealt()
        return sizes

    def _counts(self, num_replicas: int) -> list[int]:
        """Numbers of microbatches, the fewest first."""
        divisors = batch_divisors(self.step)
        batch = max(divisors, default=1)
        if self.options.microbatches is not None:
            fits = batch % (self.options.microbatches * num_replicas) == 0
            return [self.options.microbatches] if fits or num_replicas == 1 else []
        per_replica = [n for n in divisors if batch % (n * num_replicas) == 0 and n <= MAX_MICROBATCHES]
        stages = self.options.stages or min(MANY_STAGES, self.cluster.num_devices // num_replicas)
        wanted = {max((n for n in per_replica if n <= k * stages), default=0) for k in PER_STAGE}
        if self.options.stages is None:
            wanted |= {batch // num_replicas // n for n in FEW_EXAMPLES}
        return sorted(wanted & {*per_replica})

    def _check_mesh(self) -> None:
        """That as many stages of the mesh that is asked for as are asked for have all devices."""
        options, total = self.options, self.cluster.num_devices
        size = prod(options.mesh or ())
        stages = options.stages or total // size
        workers = num_workers(options.schedule or "", stages)
        if size not in self._sizes or workers * size != total:
            raise InputError(
                f"{workers} stages of mesh {options.mesh} take {workers * size} devices, and {self.cluster.name} has {total}"
                f" in nodes of {self.cluster.devices_per_node}. Ask for another mesh or number of stages"
            )

    # --- what to say

    def _undealt(self) -> InputError:
        return InputError(
            f"{self.cluster.num_devices} devices in nodes of {self.cluster.devices_per_node} cannot be dealt to "
            f"{self.options.stages} stages{self._scheduled}: each takes 1, 2, 4, ... devices of a node, or whole nodes"
            + (", and all as many" if self.options.wanted.shares_workers else "")
            + ". Ask for another number of stages, or use other devices"
        )

    @property
    def _scheduled(self) -> str:
        return f" under {self.options.schedule!r}" if self.options.schedule else ""

    def _indivisible(self) -> InputError:
        return InputError(
            f"the batch of {self.step.name} cannot be dealt to the replicas of a stage in so many microbatches "
            f"({self.options.microbatches}, mesh {self.options.mesh}). Take another batch size, or leave one of the two out"
        )

    def infeasible(self, nearest: NoCut) -> InfeasibleError:
        """Why nothing fits."""
        return InfeasibleError(
            f"no pipeline of {self.step.name} on {self.cluster.name} fits {format_bytes(self.options.memory_bytes)} a device"
            f": {nearest}. Allow more memory, more microbatches or more stages, or use more devices"
        )


def _stands(size: int, per_node: int) -> bool:
    """Whether a stage may have so many devices."""
    return size % per_node == 0 if size >= per_node else size.bit_count() == 1


def _sums(terms: Sequence[int], count: int, most: int) -> frozenset[int]:
    """What so many terms may add up to."""
    found = frozenset({0})
    for _ in range(count):
        found = frozenset(total + term for total in found for term in terms if total + term <= most)
    return found
