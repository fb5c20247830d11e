"""What a search finds, the step of the plan takes: as it was, or as somebody edited it."""

import functools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import applying, driver
from autoshard.search.device.prediction import Prediction
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import RELATIVE_GAP
from autoshard.search.options import DEFAULT_TIME_LIMIT_S, Options
from autoshard.search.plan.plan import Plan, Sharding
from autoshard.search.result import SearchResult
from autoshard.search.solver import clock
from autoshard.search.solver.clock import WorkClock
from autoshard.search.step_problem import StepProblem
from tests.decisions import with_decisions
from tests.executors import plans
from tests.zoo import MAKERS, traced

MESHES = ((2, 4), (8,), (2, 3))
THREE_AXES = ("mlp", "resnet")
"""Models small enough to have them."""
SMALLEST = ("mlp", "gpt_scan", "resnet", "message_passing")
FASTEST = (*SMALLEST, "gpt_linen", "gpt_nnx", "lstm", "dlrm", "unet")
"""Models of which the plan of the smallest peak, and the fastest one, are made too; of all models one is drawn."""
QUICK = [(model, "drawn") for model in ("mlp", "gpt_scan", "resnet", "message_passing")]
QUICK += [("mlp", kind) for kind in ("fastest", "smallest")]
"""Products, loops, convolutions and look-ups, and each kind of plan, are among these."""
SLOW = [(model, "drawn") for model in MAKERS] + [(model, "fastest") for model in FASTEST]
SLOW += [(model, "smallest") for model in SMALLEST]
SLOW = [plan for plan in SLOW if plan not in QUICK]


NUM_LAYERS = 10


@functools.cache
def stack() -> Step:
    """Equal layers, wide enough that what the backward phase reads again may be kept, with momentum."""

    def train_step(layers, momentum, x):
        def loss(layers):
            y = x
            for layer in layers:
                y = jnp.tanh(y @ layer["w"] + layer["b"])
            return jnp.mean(y**2)

        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(layers))
        return jax.tree.map(lambda p, m: p - 0.1 * m, layers, momentum), momentum

    layer = {
        "w": jax.ShapeDtypeStruct((4096, 4096), "float32"),
        "b": jax.ShapeDtypeStruct((4096,), "float32"),
    }
    return trace(
        train_step, [layer] * NUM_LAYERS, [layer] * NUM_LAYERS, jax.ShapeDtypeStruct((8192, 4096), "float32")
    )


def found_with(pins: dict[int, P]) -> SearchResult:
    """The plan of the stack where some layers' weights are pinned."""
    return _found_with(tuple(pins.items()))


@functools.cache
def _found_with(pins: tuple[tuple[int, P], ...]) -> SearchResult:
    named = {f"layers[{n}]['w']": spec for n, spec in pins}
    return driver.find(stack(), CLUSTER, Options(plans.PLENTY_BYTES, (2, 4), named))


H100S = parse_cluster("8xH100-80GB")
CLUSTER = replace(H100S, device=replace(H100S.device, name="CPU"))
"""H100s that hide nothing, as simulated devices: where nearly all that is decided makes a difference."""


def reloaded(step: Step, plan: Plan, folder: Path) -> SearchResult:
    """What the step makes of a plan that was saved and loaded."""
    plan.save(folder / "plan.json")
    return applying.apply(step, Plan.load(folder / "plan.json"), Cluster.from_json(plan.cluster))


def assert_survives(step: Step, found: SearchResult, folder: Path) -> None:
    """Saved, loaded and given to its step, a plan means the same, op by op, and says it in the same bytes."""
    again = reloaded(step, found.plan, folder)
    assert again.chosen == found.chosen
    assert again.sharding.specs == found.sharding.specs
    assert again.sharding.reshards == found.sharding.reshards
    assert as_bytes(again.plan) == as_bytes(found.plan)


def as_bytes(plan: Plan) -> str:
    return json.dumps(plan.to_json()["shardings"])


