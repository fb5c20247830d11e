"""A recurrence over many steps fits where its loop is cut into segments, and the plan says so."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import build
from autoshard.search import applying, driver
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from tests.decisions import with_decisions
from tests.search.recurrence import recurrence

LENGTH, BATCH, WIDTH = 1024, 256, 256
CARRIES_BYTES = LENGTH * BATCH * WIDTH * 4
"""Of all iterations; without segments, no recomputation holds less."""


@functools.cache
def found(cap_bytes, cluster="1xH100-80GB", remat=None):
    step = trace(*recurrence(LENGTH, BATCH, WIDTH))
    options = Options(cap_bytes, remat=remat, microbatches=1, offload="never")
    return step, driver.find(step, parse_cluster(cluster), options)


@pytest.mark.pure
def test_a_stack_of_carries_that_does_not_fit_is_cut_into_segments():
    _, result = found(CARRIES_BYTES // 4)
    said = result.plan.retention["forward scan"]
    assert said.startswith("remat in segments of ")
    assert result.plan.estimates.peak_bytes <= CARRIES_BYTES // 4
    assert f"a loop recomputed in segments of {said.removeprefix('remat in segments of ')}" in str(
        result.plan
    )


@pytest.mark.pure
def test_without_recomputation_it_does_not_fit():
    with pytest.raises(InfeasibleError):
        found(CARRIES_BYTES // 4, remat="never")


@pytest.mark.pure
def test_a_loaded_plan_is_cut_alike(tmp_path):
    step, result = found(CARRIES_BYTES // 4)
    result.plan.save(tmp_path / "plan.json")
    again = applying.apply(step, Plan.load(tmp_path / "plan.json"), parse_cluster("1xH100-80GB"))
    assert again.plan.decisions == result.plan.decisions
    assert again.plan.estimates == result.plan.estimates


@pytest.mark.pure
def test_iterations_that_keep_their_residuals_keep_them_beside_the_carries_of_segments():
    step, result = found(CARRIES_BYTES // 4)
    said = replace(
        result.plan.decisions,
        retention={"forward scan": "remat in segments of 2 before 512"},
        ops={},
        copies={},
    )
    decided = with_decisions(result.plan, said, memory_bytes=1 << 40)
    again = applying.apply(step, decided, parse_cluster("1xH100-80GB"))
    loops = [op for op in again.step.graph.ops if op.name == "scan" and op.phase is Phase.FORWARD]
    stacks = [value for op in loops for value in op.result_values[op.loop_counts[1] :]]
    assert again.plan.estimates.peak_bytes >= sum(value.num_bytes for value in stacks)


@pytest.mark.pure
def test_with_room_for_some_residuals_the_loop_is_cut_in_two():
    _, result = found(9 * CARRIES_BYTES // 10)
    assert re.fullmatch(r"remat in segments of \d+ before \d+", result.plan.retention["forward scan"])


@pytest.mark.pure
def test_where_a_loop_has_effects_the_message_says_that_it_is_not_cut():
    def step(w, xs):
        def loss(w):
            def body(h, x):
                jax.debug.print("{}", h[0, 0])
                return jnp.tanh(h @ w + x), None

            return jnp.sum(jax.lax.scan(body, xs[0], xs)[0])

        return w - 0.1 * jax.grad(loss)(w)

    w, xs = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((WIDTH, WIDTH), (LENGTH, BATCH, WIDTH)))
    options = Options(int(1.2 * CARRIES_BYTES), microbatches=1, offload="never")
    with pytest.raises(
        InfeasibleError, match=r"test_loops_in_segments.py:\d+ is not cut .* has effects \(debug_p"
    ):
        driver.find(trace(step, w, xs), parse_cluster("1xH100-80GB"), options)


@pytest.mark.devices
def test_the_program_gives_the_numbers_of_one_device():
    """All that lies in memory is small here: the cap is met because the loop is cut."""
    with jax.enable_x64(True):
        step, *abstract = recurrence(96, batch=64, width=64, dtype=jnp.float64)
        rng = np.random.default_rng(0)
        args = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / 32), abstract)
        options = Options(320 << 10, (8,), microbatches=1, offload="never")
        result = driver.find(trace(step, *abstract), parse_cluster("8xCPU"), options)
        assert "in segments of" in result.plan.retention["forward scan"]
        program = build(result.step, result.sharding, jax.devices())
        wanted = jax.jit(step)(*args)
        got = program.fn(*jax.device_put(jax.tree.map(jnp.copy, args), list(program.shardings)))
        for one, many in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(many, one, rtol=1e-9)
