"""Steps on clusters of several kinds of node: pipelines whose stages each stand on one."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.cluster import Cluster, Link
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.mixed_cluster import MixedCluster
from autoshard.search.plan.plan import Plan
from tests.executors.agreement import Reference, assert_equal, run_steps
from tests.zoo import make_mlp

pytestmark = pytest.mark.devices

NUM_STEPS = 3


def nodes_of_cpus(name: str, count: int, per_node: int, times: float, memory: str = "1GiB") -> Cluster:
    """Simulated devices that are so many times as fast."""
    there = parse_cluster(f"{count}xCPU")
    device = replace(
        there.device,
        flops_per_s=tuple((dtype, times * speed) for dtype, speed in there.device.flops_per_s),
        memory_bytes_per_s=times * there.device.memory_bytes_per_s,
    )
    return replace(there, name=name, device=device, devices_per_node=per_node)


SLOW, FAST = nodes_of_cpus("slow", 4, 2, 1.0), nodes_of_cpus("fast", 4, 4, 3.0)
MIXED = MixedCluster("mine", (SLOW, FAST), Link(1e9, 1e-6))


@pytest.fixture(scope="module")
def mlp():
    with jax.enable_x64(True):
        case = make_mlp(dtype=jnp.float64)
        yield Reference.of(case, NUM_STEPS, case.init())


@pytest.fixture(scope="module")
def plan(mlp) -> Plan:
    found = autoshard.search(
        mlp.case.step, *mlp.case.abstract_args(), cluster=MIXED, stages=2, microbatches=4
    )
    assert found.executor == "mpmd"
    return found


@pytest.mark.parametrize("order", [("slow", "fast"), pytest.param(("fast", "slow"), marks=pytest.mark.slow)])
def test_a_step_trains_as_on_one_device_in_each_order_of_the_groups(mlp, plan, order):
    data = plan.to_json() | {"groups": list(order)}
    step = autoshard.parallelize(mlp.case.step, plan=Plan.from_json(data))
    assert_equal(run_steps(step, mlp.case, mlp.case.init(), NUM_STEPS), mlp.results)
    halves = {"slow": set(jax.devices()[:4]), "fast": set(jax.devices()[4:])}
    state = step.init(mlp.case.init, args=(mlp.case.batch(0),))
    first, *_, last = (layer["w"].sharding.device_set for layer in state["params"])
    assert (first, last) == tuple(halves[name] for name in order)


def test_a_step_is_searched_and_trained_on_the_cluster_that_is_given(mlp):
    step = autoshard.parallelize(mlp.case.step, cluster=MIXED, stages=2, microbatches=2)
    assert_equal(run_steps(step, mlp.case, mlp.case.init(), NUM_STEPS), mlp.results)
    assert {*step.plan.groups} == {"slow", "fast"}
    assert step.plan.num_devices == 8


def test_a_saved_plan_is_the_same_plan(mlp, plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert [one.group for one in again.shardings] == ["fast", "slow"]
    step = autoshard.parallelize(mlp.case.step, plan=again)
    step(mlp.case.init(), mlp.case.batch(0))
    assert step.plan.estimates == plan.estimates


def test_the_faster_nodes_get_more_of_the_work(plan):
    ops = sorted(stage.first_op for stage in plan.stages)
    times_s = dict(zip(plan.stands_on, (s.forward_s for s in plan.estimates.stages), strict=True))
    assert len(ops) == 2
    assert times_s["slow"] < 3 * times_s["fast"], "a slow stage is as long as if work were shared out evenly"
    text = str(plan)
    assert "mine: 2 nodes of 2 CPU and 1 node of 4 CPU" in text
    assert "predicted peak memory on slow: " in text


def test_a_plan_that_says_nonsense_of_groups_is_refused(mlp, plan):
    def run(**said):
        step = autoshard.parallelize(mlp.case.step, plan=Plan.from_json(plan.to_json() | said))
        step(mlp.case.init(), mlp.case.batch(0))

    with pytest.raises(
        PlanError, match=r"groups: wanted the groups 'slow', 'fast' in some order, got 'slow'"
    ):
        run(groups=["slow"])
    other = [{**one, "group": "fats"} for one in plan.to_json()["shardings"]]
    with pytest.raises(PlanError, match=r"wanted shardings for a group of nodes, .*, got 'fats'"):
        run(shardings=other)
    unequal = plan.to_json()["shardings"]
    unequal[0]["mesh"], unequal[1]["mesh"] = {"data": 2}, {"data": 6}
    with pytest.raises(
        PlanError, match=r"stage 1 would stand on devices 2 to 7, which are not all of one kind"
    ):
        run(shardings=unequal, stages=[{**stage, "replicas": 1} for stage in plan.to_json()["stages"]])


@pytest.mark.parametrize("groups", [[], ["slow"], ["slow", "slow"], ["x", "fast"]])
def test_groups_that_are_not_the_clusters_are_refused(plan, groups):
    edited = Plan.from_json(plan.to_json() | {"groups": groups})
    with pytest.raises(PlanError, match=r"stages have 8 devices of the groups \[.*\], its cluster has"):
        _ = edited.stands_on


def test_a_mesh_that_no_one_kind_of_node_has_is_refused(mlp):
    with pytest.raises(InputError, match=r"take 8 devices, .*: each takes 1, 2, 4, .*, all of one kind"):
        autoshard.search(mlp.case.step, *mlp.case.abstract_args(), cluster=MIXED, mesh=(8, 1), stages="auto")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 1}, r"one program runs on devices of one kind, and mine has several"),
        ({"mesh": (2, 4)}, r"say stages='auto' beside mesh="),
        ({"stages": 2, "executor": "spmd"}, r"Leave out what only one program has \(executor=\)"),
        (
            {"stages": 4, "schedule": "zb-v"},
            r"under 'zb-v' each worker runs several stages, and all have as many",
        ),
    ],
)
def test_what_takes_devices_of_one_kind_is_refused(mlp, options, said):
    with pytest.raises(InputError, match=said):
        autoshard.search(mlp.case.step, *mlp.case.abstract_args(), cluster=MIXED, **options)


def test_where_nodes_of_one_kind_are_faster_alone_that_is_said(mlp):
    far = replace(MIXED, between=Link(1e6, 1e-2))
    with pytest.warns(
        autoshard.AutoshardWarning, match="fast alone is predicted to run step in .*, and all of mine in "
    ):
        autoshard.search(mlp.case.step, *mlp.case.abstract_args(), cluster=far)


def test_each_kind_of_node_keeps_to_its_own_cap(mlp, plan):
    tight = replace(SLOW, device=replace(SLOW.device, reserve_bytes=SLOW.device.memory_bytes - 20_000))
    needs = max(stage.peak_bytes for stage in plan.estimates.stages)
    assert needs > 20_000
    found = autoshard.search(
        mlp.case.step,
        *mlp.case.abstract_args(),
        cluster=replace(MIXED, groups=(tight, FAST)),
        stages=2,
        microbatches=4,
    )
    peaks = dict(zip(found.stands_on, (s.peak_bytes for s in found.estimates.stages), strict=True))
    assert peaks["slow"] <= 20_000 < peaks["fast"]
    assert math.isfinite(found.estimates.step_s)
