"""Stages whose replicas share their work as the search finds it: they train as one device does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.pipeline import build
from autoshard.search.ir.spec import shard_size
from autoshard.search.ir.trace import trace
from autoshard.search.memory.copies import SCOPE
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.planning import apply, find
from autoshard.search.plan.schedule import TaskKind
from tests.executors.agreement import Reference, assert_equal
from tests.executors.pipelines import trained
from tests.executors.test_pipeline import on_one_device
from tests.zoo.case import Case, Normal
from tests.zoo.gpt_linen import make_gpt_linen
from tests.zoo.megatron import make_megatron
from tests.zoo.mlp import make_mlp

PLENTY_BYTES = 1 << 40


def found(single: Reference, memory_bytes: int = PLENTY_BYTES, **options) -> Pipeline:
    return find(single.step, parse_cluster("8xCPU"), PipelineOptions(memory_bytes, **options))


def assert_trains_alike(single: Reference, pipeline: Pipeline) -> None:
    program = build(pipeline.programs, pipeline.schedule, pipeline.shardings, jax.devices())
    assert_equal(trained(single, program), single.results)


def looped() -> Case:
    """Layers in a loop, so wide that devices share them."""
    depth, width, batch = 4, 128, 16

    def step(weights, batch):
        def loss_fn(weights):
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch["x"], weights)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return weights - grads, {"loss": loss}

    def init():
        return jnp.asarray(np.random.default_rng(0).standard_normal((depth, width, width)) / width**0.5)

    return Case("looped", step, init, {"x": Normal((batch, width), jnp.float64)})


@pytest.mark.parametrize(
    ("model", "mesh", "schedule"),
    [
        ("mlp", (1, 2, 2), None),
        ("looped", (2, 2), "zb-h1"),
        pytest.param("gpt_scan", (2, 2), "zb-h1", marks=pytest.mark.slow),
        pytest.param("moe", (1, 2, 2), None, marks=pytest.mark.slow),
    ],
)
def test_stages_of_sharded_replicas_train_as_one_device(model, mesh, schedule):
    with jax.enable_x64(True):
        single = Reference.of(looped(), 2) if model == "looped" else on_one_device(model)
        pipeline = found(single, stages=2, mesh=mesh, microbatches=2, schedule=schedule)
        assert any(d for s in pipeline.shardings for spec in s.specs.values() for d in spec[1:] if d >= 0)
        assert_trains_alike(single, pipeline)


def handed_on_bytes(pipeline: Pipeline, stage: int) -> float:
    """What a device keeps of a microbatch for a stage's backward program."""
    programs, sharding = pipeline.programs, pipeline.shardings[stage]
    forward, backward = (programs.tasks[stage, kind] for kind in (TaskKind.FORWARD, TaskKind.BACKWARD))
    kept = {*forward.reads, *forward.makes} & {*backward.reads}
    values = [v for v in kept if programs.is_of_microbatch(v)]
    shapes = programs.values
    return sum(
        shapes[v].itemsize * shard_size(sharding.spec(v), shapes[v].shape, sharding.mesh_shape)
        for v in values
    )


def test_a_stage_keeps_what_is_predicted():
    case = make_megatron(num_layers=2, hidden=64, seq=32, batch=16)
    step = trace(case.step, *case.abstract_args())
    pipeline = find(step, parse_cluster("16xH100-80GB"), PipelineOptions(PLENTY_BYTES, 2, "1f1b", 2, (2, 4)))
    for stage, taken in enumerate(pipeline.plan.estimates.stages):
        np.testing.assert_allclose(handed_on_bytes(pipeline, stage), taken.residual_bytes, rtol=0.1)


def num_recomputed(pipeline: Pipeline, stage: int) -> int:
    """Ops of a stage's backward program that compute something again."""
    ops = pipeline.programs.tasks[stage, TaskKind.BACKWARD].graph.ops
    return sum(SCOPE in op.scope for op in ops)


def sent_back(pipeline: Pipeline, stage: int) -> set[int]:
    """What a stage's backward program reads of those behind it."""
    tasks = pipeline.programs.tasks
    made = {v for (n, kind), p in tasks.items() if n > stage and kind is TaskKind.BACKWARD for v in p.makes}
    return made & {*tasks[stage, TaskKind.BACKWARD].reads}


