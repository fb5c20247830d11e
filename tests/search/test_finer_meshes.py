"""Meshes of three axes: tried unasked where communication costs enough, and certified only where something is proven."""

import functools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.meshes import finer_shapes
from autoshard.search import driver
from autoshard.search.finer_meshes import FINER_GAP, MAX_FINER, FinerMeshes
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import UNKNOWN, Known
from autoshard.search.options import Options
from autoshard.search.recomputation import UncappedSolution
from autoshard.search.solver.clock import NEVER, Deadline, WorkClock
from autoshard.search.trials import Trials
from tests.search.chain import chain
from tests.zoo import make_dlrm, make_lstm, make_vit

WIDTH, BATCH, CAP = 2048, 1 << 17, 70 << 30
STEP = trace(
    chain,
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 6,
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)
SLOW, FAST = parse_cluster("64xA100-80GB-Ethernet"), parse_cluster("8xH100-80GB")


@functools.cache
def found(cluster=SLOW, **options):
    said = list[str]()
    plan = driver.find(STEP, cluster, Options(CAP, **options), said.append).plan
    return plan, [line for line in said if line.count("x") == 2 and line.startswith("mesh")]


def test_a_split_of_the_best_mesh_is_found_where_it_is_faster():
    plan, tried = found()
    assert 1 <= len(tried) <= 2 * MAX_FINER
    assert tuple(plan.decisions.mesh) == ("replica", "data", "model")
    shape = tuple(plan.decisions.mesh.values())
    assert plan.estimates.step_s < 0.95 * found(mesh=(8, 8))[0].estimates.step_s
    assert plan.estimates.step_s == pytest.approx(found(mesh=shape)[0].estimates.step_s, rel=0.01)


def test_what_does_not_fit_on_a_split_of_the_best_mesh_is_made_to():
    """Two axes fit as they are; three are faster, under this cap where something is computed again, or split further."""
    cap = int(0.3 * 2**30)
    best, on_two, on_three = (
        driver.find(STEP, SLOW, Options(cap, mesh=mesh)).plan for mesh in (None, (8, 8), (2, 4, 8))
    )
    assert on_three.estimates.step_s < 0.9 * on_two.estimates.step_s
    assert best.estimates.step_s <= 1.005 * on_three.estimates.step_s
    assert best.estimates.peak_bytes <= cap


@pytest.mark.slow  # `test_what_only_recomputes_...` shows when three axes are asked; test_recomputation, what is recomputed
def test_what_is_faster_recomputed_than_stacked_is_recomputed_on_three_axes_too():
    cluster = parse_cluster("512xH100-80GB")
    case = make_lstm(num_layers=1, hidden=1024, vocab=32000, seq=32, batch=32 * 512)
    step = trace(case.step, *case.abstract_args())
    best = driver.find(step, cluster, Options(CAP)).plan
    shape = tuple(best.decisions.mesh.values())
    assert len(shape) == 3
    asked = driver.find(step, cluster, Options(CAP, mesh=shape)).plan
    kept = driver.find(step, cluster, Options(CAP, mesh=shape, remat="never")).plan
    assert asked.decisions.retention
    assert asked.estimates.step_s < 0.99 * kept.estimates.step_s
    assert best.estimates.step_s <= 1.005 * asked.estimates.step_s


@pytest.mark.slow  # `test_what_only_recomputes_...` shows when three axes are asked
def test_where_nothing_fits_as_it_is_three_axes_are_asked_of_what_recomputes():
    """On 16 L4s under 85% of its memory the step fits on two axes, under 70% it has to recompute."""
    cluster, after = parse_cluster("16xL4"), []
    roomy_bytes = driver.find(STEP, cluster, Options(CAP)).plan.estimates.peak_bytes
    for share in (0.85, 0.7):
        said = list[str]()
        plan = driver.find(STEP, cluster, Options(int(share * roomy_bytes)), said.append).plan
        recomputing = [line.startswith("recomputing") for line in said]
        tried = [
            any(recomputing[:n])
            for n, line in enumerate(said)
            if line.count("x") == 2 and "of" not in line and line.startswith("mesh")
        ]
        after.append((bool(plan.decisions.retention), tried))
    assert after == [(False, [False, False]), (True, [True, True])]


