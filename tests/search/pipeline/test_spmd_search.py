"""Pipelines that are one program: what is predicted of them, and which is taken."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.spmd_planning import apply, find
from autoshard.search.pipeline.timeline import simulated
from autoshard.search.plan.plan import Plan

DEPTH, WIDTH, TOKENS, BATCH = 8, 512, 64, 32
FLOAT_BYTES = 4


def deep_step(is_loop, params, x):
    """Blocks of two products each, under `scan` or one after another."""

    def block(x, w):
        return x + jax.nn.relu(x @ w["up"]) @ w["down"]

    def loss_fn(params):
        if is_loop:
            y, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params)
        else:
            y = x
            for n in range(DEPTH):
                y = block(y, jax.tree.map(lambda w, n=n: w[n], params))
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def looped(params, x):
    return deep_step(True, params, x)


def unrolled(params, x):
    return deep_step(False, params, x)


SHAPES = (
    {
        "up": jax.ShapeDtypeStruct((DEPTH, WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((DEPTH, 4 * WIDTH, WIDTH), jnp.float32),
    },
    jax.ShapeDtypeStruct((BATCH, TOKENS, WIDTH), jnp.float32),
)
CLUSTER = parse_cluster("8xA100-80GB")
CAP_BYTES = CLUSTER.device_memory_limit()


def found(**options) -> Plan:
    step = trace(looped, *SHAPES)
    return find(step, CLUSTER, PipelineOptions(**{"memory_bytes": CAP_BYTES, **options})).plan


@pytest.mark.parametrize(("schedule", "per_worker"), [("gpipe", 1), ("circular", 2)])
def test_a_step_takes_its_ticks_and_says_what_it_sends(schedule, per_worker):
    workers, replicas, microbatches = 2, 4, 4
    plan = found(
        stages=workers * per_worker, schedule=schedule, mesh=(replicas, 1), microbatches=microbatches
    )
    said, ticks = plan.estimates, per_worker * microbatches + workers - 1
    stage = said.stages[0]
    assert said.stages == (stage,) * (workers * per_worker)
    ticks_s = ticks * (stage.forward_s + stage.backward_s)
    assert said.step_s == pytest.approx(ticks_s + said.between_s + stage.update_s)
    assert said.bubble * said.step_s == pytest.approx(ticks_s * (workers - 1) / ticks)
    assert simulated(plan).makespan_s == pytest.approx(ticks_s)
    sent = {(c.kind, c.axes): c.bytes for c in said.collectives}
    activation = BATCH // (replicas * microbatches) * TOKENS * WIDTH * FLOAT_BYTES
    layers = DEPTH * 2 * 4 * WIDTH * WIDTH * FLOAT_BYTES // workers
    assert sent["collective-permute", ("stage",)] == 2 * ticks * activation
    assert sent["all-reduce", ("replica",)] == layers
    assert sent["reduce-scatter", ("stage",)] == sent["all-gather", ("stage",)] == microbatches * activation
    assert sent.get(("all-to-all", ("stage",)), 0) == (2 * layers if schedule == "circular" else 0)


def test_devices_that_share_a_replica_are_searched_and_what_is_found_is_the_fastest():
    plans = [found(stages=2, mesh=mesh, microbatches=4) for mesh in ((4, 1), (2, 2), (1, 4))]
    assert found(stages=2, microbatches=4).estimates.step_s == min(plan.estimates.step_s for plan in plans)


def test_under_a_cap_it_recomputes_and_below_that_says_what_is_nearest():
    free = found(stages=2, mesh=(4, 1), microbatches=4)
    less = found(stages=2, mesh=(4, 1), microbatches=4, memory_bytes=free.estimates.peak_bytes * 9 // 10)
    assert not free.retention
    assert less.retention
    assert less.estimates.peak_bytes <= less.memory_bytes < free.estimates.peak_bytes
    assert less.estimates.step_s > free.estimates.step_s
    again = apply(trace(looped, *SHAPES), Plan.from_json(less.to_json())).plan
    assert again == less
    assert less.to_json()["executor"] == "spmd"
    with pytest.raises(
        InfeasibleError, match=r"that is one program fits 64 MiB a device: the nearest needs \d+"
    ):
        found(stages=2, mesh=(4, 1), microbatches=4, memory_bytes=64 << 20)
    with pytest.raises(InfeasibleError):
        found(stages=2, mesh=(4, 1), microbatches=4, memory_bytes=less.memory_bytes, remat="never")


def test_the_faster_executor_is_taken_and_either_can_be_asked_for():
    asked = {"cluster": CLUSTER, "stages": 2, "mesh": (4, 1), "microbatches": 4}
    one, several = (
        autoshard.search(looped, *SHAPES, **asked, executor=name, schedule="gpipe")
        for name in ("spmd", "mpmd")
    )
    assert one.executor == "spmd"
    assert several.executor == "mpmd"
    faster = min((one, several), key=lambda plan: plan.estimates.step_s)
    taken = autoshard.search(looped, *SHAPES, **asked, schedule="gpipe")
    assert taken.executor == faster.executor
    assert taken.estimates.step_s == faster.estimates.step_s
    said = []
    taken = autoshard.search(unrolled, *SHAPES, **asked, progress=said.append)
    assert taken.executor == "mpmd"
    assert any("not as one program for all stages: the step" in line for line in said)


def test_print_says_what_is_predicted_and_who_runs_it():
    text = str(found(stages=4, schedule="gpipe", mesh=(2, 1), microbatches=4))
    assert text.startswith("4 stages x GPipe, 4 microbatches, data parallel over 2\n")
    assert "executor  spmd: one program for all stages" in text
    assert "4 stages on 4 workers" in text
    assert "over stage" in text
    assert "predicted step time: " in text
    assert "predicted peak memory: " in text
