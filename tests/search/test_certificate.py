"""What is certified against brute force: no plan of the search space that keeps to the cap is faster than the bound.

Steps are so small that every assignment of every mesh can be tried. Kernels are made to disagree with the rows at
random, so that limits are lowered and rows added that are no part of the problem.
"""

from dataclasses import replace
from math import ceil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import driver, mesh_problem
from autoshard.search.device.prediction import MARGIN
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import MeshProblem, TooLargeError
from autoshard.search.options import Options
from autoshard.search.problem.live_ranges import ARGUMENTS
from autoshard.search.problem.memory_rows import Peak
from autoshard.search.problem.workspaces import WORKSPACE_BYTES
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import SearchClock
from autoshard.search.step_problem import StepProblem
from tests.search.solver.problems import every_cost_s

ARRAY = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
FOUR = parse_cluster("4xH100-80GB")


def affine(w, x):
    return w - x @ w


STEP = trace(affine, ARRAY, ARRAY)
MESHES = {
    shape: StepProblem.of(STEP, [""] * len(STEP.arguments), FOUR.device).on(FOUR, shape)
    for shape in ((4,), (2, 2))
}


def held(on_mesh, item):
    """What a live range takes under every assignment, with the margin."""
    costed, num_nodes = on_mesh.memory.costed, len(on_mesh.problem.node_cost_s)

    def along(node, per_strategy):
        return np.expand_dims(per_strategy, [n for n in range(num_nodes) if n != node])

    def num_bytes(port):
        times = 1.0 if item.resident in ARGUMENTS else 1 + MARGIN
        return along(port.node, times * item.num_bytes * costed.shares(port))

    if item.source:
        return np.maximum(num_bytes(item.port) - num_bytes(item.source), 0.0)
    copy_sources = costed.strategies[item.port.node].copy_sources
    is_held = np.array([item.copy_source in (None, source) for source in copy_sources or [None]])
    return num_bytes(item.port) * along(item.port.node, is_held)


def table(on_mesh):
    """Cost and peak in program order of every assignment."""
    cost_s, items = every_cost_s(on_mesh.problem), on_mesh.memory.items
    peaks = np.zeros_like(cost_s)
    for at in range(len(on_mesh.live_ranges.program.ops)):
        alive = (held(on_mesh, item) for item in items if item.start <= at <= item.end)
        is_product = on_mesh.live_ranges.program.ops[at].name == "dot_general"
        workspace_bytes = (1 + MARGIN) * WORKSPACE_BYTES * is_product
        peaks = np.maximum(peaks, sum(alive, np.zeros_like(cost_s)) + workspace_bytes)
    return cost_s, peaks


TABLES = {shape: table(on_mesh) for shape, on_mesh in MESHES.items()}
PEAKS = sorted(
    {ceil(peak) for cost, peaks in TABLES.values() for peak in np.unique(peaks[np.isfinite(cost)]).tolist()}
)


def optimum_s(limit_bytes, shapes=tuple(MESHES)):
    """The least computation and communication of all plans that keep to a limit in program order."""
    return min(np.where(peaks <= limit_bytes, cost, np.inf).min() for cost, peaks in map(TABLES.get, shapes))


def _is_step(n):
    """Whether a limit allows faster plans on some mesh than the one before it."""
    return any(optimum_s(PEAKS[n], (shape,)) < optimum_s(PEAKS[n - 1], (shape,)) for shape in MESHES)


LIMITS = [PEAKS[0], *(PEAKS[n] for n in range(1, len(PEAKS)) if _is_step(n)), PEAKS[-1]]
"""Limits that differ in their fastest plans."""


class Kernels:
    """Kernels that hold at random so many times what the rows say, the same ones for the same strategies."""

    def __init__(self, seed, lowest=0.8, highest=1.4):
        self.seed, self.lowest, self.highest = seed, lowest, highest

    def predicted(self, on_mesh, labels, limit_bytes):
        rng = np.random.default_rng([self.seed, *labels])
        peak = on_mesh.memory.peak(labels)
        least = Peak(peak.num_bytes * rng.uniform(self.lowest, self.highest), peak.position, peak.residents)
        return holding(least)


NO_KERNELS = SimpleNamespace(kernels=())


def holding(peak):
    """What is predicted of kernels that hold so much in any order."""
    found = SimpleNamespace(
        least=peak,
        needed_bytes=peak.num_bytes,
        over=lambda limit_bytes: (),
        peak=peak,
        transfer_s=0.0,
        waited_s=0.0,
        apart=NO_KERNELS,
        course=lambda: ((), {}),
        overlap=1.0,
        lost_overlap_s=0.0,
        with_overlap=lambda share: found,
    )
    found.within_limit = found
    return found


def with_kernels(monkeypatch, kernels):
    monkeypatch.setattr(MeshProblem, "predicted", lambda *what, **asked: kernels.predicted(*what))