# --- plans as they were found


@pytest.mark.parametrize(
    ("model", "kind"), [*QUICK, *(pytest.param(*plan, marks=pytest.mark.slow) for plan in SLOW)]
)
def test_every_plan_is_taken_by_its_step(model, kind, tmp_path):
    step, number = traced(model), list(MAKERS).index(model)
    mesh = (2, 2, 2) if model in THREE_AXES else MESHES[number % len(MESHES)]
    makers = {
        "fastest": lambda: plans.fastest(step, mesh),
        "smallest": lambda: plans.smallest(step, mesh),
        "drawn": lambda: plans.drawn(step, mesh, seed=number),
    }
    assert_survives(step, makers[kind](), tmp_path)


PINS = {
    "one layer otherwise": {3: P("model")},
    "two layers in two ways": {3: P("model"), 6: P("data", "model")},
    "layers in turn": {n: P(None, "model") if n % 2 else P("model") for n in range(NUM_LAYERS)},
    "all alike": dict.fromkeys(range(NUM_LAYERS), P("model")),
}


@pytest.mark.parametrize("case", PINS)
def test_a_plan_with_pins_is_taken_by_its_step(case, tmp_path):
    found = found_with(PINS[case])
    for n, spec in PINS[case].items():
        assert eval(found.plan.decisions.arguments[f"layers[{n}]['w']"], {"P": P}) == spec
    assert_survives(stack(), found, tmp_path)


def test_what_was_pinned_apart_stays_apart_where_all_lie_alike(tmp_path):
    """The search may choose for others what one is pinned to, and yet compute them otherwise."""
    found = found_with(PINS["one layer otherwise"])
    alike = {f"layers[{n}]['w']": "P('model')" for n in range(NUM_LAYERS)}
    again = reloaded(stack(), with_edits(found.plan, arguments=alike), tmp_path)
    assert len(again.chosen) == len(found.chosen) > len(found_with({}).chosen)
    assert again.plan.decisions.ops == found.plan.decisions.ops
    assert_survives(stack(), again, tmp_path)


def test_ops_follow_a_pin():
    """As in Megatron: one layer by columns and the next by rows."""

    def products(found: SearchResult) -> set[str]:
        is_inner = re.compile(r"forward dot_general #\d+").fullmatch
        return {text for name, text in found.plan.decisions.ops.items() if is_inner(name)}

    assert len(products(found_with({}))) == 1
    assert len(products(found_with(PINS["layers in turn"]))) == 2


# --- plans that somebody edited


def test_one_of_many_arguments_may_lie_otherwise(tmp_path):
    plan = found_with({}).plan
    edited = with_edits(plan, arguments={"layers[4]['w']": "P('model')"})
    again = reloaded(stack(), edited, tmp_path)
    assert again.plan.decisions.arguments == edited.decisions.arguments
    assert again.plan.decisions.ops == plan.decisions.ops
    assert again.plan.decisions.copies == plan.decisions.copies
    assert cost_s(again) > cost_s(found_with({}))
    assert_survives(stack(), again, tmp_path)


def test_one_of_many_copies_may_be_another(tmp_path):
    plan = found_with({}).plan
    name = "layers[4]['w'] -> backward"
    said = plan.decisions.copies[name]
    assert said == plan.decisions.copies["layers[5]['w'] -> backward"]
    assert said.startswith("kept ")
    edited = with_edits(plan, copies={name: said.replace("kept", "fresh")})
    again = reloaded(stack(), edited, tmp_path)
    assert again.plan.decisions == edited.decisions
    assert_survives(stack(), again, tmp_path)


def test_a_copy_that_is_the_arguments_own_array_follows_its_edits(tmp_path):
    plan = found_with({}).plan
    assert plan.decisions.copies["x -> backward"] == "same P()"
    again = reloaded(stack(), with_edits(plan, arguments={"x": "P('model')"}), tmp_path)
    assert again.plan.decisions.arguments["x"] == "P('model')"
    assert again.plan.decisions.copies["x -> backward"] != "same P()"
    assert again.plan.decisions.ops == plan.decisions.ops


