"""Pipelines of both executors, as users see them: shown, drawn, and refused in a sentence where something is wrong."""

import json
import math
from contextlib import suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autoshard
from autoshard import cli, pipelines
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.options import DEFAULT_TIME_LIMIT_S

EXECUTORS = ("mpmd", "spmd")
DEPTH, WIDTH, BATCH = 4, 64, 16


def deep_step(centred, params, x):
    """Layers in a loop; what is centred over the batch couples its examples."""

    def loss_fn(params):
        y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params)
        y = (y - jnp.mean(y, axis=0)) / jnp.std(y, axis=0) if centred else y
        return jnp.mean(jnp.abs(y) ** 3)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return params - 0.1 * grads, loss


def step(params, x):
    return deep_step(False, params, x)


def coupled(params, x):
    return deep_step(True, params, x)


SHAPES = (
    jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32),
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)


@pytest.mark.parametrize(
    ("options", "least_s", "most_s"),
    [
        ({}, 10.0, 1.25 * DEFAULT_TIME_LIMIT_S),
        ({"stages": "auto"}, math.inf, math.inf),
        ({"stages": 2}, math.inf, math.inf),
        ({"time_limit_s": 4}, 0.0, 4.0),
        ({"stages": 2, "time_limit_s": 4}, 3.0, 4.0),
    ],
)
def test_a_pipeline_has_the_time_that_one_program_left(options, least_s, most_s, monkeypatch):
    left_s = list[float]()

    def misses(*args):
        left_s.append(args[-1].deadline.left_s)
        raise InfeasibleError("as if")

    monkeypatch.setattr(pipelines.PipelineSearches, "_least", lambda *args: 0.0)
    monkeypatch.setattr(pipelines.spmd_planning, "find", misses)
    monkeypatch.setattr(pipelines.pipelines, "find", misses)
    with suppress(InfeasibleError):
        autoshard.search(step, *SHAPES, cluster="8xA100-80GB", **options)
    assert len(left_s) == 2
    assert least_s <= min(left_s) <= max(left_s) <= most_s


def searched(a_step, executor, **options):
    options = {"cluster": "8xA100-80GB", "stages": 2} | options
    return autoshard.search(a_step, *SHAPES, executor=executor, **options)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_plan_is_saved_shown_and_drawn(executor, tmp_path, capsys):
    plan = searched(step, executor, microbatches=4, schedule="gpipe")
    assert plan.executor == executor
    path, trace = str(tmp_path / "plan.json"), tmp_path / "trace.json"
    plan.save(path)
    assert cli.main(["show", path]) == 0
    assert "predicted peak memory" in capsys.readouterr().out
    assert cli.main(["show", path, "--timeline", "--trace", str(trace)]) == 0
    title, first, second, *_ = capsys.readouterr().out.splitlines()
    assert "2 stages, 4 microbatches" in title
    assert first.startswith("0 F0")
    assert second.startswith("1 .")
    slices = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["args"]["microbatch"] for event in slices} == {0, 1, 2, 3}
    file = json.loads(Path(path).read_text())
    Path(path).write_text(json.dumps(file | {"microbatches": 8}))
    assert cli.main(["show", path]) == 0
    assert "no estimates" in (shown := capsys.readouterr().out)
    assert "predicted" not in shown
    assert cli.main(["show", path, "--timeline"]) == 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_whose_examples_depend_on_one_another_is_refused_with_its_line(executor):
    with pytest.raises(
        NotSplittableError, match=r"cannot be split into microbatches[\s\S]*test_pipeline_executors.py:\d+"
    ):
        searched(coupled, executor)


def test_it_is_planned_without_a_pipeline_where_one_may_be_searched():
    said = []
    assert isinstance(searched(coupled, None, stages="auto", progress=said.append), autoshard.Plan)
    assert said[-1].startswith("no pipeline: ")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_more_stages_than_layers_are_refused(executor):
    wanted = {
        "mpmd": r"wanted 16 stages, but",
        "spmd": r"the 4 layers of the loop at .*16 stages",
    }
    with pytest.raises(InputError, match=wanted[executor]):
        searched(step, executor, stages=16, cluster="16xA100-80GB")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("memory", "said"), [("40KiB", r"fits 40 KiB a device: .*\d+ .iB"), ("1KiB", "fits 1 KiB a device")]
)
def test_a_stage_that_cannot_fit_is_refused(executor, memory, said):
    with pytest.raises(InfeasibleError, match=rf"no pipeline of step on 8xA100-80GB .*{said}"):
        searched(step, executor, memory=memory)


@pytest.mark.devices
@pytest.mark.parametrize("executor", EXECUTORS)
def test_devices_that_do_not_match_the_plan_are_refused(executor):
    plan = searched(step, executor, cluster="8xCPU", microbatches=4, mesh=(2, 2))
    args = [jnp.zeros(shape.shape, shape.dtype) for shape in SHAPES]
    with pytest.raises(InputError, match=r"needs \d devices"):
        autoshard.parallelize(step, plan=plan, devices=jax.devices()[:4])(*args)


@pytest.mark.devices
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_steps_own_offload_policy_keeps_one_devices_numbers(executor):
    """A loop's stack of residuals then lies in the host's memory."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["carry"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x, w):
        x = checkpoint_name(x, "carry")
        return x + jnp.tanh(x @ w), None

    def offloading(params, x):
        def loss_fn(params):
            return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, params)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    params, x = 0.1 * jnp.ones((DEPTH, 8, 8)), jax.random.normal(jax.random.key(0), (BATCH, 8))
    wanted = jax.jit(offloading)(params, x)
    planned = autoshard.parallelize(offloading, stages=2, microbatches=2, executor=executor)
    for got, one in zip(planned(jnp.copy(params), x), wanted, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-5)