@pytest.mark.parametrize(
    ("is_split", "gain_s", "shape", "floors_s", "may_gain"),
    [
        (False, 0.0, (8, 8), {(8, 8): 1.0, (2, 4, 8): 1.0}, False),
        (False, 0.0, (8, 8), {(8, 8): 1.0, (2, 4, 8): 0.9}, True),
        (False, 0.0, (8, 8), {(8, 8): 1.0}, True),
        (True, 0.0, (8, 8), {(8, 8): 1.0, (2, 4, 8): 1.0}, True),
        (False, 0.1, (8, 8), {(8, 8): 1.0, (2, 4, 8): 1.0}, False),
        (False, 0.1, (4, 2, 8), {(4, 2, 8): 1.0, (2, 4, 8): 1.0}, True),
        (False, 0.0, (4, 2, 8), {(4, 2, 8): 1.0, (2, 4, 8): 1.0}, False),
    ],
)
def test_what_only_recomputes_is_not_tried_where_the_plain_step_gains_nothing(
    is_split, gain_s, shape, floors_s, may_gain
):
    """What goes through its batch in parts is: it communicates more; and what is faster for recomputing, on three axes."""
    baseline, recomputing = mock.Mock(traced="whole"), mock.Mock(traced="in parts" if is_split else "whole")
    best = SimpleNamespace(step_problem=recomputing, on_mesh=SimpleNamespace(shape=shape))
    finer = FinerMeshes(SimpleNamespace(shapes=((8, 8),), gains_s={recomputing: gain_s}))
    assert finer._may_gain((2, 4, 8), best, baseline, floors_s) == may_gain


@pytest.mark.slow  # `test_what_is_faster_recomputed_than_stacked_...` shows it for the mesh that is the fastest anyway
def test_what_is_faster_for_recomputing_on_three_axes_is_asked_of_others():
    """The fastest one is another than for the step as it is."""
    cluster = parse_cluster("1000xH100-80GB")
    case = make_lstm(num_layers=1, hidden=2048, vocab=32000, seq=32, batch=500)
    step = trace(case.step, *case.abstract_args())
    kept, asked, best = (
        driver.find(step, cluster, Options(CAP, mesh=mesh, remat=remat)).plan
        for mesh, remat in ((None, "never"), ((125, 2, 4), None), (None, None))
    )
    assert len(kept.decisions.mesh) == len(best.decisions.mesh) == 3
    assert kept.decisions.mesh != asked.decisions.mesh
    assert asked.decisions.retention
    assert asked.estimates.step_s < 0.99 * kept.estimates.step_s
    assert best.estimates.step_s <= 1.005 * asked.estimates.step_s


def test_what_is_certified_is_certified_of_the_meshes_that_are_named():
    plan, _ = found()
    for shape in plan.meshes:
        asked = found(mesh=shape)[0]
        assert asked.estimates.step_s >= (1 - plan.gap) * plan.estimates.step_s * (1 - 1e-9), shape
    own = tuple(plan.decisions.mesh.values())
    assert ("where it lies, nothing is proven" in str(plan)) == (own not in plan.meshes)


def test_none_is_tried_where_communication_costs_little():
    plan, tried = found(FAST)
    assert not tried
    assert all(len(shape) < 3 for shape in plan.meshes)


def test_they_are_found_where_little_is_communicated_too():
    """Embedding tables on 12 devices: a twentieth of the step is communication."""
    case = make_dlrm(table_rows=(4_000_000, 1_000_000, 100_000), embed_dim=128, num_dense=13, batch=1024 * 12)
    step, cluster = trace(case.step, *case.abstract_args()), parse_cluster("12xA100-40GB")
    best, on_two, on_three = (
        driver.find(step, cluster, Options(30 << 30, mesh=mesh)).plan.estimates.step_s
        for mesh in (None, (4, 3), (2, 2, 3))
    )
    assert on_three < 0.985 * on_two
    assert best <= 1.005 * on_three


@pytest.mark.parametrize("options", [{"mesh": (8, 8)}, {"pins": {"x": P("data")}}])
def test_none_is_tried_where_axes_are_named(options):
    plan, tried = (found if "mesh" in options else found.__wrapped__)(**options)
    assert not tried
    assert len(plan.decisions.mesh) < 3


@pytest.mark.parametrize(
    ("shape", "known_s", "proven_s", "is_tried"),
    [
        ((2, 4, 8), 0.9, 0.5, True),
        ((2, 4, 8), 0.5, 0.9, True),
        ((2, 4, 8), 0.5, 1 - FINER_GAP, False),
        ((2, 4, 8), 1 - FINER_GAP, 0.5, False),
        ((8, 8), 0.5, 0.5, False),
    ],
)
def test_a_best_plan_on_three_axes_of_which_little_is_proven_is_searched_on(
    shape, known_s, proven_s, is_tried
):
    """From where it is, by the best bound that there is; not on a mesh that had its time."""
    tried = []
    best = SimpleNamespace(
        step_problem="a step", on_mesh=SimpleNamespace(shape=shape), labels=(0, 1), cost_s=1.0
    )
    trials = SimpleNamespace(
        shapes=((8, 8),),
        proven_s=lambda step_problem: {shape: proven_s},
        improve=lambda step_problem, on_mesh, left_s, known: tried.append(
            (on_mesh, known.start, known.bound_s)
        ),
    )
    FinerMeshes(trials)._improve_where_it_is(best, Known(bound_s=known_s), NEVER)
    assert tried == [(best.on_mesh, (0, 1), 0.9)] * is_tried