def never_fitting(on_mesh, labels, limit_bytes, times=1.05):
    """What kernels hold that always need more than they may, a little unless it is said how much."""
    return holding(Peak(times * limit_bytes, 0, ()))


def all_of(on_mesh):
    return on_mesh.pinned({})


# --- one mesh


@settings(max_examples=30)
@given(
    st.integers(0, 1000),
    st.sampled_from(LIMITS[:4]),
    st.sampled_from([5e-3, 0.2, 0.6]),
    st.sampled_from(sorted(MESHES)),
)
def test_the_bound_is_on_all_that_fits_in_program_order_whatever_kernels_say(
    seed, limit_bytes, relative_gap, shape
):
    with pytest.MonkeyPatch.context() as monkeypatch:
        with_kernels(monkeypatch, kernels := Kernels(seed))
        on_mesh = MESHES[shape]
        want_s = optimum_s(limit_bytes, (shape,))
        try:
            solution, found = on_mesh.fitting(all_of(on_mesh), limit_bytes, 10.0, relative_gap=relative_gap)
        except NoFitError as error:
            solution, found, bound_s = None, None, error.bound_s
        else:
            bound_s = solution.bound_s
        assert bound_s <= want_s * (1 + 1e-9)
        if solution is None or found is None:
            return
        assert want_s <= solution.cost_s * (1 + 1e-9)
        assert TABLES[shape][1][solution.labels] <= limit_bytes * (1 + 1e-9)
        assert found.least == kernels.predicted(on_mesh, solution.labels, 0.0).least
        assert found.least.num_bytes <= limit_bytes


def test_a_mesh_given_up_has_the_bound_of_what_was_asked_and_not_of_lower_limits(monkeypatch):
    """The limit falls until nothing is left; the bound stays where it was."""
    monkeypatch.setattr(MeshProblem, "predicted", never_fitting)
    on_mesh, limit_bytes = MESHES[4,], LIMITS[-1]
    want_s = optimum_s(limit_bytes, ((4,),))
    assert want_s < np.inf
    with pytest.raises(NoFitError) as raised:
        on_mesh.fitting(all_of(on_mesh), limit_bytes, 10.0)
    assert not raised.value.is_proven
    assert 0.9 * want_s <= raised.value.bound_s <= want_s * (1 + 1e-9)


def test_nothing_that_fits_is_proven_where_nothing_does(monkeypatch):
    with_kernels(monkeypatch, Kernels(0))
    for shape, on_mesh in MESHES.items():
        peaks = TABLES[shape][1][np.isfinite(TABLES[shape][0])]
        with pytest.raises(NoFitError) as raised:
            on_mesh.fitting(all_of(on_mesh), int(peaks.min()) - 1, 10.0)
        assert raised.value.is_proven


@pytest.mark.parametrize("shape", sorted(MESHES))
def test_no_strategies_hold_less_than_the_least(shape):
    """Nor do they if some are left out."""
    on_mesh, (_, peaks) = MESHES[shape], TABLES[shape]
    for cut in (slice(None), slice(1, None), slice(None, None, 2)):
        kept = [labels[cut] for labels in all_of(on_mesh)]
        least = peaks[np.ix_(*kept)].min()
        assert 0.5 * least < on_mesh.memory.least_bytes(kept) <= least * (1 + 1e-9)
    assert on_mesh.memory.least_bytes([labels[:0] for labels in all_of(on_mesh)]) == np.inf


def test_a_mesh_that_must_hold_more_than_the_limit_is_never_priced():
    on_mesh = StepProblem.of(STEP, ["", ""], FOUR.device).on(FOUR, (2, 2))
    with pytest.raises(NoFitError):
        on_mesh.fitting(all_of(on_mesh), int(on_mesh.memory.least_bytes(all_of(on_mesh))) - 1, 10.0)
    assert "problem" not in vars(on_mesh)


# --- all meshes


@pytest.mark.parametrize("seed", [0, 1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5))])
@pytest.mark.parametrize("limit_bytes", [*LIMITS[1:4], 1 << 40])
def test_no_plan_on_any_mesh_beats_the_certified_gap(monkeypatch, seed, limit_bytes):
    """Every mesh counts, those too that are given up because the kernels of all that was proposed there are too large."""
    with_kernels(monkeypatch, Kernels(seed, 0.9, 1.2))
    try:
        found = driver.find(STEP, FOUR, Options(limit_bytes, microbatches=1))
    except driver.InfeasibleError:
        return
    cost_s = found.on_mesh.problem.cost_s(found.chosen)
    assert found.plan.meshes == tuple(MESHES)
    assert found.bound_s <= optimum_s(limit_bytes) * (1 + 1e-9)
    assert (1 - found.plan.gap) * cost_s <= optimum_s(limit_bytes) * (1 + 1e-9)
    assert found.plan.gap == pytest.approx(max(0.0, 1 - found.bound_s / cost_s))


