"""A step that does not fit as it is fits with what is recomputed, and the plan says what that is."""

import functools
import re
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.errors import InfeasibleError, InputError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import build
from autoshard.search import applying, driver
from autoshard.search.ir.trace import trace
from autoshard.search.memory.copies import SCOPE
from autoshard.search.mesh_problem import NO_CAP, RELATIVE_GAP, MeshProblem
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.retention import RetentionCodec
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.problem.equivalence import folded_like
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.shortening import shortened
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline
from autoshard.search.space.rewrites import ESTIMATE_GAP, Estimates, Rewrite, UncappedSolution, _ends_first
from autoshard.search.step_problem import StepProblem
from tests.decisions import with_decisions
from tests.zoo import make_gpt_linen

CLUSTER = parse_cluster("8xH100-80GB")
LAYERS, WIDTH, BATCH = 12, 512, 1 << 16


def layer(w, x):
    return x + jnp.tanh(jax.nn.relu(x @ w[0]) @ w[1])


def loss(params, x, is_scanned):
    if is_scanned:
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params)
    else:
        for i in range(LAYERS):
            x = layer(tuple(w[i] for w in params), x)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step_of(is_scanned):
    def step(params, x):
        value, grads = jax.value_and_grad(lambda p: loss(p, x, is_scanned))(params)
        return tuple(w - 0.1 * g for w, g in zip(params, grads, strict=True)), value

    return step


def arguments(width=WIDTH, batch=BATCH, dtype=jnp.bfloat16):
    shapes = ((LAYERS, width, 2 * width), (LAYERS, 2 * width, width))
    return tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes), jax.ShapeDtypeStruct((batch, width), dtype)


@functools.cache
def traced(is_scanned):
    return trace(step_of(is_scanned), *arguments())


@functools.cache
def found(is_scanned, share, remat=None, microbatches=None):
    """Under a cap of a share of what the fastest plan holds that recomputes nothing; that one, where there is no share."""
    if share is None:
        cap_bytes, remat = 1 << 40, "never"
    else:
        cap_bytes = int(share * found(is_scanned, None).plan.estimates.peak_bytes)
    return driver.find(
        traced(is_scanned),
        CLUSTER,
        Options(cap_bytes, (8,), remat=remat, microbatches=microbatches, offload="never"),
    )


def cost_s(result):
    return result.on_mesh.problem.cost_s(result.chosen)


def num_recomputed(result):
    ops = [op for op in result.step.graph.ops]
    ops += [o for op in ops for bodies in op.bodies.values() for body in bodies for o in body.ops]
    return sum(op.scope.endswith(SCOPE) for op in ops)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_cap_that_is_out_of_reach_is_kept_to(is_scanned):
    plenty, tight = found(is_scanned, None), found(is_scanned, 0.5)
    assert plenty.plan.decisions.retention == {}
    assert len(plenty.step.graph.ops) == len(traced(is_scanned).graph.ops)
    assert num_recomputed(plenty) == 0
    assert tight.plan.estimates.peak_bytes <= tight.plan.memory_bytes
    assert num_recomputed(tight) > 0


def test_recomputation_that_would_fit_is_named_where_it_is_forbidden():
    would_fit = r"would fit: recomputation, which remat='never' forbids \(step .* or less\);"
    with pytest.raises(InfeasibleError, match=would_fit):
        found(True, 0.5, "never", 1)


def test_what_does_not_fit_either_with_recomputation_is_not_promised():
    with pytest.raises(
        InfeasibleError, match="No plan was found either that recomputes, which remat='never' forbids"
    ):
        found(False, 0.02, "never", 1)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_less_memory_never_makes_it_faster(is_scanned):
    results = [found(is_scanned, share) for share in (4.0, 0.9, 0.5)]
    costs_s = [cost_s(result) for result in results]
    assert costs_s == sorted(costs_s)
    again_s = [result.plan.estimates.recompute_s for result in results]
    assert again_s[1] < again_s[2] / 2, "little is recomputed where little is missing"
    full_s = 4 / 3 * costs_s[0]  # all products of the forward phase once more
    assert costs_s[-1] <= full_s


