"""A plan of one program, and the strategies behind it: of the step that was searched, and of the whole step that it
represents."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.units import format_mesh
from autoshard.search.ir.graph import Site, Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.options import Options, Progress, pin_marks
from autoshard.search.plan.decisions import apart, hosted, updated_there
from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.estimates import estimate
from autoshard.search.plan.executors import JIT
from autoshard.search.plan.plan import Plan, PlanOnStep
from autoshard.search.plan.recognition import outlined
from autoshard.search.plan.retention import CoarseError, RetentionCodec
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.problem.equivalence import folded_like
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.shortening import Shortened, shortened
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import WorkClock
from autoshard.search.solver.pbqp import Labels
from autoshard.search.space.found import Found
from autoshard.search.space.long_sequences import BLOCKWISE
from autoshard.search.space.warm_starts import for_whole_step, passed_between_layers
from autoshard.search.step_problem import StepProblem
from autoshard.search.stopwatch import Stopwatch

UNUSED_SHARE = 0.1
"""If residuals are offloaded and this share of the cap stays unused, the whole step is searched for a plan that
offloads less. The shortened step is too coarse for that, because each of its layers stands for many. Source: a choice
of ours."""


@dataclass(frozen=True, eq=False)
class Form:
    """A form of a step: as it is written, or with its attention in blocks.

    Attributes:
      step: the step.
      short: the shortened step that represents it; None if the whole step is searched.
    """

    step: Step
    short: Shortened | None

    @classmethod
    def of(cls, step: Step, options: Options) -> "Form":
        """A form with its shortened step, if it has equal layers."""
        return cls(step, shortened(step, equivalence_keys(step, _options_json(options))))

    @property
    def searched(self) -> Step:
        """The step that is searched."""
        return self.short.step if self.short else self.step

    @property
    def attention(self) -> str:
        """The word of a plan for its attention."""
        return BLOCKWISE if self.step.spelled_out else ""


@dataclass(frozen=True, eq=False)
class SearchResult(PlanOnStep):
    """A plan of one program, and the strategies behind it.

    Attributes:
      problem: the prepared step that was searched.
      on_mesh: the problem that the plan solves.
      chosen: a strategy for each node.
      solved_s: seconds of computation and visible communication, and of all copies to and from the host.
      bound_s: the lower bound behind the plan's gap, in seconds; -inf if nothing is proven.
      short: the shortened step, if one was searched.
      anew: names of decisions of a loaded plan that contradicted its edits, and were decided anew or dropped.
      under: goes on with the search under a lower cap, to find a plan there; None if there is no search.
    """

    problem: StepProblem
    on_mesh: MeshProblem
    chosen: Labels
    solved_s: float
    bound_s: float = -math.inf
    short: Shortened | None = None
    anew: tuple[str, ...] = ()
    under: "GoOn | None" = None

    def bounded(self, bound_s: float) -> "SearchResult":
        """The result, certified by a lower bound on the computation and communication of all plans."""
        gap = max(0.0, 1.0 - bound_s / self.solved_s) if self.solved_s > 0 else 0.0
        return replace(self.with_plan(gap=gap), bound_s=bound_s)

    def under_cap(self, cap_bytes: int) -> "SearchResult":
        """The result of a search under a lower limit, with the estimates for the cap itself, which tells the compiler's
        scheduler how much memory it may use for overlap."""
        capped = self.with_plan(memory_bytes=cap_bytes)
        found = capped.found
        costed, device = found.on_mesh.memory.costed, found.device
        estimates = estimate(costed, found.labels, device, found.hidden_s, found.host_bytes)
        return replace(capped.with_plan(estimates=estimates), solved_s=found.solved_s)

    @property
    def leaves_memory_unused(self) -> bool:
        """True if residuals are offloaded and so much memory is unused that fewer might be enough."""
        room_bytes = self.plan.memory_bytes - self.plan.estimates.peak_bytes
        return bool(self.problem.offloaded_sites) and room_bytes > UNUSED_SHARE * self.plan.memory_bytes

    @property
    def found(self) -> Found:
        """The plan as a solution of the search."""
        limit_bytes, overlap = self.plan.memory_bytes, self.plan.overlap
        device = self.on_mesh.predicted(self.chosen, limit_bytes, overlap=overlap)
        return Found(self.problem, self.on_mesh, self.chosen, limit_bytes, device)

    @property
    def step(self) -> Step:
        """The step that runs: the traced step with the plan's recomputation and offloading."""
        return self.whole.problem.step

    @property
    def sharding(self) -> StepSharding:
        """The plan's shardings in full, for the executor."""
        return self.whole._sharding

    @cached_property
    def _sharding(self) -> StepSharding:
        return step_sharding(self.on_mesh.memory.costed, self.chosen)

    @cached_property
    def whole(self) -> "SearchResult":
        """The result for the whole step, if a shortened one was searched.

        Raises:
          PlanError: decisions for representative layers contradict each other in the whole step.
        """
        if self.short is None:
            return self
        try:
            return self._for_step(self.short.whole)
        except NoFitError as e:
            raise PlanError(
                "the decisions for one of several equal layers contradict each other in the others. Undo the last edit, or "
                "search again"
            ) from e

    def check_goes_together(self) -> None:
        """Checks that the strategies of a shortened step suit the whole step and fit there.

        Raises:
          NoFitError: they do not.
        """
        blocks = passed_between_layers(self.on_mesh, self.chosen) if self.short else ()
        if self.short is None or not blocks:
            return
        try:
            longer = self._for_step(self.short.paired(blocks))
        except CoarseError:  # it recomputes only some of the ops that one op represents there
            longer = self._for_step(self.short.whole)
        if not longer.found.fits:
            raise NoFitError(
                "values that layers pass to one another take more than the memory limit", bound_s=self.bound_s
            )

    def _for_step(self, step: Step) -> "SearchResult":
        """The result for a step that the plan's step represents.

        Raises:
          NoFitError: the strategies contradict each other there.
        """
        resharder = self.on_mesh.memory.costed.resharder
        cluster = resharder.mesh.cluster
        problem = planned(step, self.plan, cluster, "the plan", self.problem)
        on_mesh = problem.on(cluster, self.on_mesh.shape, resharder)
        chosen = for_whole_step(self.on_mesh, self.chosen, on_mesh)
        return replace(self, problem=problem, on_mesh=on_mesh, chosen=chosen, short=None)