def blocks() -> Case:
    """Two products each, with an activation between them that is a chain of light ops."""
    depth, width, batch = 4, 16, 512

    def step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for w in params:
                x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), {"loss": loss}

    def init():
        rng = np.random.default_rng(0)
        shapes = {"up": (width, 2 * width), "down": (2 * width, width)}
        return [{name: jnp.asarray(rng.standard_normal(s) / 4) for name, s in shapes.items()}] * depth

    return Case("blocks", step, init, {"x": Normal((batch, width), jnp.float64)})


def transformer(num_layers: int, hidden: int) -> Case:
    sizes = {"num_layers": num_layers, "hidden": hidden, "heads": hidden // 16, "seq": 64, "batch": 8}
    return make_megatron(**sizes, dtype=jnp.float64)


@pytest.mark.parametrize(
    ("make", "share", "recomputing"),
    [
        (blocks, 0.52, [0, 1]),
        pytest.param(partial(transformer, 2, 32), 0.8, [0, 1], marks=pytest.mark.slow),
        pytest.param(partial(transformer, 4, 64), 0.8, [0], marks=pytest.mark.slow),
    ],
)
def test_a_stage_that_must_recomputes_and_all_train_as_one_device(make, share, recomputing):
    """The first of two holds twice as many microbatches; what it recomputes waits for no weight gradients of the other."""
    options = {"stages": 2, "mesh": (2, 2), "microbatches": 2, "schedule": "1f1b"}
    with jax.enable_x64(True):
        single = Reference.of(make(), 2)
        plenty = found(single, **options)
        most_bytes = plenty.plan.estimates.peak_bytes
        assert not plenty.plan.retention
        scarce = found(single, int(share * most_bytes), **options)
        assert scarce.plan.estimates.peak_bytes <= share * most_bytes
        assert [stage for stage in (0, 1) if num_recomputed(scarce, stage)] == recomputing
        assert len(sent_back(scarce, 0)) == len(sent_back(plenty, 0))
        assert_trains_alike(single, scarce)
        assert apply(single.step, scarce.plan).plan.to_json() == scarce.plan.to_json()


@pytest.mark.slow  # `test_what_is_faster_recomputed_than_stacked_...` of `tests/search/test_recomputation.py` shows it
def test_what_a_loop_would_stack_up_is_recomputed_where_that_is_faster():
    """Attention of long sequences, under a cap that is no matter."""
    case = make_megatron(num_layers=4, hidden=64, seq=512, batch=16, scanned=True)
    step = trace(case.step, *case.abstract_args())
    options = {"stages": 2, "mesh": (4, 1), "microbatches": 2, "schedule": "1f1b"}
    found, never = (
        find(step, parse_cluster("8xH100-80GB"), PipelineOptions(PLENTY_BYTES, **options, remat=remat)).plan
        for remat in (None, "never")
    )
    assert found.retention
    assert found.estimates.step_s < never.estimates.step_s


@pytest.mark.slow  # `tests/search/pipeline/test_op_shardings.py` shows what is imposed on a barrier
def test_what_is_imposed_on_a_barrier_goes_by_what_it_still_passes_on():
    """In a stage's program it waits for less than in the step: other operands than those would be told how they lie."""
    case = make_gpt_linen(num_layers=4, hidden=1024, heads=16, vocab=8192, seq=1024, batch=64)
    options = {"cluster": "8xH100-80GB", "memory": "3.2GiB", "stages": 2, "mesh": (2, 2), "microbatches": 4}
    plan = autoshard.search(case.step, *case.abstract_args(), **options)
    assert plan.executor == "mpmd"
    assert plan.retention
    programs = autoshard.emit(case.step, *case.abstract_args(), plan=plan)
    assert isinstance(programs, tuple)
    for program in programs:
        program.fn.trace(*program.args)


def test_the_update_moves_no_gradient_of_a_square_weight():
    """The sum of a product's terms is that of a transposed weight; its dims are of one size."""
    case = make_mlp(widths=(128,) * 5, batch=32)
    options = {"stages": 2, "mesh": (4, 1), "microbatches": 2, "executor": "mpmd"}
    plan = autoshard.search(case.step, *case.abstract_args(), cluster="8xCPU", **options)
    programs = autoshard.emit(case.step, *case.abstract_args(), plan=plan, devices=jax.devices())
    updates = [p.fn.lower(*p.args).compile().as_text() for p in programs if p.name.startswith("update")]
    assert len(updates) == 2
    assert all("all-gather" in text and "all-to-all" not in text for text in updates)
