"""Nothing fits: how close the search came, and what would fit.

The smallest peak over all meshes says how far off the cap is, where, and what resides there. Then each single
relaxation is tried: a higher cap, more devices, no pin, another mesh. What fits is listed with its predicted
step time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError
from cost_model.units import format_bytes, format_seconds
from search.mesh_problem import MeshProblem, Options, StepProblem, candidate_shapes
from search.plan.estimates import where
from search.problem.memory_rows import Peak
from search.solver import branch_and_bound

PEAK_TIME_LIMIT_S = 3.0
"""Seconds for the smallest peak of one mesh."""
TRIAL_TIME_LIMIT_S = 2.0
"""Seconds for one mesh of one relaxation; any plan that fits will do."""
MAX_TIMES_DEVICES = 16
"""The largest multiple of the devices that is tried."""


def explain(
    ground: StepProblem, cluster: Cluster, options: Options, tried: Sequence[MeshProblem]
) -> InfeasibleError:
    """The error to raise when none of the meshes tried has a plan that fits."""
    smallest = _smallest(tried, options)
    if smallest is None:
        return InfeasibleError("the pins contradict one another: no plan keeps them all. Remove one")
    on_mesh, chosen, peak = smallest
    slowest_s = on_mesh.problem.cost_s(chosen)
    at = where(on_mesh.memory.costed, peak.position)
    residents = ", ".join(f"{name.replace('_', ' ')} {format_bytes(b)}" for name, b in peak.residents)
    message = (
        f"nothing fits {format_bytes(options.memory_bytes)} a device on {cluster.name}. The smallest peak found is "
        f"{format_bytes(peak.num_bytes)} (mesh {_by(on_mesh.shape)}), at {at}, where these reside: {residents}."
    )
    fitting = [
        f"{what} (step {format_seconds(step_s)})"
        for what, step_s in _relaxed(ground, cluster, options, on_mesh, peak, slowest_s)
    ]
    return InfeasibleError(f"{message} Any one of these would fit: {'; '.join(fitting)}.")


def _smallest(
    tried: Sequence[MeshProblem], options: Options
) -> tuple[MeshProblem, tuple[int, ...], Peak] | None:
    """The mesh with the smallest peak, the strategies that have it, and the peak."""
    best = None
    for on_mesh in tried:
        try:
            kept = on_mesh.pinned(options.pins or {})
            cutoff_bytes = best[2].num_bytes if best else inf
            chosen = on_mesh.smallest_peak(kept, options.memory_bytes, PEAK_TIME_LIMIT_S, cutoff_bytes)
        except branch_and_bound.NoFitError:
            continue
        peak = max(
            on_mesh.memory.peak(chosen), on_mesh.predicted(chosen, 0.0).peak, key=lambda p: p.num_bytes
        )
        if best is None or peak.num_bytes < best[2].num_bytes:
            best = (on_mesh, chosen, peak)
    return best


def _relaxed(
    ground: StepProblem,
    cluster: Cluster,
    options: Options,
    smallest: MeshProblem,
    peak: Peak,
    slowest_s: float,
) -> Iterator[tuple[str, float]]:
    """Each single relaxation that fits, and its step time: what has the smallest peak, on that mesh, takes `slowest_s`."""
    cap = round(peak.num_bytes * 1.01)
    step_s = _step_s((smallest,), replace(options, memory_bytes=cap), slowest_s)
    yield f"a cap of {format_bytes(cap)}", slowest_s if step_s is None else step_s
    for name in options.pins or {}:
        pins = {other: spec for other, spec in (options.pins or {}).items() if other != name}
        freer = replace(options, pins=pins)
        step_s = _step_s(_all(ground, cluster, freer), freer)
        if step_s is not None:
            yield f"no pin on {name}", step_s
    if options.mesh is not None:
        freer = replace(options, mesh=None)
        step_s = _step_s(_all(ground, cluster, freer), freer)
        if step_s is not None:
            yield "another mesh", step_s
        return
    times = 2
    while times <= MAX_TIMES_DEVICES:
        larger = _times(cluster, times)
        may_fit = peak.num_bytes <= times * options.memory_bytes  # a device then holds 1 / times at the least
        step_s = _step_s(_all(ground, larger, options), options) if may_fit else None
        if step_s is not None:
            yield f"{larger.num_devices} devices", step_s
            return
        times *= 2


def _times(cluster: Cluster, times: int) -> Cluster:
    """As many times the nodes."""
    return replace(cluster, num_devices=cluster.num_devices * times)


def _all(ground: StepProblem, cluster: Cluster, options: Options) -> Iterator[MeshProblem]:
    """The problem on each mesh of a cluster; none where no mesh suits the options."""
    try:
        shapes = candidate_shapes(cluster, options)
    except InputError:
        return
    for shape in shapes:
        yield ground.on(cluster, shape)


def _step_s(on_meshes: Iterable[MeshProblem], options: Options, cutoff_s: float = inf) -> float | None:
    """Seconds per step of the fastest plan that fits, over all meshes; None where none beats the cutoff."""
    best_s = cutoff_s
    for on_mesh in on_meshes:
        try:
            kept = on_mesh.pinned(options.pins or {})
            found, _ = on_mesh.fitting(kept, options.memory_bytes, TRIAL_TIME_LIMIT_S, best_s)
        except branch_and_bound.NoFitError:
            continue
        best_s = min(best_s, found.cost_s)
    return best_s if best_s < cutoff_s else None


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
