"""Stacks of a loop wait on the host: the numbers stay, and no stack that waits is on the device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.errors import InfeasibleError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import build
from autoshard.search import applying, driver
from autoshard.search.ir.graph import walk
from autoshard.search.ir.trace import trace
from autoshard.search.memory.loop_offload import in_loops, loops_offloaded, may_leave_loop
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from tests.decisions import with_decisions

LAYERS, BATCH, WIDTH = 6, 512, 128
CLUSTER = parse_cluster("1xH100-80GB")


def step(params, x):
    """Layers in a loop; the mean of each is a result as well."""

    def loss(params):
        def layer(x, w):
            x = x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1])
            return x, jnp.mean(x)

        x_, means = jax.lax.scan(layer, x, params)
        return jnp.mean(x_**2), means

    (value, means), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value, means


def arguments(dtype=jnp.float32, batch=BATCH, width=WIDTH):
    w = jax.ShapeDtypeStruct((LAYERS, width, width), dtype)
    return (w, w), jax.ShapeDtypeStruct((batch, width), dtype)


STEP = trace(step, *arguments())
LOOP = 0
SITES = frozenset(
    {(LOOP,), *((LOOP, "jaxpr", 0, i) for i in range(len(STEP.graph.ops[LOOP].bodies["jaxpr"][0].ops)))}
)


def on_host(step):
    """The shapes of stacks on the host."""
    loops = [op for op in step.graph.ops if op.name == "scan"]
    return [v.shape for op in loops for v in op.result_values if v.is_on_host]


@pytest.mark.pure
def test_carries_and_residuals_leave_the_device():
    assert in_loops(STEP.graph, SITES) == SITES
    after = loops_offloaded(STEP, STEP.graph, SITES)
    kept = [v.shape for v in STEP.graph.ops[LOOP].result_values[1:]]
    assert on_host(after) == [shape for shape in kept if shape == (LAYERS, BATCH, WIDTH)] != []
    copies = [op for _, graph in walk(after.graph) for op in graph.ops if op.is_transfer]
    assert len(copies) == 2 * len(on_host(after))


@pytest.mark.pure
def test_only_what_a_backward_loop_reads_may_leave():
    assert not may_leave_loop(STEP.graph, (1,))
    assert not may_leave_loop(STEP.graph, (LOOP, "jaxpr", 0, 0, "jaxpr", 0, 0))


@pytest.mark.devices
@pytest.mark.parametrize("again", [False, True])
def test_the_program_gives_the_numbers_of_one_device(again):
    """With and without ops of the body recomputed from what comes back."""
    with jax.enable_x64(True):
        abstract = arguments(jnp.float64)
        rng = np.random.default_rng(0)
        args = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 8), abstract)
        traced = trace(step, *abstract)
        name = "forward sin"
        plan = driver.find(
            traced, parse_cluster("8xCPU"), Options(1 << 40, (8,), remat="never", offload="never")
        ).plan
        retention = {"forward scan": "offload", name: "remat" if again else "offload"}
        said = replace(plan.decisions, retention=retention, ops={}, copies={})
        decided = with_decisions(plan, said, memory_bytes=1 << 40)
        result = applying.apply(traced, decided, parse_cluster("8xCPU"))
        assert len(on_host(result.step)) >= 1
        program = build(result.step, result.sharding, jax.devices())
        wanted = jax.jit(step)(*args)
        got = program.fn(*jax.device_put(jax.tree.map(jnp.copy, args), program.shardings))
        for one, many in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(many, one, rtol=1e-9)


@pytest.mark.pure
def test_a_search_offloads_stacks_and_its_plan_is_applied_alike(tmp_path):
    """Layers so large that the device cannot keep what the backward loop reads."""
    traced = trace(step, *arguments(batch=1 << 15, width=1024))
    most = driver.find(traced, CLUSTER, Options(1 << 40, remat="never", offload="never", microbatches=1))
    cap_bytes = int(0.7 * most.plan.estimates.peak_bytes)
    with pytest.raises(InfeasibleError):
        driver.find(traced, CLUSTER, Options(cap_bytes, remat="never", offload="never", microbatches=1))
    asked = Options(cap_bytes, remat="never", offload=("residuals",), microbatches=1)
    plan = driver.find(traced, CLUSTER, asked).plan
    assert "offload" in plan.retention.values()
    assert plan.estimates.peak_bytes <= cap_bytes
    assert plan.estimates.host_bytes > 0
    plan.save(tmp_path / "plan.json")
    again = applying.apply(traced, Plan.load(tmp_path / "plan.json"), CLUSTER).plan
    assert (again.decisions, again.estimates) == (plan.decisions, plan.estimates)


@pytest.mark.pure
def test_what_a_loop_does_not_stack_up_cannot_be_offloaded():
    plan = driver.find(STEP, CLUSTER, Options(1 << 40)).plan
    wrong = replace(plan.decisions, retention={"forward scan": "offload in segments of 2"})
    with pytest.raises(PlanError, match="or stacked up by one, 'offload'"):
        applying.apply(STEP, with_decisions(plan, wrong), CLUSTER)
