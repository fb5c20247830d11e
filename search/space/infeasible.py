"""The error if nothing fits: how close the search came, and a list of changes that would fit.

The smallest peak over all meshes tells how far off the cap is, where the peak lies, and which arrays reside there. Then
each single relaxation of the request is tried: a higher cap, no pin, another mesh, more devices. A relaxation with a
plan on any of its meshes is listed with that plan's step time, which a longer search may lower.

All this takes `TIME_LIMIT_S`, or `SHARE` of the search's time if that is less, from the end of that time on. Each part has
a share of the time that the parts before it left. A mesh that must hold more than the cap in any case
(`Memory.least_bytes`) is neither priced nor solved. The message names the parts for which there was no time, and claims
nothing else about them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError, PlanError
from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.search.memory.loop_segments import uncut_loops
from autoshard.search.mesh_problem import PEAK_SLACK, WIDE_GAP, MeshProblem
from autoshard.search.options import Options, candidate_shapes
from autoshard.search.plan.estimates import where
from autoshard.search.problem.memory_rows import Peak
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline
from autoshard.search.solver.pbqp import Labels
from autoshard.search.space.found import Found
from autoshard.search.step_problem import StepProblem

TIME_LIMIT_S = 5.0
"""Seconds by the search's clock for the whole explanation. Source: a choice of ours; together with the search a user
waits ten."""

SHARE = 0.25
"""Largest share of a search's time limit that the explanation takes. Source: the promise that a search ends within a quarter
of its limit."""


def until(options: Options, search: Deadline) -> Deadline:
    """The end of the explanation.

    Args:
      options: the options of the search.
      search: the end of the search, which may be over.
    """
    begin_s = min(search.clock.now_s, search.end_s)
    return Deadline(search.clock, begin_s + min(TIME_LIMIT_S, SHARE * options.limit_s))


PEAK_SHARE = 0.4
"""Share of that time for the smallest peak of all meshes."""

MAX_TIMES_DEVICES = 16
"""Largest multiple of the devices that is tried."""

CLOSE_TO_FLOOR = 1.05
"""A mesh is not searched for a smaller peak if the smallest peak so far is below this multiple of its lower bound."""

MET_PEAK_SLACK = 1.15
"""Cap at which a search probably finds a plan, as a multiple of a peak that it met under a smaller cap. Source: a
choice of ours; under a cap equal to that peak it would take another way."""


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest peak that was found.

    Attributes:
      on_mesh: the problem on the peak's mesh.
      labels: the strategies with this peak.
      peak: the larger peak of program order and kernels.
      least_bytes: a lower bound on the peaks of all meshes.
      untried: meshes that may have a smaller peak, and for which there was no time.
      slack: multiple of the peak that is a cap under which a search would find a plan.
    """

    on_mesh: MeshProblem
    labels: Labels
    peak: Peak
    least_bytes: float
    untried: tuple[str, ...]
    slack: float = PEAK_SLACK

    @classmethod
    def of(cls, nearest: Found, larger: "Smallest | None") -> "Smallest":
        """The smallest peak that the search met, if the peak that was looked for afterwards is larger."""
        least_bytes, untried = (larger.least_bytes, larger.untried) if larger else (0.0, ())
        return cls(nearest.on_mesh, nearest.labels, nearest.peak, least_bytes, untried, MET_PEAK_SLACK)


@dataclass(frozen=True, slots=True)
class _Relaxation:
    """A change of the request that the user may make."""

    name: str
    cluster: Cluster
    options: Options


def smallest_peak(tried: Sequence[MeshProblem], options: Options, deadline: Deadline) -> Smallest | None:
    """The smallest peak over some meshes. Those with the smallest lower bound come first. None if there was no time to
    find a plan.

    Raises:
      InfeasibleError: the pins allow no plan on any of the meshes.
    """
    least = {n: _least_bytes(on_mesh, options) for n, on_mesh in enumerate(tried)}
    best, untried, deadline = None, [], deadline.share(PEAK_SHARE)
    contradictory = []
    for n in sorted(least, key=least.__getitem__):
        on_mesh = tried[n]
        if best and best.peak.num_bytes <= CLOSE_TO_FLOOR * least[n]:
            break
        if (best or contradictory) and deadline.is_over:
            untried.append(format_mesh(on_mesh.shape))
            continue
        try:
            labels, peak = on_mesh.smallest_peak(on_mesh.pinned(options.pins or {}), deadline.left_s / 2)
        except NoFitError as e:
            contradictory.append(e.is_proven)
            continue
        if not best or peak.num_bytes < best.peak.num_bytes:
            best = Smallest(on_mesh, labels, peak, min(least.values()), ())
    if not best and not untried and all(contradictory):
        raise InfeasibleError("the pins contradict one another: no plan keeps them all. Remove one")
    return replace(best, untried=tuple(untried)) if best else None


