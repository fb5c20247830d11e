"""The search for a pipeline that runs as one program: over microbatches, replicas, stages and recomputation.

All stages are equal, so nothing has to be cut, and only a few numbers are searched. Numbers of parts of the batch are
tried as for stages with programs of their own (`search.pipeline.search`): the one with the least bound first, until a
bound exceeds the best plan. Once the step is made ready in so many parts, each number of replicas and of stages is
priced by sums. The fastest candidate that fits is the answer. If none fits, the search goes on with steps that
recompute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.memo import memo
from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.ir.graph import Step
from autoshard.search.memory.microbatches import batch_divisors, batch_halvings
from autoshard.search.pipeline.bounds import Pipelines
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.schedules.registry import FAMILIES, check_numbers
from autoshard.search.pipeline.spmd import check_has_loops, layer_loops, written
from autoshard.search.pipeline.spmd_costs import SpmdCosts
from autoshard.search.pipeline.spmd_memory import SpmdMemory
from autoshard.search.pipeline.spmd_sharding import spmd_sharding
from autoshard.search.pipeline.stage_meshes import MAX_MICROBATCHES, state_bytes
from autoshard.search.plan.executors import SPMD
from autoshard.search.plan.spmd_step import SpmdSharding, SpmdStep
from autoshard.search.plan.text_table import plural

STAGES_PER_WORKER = {name: FAMILIES[name].stages_each for name in ("gpipe", "circular")}
"""Stages of a worker, by the schedules that one program can run."""


@dataclass(frozen=True, slots=True)
class SpmdCandidate:
    """A point of the search space: the devices, the layers and the examples of a pipeline that runs as one program.

    Attributes:
      schedule: `gpipe` or `circular`.
      stages: number of runs of equally many layers.
      workers: number of groups of devices, each with equally many stages.
      num_replicas: replicas of each stage.
      shape: the mesh of a replica's devices.
      microbatches: microbatches of each replica.
    """

    schedule: str
    stages: int
    workers: int
    num_replicas: int
    shape: tuple[int, ...]
    microbatches: int

    @property
    def count(self) -> int:
        """Number of parts in which all replicas of a stage together go through the batch."""
        return self.microbatches * self.num_replicas

    def check(self, step: Step, cluster: Cluster) -> None:
        """Refuses numbers that one program cannot run.

        Raises:
          InputError: it cannot.
        """
        if self.schedule not in STAGES_PER_WORKER:
            raise InputError(
                f"schedule={self.schedule!r} cannot be run by executor={SPMD!r}, in which all stages do the same at any "
                f"time. Choose one of {', '.join(STAGES_PER_WORKER)}, or leave out executor="
            )
        check_numbers(self.schedule, self.stages, self.microbatches, self.workers)
        if (taken := self.workers * self.num_replicas * prod(self.shape)) != cluster.num_devices:
            raise InputError(
                f"{self.workers} groups of mesh {(self.num_replicas, *self.shape)} take {taken} devices, and {cluster.name} "
                f"has {cluster.num_devices}. Take another mesh or number of stages"
            )
        divisors = batch_divisors(step)
        if divisors and self.count not in divisors:
            raise InputError(
                f"{plural(max(divisors), 'example')} cannot be split over the {plural(self.num_replicas, 'replica')} of "
                f"each stage in {self.microbatches} microbatches on each: that makes {self.count} parts. Take a batch that "
                "is a multiple, or other numbers of microbatches or stages"
            )


@dataclass(frozen=True, eq=False)
class SpmdProposal:
    """A candidate that is priced.

    Attributes:
      parts: the step that it runs.
      candidate: the candidate.
      intra_op: the strategies of a replica's devices.
      program: the program of all stages.
      sharding: the specs of its values.
      costs: its time and messages.
    """

    parts: Parts
    candidate: SpmdCandidate
    intra_op: IntraOp
    program: SpmdStep
    sharding: SpmdSharding
    costs: SpmdCosts

    @property
    def ticks_s(self) -> float:
        """Seconds in loops over layers."""
        return self.costs.num_ticks * (
            self.costs.pass_s(is_backward=False) + self.costs.pass_s(is_backward=True)
        )

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.ticks_s + self.costs.between_s + self.costs.once_s

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage computes results that nobody reads."""
        return self.ticks_s * (self.candidate.workers - 1) / self.costs.num_ticks / self.step_s

    def memory(self, limit_bytes: float) -> SpmdMemory:
        """The memory of a device, if the compiler's scheduler may use so many bytes."""
        return SpmdMemory(self.costs, limit_bytes)