def activated(params, x):
    """Its activation is a chain of light ops, each of which hands something to the backward phase."""

    def layer(x, w):
        return x + jax.nn.gelu(x @ w[0]) @ w[1], None

    def loss(params):
        return jnp.mean(jax.lax.scan(layer, x, params)[0].astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return tuple(w - 0.1 * g for w, g in zip(params, grads, strict=True)), value


def test_what_is_faster_recomputed_than_stacked_is_recomputed_without_a_cap():
    step = trace(activated, *arguments())
    kept, either = (driver.find(step, CLUSTER, Options(1 << 40, (8,), remat=r)) for r in ("never", None))
    assert num_recomputed(either) > 0
    assert cost_s(either) < 0.99 * cost_s(kept)
    assert either.plan.estimates.peak_bytes < kept.plan.estimates.peak_bytes


def test_recomputation_costs_no_more_than_sharding_more_would():
    """A cap that plain plans reach too."""
    baseline, either = found(False, 0.98, "never"), found(False, 0.98)
    assert cost_s(either) <= cost_s(baseline) * (1 + 1e-9)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_a_plan_is_honoured_when_it_is_loaded(is_scanned, tmp_path):
    result = found(is_scanned, 0.5)
    result.plan.save(tmp_path / "plan.json")
    again = applying.apply(traced(is_scanned), Plan.load(tmp_path / "plan.json"), CLUSTER)
    assert again.plan.decisions == result.plan.decisions
    assert again.plan.estimates == result.plan.estimates
    assert (again.chosen, again.plan.gap) == (result.chosen, result.plan.gap)


def test_without_its_decisions_a_plan_keeps_everything():
    plan = found(False, 0.5).plan
    kept = replace(plan.decisions, retention={}, ops={}, copies={})
    again = applying.apply(traced(False), with_decisions(plan, kept, memory_bytes=1 << 40), CLUSTER)
    assert num_recomputed(again) == 0


@pytest.mark.devices
@pytest.mark.parametrize("is_scanned", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_program_gives_the_numbers_of_one_device(is_scanned):
    """Found for large arrays, done to small ones: the names are the same."""
    with jax.enable_x64(True):
        params, x = arguments(width=16, batch=32, dtype=jnp.float64)
        rng = np.random.default_rng(0)
        params, x = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 4), (params, x))
        small = trace(step_of(is_scanned), params, x)
        said = found(is_scanned, 0.5).plan.decisions.retention
        short = shortened(small, [None] * len(small.arguments))
        folded = fold(flatten(short.step if short else small))
        folded = folded_like(flatten(short.whole), folded) if short else folded
        sites, _ = RetentionCodec(folded).read(said, "plan")
        assert sites
        step_problem = StepProblem.of(small, (), CLUSTER.device, sites)
        on_mesh = step_problem.on(CLUSTER, (8,))
        labels = on_mesh.solve(on_mesh.pinned({}), 1 << 40, 2.0).labels
        sharding = step_sharding(on_mesh.memory.costed, labels)
        program = build(step_problem.step, sharding, jax.devices())
        wanted = jax.jit(step_of(is_scanned))(params, x)
        got = program.fn(*jax.device_put(jax.tree.map(jnp.copy, (params, x)), program.shardings))
        for one, many in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(many, one, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("forward nothing", "remat", "names no forward op of this step"),
        (None, "offloaded", "cannot be 'offloaded'. Say 'remat' or, of what is made outside"),
        (None, "remat 0-99 of 100", "cannot be 'remat 0-99 of 100'"),
    ],
)
def test_a_retention_that_cannot_be_is_refused(name, text, said):
    plan = found(False, 0.5).plan
    name = name or next(iter(plan.decisions.retention))
    wrong = replace(plan.decisions, retention={**plan.decisions.retention, name: text})
    with pytest.raises(PlanError, match=".*".join(map(re.escape, ("retention", name, said)))):
        applying.apply(traced(False), with_decisions(plan, wrong), CLUSTER)


def test_what_else_is_asked_for_is_refused():
    with pytest.raises(
        InputError, match="wanted remat=\"never\", or nothing to have it searched, got 'always'"
    ):
        Options(1, remat="always")


def test_what_misses_on_one_mesh_is_tried_on_another(monkeypatch):
    """There it may hold less."""
    tried, fits = [], MeshProblem.fitting
    cap_bytes = int(0.75 * found(True, None).plan.estimates.peak_bytes)

    def fitting(on_mesh, *args, **more):
        if on_mesh.shape == (8,):
            raise NoFitError("it misses", bound_s=0.0, num_rows=1)
        return fits(on_mesh, *args, **more)

    monkeypatch.setattr(MeshProblem, "fitting", fitting)
    options = Options(cap_bytes, offload="never", microbatches=1)
    best = driver.find(traced(True), CLUSTER, options, tried.append)
    meshes = [line.split()[-1] for line in tried if line.startswith("recomputing")]
    assert meshes[0] == "8"
    assert "2x4" in meshes
    assert best.plan.decisions.mesh == {"data": 2, "model": 4}
    assert num_recomputed(best)