def explain(
    step_problem: StepProblem,
    cluster: Cluster,
    options: Options,
    smallest: Smallest | None,
    is_proven: bool,
    deadline: Deadline,
    forbidden_s: float | None = None,
    also_tried: str = "",
) -> InfeasibleError:
    """The error to raise if no plan was found.

    Args:
      smallest: the smallest peak; None if there was no time to find a plan.
      is_proven: True if it is proven that nothing fits.
      deadline: the end of all trials.
      forbidden_s: seconds per step with recomputation, if that would fit and is forbidden.
      also_tried: a sentence on other rewrites that were tried.
    """
    found = f"{'nothing fits' if is_proven else 'nothing was found that fits'} {format_bytes(options.memory_bytes)}"
    if smallest is None:
        return InfeasibleError(
            f"{found} a device on {cluster.name}, and there was no time to find out what would. Allow more memory, or "
            "more time with time_limit_s"
        )
    peak = smallest.peak
    residents = ", ".join(f"{name.replace('_', ' ')} {format_bytes(b)}" for name, b in peak.residents)
    would_fit, untried = _fitting(step_problem, cluster, options, smallest, deadline)
    if forbidden_s is not None:
        would_fit = [f"recomputation, which remat='never' forbids ({_step_text(forbidden_s)})", *would_fit]
    sentences = [
        f"{found} a device on {cluster.name}.",
        f"The smallest peak found is {format_bytes(peak.num_bytes)} (mesh {format_mesh(smallest.on_mesh.shape)}), at "
        f"{where(smallest.on_mesh.memory.costed, peak.position)}, where these reside: {residents}.",
        f"Any one of these would fit: {'; '.join(would_fit)}.",
    ]
    untried = (*(f"a smaller peak on mesh {shape}" for shape in smallest.untried), *untried)
    if untried:
        sentences.append(f"Not found out in the time that this took: {', '.join(untried)}.")
    if also_tried:
        sentences.append(also_tried)
    if options.is_limited and not is_proven:
        sentences.append("A longer search (time_limit_s) may find a plan.")
    if options.remat != "never":
        sentences += uncut_loops(step_problem.traced)
    if options.remat == "never" and forbidden_s is None:
        sentences.append("No plan was found either that recomputes, which remat='never' forbids.")
    return InfeasibleError(" ".join(sentences), peak.num_bytes)


def _fitting(
    step_problem: StepProblem, cluster: Cluster, options: Options, smallest: Smallest, deadline: Deadline
) -> tuple[list[str], list[str]]:
    """The single relaxations that fit, with their step times, and those for which there was no time."""
    cap_bytes = smallest.slack * smallest.peak.num_bytes
    step_s = smallest.on_mesh.problem.cost_s(smallest.labels)
    fitting, untried = [f"a cap of {format_bytes(cap_bytes)} ({_step_text(step_s)})"], []
    every = _relaxations(cluster, options, smallest.least_bytes)
    for n, alternatives in enumerate(every):
        share = deadline.share(1 / (len(every) - n))
        for relaxation in alternatives:
            half = share.share(1 / 2)
            step_s = _step_s(_all(step_problem, relaxation), relaxation.options, half)
            if step_s is None:
                untried.append(relaxation.name)
            elif step_s < inf:
                fitting.append(f"{relaxation.name} ({_step_text(step_s)})")
                break
    return fitting, untried


def _relaxations(cluster: Cluster, options: Options, least_bytes: float) -> list[tuple[_Relaxation, ...]]:
    """The single relaxations besides a higher cap. Of each tuple, the first that fits is enough."""
    pins = options.pins or {}
    found = []
    for name in pins:
        others = {other: spec for other, spec in pins.items() if other != name}
        found.append((_Relaxation(f"no pin on {name}", cluster, replace(options, pins=others)),))
    if options.mesh is not None:
        return [*found, (_Relaxation("another mesh", cluster, replace(options, mesh=None)),)]
    more = tuple(
        replace(cluster, num_devices=times * cluster.num_devices)
        for times in _powers_of_two(MAX_TIMES_DEVICES)
        if least_bytes <= times * options.memory_bytes  # a device then holds 1 / times at the least
    )
    return [*found, tuple(_Relaxation(f"{c.num_devices} devices", c, options) for c in more)]


def _powers_of_two(highest: int) -> Iterator[int]:
    return (2**n for n in range(1, highest.bit_length()))


def _all(step_problem: StepProblem, relaxation: _Relaxation) -> Iterator[MeshProblem]:
    """The problem on each mesh of a cluster; none if no mesh suits the options."""
    try:
        shapes = candidate_shapes(relaxation.cluster, relaxation.options)
    except InputError:
        return
    for shape in shapes:
        yield step_problem.on(relaxation.cluster, shape)


def _step_s(on_meshes: Iterable[MeshProblem], options: Options, deadline: Deadline) -> float | None:
    """Seconds per step of the fastest plan that was found. Infinite if nothing fits; None if time ran out before a plan
    was found."""
    best_s, is_proven = inf, True
    for on_mesh in on_meshes:
        if deadline.is_over:
            is_proven = False
            break
        try:
            kept, left_s = on_mesh.pinned(options.pins or {}), deadline.left_s / 2
            solution, _ = on_mesh.fitting(kept, options.memory_bytes, left_s, best_s, WIDE_GAP)
            best_s = solution.cost_s
        except PlanError:  # a pin that this mesh cannot keep
            continue
        except NoFitError as e:
            is_proven = is_proven and e.is_proven
    return best_s if best_s < inf or is_proven else None


def _least_bytes(on_mesh: MeshProblem, options: Options) -> float:
    return on_mesh.memory.least_bytes(on_mesh.pinned(options.pins or {}))


def _step_text(step_s: float) -> str:
    return f"step {format_seconds(step_s)} or less"
