"""Plan files of earlier versions are read, shown and run."""

import json

import jax
import numpy as np
import pytest

import autoshard
from autoshard.cost_model.errors import PlanError
from autoshard.planning import fingerprint_of
from autoshard.search.ir.trace import trace_call
from autoshard.search.plan.plan import Plan
from tests.search.plan.former import BATCH, FOLDER, PARAMS, train_step

KINDS = {"jit": "jit", "mpmd": "mpmd", "spmd": "spmd", "plain": "spmd", "mixed": "mpmd"}
"""By file, its executor."""


def text_of(kind: str) -> str:
    return (FOLDER / f"{kind}.json").read_text()


def plan_of(kind: str) -> Plan:
    return Plan.load(FOLDER / f"{kind}.json")


@pytest.mark.parametrize(("kind", "executor"), KINDS.items(), ids=KINDS)
def test_a_file_is_as_it_was_written(kind, executor):
    plan = plan_of(kind)
    assert (plan.executor, plan.is_edited) == (executor, False)
    assert "predicted step time" in str(plan)


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_a_file_is_seen(kind, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text_of(kind).replace("P(None", "P('data'"))
    plan = Plan.load(path)
    assert plan.is_edited == (kind == "jit")
    path.write_text(text_of(kind).replace('"first_op": 3', '"first_op": 2'))
    plan = Plan.load(path)
    assert plan.is_edited == (kind == "mpmd")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_says_today_what_it_said(kind):
    was, plan = json.loads(text_of(kind)), plan_of(kind)
    assert [plan.fingerprint, plan.cluster, plan.memory_bytes] == [
        was[key] for key in ("fingerprint", "cluster", "memory_bytes")
    ]
    said = was["decisions"] if kind == "jit" else was
    assert (plan.microbatches, plan.retention) == (said["microbatches"], said["retention"])
    tables = was["decisions"] if KINDS[kind] == "mpmd" else [was["decisions"]] if "decisions" in was else []
    for table, sharding in zip(tables, plan.shardings, strict=kind != "plain"):
        for name in ("mesh", "arguments", "ops", "copies"):
            assert getattr(sharding, name) == table[name]
    step = {key: was["estimates"][key] for key in ("step_s", "peak_bytes")}
    assert {key: getattr(plan.estimates, key) for key in step} == step


@pytest.mark.parametrize("kind", ["mpmd", "mixed"])
def test_the_stages_of_a_file_are_those_it_had(kind):
    was, plan = json.loads(text_of(kind)), plan_of(kind)
    stages = [{"first_op": stage.first_op, "mesh": plan.mesh_of(stage)} for stage in plan.stages]
    assert stages == was["stages"]
    assert [plan.groups, plan.schedule, plan.workers] == [
        tuple(was.get("groups", ())),
        was["schedule"],
        was["workers"],
    ]
    for stage, taken in zip(was["estimates"]["stages"], plan.estimates.stages, strict=True):
        assert {key: getattr(taken, key) for key in stage if key != "collectives"} == {
            key: value for key, value in stage.items() if key != "collectives"
        }


@pytest.mark.parametrize("kind", ["spmd", "plain"])
def test_the_equal_stages_of_a_file_are_those_it_had(kind):
    was, plan = json.loads(text_of(kind)), plan_of(kind)
    assert (len(plan.stages), {"stage": plan.workers, "replica": plan.num_replicas}) == (
        was["stages"],
        was["mesh"],
    )
    assert (plan.schedule, plan.num_devices) == (was["schedule"], 8)
    of_stage = ("forward_s", "backward_s", "update_s", "residual_bytes", "state_bytes")
    for taken in plan.estimates.stages:
        assert [getattr(taken, key) for key in of_stage] == [was["estimates"][key] for key in of_stage]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_saved_again_has_the_form_of_today(kind):
    plan = plan_of(kind)
    data = plan.to_json()
    again = Plan.from_json(data)
    assert data["schema"] == "autoshard.plan/2"
    assert (again, again.estimates, again.gap, again.is_edited) == (plan, plan.estimates, plan.gap, False)
    assert again.to_json() == data


@pytest.mark.parametrize(
    ("kind", "key"),
    [("jit", "decisions"), ("jit", "jax"), ("mpmd", "stages"), ("spmd", "mesh"), ("spmd", "estimates")],
)
def test_a_key_that_is_missing_is_named(kind, key):
    data = json.loads(text_of(kind))
    del data[key]
    with pytest.raises(PlanError, match=f"my.json: {key} is missing"):
        Plan.from_json(data, "my.json")
    with pytest.raises(PlanError, match=r"my.json"):
        Plan.from_json({**data, key: 7}, "my.json")


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
