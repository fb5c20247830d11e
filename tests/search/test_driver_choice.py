"""What the driver decides itself: which mesh wins, what is told of the search, and which plans it takes back."""

from dataclasses import replace
from functools import cache
from math import inf

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.errors import InfeasibleError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_mesh
from autoshard.search import applying, driver
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import NO_CAP, MeshProblem
from autoshard.search.options import Options, candidate_shapes
from autoshard.search.problem.memory_rows import Peak
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.space import infeasible
from autoshard.search.space.infeasible import Smallest
from tests.decisions import with_decisions
from tests.search.chain import chain

CLUSTER = parse_cluster("16xH100-80GB")
SHAPES = ((16,), (2, 8), (4, 4), (8, 2))
CAP_BYTES = 80 * 2**30
AS_IT_IS = Options(CAP_BYTES, remat="never", microbatches=1, offload="never")


def mlp(params, x):
    return chain(params, x), jnp.max(x)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


WEIGHTS, X = [array(4096, 4096)] * 4, array(1 << 16, 4096)
STEP = trace(mlp, WEIGHTS, X)
SHARDED = {f"params[{n}]": P("data") for n in range(4)} | {"x": P("data")}


def find(options=None, step=STEP, cluster=CLUSTER, **more):
    return driver.find(step, cluster, options or Options(CAP_BYTES), **more)


@cache
def found():
    return find()


def cost_s(found) -> float:
    return found.on_mesh.problem.cost_s(found.chosen)


class Spy:
    """Listens to what the solver is asked for, and lets it find nothing on some meshes."""

    def __init__(self, monkeypatch, bounds_s=()) -> None:
        self.asked, self.bounds_s = [], dict(bounds_s)
        solve = MeshProblem.solve

        def spied(on_mesh, kept, limit_bytes, time_limit_s, cutoff_s=inf, *more, **named):
            self.asked.append((on_mesh.shape, limit_bytes, time_limit_s, cutoff_s))
            if on_mesh.shape in self.bounds_s:
                raise NoFitError("nothing", bound_s=self.bounds_s[on_mesh.shape])
            return solve(on_mesh, kept, limit_bytes, time_limit_s, cutoff_s, *more, **named)

        monkeypatch.setattr(MeshProblem, "solve", spied)

    @property
    def asked_without_cap(self):
        return [one for one in self.asked if one[1] == NO_CAP]


# --- which mesh


def test_the_fastest_plan_of_all_meshes_wins():
    alone = {shape: cost_s(find(Options(CAP_BYTES, mesh=shape))) for shape in SHAPES}
    assert candidate_shapes(CLUSTER, Options(CAP_BYTES)) == SHAPES
    found = find()
    fastest = min(alone, key=alone.__getitem__)
    assert fastest != SHAPES[-1]
    assert found.on_mesh.shape == fastest
    assert tuple(found.plan.decisions.mesh.values()) == fastest
    assert cost_s(found) == pytest.approx(alone[fastest], rel=5e-3)


def test_of_equal_plans_the_first_mesh_s_wins():
    step = trace(lambda x: x + 1.0, array(1 << 16, 4096))
    assert find(step=step).on_mesh.shape == SHAPES[0]


def test_the_mesh_that_promises_most_comes_first(monkeypatch):
    promises_s = dict(zip(SHAPES, (3.0, 1.0, 4.0, 2.0), strict=True))
    monkeypatch.setattr(
        MeshProblem, "promised_s", lambda on_mesh, kept, *known: promises_s.get(on_mesh.shape, 9.0)
    )
    spy = Spy(monkeypatch)
    find()
    assert spy.asked_without_cap[0][0] == (2, 8)


def test_a_mesh_that_promises_less_than_was_found_costs_next_to_nothing():
    """In a bandwidth-bound step, cutting the batch over all devices is best, and other meshes' bounds say so at once."""
    on_mesh = find(Options(CAP_BYTES, mesh=(2, 8))).on_mesh
    kept = on_mesh.pinned({})
    with pytest.raises(NoFitError) as e:
        on_mesh.solve(kept, CAP_BYTES, 10.0, cutoff_s=0.9 * on_mesh.promised_s(kept))
    assert e.value.bound_s >= on_mesh.promised_s(kept) * (1 - 1e-9)


def test_a_mesh_on_which_nothing_fits_is_passed_over_and_its_bound_counts(monkeypatch):
    plain = find()
    bound_s = plain.on_mesh.promised_s(plain.on_mesh.pinned({}))
    Spy(monkeypatch, {plain.on_mesh.shape: bound_s})
    found = find()
    assert found.on_mesh.shape != plain.on_mesh.shape
    assert found.plan.gap == pytest.approx(1 - bound_s / cost_s(found))


def test_only_what_is_fastest_without_a_cap_is_held_to_it(monkeypatch):
    spy = Spy(monkeypatch)
    plenty = find()
    held = [shape for shape, limit_bytes, *_ in spy.asked if limit_bytes == CAP_BYTES and shape in SHAPES]
    assert held == [plenty.on_mesh.shape]


def test_progress_names_the_meshes_that_are_solved(monkeypatch):
    lines, spy = list[str](), Spy(monkeypatch)
    find(progress=lines.append)
    solved = {shape for shape, *_ in spy.asked}
    assert {line.rsplit("mesh ", 1)[1].split()[0] for line in lines} == {
        format_mesh(shape) for shape in solved
    }