def test_an_edited_copy_wins_over_what_contradicts_it(tmp_path):
    """A copy that is kept from the forward phase: the op that reads it there, otherwise until now, follows, and with it the
    copies of all others that it reads."""
    plan = found_with({}).plan
    name = "layers[4]['w'] -> backward"
    again = reloaded(stack(), with_edits(plan, copies={name: "kept P()"}), tmp_path)
    assert again.plan.decisions.copies[name] == "kept P()"
    assert again.plan.decisions.arguments == plan.decisions.arguments
    assert [name for name in again.anew if name in plan.decisions.ops] == [READER]
    assert changed(plan, again.plan) <= {name, *again.anew}
    assert reloaded(stack(), again.plan, tmp_path).plan.decisions == again.plan.decisions


READER = "forward dot_general #3"
"""Of most of the stack's weights."""


def changed(plan: Plan, other: Plan) -> set[str]:
    """The decisions that are not the same."""
    tables = [
        (getattr(plan.decisions, t), getattr(other.decisions, t)) for t in ("arguments", "ops", "copies")
    ]
    return {
        name for ours, theirs in tables for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)
    }


def test_an_edited_op_wins_over_the_copies_for_it(tmp_path):
    plan = found_with({}).plan
    name, worse = "forward dot_general #2", "P(), P() -> P()"
    assert plan.decisions.ops[name] != worse
    again = reloaded(stack(), with_edits(plan, ops={name: worse}), tmp_path)
    assert again.plan.decisions.ops == plan.decisions.ops | {name: worse}
    assert again.plan.decisions.arguments == plan.decisions.arguments
    assert again.anew
    assert set(again.anew) <= set(plan.decisions.copies)
    assert_survives(stack(), again, tmp_path)


@pytest.mark.parametrize("spec", ["P('model') on host", "P() on host", "P('data')", "P()"])
def test_what_rests_on_the_host_may_rest_otherwise_and_what_brings_it_follows(spec, tmp_path):
    def step(w, momentum, x):
        momentum = 0.9 * momentum + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * momentum, momentum

    w, x = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((64, 512), "float32")
    traced_step = trace(step, w, w, x)
    options = Options(plans.PLENTY_BYTES, (2, 4), offload=("optimizer_state",))
    plan = driver.find(traced_step, CLUSTER, options).plan
    assert plan.decisions.arguments["momentum"] not in (spec, spec.removesuffix(" on host"))
    again = reloaded(traced_step, with_edits(plan, arguments={"momentum": spec}), tmp_path)
    assert again.plan.decisions.arguments == plan.decisions.arguments | {"momentum": spec}
    assert again.anew
    assert all("offload" in name for name in again.anew)


def test_an_edit_that_names_nothing_is_refused(tmp_path):
    with pytest.raises(PlanError, match="'forward sin' names no op of this step"):
        reloaded(stack(), with_edits(found_with({}).plan, ops={"forward sin": "P()"}), tmp_path)


def test_two_edits_that_contradict_each_other_are_both_named(tmp_path):
    plan = found_with({}).plan
    name, other = "layers[4]['w'] -> backward", "P('data'), P(None, 'model') -> P('data', 'model')"
    assert plan.decisions.ops[READER] != other
    edited = with_edits(plan, copies={name: "kept P()"}, ops={READER: other})
    with pytest.raises(PlanError) as raised:
        reloaded(stack(), edited, tmp_path)
    message = str(raised.value)
    assert "contradict each other, and both were edited. Undo one of the two" in message
    for key, said in {name: "kept P()", READER: other}.items():
        assert f"{key!r} as {said!r}" in message


