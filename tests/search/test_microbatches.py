"""A step that goes through its batch in microbatches: asked for, or because the cap wants it."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.errors import InfeasibleError, InputError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import build
from autoshard.search import applying, driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan

CLUSTER = parse_cluster("8xCPU")
WIDTHS, BATCH = (64, *(128,) * 4, 64), 1 << 14


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], value


def coupled(params, x):
    """Each example is compared with the mean of all."""
    return step(params, x - jnp.mean(x @ params[0] @ params[0].T, 0))


def arguments():
    params = [jax.ShapeDtypeStruct(s, jnp.float64) for s in itertools.pairwise(WIDTHS)]
    return params, jax.ShapeDtypeStruct((BATCH, WIDTHS[0]), jnp.float64)


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


@functools.cache
def traced(function):
    return trace(function, *arguments())


@functools.cache
def found(share=None, microbatches=None, remat=None, function=step):
    """Under a cap of a share of what the fastest plan holds where memory is plenty."""
    cap_bytes = 1 << 40 if share is None else int(share * found(function=function).plan.estimates.peak_bytes)
    options = Options(cap_bytes, mesh=(8,), remat=remat, microbatches=microbatches)
    return driver.find(traced(function), CLUSTER, options)


def loops(result):
    return [int(op.params["length"]) for op in result.step.graph.ops if op.name == "scan"]


def test_as_many_as_are_asked_for():
    four = found(microbatches=4)
    assert loops(four) == [4]
    assert four.plan.decisions.microbatches == four.plan.options["microbatches"] == 4
    assert four.plan.estimates.peak_bytes < 0.5 * found().plan.estimates.peak_bytes
    assert str(four.plan).splitlines()[0].endswith(", 4 microbatches")


def test_where_memory_is_plenty_there_is_one():
    assert found().step is traced(step)
    assert found().plan.decisions.microbatches == 1


def test_a_cap_that_is_out_of_reach_otherwise_is_kept_to():
    tight = found(0.22, remat="never")
    assert tight.plan.decisions.microbatches > 1
    assert tight.plan.estimates.peak_bytes <= tight.plan.memory_bytes
    with pytest.raises(InfeasibleError, match="nothing"):
        found(0.22, microbatches=1, remat="never")


@pytest.mark.parametrize("microbatches", [8, pytest.param(16, marks=pytest.mark.slow), 32])
def test_no_number_of_microbatches_that_is_asked_for_is_faster(microbatches):
    chosen = found(0.22, remat="never").plan.estimates.step_s
    assert chosen <= found(0.22, microbatches=microbatches, remat="never").plan.estimates.step_s


def test_recomputing_and_microbatches_go_together():
    tight = found(0.48, microbatches=2)
    assert loops(tight) == [2]
    assert tight.plan.decisions.retention
    assert (
        tight.plan.estimates.peak_bytes
        <= tight.plan.memory_bytes
        < found(microbatches=2).plan.estimates.peak_bytes
    )


@pytest.mark.parametrize("asked", [{"microbatches": 4}, {"remat": "never", "offload": "never"}])
def test_where_time_is_over_the_message_says_that_more_may_find_a_plan(asked):
    cap_bytes = int(0.3 * found().plan.estimates.peak_bytes)
    options = Options(cap_bytes, mesh=(8,), **asked)
    assert driver.find(traced(step), CLUSTER, options).plan.estimates.peak_bytes <= cap_bytes
    with pytest.raises(InfeasibleError, match=r"nothing was found .* longer search \(time_limit_s\)"):
        driver.find(traced(step), CLUSTER, replace(options, time_limit_s=1e-6))


@pytest.mark.parametrize(("share", "microbatches"), [(None, 4), (0.48, 2)])
def test_a_plan_is_read_as_it_was_written(share, microbatches, tmp_path):
    plan = found(share, microbatches).plan
    plan.save(tmp_path / "plan.json")
    again = applying.apply(traced(step), Plan.load(tmp_path / "plan.json"), CLUSTER)
    assert again.plan.decisions == plan.decisions
    assert again.plan.estimates == plan.estimates
    assert again.plan.fingerprint == found().plan.fingerprint


@pytest.mark.parametrize(
    ("count", "message"), [(3, "plan.json: .* is not a multiple of 3"), (0, "at least 1 microbatch, got 0")]
)
def test_an_edited_number_that_cannot_be_is_refused(count, message):
    plan = found(microbatches=4).plan
    edited = replace(plan, microbatches=count)
    with pytest.raises(PlanError, match=message):
        applying.apply(traced(step), edited, CLUSTER, "plan.json")


def test_examples_that_depend_on_one_another_are_refused_where_they_do():
    with pytest.raises(InputError, match=r"test_microbatches.py:\d+ needs, for each example"):
        found(microbatches=2, function=coupled)
    with pytest.raises(InfeasibleError, match=r"Microbatches were not tried: .*test_microbatches.py:\d+"):
        found(0.1, remat="never", function=coupled)


def thirds(params, x):
    """The step on examples that are taken three by three, one group after another."""

    def of_group(group):
        return jnp.tanh(group @ params[0] @ params[0].T)

    grouped = jnp.reshape(x, (-1, 3, x.shape[1]))
    return step(params, jnp.reshape(jax.lax.map(of_group, grouped), x.shape))


def test_a_number_that_groups_do_not_allow_leaves_the_others():
    """Two microbatches do not divide a group; three do."""
    params, x = arguments()
    one = trace(thirds, params, jax.ShapeDtypeStruct((3 * 4096, *x.shape[1:]), x.dtype))
    asked = {"mesh": (8,), "remat": "never", "offload": "never"}
    fastest = driver.find(one, CLUSTER, Options(1 << 40, **asked)).plan
    tight = driver.find(one, CLUSTER, Options(int(0.5 * fastest.estimates.peak_bytes), **asked)).plan
    assert tight.decisions.microbatches % 3 == 0


def test_a_number_that_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="at least 1 microbatch, got 0"):
        Options(1 << 30, microbatches=0)
    with pytest.raises(InputError, match="16384 examples, which is not a multiple of 3"):
        found(microbatches=3)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("share", "microbatches"), [pytest.param(None, 4, marks=pytest.mark.slow), (0.48, 2)]
)  # `tests/search/memory/test_microbatches.py` has the numbers of what is not recomputed
def test_on_simulated_devices_the_numbers_are_those_of_one(share, microbatches):
    result = found(share, microbatches)
    program = build(result.step, result.sharding, jax.devices())
    rng = np.random.default_rng(0)
    params, x = jax.tree.map(lambda s: rng.normal(size=s.shape) / s.shape[0] ** 0.5, arguments())
    wanted = jax.jit(step)(params, x)
    got = program.fn(*jax.device_put((params, x), program.shardings))
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-12)