@pytest.mark.slow  # on one mesh `test_what_is_faster_for_recomputing_is_certified_by_itself` shows it
def test_what_misses_by_little_does_not_keep_the_rest_from_being_tried():
    """What recomputes nothing fits on another mesh, 9% slower; what costs next to nothing to recompute does not fit."""
    cluster = parse_cluster("64xA100-80GB-Ethernet")
    case = make_gpt_linen(num_layers=8, hidden=1024, heads=16, vocab=32000, seq=512, batch=4 * 64)
    step = trace(case.step, *case.abstract_args())
    uncapped = driver.find(step, cluster, Options(cluster.device_memory_limit())).plan.estimates
    tight = driver.find(step, cluster, Options(int(0.8 * uncapped.peak_bytes))).plan.estimates
    assert tight.peak_bytes <= 0.8 * uncapped.peak_bytes
    assert tight.step_s < 1.02 * uncapped.step_s


def test_of_what_recomputes_a_bound_is_proven_on_every_mesh():
    """On the others, too, it has to recompute."""
    cap_bytes = int(0.6 * found(True, None).plan.estimates.peak_bytes)
    plan = driver.find(traced(True), CLUSTER, Options(cap_bytes, offload="never", microbatches=1)).plan
    assert {*plan.meshes} >= {(8,), (2, 4)}
    assert plan.gap is not None
    assert plan.gap < 0.5 * plan.estimates.recompute_s / plan.estimates.step_s


@pytest.mark.parametrize(("is_missing", "estimated"), [(False, [(2, 4)]), (True, [(2, 4), (8,)])])
def test_other_meshes_are_estimated_where_the_fastest_one_does_not_do(monkeypatch, is_missing, estimated):
    cap_bytes = int(0.94 * found(False, None).plan.estimates.peak_bytes)
    shapes, begin, fits = [], Estimates.__init__, MeshProblem.fitting

    def recorded(estimates, step_problem, uncapped, *args):
        shapes.append(uncapped.on_mesh.shape)
        begin(estimates, step_problem, uncapped, *args)

    def fitting(on_mesh, *args, **more):
        if is_missing and on_mesh.shape == (2, 4):
            raise NoFitError("it misses", bound_s=0.0, num_rows=1)
        return fits(on_mesh, *args, **more)

    monkeypatch.setattr(Estimates, "__init__", recorded)
    monkeypatch.setattr(MeshProblem, "fitting", fitting)
    best = driver.find(traced(False), CLUSTER, Options(cap_bytes, offload="never", microbatches=1))
    assert list(dict.fromkeys(shapes)) == estimated
    assert best.on_mesh.shape in {(8,) if is_missing else (2, 4), (2, 2, 2)}  # or on a split of it


A100S = parse_cluster("8xA100-80GB")


@functools.cache
def gelus():
    """Written one after the other; on A100s XLA stores each tanh."""

    def loss(params, x):
        for i in range(LAYERS):
            x = x + jax.nn.gelu(x @ params[0][i]) @ params[1][i]
        return jnp.mean(x**2)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return tuple(w - 0.1 * g for w, g in zip(params, grads, strict=True)), value

    return trace(step, *arguments(dtype=jnp.float32))


@functools.cache
def gelus_found():
    """With plenty of memory, under a cap of 90% of what it holds then, and the lines of that search."""
    plenty, lines = (
        driver.find(gelus(), A100S, Options(1 << 40, offload="never", microbatches=1)),
        list[str](),
    )
    cap_bytes = int(0.9 * plenty.plan.estimates.peak_bytes)
    tight = driver.find(gelus(), A100S, Options(cap_bytes, offload="never", microbatches=1), lines.append)
    return plenty, tight, lines


def test_what_is_faster_for_recomputing_is_certified_by_itself():
    """Bounds on plans that keep everything are above it. It is found without a cap, too."""
    plenty, tight, _ = gelus_found()
    for found in (plenty, tight):
        assert num_recomputed(found) > 0
        assert -np.inf < found.bound_s <= cost_s(found)
    assert cost_s(plenty) <= cost_s(tight) / (1 - RELATIVE_GAP)


