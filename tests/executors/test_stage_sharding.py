"""Stages whose replicas share their work as the search finds it: they train as one device does."""

import jax
import numpy as np
import pytest

from cost_model.hardware import parse_cluster
from executors.pipeline import build
from search.ir.spec import shard_size
from search.ir.trace import trace
from search.pipeline.planning import Pipeline, find
from search.pipeline.search import PipelineOptions
from search.plan.schedule import TaskKind
from tests.executors.agreement import assert_equal
from tests.executors.pipelines import trained
from tests.executors.test_pipeline import on_one_device
from tests.zoo.megatron import make_megatron

PLENTY_BYTES = 1 << 40


def found(model: str, memory_bytes: int = PLENTY_BYTES, **options) -> Pipeline:
    wanted = PipelineOptions(memory_bytes, **options)
    return find(on_one_device(model).step, parse_cluster("8xCPU"), wanted)


def assert_trains_alike(model: str, pipeline: Pipeline) -> None:
    program = build(pipeline.programs, pipeline.schedule, pipeline.shardings, jax.devices())
    assert_equal(trained(on_one_device(model), program), on_one_device(model).results)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gpt_scan", {"stages": 2, "mesh": (2, 2), "microbatches": 2, "schedule": "zb-h1"}),
        ("moe", {"stages": 2, "mesh": (1, 2, 2), "microbatches": 2}),
    ],
)
def test_stages_of_sharded_replicas_train_as_one_device(model, options):
    with jax.enable_x64(True):
        pipeline = found(model, **options)
        assert any(d for s in pipeline.shardings for spec in s.specs.values() for d in spec[1:] if d >= 0)
        assert_trains_alike(model, pipeline)


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
    case = make_megatron(num_layers=4, hidden=64, seq=32, batch=16)
    step = trace(case.step, *case.abstract_args())
    pipeline = find(step, parse_cluster("16xH100-80GB"), PipelineOptions(PLENTY_BYTES, 2, "1f1b", 2, (2, 4)))
    for stage, taken in enumerate(pipeline.plan.estimates.stages):
        np.testing.assert_allclose(handed_on_bytes(pipeline, stage), taken.residual_bytes, rtol=0.1)


def test_what_does_not_fit_as_it_is_recomputes_and_trains_as_one_device():
    options = {"stages": 2, "mesh": (2, 2), "microbatches": 2, "schedule": "1f1b"}
    with jax.enable_x64(True):
        plenty = found("gpt_linen", **options).plan
        assert not plenty.retention
        scarce = found("gpt_linen", int(0.95 * plenty.estimates.peak_bytes), **options)
        assert scarce.plan.retention
        assert scarce.plan.estimates.peak_bytes <= 0.95 * plenty.estimates.peak_bytes
        assert_trains_alike("gpt_linen", scarce)
