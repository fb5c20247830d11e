"""Edits by hand are seen, and said."""

import copy

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import AutoshardWarning
from autoshard.search.plan.plan import Plan


def train_step(params, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


PARAMS = {
    "up": jax.ShapeDtypeStruct((64, 128), "float32"),
    "down": jax.ShapeDtypeStruct((128, 64), "float32"),
}
BATCH = jax.ShapeDtypeStruct((48, 64), "float32")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autoshard.search(train_step, PARAMS, BATCH, cluster="8xCPU", mesh=(2, 4))


def edit(plan: Plan, table: str, name: str, said: object) -> Plan:
    data = copy.deepcopy(plan.to_json())
    data["shardings"][0][table][name] = said
    return Plan.from_json(data)


def test_a_plan_as_it_was_made_is_not_edited(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.edited == ()
    assert not loaded.is_edited
    assert "by hand" not in str(loaded)


@pytest.mark.parametrize(
    ("table", "said"),
    [("arguments", "P('model', 'data')"), ("ops", "P()"), ("copies", "fresh P()"), ("mesh", 3)],
)
def test_what_was_edited_is_named(plan, table, said):
    name = next(iter(getattr(plan.decisions, table)))
    loaded = edit(plan, table, name, said)
    assert loaded.edited == ((table, name),)
    assert loaded.is_edited


def test_what_was_deleted_is_seen(plan):
    data = copy.deepcopy(plan.to_json())
    data["shardings"][0]["arguments"].popitem()
    changed = Plan.from_json(data)
    assert changed.edited == ()
    assert changed.is_edited
    assert "decisions deleted by hand" in str(changed)


ESTIMATES = ("step time", "peak memory", "collectives", "gap")


def test_a_summary_of_an_edited_plan_shows_no_estimates(plan):
    assert all(estimate in str(plan) for estimate in ESTIMATES)
    text = str(edit(plan, "arguments", "params['up']", "P()"))
    assert "1 decision edited by hand: params['up']\n  no estimates: they were made before" in text
    assert not any(estimate in text for estimate in ESTIMATES)


def changed(data, path, value):
    """A copy with one value changed; None removes it."""
    data = copy.deepcopy(data)
    *keys, last = path.split(".")
    inner = data
    for key in keys:
        inner = inner[key]
    inner.pop(last) if value is None else inner.update({last: value})
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("estimates.step_s", 1e-9),
        ("estimates.peak_bytes", 1),
        ("gap", 0.0),
        ("marks", None),
        ("cluster.name", "mine"),
        ("memory_bytes", 1 << 20),
        ("microbatches", 2),
        ("fingerprint", "0" * 16),
        ("seal", None),
    ],
)
def test_an_edit_of_anything_in_a_file_is_seen(plan, path, value):
    loaded = Plan.from_json(changed(plan.to_json(), path, value))
    assert loaded.is_edited
    assert Plan.from_json(loaded.to_json()).is_edited
    assert not any(estimate in str(loaded) for estimate in ESTIMATES)


def test_a_gap_that_was_written_by_hand_is_not_believed(plan):
    loaded = Plan.from_json(changed(plan.to_json(), "gap", 0.5))
    step = autoshard.parallelize(train_step, plan=loaded)
    step.lower(PARAMS, BATCH)
    assert step.plan.gap is None


def test_what_a_file_says_beside_a_plan_is_no_edit(plan):
    assert not Plan.from_json(plan.to_json() | {"note": "from Monday"}).is_edited


@pytest.mark.devices
def test_a_plan_that_ran_is_no_longer_edited(plan):
    changed = edit(plan, "arguments", "batch", "P()")
    step = autoshard.parallelize(train_step, plan=changed)
    step.lower(PARAMS, BATCH)
    assert step.plan.decisions.arguments["batch"] == "P()"
    assert not step.plan.is_edited


def test_what_is_decided_anew_for_an_edit_is_said(plan):
    changed = edit(plan, "ops", "forward mul", "P() -> P()")
    said = (
        "the plan: what contradicts forward mul, as edited by hand, is decided anew: backward mul -> backward"
    )
    with pytest.warns(AutoshardWarning, match=said):
        autoshard.emit(train_step, PARAMS, BATCH, plan=changed)
