"""Nothing fits: how close the search came, and what would fit.

The smallest peak over all meshes says how far off the cap is, where, and what resides there. Then each single
relaxation is tried: a higher cap, more devices, no pin, another mesh. What fits is listed with its predicted
step time.
"""

from collections.abc import Iterator
from dataclasses import replace

from autoshard.errors import InfeasibleError, InputError
from autoshard.units import format_bytes, format_seconds
from cost_model.cluster import Cluster
from search import ilp
from search.estimate import where
from search.ground import Ground, Grounded, Options, candidate_shapes
from search.simulate import Peak

PEAK_TIME_LIMIT_S = 3.0
"""Seconds for the smallest peak of one mesh."""
TRIAL_TIME_LIMIT_S = 2.0
"""Seconds for one mesh of one relaxation; any plan that fits will do."""
MAX_TIMES_DEVICES = 16
"""The largest multiple of the devices that is tried."""


def explain(ground: Ground, cluster: Cluster, options: Options) -> InfeasibleError:
    """The error to raise when no mesh has a plan that fits."""
    smallest = _smallest(ground, cluster, options)
    if smallest is None:
        return InfeasibleError("the pins contradict one another: no plan keeps them all. Remove one")
    shape, on_mesh, peak = smallest
    residents = ", ".join(f"{name.replace('_', ' ')} {format_bytes(b)}" for name, b in peak.residents)
    message = (
        f"nothing fits {format_bytes(options.memory_bytes)} a device on {cluster.name}. The smallest peak found is "
        f"{format_bytes(peak.num_bytes)} (mesh {_by(shape)}), at {where(on_mesh.memory.priced, peak.position)}, where "
        f"these reside: {residents}."
    )
    fitting = [
        f"{what} (step {format_seconds(step_s)})" for what, step_s in _relaxed(ground, cluster, options, peak)
    ]
    advice = (
        f" Any one of these would fit: {'; '.join(fitting)}." if fitting else " Use a smaller batch or model."
    )
    return InfeasibleError(message + advice)


def _smallest(
    ground: Ground, cluster: Cluster, options: Options
) -> tuple[tuple[int, ...], Grounded, Peak] | None:
    best = None
    for shape in candidate_shapes(cluster, options):
        on_mesh = ground.on(cluster, shape)
        try:
            kept = on_mesh.pinned(options.pins or {})
            labels = on_mesh.smallest_peak(kept, options.memory_bytes, PEAK_TIME_LIMIT_S)
        except ilp.NoFitError:
            continue
        peak = max(
            on_mesh.memory.peak(labels), on_mesh.simulated(labels, 0.0).peak, key=lambda p: p.num_bytes
        )
        if best is None or peak.num_bytes < best[2].num_bytes:
            best = (shape, on_mesh, peak)
    return best


def _relaxed(ground: Ground, cluster: Cluster, options: Options, peak: Peak) -> Iterator[tuple[str, float]]:
    """Each single relaxation that fits, and its step time."""
    cap = round(peak.num_bytes * 1.01)
    step_s = _step_s(ground, cluster, replace(options, memory_bytes=cap))
    if step_s is not None:
        yield f"a cap of {format_bytes(cap)}", step_s
    for name in options.pins or {}:
        pins = {other: spec for other, spec in (options.pins or {}).items() if other != name}
        step_s = _step_s(ground, cluster, replace(options, pins=pins))
        if step_s is not None:
            yield f"no pin on {name}", step_s
    if options.mesh is not None:
        step_s = _step_s(ground, cluster, replace(options, mesh=None))
        if step_s is not None:
            yield "another mesh", step_s
        return
    times = 2
    while times <= MAX_TIMES_DEVICES:
        larger = _times(cluster, times)
        step_s = _step_s(ground, larger, options)
        if step_s is not None:
            yield f"{larger.num_devices} devices", step_s
            return
        times *= 2


def _times(cluster: Cluster, times: int) -> Cluster:
    """As many times the nodes."""
    return replace(cluster, num_devices=cluster.num_devices * times)


def _step_s(ground: Ground, cluster: Cluster, options: Options) -> float | None:
    """Seconds per step of the first plan that fits, over all meshes; None where none does."""
    try:
        shapes = candidate_shapes(cluster, options)
    except InputError:
        return None
    best = None
    for shape in shapes:
        on_mesh = ground.on(cluster, shape)
        try:
            kept = on_mesh.pinned(options.pins or {})
            found, _ = on_mesh.fitting(kept, options.memory_bytes, TRIAL_TIME_LIMIT_S)
        except ilp.NoFitError:
            continue
        best = found.cost_s if best is None else min(best, found.cost_s)
    return best


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
