"""A pipeline changes where and when numbers are computed, never which: three steps, in float64, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.cost_model.errors import InputError
from autoshard.executors.pipeline import build
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.schedules.registry import FAMILIES
from tests import zoo
from tests.executors.agreement import Reference, assert_equal
from tests.executors.pipelines import alike, pipelined, programs_of, schedule_of, trained
from tests.zoo import Case
from tests.zoo.case import Normal

NUM_STEPS = 3

MODELS = {
    "mlp": {"widths": (32, 48, 32, 48, 16)},
    "gpt_linen": {"num_layers": 1, "hidden": 16, "heads": 2, "seq": 8},  # tied embeddings, dropout
    "gpt_nnx_optimizer": {"num_layers": 1, "hidden": 16, "heads": 2, "seq": 8},
    "gpt_scan": {"num_layers": 5, "hidden": 16, "heads": 2, "vocab": 16, "optimizer": zoo.MOMENTUM},
    "vit": {"num_layers": 1, "hidden": 16, "heads": 2, "image": 8, "optimizer": zoo.MOMENTUM},
    "t5": {
        "num_layers": 1,
        "hidden": 16,
        "heads": 2,
        "source_seq": 8,
    },  # all decoder layers read what the encoder makes
    "resnet": {"batch_norm": False, "stage_features": (8,), "blocks_per_stage": (1,), "image": 8},
    "moe": {"num_layers": 1, "hidden": 16, "heads": 2, "optimizer": zoo.MOMENTUM},
}


@functools.cache
def on_one_device(model: str) -> Reference:
    return Reference.of(zoo.MAKERS[model](dtype=jnp.float64, **MODELS[model]), NUM_STEPS)


def assert_trains_alike(model: str, schedule, **options) -> PipelineProgram:
    with jax.enable_x64(True):
        single = on_one_device(model)
        program = pipelined(single.step, schedule, **options)
        assert_equal(trained(single, program), single.results)
    return program


QUICK = ("1f1b", "zb-v", "chimera")
"""Stages in a row, backward tasks in two on mirrored stages, and stages twice. An executor knows nothing else of a schedule;
`tests/search/pipeline/test_schedules.py` shows that each runs its tasks in an order that can be."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_each_schedule_trains_as_one_device(name):
    assert_trains_alike("mlp", schedule_of(name, 4, 8 if name == "dualpipe-v" else 4))


@pytest.mark.slow  # `test_numerics` runs the models, those above the schedules
@pytest.mark.parametrize(
    ("model", "name", "num_stages", "num_microbatches", "num_replicas"),
    [
        ("resnet", "zb-h2", 2, 4, 2),
        ("gpt_nnx_optimizer", "zb-h1", 2, 4, 1),
        ("t5", "1f1b", 2, 4, 1),
        ("vit", "gpipe", 2, 8, 1),
    ],
)
def test_each_model_trains_as_on_one_device(model, name, num_stages, num_microbatches, num_replicas):
    assert_trains_alike(model, schedule_of(name, num_stages, num_microbatches), num_replicas=num_replicas)


def test_unequal_stages_on_unequal_submeshes_train_as_one_device():
    assert_trains_alike("mlp", schedule_of("1f1b", 3, 4), sizes=(4, 2, 2), shares=(0.1, 0.7), num_replicas=2)


# --- what stages have to say to one another


WIDTH, BATCH = 8, 8


def clipped_step(params, batch, scale):
    """Layers, one of them used twice; the last reads the first one's result, too. The norm of all gradients clips them."""

    def loss_fn(params):
        first = jnp.tanh(batch["x"] @ params["a"])
        x = jnp.tanh(first @ params["shared"])
        x = jnp.tanh(x @ params["b"]) + first
        return jnp.mean((x @ params["shared"].T - batch["y"]) ** 2), x

    (loss, x), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    norm = optax.tree.norm(grads)
    params = jax.tree.map(lambda w, g: w - scale * g * jnp.minimum(1, 0.01 / norm), params, grads)
    return params, {"loss": loss, "norm": norm, "largest": x.max(), "by example": x, "one": jnp.ones(2)}


