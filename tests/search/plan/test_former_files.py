"""Plan files of earlier versions are read, shown and run."""

import json

import jax
import numpy as np
import pytest

import autoshard
from autoshard.api import loaded
from autoshard.planning import fingerprint_of
from autoshard.search.ir.trace import trace_call
from tests.search.plan.former import BATCH, FOLDER, PARAMS, train_step

KINDS = {"jit": "jit", "mpmd": "mpmd", "spmd": "spmd", "plain": "spmd", "mixed": "mpmd"}
"""By file, its executor."""


def text_of(kind: str) -> str:
    return (FOLDER / f"{kind}.json").read_text()


@pytest.mark.parametrize(("kind", "executor"), KINDS.items(), ids=KINDS)
def test_a_file_is_as_it_was_written(kind, executor):
    plan = loaded(FOLDER / f"{kind}.json")[0]
    assert (plan.executor, plan.is_edited) == (executor, False)
    assert "predicted step time" in str(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_a_file_is_seen(kind, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text_of(kind).replace("P(None", "P('data'"))
    plan = loaded(path)[0]
    assert plan.is_edited == (kind == "jit")
    path.write_text(text_of(kind).replace('"first_op": 3', '"first_op": 2'))
    plan = loaded(path)[0]
    assert plan.is_edited == (kind == "mpmd")


@pytest.mark.devices
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_an_earlier_version_trains_as_one_device(kind, tmp_path):
    traced = trace_call("cpu", train_step, (PARAMS, BATCH), {})
    now = {"jax": jax.__version__, "fingerprint": fingerprint_of(traced)}  # that another JAX may change
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(text_of(kind)) | now))
    rng = np.random.default_rng(0)
    params, batch = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype) / 4, (PARAMS, BATCH))
    wanted = jax.jit(train_step)(params, batch)
    step = autoshard.parallelize(train_step, plan=path)
    params = jax.device_put(params, step.in_shardings(params, batch)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), step(params, batch), wanted)
