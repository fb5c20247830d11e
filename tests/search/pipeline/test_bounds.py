"""Bounds of pipelines, against schedules run in time."""

from functools import cache
from itertools import pairwise, product
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.bounds import PipelineBounds, Pipelines, dispatch_s, least_makespan_s
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.proposals import Placed, Proposal, Stages
from autoshard.search.pipeline.schedules.registry import FAMILIES, build_schedule
from autoshard.search.pipeline.simulator import StageCost, simulate
from autoshard.search.pipeline.step_work import StepWork
from autoshard.search.step_problem import StepProblem

pytestmark = pytest.mark.pure


def costs(rng: np.random.Generator, num_stages: int) -> list[StageCost]:
    """Of stages that have nothing in common; some have no weight gradients."""
    seconds = rng.exponential(size=(num_stages, 3)) * rng.choice([0.1, 1.0, 3.0], size=(num_stages, 1))
    sends = rng.exponential(scale=0.1, size=(num_stages, 2))
    return [StageCost(*map(float, (*s, *t))) for s, t in zip(seconds, sends, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_schedule_is_faster_than_its_bound(name):
    rng, family = np.random.default_rng(0), FAMILIES[name]
    per_worker = family.stages_per_worker or 2
    for workers, m in product((1, 2, 3, 4), (1, 2, 4, 8, 12)):
        if not family.suits(workers, m):
            continue
        schedule = build_schedule(name, workers * per_worker, m, workers)
        assert schedule.splits_backward == family.splits_backward
        for _ in range(8):
            stages = costs(rng, workers * per_worker)
            took_s = simulate(schedule, stages).makespan_s
            assert least_makespan_s(name, stages, m, workers) <= took_s * (1 + 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_workers_hold_the_stages_that_a_family_says(name):
    family = FAMILIES[name]
    per_worker = family.stages_per_worker or 2
    schedule = build_schedule(name, 4 * per_worker, 8, 4)
    held = family.stages_of_workers(4 * per_worker, 4)
    assert [tuple(sorted(stages)) for stages in held] == [schedule.stages_of(w) for w in range(4)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "circular"])
def test_the_bound_of_equal_stages_is_what_they_take(name):
    """Where backward passes are whole: the textbook's bubble, by any number of stages on a worker."""
    per_worker = FAMILIES[name].stages_per_worker or 2
    stages = [StageCost(1.0, 1.5, 0.5)] * (4 * per_worker)
    took_s = simulate(build_schedule(name, len(stages), 8, 4), stages).makespan_s
    assert least_makespan_s(name, stages, 8, 4) == pytest.approx(took_s)
    assert took_s == pytest.approx((8 * per_worker + 3) * 3.0)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize("workers", [2, 4])
def test_the_bound_of_one_microbatch_is_what_it_takes(name, workers):
    """The weight gradient of the first stage follows the whole way back."""
    stages = [StageCost(1.0, 1.0, 0.9)] * ((FAMILIES[name].stages_per_worker or 1) * workers)
    took_s = simulate(build_schedule(name, len(stages), 1, workers), stages).makespan_s
    assert least_makespan_s(name, stages, 1, workers) == pytest.approx(took_s)


def test_hosts_hand_out_weight_gradients_one_by_one():
    assert dispatch_s("zb-h1", 8, 2) == pytest.approx(1.5 * dispatch_s("1f1b", 8, 2))


# --- families

CLUSTER = parse_cluster("8xA100-80GB")
BLOCKS, EXAMPLES, TOKENS, WIDTH = 8, 32, 1024, 8192


@cache
def step_of(dtype: str) -> Step:
    """Equal blocks."""

    def step(params, x):
        def loss_fn(params):
            y = x
            for w in params:
                y = jax.nn.relu(y @ w)
            return jnp.sum(y)

        return jax.tree.map(jnp.subtract, params, jax.grad(loss_fn)(params))

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)] * BLOCKS
    return trace(step, params, jax.ShapeDtypeStruct((EXAMPLES, TOKENS, WIDTH), dtype))


@cache
def bounds_of(dtype: str) -> PipelineBounds:
    step = step_of(dtype)
    problem = StepProblem.of(step, [""] * len(step.arguments), CLUSTER.device)
    return PipelineBounds(step, CLUSTER, StepWork.of(problem.on(CLUSTER, (8,))))


@cache
def parts_of(dtype: str, count: int) -> Parts:
    step = step_of(dtype)
    return Parts.of(step, CLUSTER, count)


def equal_stages(parts: Parts, one: Pipelines) -> Proposal:
    """A pipeline of a family on all devices, with as many blocks in each stage."""
    family, size = FAMILIES[one.schedule], one.num_replicas * one.shape[0]
    workers = CLUSTER.num_devices // size
    stages = workers * (family.stages_per_worker or 2)
    held = enumerate(family.stages_of_workers(stages, workers))
    worker_of = {stage: w for w, of_worker in reversed([*held]) for stage in of_worker}
    ends = np.linspace(0, parts.layers.num_layers, stages + 1).round().astype(int).tolist()
    placed = [Placed(*cut, worker_of[n] * size, one.shape) for n, cut in enumerate(pairwise(ends))]
    schedule = build_schedule(one.schedule, stages, one.num_microbatches, workers)
    return Stages([parts] * stages, CLUSTER, one.num_replicas, placed, family.copies).proposal(schedule)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_replicas", "size", "share"), [(1, 2, 0.92), (2, 1, 0.96), (2, 2, 0.89), (4, 1, 0.97)]
)
def test_no_pipeline_with_equal_stages_is_faster_than_its_family(dtype, num_replicas, size, share):
    """Each family, for several numbers of microbatches."""
    ratios = list[float]()
    for name, m in product(FAMILIES, (2, 4, 8)):
        one = Pipelines(name, m, num_replicas, (size,))
        if (least_s := bounds_of(dtype).least_s(one, None)) < inf:
            took_s = equal_stages(parts_of(dtype, one.count), one).step_s
            ratios.append(least_s / took_s)
    assert share < max(ratios) <= 1 + 1e-9, "a bound from far away bounds nothing"


def test_no_cut_takes_less_than_the_work_of_a_step_shared_evenly():
    """All cuts of the blocks into two stages, with as many devices each."""
    one = Pipelines("1f1b", 8, 1, (4,))
    parts, bounds = parts_of("bfloat16", one.count), bounds_of("bfloat16")
    schedule = build_schedule(one.schedule, 2, one.num_microbatches, 2)
    took_s = [
        Stages(
            [parts] * 2,
            CLUSTER,
            1,
            [Placed(0, cut, 0, one.shape), Placed(cut, parts.layers.num_layers, 4, one.shape)],
        )
        .proposal(schedule)
        .step_s
        for cut in range(1, parts.layers.num_layers)
    ]
    work_s = bounds.work_s(one.count, 4)
    assert bounds.work_s(one.count, 1) <= work_s <= min(took_s)
    bubble = 1 / (8 + 1)
    assert work_s > (1 - bubble - 0.2) * min(took_s), "a bound from far away bounds nothing"
