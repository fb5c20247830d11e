"""A pipeline that is one program trains as one device does: layers in a loop, in float64."""

import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.spmd import written
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.spmd_step import LayerLoop
from tests.executors.agreement import Reference, assert_equal, run_steps
from tests.zoo import Case, make_gpt_scan, make_mlp
from tests.zoo.case import Normal

NUM_STEPS = 2

LAYERS, WIDTH, BATCH = 8, 8, 32


def shared_step(recomputes, state, batch, key):
    """Layers that share a matrix and a mask of the examples, have keys of their own, and hand out what they make for each
    example; gradients are clipped by the norm of all."""

    def loss_fn(params):
        def plain_layer(carry, own):
            x, total = carry
            noise = jax.random.normal(own["key"], (WIDTH,), x.dtype)
            y = jnp.tanh(x @ own["w"] @ params["shared"] + 0.1 * noise) * batch["mask"]
            return (x + y, total + jnp.mean(y**2)), jnp.sum(y, axis=1)

        layer = jax.checkpoint(plain_layer) if recomputes else plain_layer
        own = {"w": params["layers"], "key": jax.random.split(key, LAYERS)}
        x = batch["x"] @ params["embed"]
        (x, total), by_layer = jax.lax.scan(layer, (x, jnp.zeros((), x.dtype)), own)
        return jnp.mean((x @ params["embed"].T - batch["x"]) ** 2) + 0.1 * total, by_layer

    params, moments = state
    (loss, by_layer), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    moments = jax.tree.map(lambda m, g: 0.9 * m + g / jnp.maximum(1, norm), moments, grads)
    params = jax.tree.map(lambda w, m: w - 0.1 * m, params, moments)
    return (params, moments), {"loss": loss, "norm": norm, "by layer": by_layer}


def shared(recomputes=False) -> Case:
    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = {"embed": (WIDTH, WIDTH), "layers": (LAYERS, WIDTH, WIDTH), "shared": (WIDTH, WIDTH)}
        pairs = zip(keys, shapes.items(), strict=True)
        params = {name: jax.random.normal(k, shape, jnp.float64) / 3 for k, (name, shape) in pairs}
        return params, jax.tree.map(jnp.zeros_like, params)

    inputs = {"x": Normal((BATCH, WIDTH), jnp.float64), "mask": Normal((BATCH, 1), jnp.float64)}
    step = functools.partial(shared_step, recomputes)
    return Case("shared", step, init, inputs, extra=lambda: (jax.random.key(7),))


def gpt() -> Case:
    return make_gpt_scan(num_layers=4, hidden=16, heads=2, vocab=16, seq=8, batch=32, dtype=jnp.float64)


CASES = {"gpt": gpt, "shared": shared, "recomputed": functools.partial(shared, recomputes=True)}


@functools.cache
def on_one_device(name: str) -> Reference:
    return Reference.of(CASES[name](), NUM_STEPS)