@dataclass(frozen=True, eq=False)
class SpmdParts:
    """A step in parts, to be run as one program.

    Attributes:
      traced: the step.
      parts: the step in parts.
    """

    traced: Step
    parts: Parts

    def proposal(self, candidate: SpmdCandidate) -> SpmdProposal:
        """Prices a candidate.

        Raises:
          InputError: there is no loop over so many equal layers.
        """
        layer_loops(self._step, candidate.stages)
        per_worker, intra_op = candidate.stages // candidate.workers, self.parts.solution(candidate.shape)
        program = replace(self._program, num_workers=candidate.workers, stages_per_worker=per_worker)
        sharding = replace(self._sharding(candidate.shape), num_replicas=candidate.num_replicas)
        costs = SpmdCosts(program, sharding, intra_op, self._step, self.parts.cluster)
        return SpmdProposal(self.parts, candidate, intra_op, program, sharding, costs)

    @memo
    def _sharding(self, shape: tuple[int, ...]) -> SpmdSharding:
        if prod(shape) == 1:
            return SpmdSharding(1)
        return spmd_sharding(self.parts.solution(shape), self._step, self._program, 1)

    @cached_property
    def _step(self) -> PipelineStep:
        return PipelineStep.of_loop(self.parts.step_problem.step)

    @cached_property
    def _program(self) -> SpmdStep:
        return written(self.traced, self._step, 1, 1)