def clipped() -> Case:
    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        names = ("a", "shared", "b")
        return {
            n: jax.random.normal(k, (WIDTH, WIDTH), jnp.float64) for n, k in zip(names, keys, strict=True)
        }

    inputs = {"x": Normal((BATCH, WIDTH), jnp.float64), "y": Normal((BATCH, WIDTH), jnp.float64)}
    return Case("clipped", clipped_step, init, inputs, extra=lambda: (jnp.float64(0.1),))


def test_totals_over_all_stages_and_results_by_example_are_one_devices():
    with jax.enable_x64(True):
        single = Reference.of(clipped(), NUM_STEPS)
        program = pipelined(single.step, schedule_of("1f1b", 2, 2), num_replicas=2)
        assert_equal(trained(single, program), single.results)


def test_a_shared_parameters_gradients_cross_once_in_a_step():
    with jax.enable_x64(True):
        step = trace(clipped_step, *clipped().abstract_args())
        _, programs = programs_of(step, schedule_of("1f1b", 2, 4))
    crossing = [t for t in programs.transfers if programs.values[t.value].shape == (WIDTH, WIDTH)]
    assert crossing
    assert not any(t.is_per_microbatch for t in crossing)


# --- state


def test_state_is_donated_and_rests_on_its_stage():
    with jax.enable_x64(True):
        single = on_one_device("mlp")
        program = pipelined(single.step, schedule_of("1f1b", 2, 4))
        start = single.placed(program.shardings[0])
        after, _ = program.fn(start, single.case.batch(0))
    first, *_, last = (layer["w"] for layer in after["params"])
    assert first.sharding.device_set == set(jax.devices()[:4])
    assert last.sharding.device_set == set(jax.devices()[4:])
    assert all(x.is_deleted() for x in jax.tree.leaves(start))


def test_too_few_devices_are_refused():
    schedule = schedule_of("1f1b", 2, 4)
    case = zoo.make_mlp()
    _, programs = programs_of(trace(case.step, *case.abstract_args()), schedule)
    with pytest.raises(InputError, match="worker 1 needs 4 devices"):
        build(programs, schedule, [alike(4, 1)] * 2, jax.devices()[:6])


def test_a_call_of_another_shape_is_noticed():
    noticed = []
    schedule, case = schedule_of("1f1b", 2, 4), zoo.make_mlp()
    _, programs = programs_of(trace(case.step, *case.abstract_args()), schedule)
    program = build(programs, schedule, [alike(4, 1)] * 2, jax.devices(), lambda: noticed.append(True))
    batch = jax.tree.map(lambda x: np.concatenate([x, x]), case.batch(0))
    with pytest.raises(TypeError, match="wanted an argument of shape"):
        program.fn(jax.device_put(case.init(), program.shardings[0]), batch)
    assert noticed


def test_state_that_no_example_is_read_for_is_a_result():
    """The largest weight, seen in the forward phase: every microbatch sees the same."""

    def step(state, batch):
        def loss(weights):
            def body(carry, _):
                h, seen = carry
                return (jnp.tanh(h @ weights[0]), jnp.maximum(seen, jnp.abs(weights[0]).max())), None

            (h, seen), _ = jax.lax.scan(body, (batch["x"], state["seen"]), length=2)
            return jnp.mean((h @ weights[1]) ** 2), seen

        (value, seen), gradients = jax.value_and_grad(loss, has_aux=True)(state["weights"])
        weights = [w - 0.1 * g for w, g in zip(state["weights"], gradients, strict=True)]
        return {"weights": weights, "seen": seen}, value

    def init():
        return {"weights": [0.3 * jnp.eye(4), jnp.ones((4, 2))], "seen": jnp.zeros(())}

    with jax.enable_x64(True):
        case = Case("seen", step, init, {"x": Normal((8, 4), np.float64)})
        reference = Reference.of(case, 2)
        program = pipelined(reference.step, schedule_of("1f1b", 2, 2))
        assert_equal(trained(reference, program), reference.results)