def test_where_edits_are_not_known_arguments_win(tmp_path):
    """In plans from before they were seen."""
    plan = found_with({}).plan
    edits = {"arguments": {"x": "P('model')"}, "copies": {"x -> backward": "same P()"}}
    again = reloaded(stack(), replace(with_edits(plan, **edits), marks=""), tmp_path)
    assert again.plan.decisions.arguments["x"] == "P('model')"
    assert again.anew == ("x -> backward",)


def test_a_cap_is_not_taken_for_a_contradiction(tmp_path):
    plan = found_with({}).plan
    small = replace(plan, memory_bytes=plan.estimates.peak_bytes // 2)
    with pytest.raises(
        InfeasibleError, match=r"do not fit its cap of .* a device\. Undo the last edit, or raise"
    ):
        reloaded(stack(), small, tmp_path)


def test_a_plan_that_fits_in_the_order_of_least_memory_is_taken(tmp_path, monkeypatch):
    """It may have been compiled and found to fit, whatever the scheduler's order is predicted to hold."""
    plan = found_with({}).plan
    tight = replace(plan, memory_bytes=plan.estimates.peak_bytes)
    monkeypatch.setattr(Prediction, "needed_bytes", 1.01 * tight.memory_bytes)
    assert as_bytes(reloaded(stack(), tight, tmp_path).plan) == as_bytes(plan)


@pytest.mark.parametrize(
    ("kind", "name", "worse"),
    [
        ("arguments", "layers[4]['w']", "P()"),
        pytest.param("arguments", "x", "P(None, 'model')", marks=pytest.mark.slow),  # as for a layer
        ("ops", "forward dot_general #2", "P(), P() -> P()"),
        ("copies", "layers[4]['w'] -> backward", "fresh P()"),
        pytest.param(
            "copies", "forward dot_general -> forward", "fresh P()", marks=pytest.mark.slow
        ),  # as above
    ],
)
def test_what_is_deleted_is_searched_again(kind, name, worse, tmp_path):
    plan = found_with({}).plan
    table = dict(getattr(plan.decisions, kind))
    edited = reloaded(stack(), with_edits(plan, **{kind: {name: worse}}), tmp_path)
    assert getattr(edited.plan.decisions, kind)[name] == worse
    del table[name]
    again = reloaded(stack(), with_decisions(plan, replace(plan.decisions, **{kind: table})), tmp_path)
    assert getattr(again.plan.decisions, kind).items() >= table.items()
    assert cost_s(again) == pytest.approx(cost_s(found_with({})), rel=1e-12)
    assert cost_s(again) < cost_s(edited)


def cost_s(found: SearchResult) -> float:
    """What the solver minimises."""
    return found.on_mesh.problem.cost_s(found.chosen)


def test_a_mesh_alone_is_a_plan(tmp_path):
    plan = found_with({}).plan
    bare = replace(plan, shardings=(Sharding(plan.decisions.mesh, {}, {}, {}),))
    again = reloaded(stack(), bare, tmp_path)
    assert cost_s(again) == pytest.approx(cost_s(found_with({})), rel=RELATIVE_GAP)


def test_an_argument_of_each_class_may_lie_otherwise(tmp_path):
    """Also where those that are decided together are not read by the same ops."""
    step = traced("gpt_linen")
    found = plans.drawn(step, (2, 4), seed=1)
    changes = dict(other_specs(found))
    assert len(changes) > 20
    again = reloaded(step, with_edits(found.plan, arguments=changes), tmp_path)
    assert again.plan.decisions.arguments == {**found.plan.decisions.arguments, **changes}
    assert again.plan.decisions.ops == found.plan.decisions.ops
    assert again.plan.decisions.copies.keys() == found.plan.decisions.copies.keys()
    assert_survives(step, again, tmp_path)


def other_specs(found: SearchResult) -> Iterator[tuple[str, str]]:
    """Of each class of several arguments, one, and a spec in which it could rest as well."""
    codec = found.on_mesh.codec
    for node, names in enumerate(codec.names):
        if len(names) > 1 and names[0] in found.plan.decisions.arguments:
            other = (found.chosen[node] + 1) % len(codec.texts(node))
            if other != found.chosen[node]:
                yield names[len(names) // 2], codec.text(node, other)


def test_arguments_apart_cost_what_they_cost_together():
    """However they are taken apart: under the same decisions, the same seconds and bytes."""
    step, bits = traced("gpt_linen"), random.Random(0)
    found = plans.drawn(step, (2, 4), seed=1)
    devices = plans.cluster((2, 4))
    halves = [bits.randrange(2) for _ in step.arguments]
    on_mesh = StepProblem.of(step, (), devices.device, decided=halves).on(devices, (2, 4))
    assert len(on_mesh.problem.num_labels) > len(found.chosen)
    chosen = [int(k[0]) for k in on_mesh.codec.allowed(found.plan.decisions, "plan") if len(k) == 1]
    assert on_mesh.codec.decisions(chosen) == found.plan.decisions
    assert on_mesh.problem.cost_s(chosen) == pytest.approx(found.on_mesh.problem.cost_s(found.chosen))
    assert on_mesh.memory.peak(chosen) == found.on_mesh.memory.peak(found.chosen)


# --- plans that cannot be


def test_a_plan_for_another_step(tmp_path):
    plan = found_with({}).plan
    message = r"was made for another step, 'train_step'\. In 'step', it takes \d+ arguments? "
    with pytest.raises(PlanError, match=message):
        reloaded(traced("mlp"), plan, tmp_path)


def test_pins_of_a_plan_that_are_no_texts():
    data = found_with({}).plan.to_json()
    data["options"]["pin"] = {"x": 7}
    with pytest.raises(PlanError, match=r"plan: options\.pin\.x must be text, got 7"):
        Plan.from_json(data)


def with_edits(plan: Plan, **edits: dict[str, str]) -> Plan:
    tables = {kind: dict(getattr(plan.decisions, kind)) | edited for kind, edited in edits.items()}
    return with_decisions(plan, replace(plan.decisions, **tables))


def chain_of_products():
    """A step of microseconds whose bound stays open."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(weights, momentum, x):
        grads = jax.grad(loss)(weights, x)
        momentum = [0.9 * m + g for m, g in zip(momentum, grads, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, momentum, strict=True)], momentum

    weights = [jax.ShapeDtypeStruct((2048, 2048), "float32")] * 6
    return trace(step, weights, weights, jax.ShapeDtypeStruct((512, 2048), "float32"))


def test_a_step_of_microseconds_is_not_searched_for_as_long_as_there_is_time(monkeypatch):
    """What is left open of its bound is worth little in thirty thousand steps."""
    spent = WorkClock()
    monkeypatch.setattr(Options, "new_clock", lambda options: spent)
    found = driver.find(chain_of_products(), parse_cluster("8xH100-80GB"), Options(80 << 30))
    assert found.plan.estimates.step_s < 1e-3
    assert spent.now_s < 0.7 * DEFAULT_TIME_LIMIT_S


def test_a_slow_machine_finds_the_plan_that_a_fast_one_finds(monkeypatch):
    """Byte for byte, though both ran out of time; where a user gives seconds, they are the machine's."""
    step, cluster = chain_of_products(), parse_cluster("8xH100-80GB")

    def found(seconds_a_reading, **asked):
        readings_s = count(step=seconds_a_reading)
        monkeypatch.setattr(clock, "thread_time", lambda: next(readings_s))
        asked = Options(80 << 30, (2, 4), **{"nominal_s": 0.1, **asked})
        return json.dumps(driver.find(step, cluster, asked).plan.to_json())

    fast, slow = 2e-3, 1.0
    assert found(fast) == found(slow)
    assert found(fast, time_limit_s=0.3) != found(slow, time_limit_s=0.3)