@pytest.mark.slow  # `test_a_split_of_the_best_mesh_...` shows that what promises most is found
def test_fewer_examples_than_devices_are_fastest_on_a_mesh_that_does_not_split_the_best_one():
    """That mesh is found: it promises most."""
    case = make_vit(num_layers=1, hidden=1024, heads=16, image=224, patch=16, batch=256)
    step, cluster = trace(case.step, *case.abstract_args()), parse_cluster("512xH100-80GB")
    on_two, *on_splits, on_another, best = (
        driver.find(step, cluster, Options(CAP, mesh=mesh)).plan.estimates.step_s
        for mesh in ((128, 4), *finer_shapes(cluster, (128, 4))[:MAX_FINER], (16, 2, 16), None)
    )
    assert on_another < 0.95 * min(on_two, *on_splits)
    assert best <= 1.005 * on_another


@pytest.mark.parametrize(
    ("first_bounds_s", "again"), [((0.996, 0.5), [1]), ((0.5, 0.6), [0, 1]), ((1.0, 0.999), [])]
)
def test_meshes_of_three_axes_that_are_open_get_what_time_is_left(monkeypatch, first_bounds_s, again):
    shapes, calls = ((2, 4, 8), (8, 2, 4)), []
    fastest = UncappedSolution(SimpleNamespace(shape=(8, 8)), (), 1.0)
    trials = SimpleNamespace(
        best=None,
        cutoff_s=2.0,
        cluster=SLOW,
        options=Options(CAP, remat="never"),
        pins={},
        progress=lambda line: None,
    )
    finer = FinerMeshes(trials)

    def look(on_mesh, step_problem, found, deadline, known):
        index = shapes.index(on_mesh.shape)
        finer.floors_s[on_mesh.shape] = 1.0 if index in calls else first_bounds_s[index]
        calls.append(index)
        return []

    monkeypatch.setattr(UncappedSolution, "communication_share", 0.5)
    promising = [(SimpleNamespace(shape=shape), UNKNOWN) for shape in shapes]
    monkeypatch.setattr(finer, "_splits", lambda baseline, coarser: promising)
    monkeypatch.setattr(finer, "_deadline", lambda share: NEVER)
    monkeypatch.setattr(finer, "_too_large_on", look)
    baseline = SimpleNamespace(step_problem="a step", uncapped=(), found=(), floors_s={(64,): 1.0})
    assert finer.uncapped(baseline, [fastest]) == [fastest]
    assert calls == [0, 1, *again]


@pytest.mark.parametrize("spent_s", [10.0, 16.0, 40.0])
def test_meshes_of_three_axes_end_with_the_search(spent_s):
    """They have a multiple of the work so far, which must not be a multiple of the limit."""
    clock = WorkClock()
    trials = Trials(STEP, [""] * len(STEP.arguments), FAST, Options(CAP), lambda line: None, clock)
    clock.spend(spent_s)
    assert spent_s + FinerMeshes(trials)._deadline(1.0).left_s <= max(1.25 * 15.0, spent_s)


@pytest.mark.parametrize(
    ("left_s", "tried"),
    [(9.0, [(2, 16, 2), (2, 8, 4), (8, 2, 4), (2, 4, 8)]), (2.5, [(2, 2, 16), (8, 2, 4), (2, 4, 8)])],
)
def test_meshes_are_asked_what_they_promise_while_there_is_time(monkeypatch, left_s, tried):
    """The later one is asked, the more it promises; two split the best mesh, two others are tried besides."""
    clock, asked = WorkClock(), []

    def begun(baseline, shape, coarser):
        def promised_s(kept, known):
            clock.spend(1.0)
            asked.append(shape)
            return -len(asked)

        return mock.Mock(shape=shape, promised_s=promised_s), UNKNOWN

    finer = FinerMeshes(mock.Mock(cluster=SLOW))
    monkeypatch.setattr(finer, "_deadline", lambda share: Deadline.after(left_s, clock))
    monkeypatch.setattr(finer, "_begun", begun)
    baseline = mock.Mock(on_meshes=[mock.Mock(shape=shape) for shape in ((2, 32), (8, 8))])
    coarser = [UncappedSolution(mock.Mock(shape=(8, 8)), (), 1.0)]
    assert [on_mesh.shape for on_mesh, _ in finer._most_promising(baseline, coarser)] == tried