type GoOn = Callable[[Options, Progress], SearchResult]
"""Goes on with a search under a lower cap, with what it has learned."""


def planned(
    step: Step, plan: Plan, cluster: Cluster, place: str, like: StepProblem | None = None
) -> StepProblem:
    """The prepared step with a plan's rewrites, folded like the shortened step if one is given.

    Raises:
      PlanError: the plan decides something that the step or the cluster does not have. The message begins with its place.
      CoarseError: it separates ops that one op represents.
    """
    marks = pin_marks(step, plan.options.get("pin", {}))
    split = in_microbatches(step, plan, place)
    sites = offloaded_sites = frozenset[Site]()
    program = folded_like(flatten(split), like.traced_program) if like else None
    if retention := plan.decisions.retention:
        program = program or fold(flatten(split), marks)
        sites, offloaded_sites = RetentionCodec(program).read(retention, place)
    on_host, decided = hosted(step, plan.decisions, place), apart(step, plan.decisions)
    updated = updated_there(split, plan.decisions, on_host, cluster, place)
    shape = tuple(plan.decisions.mesh.values())
    if tuple(plan.decisions.mesh) != AXIS_NAMES.get(len(shape)):
        raise PlanError(f"{place}: wanted mesh axes named {AXIS_NAMES}, got {tuple(plan.decisions.mesh)}")
    if plan.num_devices != cluster.num_devices:
        raise PlanError(
            f"{place}: its mesh {format_mesh(shape)} has {plan.num_devices} devices, its cluster {cluster.name} has "
            f"{cluster.num_devices}. Give the axes sizes whose product is {cluster.num_devices}"
        )
    return StepProblem.of(
        split,
        marks,
        cluster.device,
        sites,
        on_host,
        offloaded_sites,
        decided,
        known=program,
        clock=WorkClock(),
        like=like.graph.folded if like else None,
        updated=updated,
    )


def in_microbatches(step: Step, plan: Plan, place: str) -> Step:
    """The step that a plan runs, before recomputation.

    Raises:
      PlanError: it cannot be split into the plan's microbatches.
    """
    try:
        return microbatched(step, plan.decisions.microbatches)
    except InputError as e:
        raise PlanError(f"{place}: microbatches: {e}") from e


def finished(
    form: Form,
    found: Found,
    cluster: Cluster,
    options: Options,
    meshes: tuple[tuple[int, ...], ...],
    watch: Stopwatch,
) -> SearchResult:
    """The result with its plan written down: decisions by name, estimates, and the time that the search took.

    Args:
      form: the form of the step that runs.
      found: the strategies.
      cluster: the cluster that will run it.
      options: what the user asked for.
      meshes: the meshes that were searched: sizes of their axes.
      watch: the time of each part of the search.
    """
    costed, step_problem = found.on_mesh.memory.costed, found.step_problem
    sites, offloaded_sites = step_problem.sites, step_problem.offloaded_sites
    retention = (
        RetentionCodec(step_problem.traced_program).decisions(sites, offloaded_sites)
        if sites or offloaded_sites
        else {}
    )
    step, split = form.step, step_problem.traced
    decisions = found.on_mesh.codec.decisions(found.labels)
    arguments = {argument.name: decisions.arguments[argument.name] for argument in step.arguments}
    plan = Plan(
        step=step.name,
        fingerprint=fingerprint(step.spelled_out or step),
        jax=jax.__version__,
        cluster=cluster.to_json(),
        options=_options_json(options),
        meshes=meshes,
        memory_bytes=options.memory_bytes,
        executor=JIT,
        microbatches=split.num_microbatches,
        retention=retention,
        shardings=(replace(decisions, arguments=arguments).sharding,),
        estimates=estimate(costed, found.labels, found.device, found.hidden_s, found.host_bytes),
        outline=outlined(step.spelled_out or step),
        attention=form.attention,
        overlap=found.device.overlap,
    )
    watch.lap("plan")
    plan = replace(plan, marks=marks_of(plan), search_s=watch.seconds)
    return SearchResult(plan, step_problem, found.on_mesh, found.labels, found.solved_s, short=form.short)


def equivalence_keys(step: Step, options: Mapping[str, Any]) -> list[Any]:
    """Per argument, the key of its equivalence class: its pin, and whether it is named to rest on the host."""
    offload = options.get("offload", ())
    named = () if isinstance(offload, str) else tuple(offload)
    is_named = [a.name.startswith(named) for a in step.arguments]
    return list(zip(pin_marks(step, options.get("pin", {})), is_named, strict=True))


def _options_json(options: Options) -> dict[str, Any]:
    """The options that the user gave, JSON-ready."""
    given: dict[str, Any] = {}
    if options.mesh is not None:
        given["mesh"] = list(options.mesh)
    if options.remat is not None:
        given["remat"] = options.remat
    if options.offload is not None:
        given["offload"] = options.offload if isinstance(options.offload, str) else list(options.offload)
    if options.microbatches is not None:
        given["microbatches"] = options.microbatches
    if options.pins:
        given["pin"] = {name: str(spec) for name, spec in sorted(options.pins.items())}
    return given