def test_where_none_was_found_the_smallest_peak_s_plan_does_if_it_fits(monkeypatch):
    labels = find(Options(CAP_BYTES, mesh=(2, 8))).chosen

    def smallest_peak(tried, options, deadline):
        assert [on_mesh.shape for on_mesh in tried] == list(SHAPES)
        assert options.memory_bytes == CAP_BYTES
        assert deadline.left_s <= infeasible.TIME_LIMIT_S
        return Smallest(tried[1], labels, Peak(CAP_BYTES, 0, ()), 1.0, ())

    lines = []
    Spy(monkeypatch, dict.fromkeys(SHAPES, 1e-3))
    monkeypatch.setattr(infeasible, "smallest_peak", smallest_peak)
    found = find(AS_IT_IS, progress=lines.append)
    assert lines[-1] == "no plan so far; looking for the smallest peak"
    assert (found.on_mesh.shape, found.chosen) == ((2, 8), labels)
    assert 0.0 <= found.plan.gap < 1.0


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize(("bounds_s", "is_proven"), [((inf,) * 4, True), ((inf, inf, 1e-3, inf), False)])
def test_where_that_does_not_fit_either_the_error_says_what_would(monkeypatch, is_found, bounds_s, is_proven):
    def smallest_peak(tried, options, deadline):
        return Smallest(tried[0], (), Peak(CAP_BYTES + 1.0, 0, ()), 1.0, ()) if is_found else None

    def explain(step_problem, cluster, options, smallest, proven, deadline, forbidden_s, also_tried):
        assert (forbidden_s, also_tried) == (None, "")
        assert (step_problem.step, cluster, options) == (STEP, CLUSTER, AS_IT_IS)
        assert (smallest is not None, proven) == (is_found, is_proven)
        return InfeasibleError("this would fit")

    Spy(monkeypatch, dict(zip(SHAPES, bounds_s, strict=True)))
    monkeypatch.setattr(infeasible, "smallest_peak", smallest_peak)
    monkeypatch.setattr(infeasible, "explain", explain)
    with pytest.raises(InfeasibleError, match="this would fit"):
        find(AS_IT_IS)


# --- what the plan says


def test_a_plan_says_what_was_asked_for():
    plan = find(Options(CAP_BYTES, mesh=(16,), pins=SHARDED)).plan
    assert plan.options == {"mesh": [16], "pin": {name: str(SHARDED[name]) for name in sorted(SHARDED)}}
    assert found().plan.options == {}
    assert (plan.step, plan.memory_bytes, plan.cluster) == ("mlp", CAP_BYTES, CLUSTER.to_json())
    assert plan.jax == jax.__version__
    assert {name: plan.decisions.arguments[name] for name in SHARDED} == dict.fromkeys(SHARDED, "P('data')")


def test_seconds_are_told_by_stage():
    plan = found().plan
    assert list(plan.search_s) == ["trace", "graph", "strategies", "solve", "recompute", "plan"]
    assert plan.search_s["trace"] == STEP.trace_s
    assert all(seconds > 0 for seconds in plan.search_s.values())


@pytest.mark.parametrize("gpu", ["H100-80GB", "A100-80GB"])
def test_a_step_takes_its_computation_and_the_communication_that_is_not_hidden(gpu):
    """Weights are gathered for the forward phase, gradients scattered; computation hides much of that."""
    cluster = parse_cluster(f"16x{gpu}")
    estimates = find(Options(CAP_BYTES, mesh=(16,), pins=SHARDED), cluster=cluster).plan.estimates
    communication_s = sum(c.seconds for c in estimates.collectives)
    assert communication_s > 0.1 * estimates.compute_s
    assert estimates.hidden_s > 0.4 * communication_s
    assert estimates.hidden_s <= communication_s
    assert estimates.step_s == pytest.approx(estimates.compute_s + communication_s - estimates.hidden_s)


# --- plans that come back


def test_a_plan_that_comes_back_is_the_same():
    plan = found().plan
    again = applying.apply(STEP, plan, CLUSTER)
    assert again.plan == plan
    assert again.plan.to_json() == plan.to_json()


def test_a_gap_holds_as_long_as_the_step_s_time_does():
    plan = replace(find(Options(CAP_BYTES, mesh=(16,), pins=SHARDED)).plan, gap=0.125)
    assert applying.apply(STEP, plan, CLUSTER).plan.gap == 0.125
    slower = replace(plan.estimates, step_s=plan.estimates.step_s * 1.001)
    again = applying.apply(STEP, replace(plan, estimates=slower), CLUSTER).plan
    assert again.gap is None
    assert again.estimates == plan.estimates
    assert again.options == plan.options


def test_a_plan_of_another_step_is_refused():
    other = trace(mlp, WEIGHTS[:3], X)
    with pytest.raises(
        PlanError, match=r"plan\.json was made for another step\. In 'mlp', it takes 1 argument fewer"
    ):
        applying.apply(other, found().plan, CLUSTER, "plan.json")


@pytest.mark.parametrize("names", [("model", "data"), ("a",), ("data", "model", "replica")])
def test_a_plan_s_mesh_has_the_axes_of_its_number(names):
    plan = found().plan
    sizes = dict(zip(names, (4, 2, 2), strict=False))
    decisions = replace(plan.decisions, mesh=sizes)
    with pytest.raises(PlanError, match="wanted mesh axes named"):
        applying.apply(STEP, with_decisions(plan, decisions), CLUSTER)


def test_a_plan_that_does_not_fit_its_cap_is_refused():
    with pytest.raises(InfeasibleError, match="the decisions of plan do not fit its cap of 1 MiB a device"):
        applying.apply(STEP, replace(found().plan, memory_bytes=2**20), CLUSTER)
