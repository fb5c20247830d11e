"""Stages whose replicas share their work as the search finds it: they train as one device does."""

import jax
import pytest

from cost_model.hardware import parse_cluster
from executors.pipeline import build
from search.pipeline.planning import Pipeline, find
from search.pipeline.search import PipelineOptions
from tests.executors.agreement import assert_equal
from tests.executors.pipelines import trained
from tests.executors.test_pipeline import on_one_device

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
        ("t5", {"stages": 2, "mesh": (1, 4), "microbatches": 4, "schedule": "1f1b"}),
    ],
)
def test_stages_of_sharded_replicas_train_as_one_device(model, options):
    with jax.enable_x64(True):
        pipeline = found(model, **options)
        assert any(d for s in pipeline.shardings for spec in s.specs.values() for d in spec[1:] if d >= 0)
        assert_trains_alike(model, pipeline)


def test_what_does_not_fit_as_it_is_recomputes_and_trains_as_one_device():
    options = {"stages": 2, "mesh": (2, 2), "microbatches": 2, "schedule": "1f1b"}
    with jax.enable_x64(True):
        plenty = found("gpt_linen", **options).plan
        assert not plenty.retention
        scarce = found("gpt_linen", int(0.95 * plenty.estimates.peak_bytes), **options)
        assert scarce.plan.retention
        assert scarce.plan.estimates.peak_bytes <= 0.95 * plenty.estimates.peak_bytes
        assert_trains_alike("gpt_linen", scarce)