@pytest.mark.parametrize(
    ("name", "stages", "schedule", "microbatches", "mesh"),
    [
        ("shared", 2, "gpipe", 4, (2, 2)),
        pytest.param("shared", 8, "circular", 4, None, marks=pytest.mark.slow),  # as the next one
        ("recomputed", 4, "circular", 8, (1, 2, 2)),
        pytest.param("gpt", 2, "gpipe", 4, (2, 2), marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_one_device(name, stages, schedule, microbatches, mesh):
    with jax.enable_x64(True):
        single = on_one_device(name)
        case = single.case
        options = {"stages": stages, "schedule": schedule, "microbatches": microbatches, "mesh": mesh}
        step = autoshard.parallelize(case.step, executor="spmd", **options)
        # A copy: the step donates its state.
        state = jax.tree.map(jnp.copy, single.start)
        assert_equal(run_steps(step, case, state, NUM_STEPS), single.results)
    assert step.plan.executor == "spmd"
    assert step.plan.workers == (stages if schedule == "gpipe" else stages // 2)


def test_under_a_cap_it_recomputes_and_trains_alike():
    with jax.enable_x64(True):
        single = on_one_device("shared")
        case = single.case
        options = {"stages": 2, "mesh": (4, 1), "microbatches": 4, "executor": "spmd"}
        free = autoshard.search(case.step, *case.abstract_args(), cluster="8xCPU", **options)
        less = free.estimates.peak_bytes * 9 // 10
        step = autoshard.parallelize(case.step, memory=less, **options)
        state = jax.tree.map(jnp.copy, single.start)
        assert_equal(run_steps(step, case, state, NUM_STEPS), single.results)
    assert step.plan.retention
    assert step.plan.memory_bytes == less


def cast_step(params, x):
    """Layers compute in a narrower type than their parameters have."""

    def loss_fn(params):
        ws = params["layers"].astype(jnp.float32)
        x_, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)
        return jnp.mean((x_ @ params["head"].astype(jnp.float32)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def test_gradients_of_parameters_in_another_type_are_added_up_on_their_stages():
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH), jnp.float64),
            "head": jax.random.normal(keys[1], (WIDTH, 1), jnp.float64),
        }
        x = jax.random.normal(keys[2], (BATCH, WIDTH), jnp.float32)
        wanted, _ = jax.jit(cast_step)(params, x)
        step = trace(cast_step, params, x)
        program = written(step, PipelineStep.of(step, 8), 4, 1)
        _, backward = (part for part in program.parts if isinstance(part, LayerLoop))
        ((stack, total),) = ((v, t) for v, t in backward.sums.items() if t in program.layered)
        assert (program.values[stack].dtype, program.values[total].dtype) == (jnp.float32, jnp.float64)
        step = autoshard.parallelize(
            cast_step, stages=4, mesh=(2, 1), microbatches=4, schedule="gpipe", executor="spmd"
        )
        got, _ = step(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted)


def test_layers_rest_on_their_stages_and_a_saved_plan_is_used_again(tmp_path):
    path, case = tmp_path / "plan.json", shared()
    with jax.enable_x64(True):
        step = autoshard.parallelize(case.step, stages=2, mesh=(2, 2), microbatches=8, executor="spmd")
        params, moments = step.init(case.init, args=(case.batch(0), *case.extra()))
        step.plan.save(path)
        again = autoshard.parallelize(case.step, plan=path)
        abstract, _ = again.abstract_state(case.init, args=(case.batch(0), *case.extra()))
        edited = Plan.from_json(json.loads(path.read_text()) | {"stages": [{"replicas": 2}] * 3})
        with pytest.raises(PlanError, match="on 2 workers, got 3"):
            autoshard.parallelize(case.step, plan=edited)(*case.args())
        with pytest.raises(InputError, match="the plan's mesh 2x2x2 needs 8 devices, and there are 4"):
            autoshard.parallelize(case.step, plan=path, devices=jax.devices()[:4])(*case.args())
    layers = params["layers"]
    on_stages = {s.device: s.index[0].indices(LAYERS)[:2] for s in layers.addressable_shards}
    assert on_stages == {d: ((0, 4) if i < 4 else (4, 8)) for i, d in enumerate(jax.devices())}
    assert abstract["layers"].sharding == layers.sharding
    assert moments["layers"].sharding.spec[0] == layers.sharding.spec[0] == "stage"
    assert Plan.load(path).to_json() == step.plan.to_json()
    assert {step.plan, Plan.load(path), pickle.loads(pickle.dumps(step.plan))} == {step.plan}
    assert step.plan.gap is None
    assert str(step.plan).startswith("2 stages x GPipe, ")
    assert "8 microbatches on each replica of a stage" in str(step.plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"schedule": "1f1b"},
            "schedule='1f1b' cannot be run by executor='spmd', in which all stages do the same",
        ),
        (
            {"stages": 16, "schedule": "circular", "microbatches": 8},
            "the 8 layers of the loop at .* are not a multiple of 16 stages",
        ),
        (
            {"executor": "two programs"},
            "no executor is called 'two programs'. Choose one of 'jit'",
        ),
        (
            {"executor": "one program"},
            "executor='one program' is now called 'spmd'. Write executor='spmd'",
        ),
        (
            {"executor": "a program per stage"},
            "executor='a program per stage' is now called 'mpmd'. Write executor='mpmd'",
        ),
        ({"executor": "jit"}, "executor='jit' is one program, without a pipeline, and stages=2 asks for one"),
        ({"stages": 1}, "executor='spmd' is of a pipeline, and there is none with stages=1"),
        (
            {"microbatches": 3},
            "32 examples cannot be split over the 1 replica of each stage in 3 microbatches",
        ),
        (
            {"stages": 4, "schedule": "circular", "microbatches": 1},
            "as many microbatches as workers, got 1 for 2",
        ),
    ],
)
def test_what_one_program_cannot_do_is_said(options, said):
    case = shared()
    with jax.enable_x64(True), pytest.raises(InputError, match=said):
        autoshard.parallelize(case.step, **({"stages": 2, "executor": "spmd"} | options))(*case.args())


def test_layers_that_are_no_loop_are_refused():
    case = make_mlp()
    with pytest.raises(InputError, match=r"has no jax\.lax\.scan over layers with parameters of their own"):
        autoshard.parallelize(case.step, stages=2, executor="spmd", microbatches=2)(*case.args())