class SpmdSearch:
    """One search.

    Attributes:
      best: the best pipeline so far.
      least_bytes: the least memory of a pipeline that exceeds the cap.
      cutoff_s: seconds of another plan that a pipeline has to beat.
      skipped_s: lower bound on the pipelines that were not tried.
      prepared: values that searches for one step share.
    """

    def __init__(
        self,
        step: Step,
        cluster: Cluster,
        options: PipelineOptions,
        progress: Callable[[str], None] = lambda line: None,
        prepared: Prepared | None = None,
    ) -> None:
        self.step, self.cluster, self.options, self.progress = step, cluster, options, progress
        self.prepared = prepared or Prepared.within()
        self.best: SpmdProposal | None = None
        self.least_bytes = self.cutoff_s = self.skipped_s = inf

    def run(self, cutoff_s: float = inf) -> SpmdProposal:
        """The fastest pipeline that fits.

        Raises:
          InputError: no numbers go together.
          NotSplittableError: the step has no microbatches; the message says why.
          InfeasibleError: nothing fits, or takes less than the cutoff.
        """
        self.cutoff_s, by_count = cutoff_s, dict[int, list[SpmdCandidate]]()
        for one in self._all():
            if self._may_hold(one.num_replicas):
                by_count.setdefault(one.count, []).append(one)
        left = sorted(by_count, reverse=True)
        while left and not self.prepared.deadline.is_over:
            least_s = {count: min(map(self._least_s, by_count[count])) for count in left}
            count = min(left, key=least_s.__getitem__)
            if (target_s := self._target_s) <= least_s[count]:
                self.skipped_s = least_s[count]
                break
            left.remove(count)
            before_s = self._best_s
            candidates = [one for one in by_count[count] if self._least_s(one) < target_s]
            self._in_parts(count, candidates)
            if self.prepared.bounds is None and self._best_s == before_s < inf:
                break
        if self.best is None:
            raise self._infeasible()
        return self.best

    def least_s(self) -> float:
        """Lower bound on the seconds of a step of any pipeline.

        Raises:
          InputError: no numbers go together.
        """
        return min(
            (self._least_s(one) for one in self._all() if self._may_hold(one.num_replicas)), default=inf
        )

    def work_s(self) -> float:
        """Lower bound on the seconds of a step of any pipeline, wherever its stages begin.

        Raises:
          InputError: no numbers go together.
        """
        bounds = self.prepared.bounds
        each = ((one.count, prod(one.shape)) for one in self._all() if self._may_hold(one.num_replicas))
        return 0.0 if bounds is None else min((bounds.work_s(*one) for one in each), default=inf)

    def _least_s(self, one: SpmdCandidate) -> float:
        """Lower bound on the seconds of a step."""
        family = Pipelines(one.schedule, one.microbatches, one.num_replicas, one.shape, is_one_program=True)
        return self.prepared.least_s(family, one.stages)

    def _in_parts(self, count: int, candidates: Sequence[SpmdCandidate]) -> None:
        self.progress(f"the step in {count} parts, as one program")
        parts = self.prepared.in_parts(count, self.step, self.cluster, self.options)
        if self._has_fit(parts, candidates) or self.options.remat == "never":
            return
        for choice in parts.choices(max(one.shape for one in candidates)):
            if self._has_fit(parts.recomputing(choice.sites), candidates):
                return

    def _has_fit(self, parts: Parts, candidates: Sequence[SpmdCandidate]) -> bool:
        """Takes a better pipeline, if there is one; true if recomputation cannot improve on the best one."""
        in_one, found, refused = SpmdParts(self.step, parts), list[SpmdProposal](), list[InputError]()
        for candidate in candidates:
            try:
                found.append(in_one.proposal(candidate))
            except InputError as e:
                refused.append(e)
        if not found:
            raise refused[0]
        for proposal in sorted(found, key=lambda one: one.step_s):
            if proposal.step_s >= self._target_s:
                return True
            memory = proposal.memory(limit_bytes := self.options.memory_bytes)
            needed_bytes = memory.held_bytes if memory.held_bytes > limit_bytes else memory.peak_bytes
            self.least_bytes = min(self.least_bytes, needed_bytes)
            if needed_bytes <= limit_bytes:
                self.best = proposal
                return proposal is found[0]
        return False

    @property
    def _best_s(self) -> float:
        return self.best.step_s if self.best else inf

    @property
    def _target_s(self) -> float:
        """Seconds of the plan to beat."""
        return min(self._best_s, self.cutoff_s)

    # --- what to try

    def _all(self) -> list[SpmdCandidate]:
        """All candidates that match the options.

        Raises:
          InputError: there are none.
        """
        check_has_loops(self.step)
        found, refused = list[SpmdCandidate](), list[InputError]()
        for candidate in self._asked():
            try:
                candidate.check(self.step, self.cluster)
                found.append(candidate)
            except InputError as e:
                refused.append(e)
        if not found:
            raise refused[0] if refused else self._indivisible()
        return found

    def _asked(self) -> Iterator[SpmdCandidate]:
        options = self.options
        names = (options.schedule,) if options.schedule else tuple(STAGES_PER_WORKER)
        for name in names:
            per_worker = STAGES_PER_WORKER.get(name, 1)
            for num_replicas, shape in self._meshes():
                workers = self._num_workers(num_replicas * prod(shape), per_worker)
                stages = options.stages or workers * per_worker
                for microbatches in self._microbatches(num_replicas) if workers else ():
                    yield SpmdCandidate(name, stages, workers, num_replicas, shape, microbatches)

    def _num_workers(self, size: int, per_worker: int) -> int:
        """Number of groups of `size` devices each; 0 if there are none, or if they cannot have the number of stages
        asked for."""
        if self.options.mesh is not None and self.options.stages is not None:
            return self.options.stages // per_worker  # whether these are all devices is checked
        workers, rest = divmod(self.cluster.num_devices, size)
        is_asked = self.options.stages in (None, workers * per_worker)
        return workers if not rest and workers > 1 and is_asked else 0

    def _meshes(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The possible numbers of replicas of a stage, with the mesh of each."""
        if self.options.mesh is not None:
            yield self.options.mesh[0], self.options.mesh[1:] or (1,)
            return
        total, per_node = self.cluster.num_devices, self.cluster.devices_per_node
        for num_replicas in (n for n in range(1, total + 1) if total % n == 0):
            for size in (n for n in range(1, per_node + 1) if per_node % n == 0):
                if total % (num_replicas * size) == 0:
                    yield num_replicas, (size,)

    def _microbatches(self, num_replicas: int) -> Sequence[int]:
        if self.options.microbatches is not None:
            return (self.options.microbatches,)
        counts = (n // num_replicas for n in batch_halvings(self.step) if n % num_replicas == 0)
        return [n for n in counts if n <= MAX_MICROBATCHES]

    def _may_hold(self, num_replicas: int) -> bool:
        """True if all devices together can hold the state once per replica."""
        return num_replicas * self._state_bytes <= self.cluster.num_devices * self.options.memory_bytes

    @cached_property
    def _state_bytes(self) -> int:
        return sum(state_bytes(self.step))

    # --- what to say

    def _indivisible(self) -> InputError:
        stages, total = self.options.stages or "several", self.cluster.num_devices
        return InputError(
            f"{total} devices cannot be split into {stages} stages of equal layers, as many to each group, with parts of "
            f"a batch of {batch_halvings(self.step)[0]}. Ask for a number of stages that gives a divisor of {total} groups"
        )

    def _infeasible(self) -> InfeasibleError:
        if self.skipped_s < inf:
            return InfeasibleError(
                f"pipelines of {self.step.name} that are one program take {format_seconds(self.skipped_s)} or more, and "
                f"there is a plan of {format_seconds(self.cutoff_s)}"
            )
        cap = format_bytes(self.options.memory_bytes)
        nearest = f": the nearest needs {format_bytes(self.least_bytes)}" if self.least_bytes < inf else ""
        return InfeasibleError(
            f"no pipeline of {self.step.name} on {self.cluster.name} that is one program fits {cap} a device{nearest}. "
            "Allow more memory, or use more devices"
        )