def test_kernels_are_taken_to_hold_as_many_times_more_when_something_is_recomputed(monkeypatch):
    """So it saves what they hold too much."""
    step_problem = StepProblem.of(traced(False), (), CLUSTER.device)
    on_mesh = step_problem.on(CLUSTER, (8,))
    solution = on_mesh.solve(on_mesh.pinned({}), NO_CAP, 10.0)
    uncapped = UncappedSolution(on_mesh, solution.labels, solution.cost_s)
    in_order_bytes = on_mesh.memory.peak(solution.labels).num_bytes
    predicted, missing = MeshProblem.predicted, []
    for times in (1.0, 1.25):

        def more(on_mesh, labels, limit_bytes, times=times):
            found = predicted(on_mesh, labels, limit_bytes)
            return mock.Mock(least=replace(found.least, num_bytes=times * in_order_bytes))

        monkeypatch.setattr(MeshProblem, "predicted", more)
        limit_bytes, deadline = int(0.99 * in_order_bytes), Deadline.after(10.0, on_mesh.clock)
        curve = on_mesh.cap_curve(on_mesh.pinned({}), ESTIMATE_GAP)
        missing.append(Estimates(step_problem, uncapped, {}, limit_bytes, curve, deadline).missing_bytes)
    assert missing == pytest.approx([in_order_bytes - limit_bytes / times for times in (1.0, 1.25)], rel=0.01)


@pytest.mark.parametrize("num", [0, 1, 2, 3, 8])
def test_all_rewrites_are_estimated_those_at_the_ends_first(num):
    order = [*_ends_first(num)]
    assert sorted(order) == [*range(num)]
    assert order[:2] == [*dict.fromkeys((0, num - 1))][:num]


def test_a_rewrite_costs_its_recomputation_and_what_strategies_that_save_the_rest_cost_at_least():
    """No strategies of the step that keep to the cap and the saved bytes are faster."""
    step_problem = StepProblem.of(traced(False), (), CLUSTER.device)
    on_mesh = step_problem.on(CLUSTER, (8,))
    kept = on_mesh.pinned({})
    solution = on_mesh.solve(kept, NO_CAP, 10.0)
    limit_bytes = int(0.95 * on_mesh.memory.least_bytes(kept))
    uncapped = UncappedSolution(on_mesh, solution.labels, solution.cost_s)
    curve, deadline = on_mesh.cap_curve(kept, ESTIMATE_GAP), Deadline.after(10.0, on_mesh.clock)
    estimates = Estimates(step_problem, uncapped, {}, limit_bytes, curve, deadline)
    found = estimates.rewrites(may_recompute=True, may_offload=False)
    assert min(one.cost_s - one.more_s for one in found) >= estimates.uncapped.cost_s
    for one in found:
        cap_bytes = int(estimates.room_bytes + one.saved_bytes)
        with suppress(NoFitError):
            fitting = on_mesh.solve(kept, cap_bytes, 10.0)
            least_s = max(fitting.cost_s, estimates.uncapped.cost_s)
            assert one.cost_s - one.more_s <= least_s * (1 + 1e-9)
    assert len({one.cost_s - one.more_s for one in found}) > 1


def test_copies_to_the_host_are_never_expected_to_hide_altogether(monkeypatch):
    offered: list[Rewrite] = []
    rewrites = Estimates.rewrites

    def recorded(*args, **more):
        offered.extend(found := rewrites(*args, **more))
        return found

    monkeypatch.setattr(Estimates, "rewrites", recorded)
    cap_bytes = int(0.8 * found(False, None).plan.estimates.peak_bytes)
    near = replace(CLUSTER, host_link=replace(CLUSTER.host_link, bytes_per_s=1e12))
    driver.find(traced(False), near, Options(cap_bytes, (8,), microbatches=1))
    saved_bytes = {0.0: 0.0} | {one.more_s: one.saved_bytes for one in offered if not one.offloaded_sites}
    offloading = [one for one in offered if one.offloaded_sites and one.cost_s < np.inf]
    assert offloading
    for one in offloading:
        copied_s = 2 * near.host_link.copy_s(one.saved_bytes - saved_bytes[one.more_s])
        assert one.cost_s - one.uncapped.cost_s - one.more_s >= 0.2 * copied_s > 0