def test_a_mesh_that_is_given_up_stays_in_the_gap(monkeypatch):
    """Only on the mesh with the best plans do kernels never fit."""
    limit_bytes = LIMITS[2]
    best = min(MESHES, key=lambda shape: optimum_s(limit_bytes, (shape,)))
    other = next(shape for shape in MESHES if shape != best)
    assert np.inf > optimum_s(limit_bytes, (other,)) > 2 * optimum_s(limit_bytes, (best,))

    def predicted(on_mesh, labels, cap_bytes):
        kernels = never_fitting if on_mesh.shape == best else Kernels(0, 0.5, 0.5).predicted
        return kernels(on_mesh, labels, cap_bytes)

    monkeypatch.setattr(MeshProblem, "predicted", predicted)
    found = driver.find(STEP, FOUR, Options(limit_bytes, microbatches=1))
    assert found.on_mesh.shape == other
    assert found.bound_s <= optimum_s(limit_bytes, (best,)) * (1 + 1e-9)
    assert found.plan.gap > 0.5


@pytest.mark.parametrize("limit_bytes", LIMITS)
def test_a_gap_of_nothing_is_the_optimum(monkeypatch, limit_bytes):
    with_kernels(monkeypatch, Kernels(0, 1.0, 1.0))
    monkeypatch.setattr(mesh_problem, "NUM_STEPS", 1e9)  # of which even a microsecond is worth looking for
    found = driver.find(STEP, FOUR, Options(limit_bytes, microbatches=1))
    cost_s = found.on_mesh.problem.cost_s(found.chosen)
    assert found.plan.gap <= mesh_problem.RELATIVE_GAP + 1e-9
    assert optimum_s(limit_bytes) >= cost_s * (1 - mesh_problem.RELATIVE_GAP) * (1 - 1e-9)


# --- time


class Hands(SearchClock):
    """A clock that a test moves, and no work does."""

    counts_work = True

    def __init__(self) -> None:
        self.passed_s = 0.0

    @property
    def now_s(self) -> float:
        return self.passed_s

    def spend(self, nominal_s: float) -> None:
        pass

    def pass_by(self, seconds: float) -> None:
        self.passed_s += seconds


def by_hand(on_mesh):
    return replace(on_mesh, clock=Hands())


def test_a_time_limit_binds_whatever_kernels_say(monkeypatch):
    """A simulation takes 10 s and never fits: of 15 s there are two, however often one may tighten."""
    on_mesh, asked = by_hand(MESHES[4,]), {"solve": 0, "predicted": 0}
    solve = MeshProblem.solve

    def spied(*what):
        asked["solve"] += 1
        return solve(*what)

    def predicted(*what):
        asked["predicted"] += 1
        on_mesh.clock.pass_by(10.0)
        return never_fitting(*what)

    monkeypatch.setattr(MeshProblem, "solve", spied)
    monkeypatch.setattr(MeshProblem, "predicted", predicted)
    with pytest.raises(NoFitError):
        on_mesh.fitting(all_of(on_mesh), LIMITS[3], 15.0)
    assert asked == {"solve": 2, "predicted": 2}


def test_what_does_not_fit_says_what_came_nearest(monkeypatch):
    on_mesh, asked = MESHES[4,], []

    def predicted(on_mesh, labels, cap_bytes):
        asked.append(labels)
        return never_fitting(on_mesh, labels, cap_bytes, {1: 1.05, 2: 1.03}.get(len(asked), 1.04))

    monkeypatch.setattr(MeshProblem, "predicted", predicted)
    with pytest.raises(TooLargeError) as raised:
        on_mesh.fitting(all_of(on_mesh), LIMITS[-1], 10.0)
    assert len(asked) >= 2
    assert raised.value.labels == asked[1]
    assert raised.value.predicted.least.num_bytes == 1.03 * LIMITS[-1]


def test_the_solver_gets_less_than_what_is_left(monkeypatch):
    on_mesh, given_s = by_hand(MESHES[4,]), []
    solve = MeshProblem.solve

    def spied(on_mesh, kept, limit_bytes, time_limit_s, *more):
        given_s.append(time_limit_s)
        on_mesh.clock.pass_by(time_limit_s)
        return solve(on_mesh, kept, limit_bytes, 10.0, *more)

    monkeypatch.setattr(MeshProblem, "solve", spied)
    monkeypatch.setattr(MeshProblem, "predicted", never_fitting)
    with pytest.raises(NoFitError):
        on_mesh.fitting(all_of(on_mesh), LIMITS[-1], 16.0)
    assert len(given_s) > 2
    assert given_s[:3] == pytest.approx([4.0, 6.0, 3.0])
    assert sum(given_s) < 16.0
