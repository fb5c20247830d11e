"""`parallelize(stages=...)`: a step that trains as a pipeline, and what is said where it cannot."""

import functools
import json
import pickle
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import compiled_peaks
from autoshard.compiled_peaks import Judgement
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_seconds
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.plan.plan import Plan
from tests.executors.agreement import Reference, assert_equal, run_steps
from tests.zoo import make_mlp, make_resnet

pytestmark = pytest.mark.devices

NUM_STEPS = 3


@functools.cache
def on_one_device() -> Reference:
    case = make_mlp(dtype=jnp.float64)
    return Reference.of(case, NUM_STEPS, case.init())


@functools.cache
def in_two_stages():
    """The step as a pipeline, called once."""
    case = on_one_device().case
    step = autoshard.parallelize(case.step, stages=2, microbatches=2)
    step(case.init(), case.batch(0))
    return step


@pytest.fixture
def mlp():
    with jax.enable_x64(True):
        yield on_one_device()


def of_mlp(**options):
    """A step of pipelines, called once."""
    case = make_mlp()
    return autoshard.parallelize(case.step, **options)(*case.args())


def test_a_step_trains_as_on_one_device_and_its_state_is_born_on_its_stages(mlp):
    case = mlp.case
    step = autoshard.parallelize(case.step, stages=2, schedule="1f1b", microbatches=4)
    state = step.init(case.init, args=(case.batch(0),))
    first, *_, last = (layer["w"].sharding.device_set for layer in state["params"])
    assert (first, last) == (set(jax.devices()[:4]), set(jax.devices()[4:]))
    assert_equal(run_steps(step, case, state, NUM_STEPS), mlp.results)
    assert [*map(step.plan.mesh_of, step.plan.stages)] == [{"replica": 2, "data": 2}] * 2


# --- pinned and offloaded arguments


def momentum(state, x):
    """A step of two wide layers with momentum, which only the update reads."""

    def loss(w):
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    old = state["m"]
    m = [0.9 * m + g for m, g in zip(old, jax.grad(loss)(state["w"]), strict=True)]
    return {"w": [w - 0.1 * m for w, m in zip(state["w"], m, strict=True)], "m": m}


def slowly(*values):
    """Pins like others, of other arguments or on other meshes."""
    return pytest.param(*values, marks=pytest.mark.slow)


WIDTH = 192
"""Momenta are large enough to be split over replicas."""


def of_momentum():
    keys = jax.random.split(jax.random.key(0), 3)
    w = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH for key in keys[:2]]
    return {"w": w, "m": [jnp.zeros_like(x) for x in w]}, jax.random.normal(keys[2], (8, WIDTH))


@pytest.mark.parametrize(
    ("pin", "mesh", "specs"),
    [
        ({"state['w'][0]": jax.P(None, "data")}, (2, 2), {"w0": jax.P(None, "data")}),
        slowly({"state['m'][0]": jax.P()}, (2, 2), {"m0": jax.P()}),
        ({"state['m'][*]": jax.P("data")}, (2, 2), dict.fromkeys(("m0", "m1"), jax.P("data"))),
        slowly(
            {"state['m']": "P('data', 'model')"},
            (1, 2, 2),
            dict.fromkeys(("m0", "m1"), jax.P("data", "model")),
        ),
        slowly({"state['w'][1]": jax.P("model")}, None, {"w1": jax.P("model")}),
        ({"x": jax.P("data")}, (2, 2), {"x": jax.P("data")}),
        ({"state['m'][0]": "P('data') on host"}, (2, 2), {"m0": jax.P("data")}),
    ],
)
def test_a_pinned_argument_rests_as_pinned_on_each_replica_of_its_stage(pin, mesh, specs, tmp_path):
    state, x = of_momentum()
    options = {"stages": 2, "microbatches": 2, "schedule": "1f1b"}
    step = autoshard.parallelize(momentum, **options, mesh=mesh, pin=pin)
    wanted = momentum(momentum(state, x), x)
    rests, there = step.in_shardings(state, x)
    after = step(step(jax.device_put(state, rests), x), x)
    for got, want in zip(*map(jax.tree.leaves, (after, wanted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    places = {f"{kind}{n}": sharding for kind in "wm" for n, sharding in enumerate(rests[kind])} | {
        "x": there
    }
    assert {name: places[name].spec for name in specs} == specs
    assert jax.tree.map(lambda array: array.sharding, after) == rests
    step.plan.save(tmp_path / "plan.json")
    again = autoshard.parallelize(momentum, plan=tmp_path / "plan.json")
    assert again.in_shardings(state, x) == (rests, there)
    assert again.plan == step.plan


def test_a_stages_optimizer_state_rests_on_its_host(tmp_path):
    state, x = of_momentum()
    options = {"stages": 2, "microbatches": 2, "schedule": "1f1b", "mesh": (2, 2)}
    step = autoshard.parallelize(momentum, **options, offload=("optimizer_state",))
    wanted = momentum(momentum(state, x), x)
    rests, _ = step.in_shardings(state, x)
    assert {kind: {s.memory_kind for s in rests[kind]} for kind in "wm"} == {
        "w": {"device"},
        "m": {"pinned_host"},
    }
    after = step(step(jax.device_put(state, rests), x), x)
    assert jax.tree.map(lambda array: array.sharding, after) == rests
    one_momentum = WIDTH * WIDTH * 4
    assert [stage.host_bytes for stage in step.plan.estimates.stages] == [one_momentum // 4] * 2
    step.plan.save(tmp_path / "plan.json")
    again = autoshard.parallelize(momentum, plan=tmp_path / "plan.json")
    same = again(again(state, x), x)
    assert again.plan == step.plan
    assert again.plan.gap == step.plan.gap
    assert 0 < (step.plan.gap or 0) < 1
    for got, loaded, want in zip(*map(jax.tree.leaves, (after, same, wanted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(got, loaded)


def test_without_a_pin_state_that_only_the_update_reads_is_split_over_replicas():
    state, x = of_momentum()
    step = autoshard.parallelize(momentum, stages=2, microbatches=2, mesh=(2, 2), schedule="1f1b")
    rests, _ = step.in_shardings(state, x)
    assert "replica" in rests["m"][0].spec


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pin": {"state['w'][0]": jax.P("replica")}}, "no stage's mesh has an axis 'replica' for pins"),
        ({"pin": {"x": jax.P("data")}, "executor": "spmd"}, "pin= is for stages with a program each"),
        ({"pin": {"state['m'][0]": jax.P("model")}, "mesh": (2, 2)}, "pin \"state['m'][0]\": .*'model'"),
        (
            {"offload": ("optimizer_state",), "executor": "spmd"},
            "offload= is for stages with a program each, and executor='spmd' is one program for all",
        ),
        (
            {"pin": {"state['m'][0]": "P('data') on host"}, "offload": "never"},
            'rests on the host, and offload="never" forbids it',
        ),
        (
            {"pin": {"state['m'][0]": jax.P(None, None, "data")}, "mesh": (2, 2)},
            "2 dimensions, and the spec is for 3",
        ),
    ],
)
def test_what_cannot_be_pinned_on_stages_is_said(options, said):
    with pytest.raises(InputError, match=said.replace("[", "\\[").replace("]", "\\]")):
        autoshard.parallelize(momentum, stages=2, **options)(*of_momentum())


# --- the choices of a decision


OF_A_PRODUCT = {
    "P(), P() -> P()",
    "P('data'), P() -> P('data')",
    "P(None, 'data'), P('data') -> P(unreduced={'data'})",
    "P(), P(None, 'data') -> P(None, 'data')",
}


def scanned(w, x):
    """A step of layers in a loop."""

    def loss(w):
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize(("step", "executor"), [(momentum, "mpmd"), (scanned, "spmd")])
def test_a_pipelines_decision_has_the_choices_of_one_programs(step, executor):
    args = of_momentum() if step is momentum else (jnp.ones((2, 16, 16)), jnp.ones((8, 16)))
    plan = autoshard.search(
        step,
        *args,
        cluster="8xCPU",
        stages=2,
        microbatches=2,
        mesh=(1, 4),
        executor=executor,
        schedule="gpipe",
    )
    name, total = (
        "forward dot_general",
        next(n for n in plan.shardings[0].ops if n.startswith("backward carry")),
    )
    assert {*autoshard.choices(step, *args, plan=plan, name=name)} == OF_A_PRODUCT
    sums = autoshard.choices(step, *args, plan=plan, name=total)
    assert plan.shardings[0].ops[total] in sums
    assert not any("unreduced" in text for text in sums), "no program hands on the terms of a sum"


def test_each_choice_of_a_pipelines_decision_can_be(tmp_path):
    state, x = of_momentum()
    shapes = dict(cluster="8xCPU", stages=2, microbatches=2, mesh=(1, 4), schedule="1f1b")
    plan = autoshard.search(momentum, state, x, **shapes)
    data, name = plan.to_json(), "state['m'][0]"
    for text in autoshard.choices(momentum, state, x, plan=plan, name=name):
        data["shardings"][0]["arguments"][name] = text
        (path := tmp_path / "plan.json").write_text(json.dumps(data))
        step = autoshard.parallelize(momentum, plan=path)
        spec = step.in_shardings(state, x)[0]["m"][0].spec
        assert str(spec).replace(",)", ")") == text


# --- arguments that are given up


def two_layers(w, x, cache):
    """A step of two layers, with an array besides that has a result like it."""

    def loss(w):
        return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

    return [v - 0.1 * g for v, g in zip(w, jax.grad(loss)(w), strict=True)], jnp.sin(cache)


@pytest.mark.parametrize("donate", [None, "cache"])
def test_what_is_given_up_is_reused_where_a_result_is_like_it(donate):
    w, x, cache = [jnp.ones((16, 16)) / 16] * 2, jnp.ones((8, 16)), jnp.ones((4, 3))
    step = autoshard.parallelize(two_layers, stages=2, microbatches=2, donate=donate)
    wanted = two_layers(w, x, cache)
    for _ in range(2):
        _, _, there = step.in_shardings(w, x, cache)
        given = jax.device_put(cache + 0, there)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), step(w, x, given), wanted)
        assert given.is_deleted() == (donate is not None)


def test_a_state_made_the_ordinary_way_is_placed_by_the_first_call(mlp):
    assert_equal(run_steps(in_two_stages(), mlp.case, mlp.case.init(), NUM_STEPS), mlp.results)


def test_a_saved_plan_is_used_again(mlp, tmp_path):
    case, path = mlp.case, tmp_path / "plan.json"
    step = in_two_stages()
    step.plan.save(path)
    assert Plan.load(path).to_json() == step.plan.to_json()
    assert {step.plan, Plan.load(path), pickle.loads(pickle.dumps(step.plan))} == {step.plan}
    schedule, predicted = step.plan.schedule, format_seconds(step.plan.estimates.step_s)
    assert repr(step).endswith(f": 2 stages, schedule {schedule}, {predicted} a step predicted>")
    again = autoshard.parallelize(case.step, plan=path)
    assert_equal(run_steps(again, case, case.init(), NUM_STEPS), mlp.results)
    assert again.plan == step.plan


def test_an_edited_cut_is_honoured_and_an_impossible_one_refused(mlp):
    case = mlp.case
    data = in_two_stages().plan.to_json()
    data["stages"][1]["first_op"] = 1
    edited = autoshard.parallelize(case.step, plan=Plan.from_json(data))
    assert_equal(run_steps(edited, case, case.init(), NUM_STEPS), mlp.results)
    data["stages"][1]["first_op"] = 1000
    with pytest.raises(PlanError, match=r"ascending ones below \d+, got \[0, 1000\]"):
        autoshard.parallelize(case.step, plan=Plan.from_json(data))(case.init(), case.batch(0))


def test_a_batch_of_another_size_has_its_own_pipeline(mlp):
    case = mlp.case
    step = autoshard.parallelize(case.step, stages=2, microbatches=2)
    state, _ = step(case.init(), case.batch(0))
    half = jax.tree.map(lambda x: x[:12], case.batch(1))
    with pytest.warns(autoshard.AutoshardWarning, match="planning once for the new ones too$"):
        state, metrics = step(state, half)
    wanted, _ = jax.jit(case.step)(case.init(), case.batch(0))
    np.testing.assert_allclose(metrics["loss"], jax.jit(case.step)(wanted, half)[1]["loss"], rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 0}, "at least 1 stage, got 0"),
        ({"stages": "2"}, "wanted stages as a whole number, or 'auto' to have it searched, got '2'"),
        ({"stages": 2.0}, "wanted stages as a whole number, or 'auto' to have it searched, got 2.0"),
        ({"stages": 2, "schedule": "2f2b"}, "no schedule is called '2f2b'. Choose one of gpipe"),
        ({"schedule": "1f1b"}, "schedule='1f1b' is of a pipeline, and there is none"),
        ({"stages": 16}, "8 devices in nodes of 8 cannot be split into 16 stages"),
        (
            {"stages": 6, "schedule": "zb-v"},
            "8 devices in nodes of 8 cannot be split into 6 stages under 'zb-v'",
        ),
        ({"stages": 2, "microbatches": 7}, "24 examples, which is not a multiple of 7"),
        ({"stages": 2, "mesh": (8,)}, "wanted the mesh of a stage as its number of replicas and"),
        ({"stages": 2, "mesh": (2, 4)}, "take 16 devices"),
        ({"stages": 2, "offload": ("residuals",)}, "residuals wait on the host in one program only"),
        ({"stages": 2, "offload": ("moments",)}, "has no argument 'moments' that can rest on the host"),
    ],
)
def test_what_cannot_be_asked_for_is_said(options, said):
    with pytest.raises(InputError) as caught:
        of_mlp(**options)
    assert said in str(caught.value)


def test_numbers_of_microbatches_that_do_not_suit_the_schedule_are_passed_over():
    case = make_mlp(batch=12)  # 3 on each of 4 replicas are no groups of 2, as on 2 workers

    def interleaved(microbatches=None):
        return autoshard.search(
            case.step,
            *case.abstract_args(),
            cluster="8xCPU",
            stages=4,
            schedule="interleaved-1f1b",
            microbatches=microbatches,
        )

    plan = interleaved()
    assert plan.executor == "mpmd"
    assert plan.microbatches % 2 == 0
    with pytest.raises(InputError, match="wants microbatches in groups of as many as there are workers"):
        interleaved(3)


def test_more_stages_than_there_is_to_cut_are_refused():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    with pytest.raises(InputError, match=r"wanted 8 stages, but .* Ask for fewer stages"):
        autoshard.parallelize(step, stages=8, microbatches=2)(jnp.ones((4, 2)), jnp.ones((8, 4)))


def test_a_loss_of_which_all_is_recomputed_has_nothing_to_cut():
    def step(w, x):
        return w - 0.1 * jax.grad(jax.checkpoint(lambda w: jnp.mean(jnp.tanh(x @ w) @ w)))(w)

    args = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((32, 16), "float32")
    with pytest.raises(
        InputError, match="wanted 2 stages, but the step's forward phase can be cut into 1 at most"
    ):
        autoshard.search(step, *args, cluster="8xCPU", stages=2, microbatches=2)


def test_bfloat16_sums_in_one_program_with_replicas_and_devices_of_these():
    def step(w, x):
        def loss(w):
            return jnp.mean(
                jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].astype(jnp.float32) ** 2
            )

        value, grads = jax.value_and_grad(loss)(w)
        return w - 0.5 * grads, value

    w = jax.random.normal(jax.random.key(0), (4, 16, 16), jnp.bfloat16) / 4
    x = jax.random.normal(jax.random.key(1), (16, 16), jnp.bfloat16)
    wanted, _ = jax.jit(step)(w, x)
    options = {"stages": 2, "microbatches": 2, "mesh": (2, 2), "executor": "spmd"}
    got, _ = autoshard.parallelize(step, **options)(jnp.copy(w), x)
    np.testing.assert_allclose(got.astype(jnp.float32), wanted.astype(jnp.float32), atol=2e-2)


def test_examples_that_depend_on_one_another_are_the_reason_given():
    case = make_resnet()  # with batch norm
    with pytest.raises(NotSplittableError, match="cannot be split into microbatches"):
        autoshard.parallelize(case.step, stages=2, microbatches=2)(*case.args())


def test_state_of_ones_own_is_placed_in_later_calls_too_and_kept(mlp):
    case, step = mlp.case, in_two_stages()
    wanted, _ = step(case.init(), case.batch(0))
    anew, there = case.init(), jax.device_put(case.init(), jax.devices()[7])
    for state in (anew, there, jax.tree.map(np.asarray, anew)):
        assert_equal(step(state, case.batch(0))[0], wanted)
    assert not any(x.is_deleted() for x in jax.tree.leaves((anew, there)))


def test_where_the_state_will_lie_is_said_beforehand(mlp):
    case = mlp.case
    step = autoshard.parallelize(case.step, plan=in_two_stages().plan)
    shapes = step.abstract_state(case.init, args=(case.batch(0),))
    state = step.init(case.init, args=(case.batch(0),))
    alike = jax.tree.map(
        lambda s, x: (s.shape, s.dtype, s.sharding) == (x.shape, x.dtype, x.sharding), shapes, state
    )
    assert all(jax.tree.leaves(alike))


def test_what_it_does_is_told():
    said, case = [], make_mlp()
    autoshard.parallelize(case.step, stages=2, microbatches=2, progress=said.append)(*case.args())
    assert said[0] == "tracing"
    assert said[-1] == "compiling"
    assert "2 microbatches, 4 replicas of each stage" in said


@functools.cache
def in_four_replicas():
    """The step with momentum as a pipeline, called once."""
    step = autoshard.parallelize(momentum, stages=2, microbatches=2, mesh=(4, 1), schedule="1f1b")
    step(*of_momentum())
    return step


def outputs(w, x):
    return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)


@pytest.mark.parametrize("examples", [8, 6])
def test_an_evaluation_like_a_pipeline_reads_the_state_where_its_stages_have_it(examples):
    """Of 6 examples two replicas of a stage get one microbatch."""
    state, x = of_momentum()
    options = {"stages": 2, "microbatches": 2, "mesh": (2, 2), "schedule": "1f1b"}
    step = autoshard.parallelize(momentum, **options, offload=("optimizer_state",))
    state = step(state, x)
    evaluate = autoshard.parallelize(lambda state, x: outputs(state["w"], x), like=step)
    wanted = outputs(jax.device_get(state["w"]), x[:examples])
    np.testing.assert_allclose(evaluate(state, x[:examples]), wanted, rtol=1e-5)
    rests, _ = evaluate.in_shardings(state, x[:examples])
    assert rests == jax.tree.map(lambda array: array.sharding, state)
    assert not any(array.is_deleted() for array in jax.tree.leaves(state))
    assert evaluate.plan.microbatches == examples // 4


@pytest.mark.parametrize(
    ("evaluation", "args", "said"),
    [
        (lambda w, x: jnp.mean(x @ w), (jnp.ones((3, 3)), jnp.ones((8, 3))), "which shares no argument"),
        (outputs, ([jnp.ones((WIDTH, WIDTH))] * 2, jnp.ones((7, WIDTH))), "cannot be split over the 4 repl"),
    ],
)
def test_what_cannot_be_like_a_pipeline_is_said(evaluation, args, said):
    like = autoshard.parallelize(evaluation, like=in_four_replicas())
    with pytest.raises(InputError, match=said):
        like(*args)


def test_one_stage_is_no_pipeline():
    case = make_mlp()
    step = autoshard.parallelize(case.step, stages=1)
    step(*case.args())
    assert isinstance(step.plan, autoshard.Plan)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"workers": "two"}, 'my.json: workers must be a whole number, got "two"'),
        ({"stages": [{"first_op": -1}]}, r"my.json: stages\[0\].first_op must be at least zero"),
        ({"stages": [{"replicas": 0}]}, r"stages\[0\].replicas must be more than zero, got 0"),
        ({"stages": []}, r"my.json: stages must be given for one at least"),
        ({"stages": [{}, {"sharding": 7}]}, r"stages\[1\].sharding is 7, and the last of shardings is 0"),
        ({"executor": "jit"}, r"executor 'jit' is one program, no pipeline, and there are 2 stages"),
        ({"executor": "mmpd"}, r"executor must be one of 'jit', 'mpmd', 'spmd', got 'mmpd'"),
        (
            {"schema": "autoshard.pipeline/9"},
            "has schema 'autoshard.pipeline/9'; this autoshard reads 'autoshard.plan/2', 'autoshard.plan/1', ",
        ),
    ],
)
@pytest.mark.usefixtures("mlp")
def test_what_is_wrong_in_a_plan_is_named(changed, said):
    with pytest.raises(PlanError, match=said):
        Plan.from_json(in_two_stages().plan.to_json() | changed, "my.json")


@pytest.mark.usefixtures("mlp")
def test_a_plan_of_another_step_is_refused():
    other = make_mlp(widths=(32, 16, 16))
    with pytest.raises(PlanError, match="made for another step"):
        autoshard.parallelize(other.step, plan=in_two_stages().plan)(*other.args())


def test_the_programs_that_run_are_emitted_one_by_one():
    case = make_mlp()
    args, options = (
        case.abstract_args(),
        {"stages": 2, "schedule": "zb-h1", "microbatches": 4, "mesh": (2, 2)},
    )
    plan = autoshard.search(case.step, *args, cluster="8xCPU", **options)
    emitted = autoshard.emit(case.step, *args, plan=plan)
    named = {program.name for program in emitted}
    assert named > {
        "forward 0",
        "forward 1",
        "backward 1",
        "weight gradient 0",
        "weight gradient 1",
        "reduce 0",
        "update 0",
    }
    halves = [set(jax.devices()[:4]), set(jax.devices()[4:])]
    for program in emitted:
        assert set(program.mesh.devices.flat) in halves
        assert all(a.sharding.mesh == program.mesh for a in program.args)
    last = next(program for program in emitted if program.name == "update 1")
    last.fn.lower(*last.args)


def test_a_pipeline_cannot_be_lowered_as_one_program():
    case = make_mlp()
    with pytest.raises(InputError, match="runs many programs"):
        autoshard.parallelize(case.step, stages=2).lower(*case.abstract_args())


def test_as_many_stages_as_are_fastest_may_be_none():
    case = make_mlp()
    options = {"cluster": "16xA100-80GB", "microbatches": 2}
    found = autoshard.search(case.step, *case.abstract_args(), stages="auto", **options)
    one = autoshard.search(case.step, *case.abstract_args(), **options)
    staged = autoshard.search(case.step, *case.abstract_args(), stages=2, **options)
    assert found.estimates.step_s <= min(one.estimates.step_s, staged.estimates.step_s)


def test_a_pipeline_is_found_by_itself_where_one_program_waits():
    gpus = parse_cluster("8xL4")
    flops = tuple((dtype, rate * 1e-5) for dtype, rate in gpus.device.flops_per_s)
    device = replace(gpus.device, flops_per_s=flops, memory_bytes_per_s=gpus.device.memory_bytes_per_s * 1e-3)
    slow = replace(
        gpus, device=device, intra=replace(gpus.intra, bytes_per_s=1e6), num_devices=2, devices_per_node=2
    )
    case = make_mlp(widths=(256,) * 5, batch=64)
    step = autoshard.parallelize(case.step, cluster=slow, devices=jax.devices()[:2])
    state, metrics = step(*case.args())
    found = step.plan
    one = autoshard.search(case.step, *case.abstract_args(), cluster=slow, stages=1)
    assert found.estimates.step_s < one.estimates.step_s
    wanted, alike = jax.jit(case.step)(*case.args())
    np.testing.assert_allclose(metrics["loss"], alike["loss"], rtol=1e-5)
    with pytest.warns(autoshard.AutoshardWarning, match="planning once for the new ones too$"):
        step(state, jax.tree.map(lambda x: x[:32], case.batch(1)))
    assert step.plan.executor == "mpmd"
    again = autoshard.parallelize(case.step, like=step)
    _, metrics = again(wanted, case.batch(1))
    np.testing.assert_allclose(
        metrics["loss"], jax.jit(case.step)(wanted, case.batch(1))[1]["loss"], rtol=1e-5
    )
    assert again.plan.stages == found.stages


def test_the_compiler_has_the_time_that_a_search_of_pipelines_leaves(monkeypatch):
    timeouts_s = []

    def judge(found, timeout_s):
        timeouts_s.append(timeout_s)
        return Judgement(1, 1, 1, True)

    monkeypatch.setattr(compiled_peaks, "judge_of_pipelines", lambda *_: judge)
    monkeypatch.setattr(compiled_peaks, "may_exceed", lambda *_: True)
    case = make_mlp()
    autoshard.search(case.step, *case.abstract_args(), cluster="8xCPU", stages=2, time_limit_s=60)
    (timeout_s,) = timeouts_s
    assert 0 < timeout_s < 60


def test_where_one_program_does_well_or_what_is_asked_for_means_one_no_pipeline_is_searched():
    case, said = make_mlp(widths=(4096,) * 5, batch=4096), []
    shapes = case.abstract_args()
    autoshard.search(case.step, *shapes, cluster="8xH100-80GB", progress=said.append)
    autoshard.search(case.step, *shapes, cluster="8xL4-Ethernet", mesh=(8,), progress=said.append)
    assert not any("pipeline" in line for line in said)


def test_a_step_without_microbatches_says_why_there_is_no_pipeline_and_gets_one_program():
    case, said = make_resnet(), []  # with batch norm
    plan = autoshard.search(
        case.step, *case.abstract_args(), cluster="8xL4", stages="auto", progress=said.append
    )
    assert isinstance(plan, autoshard.Plan)
    assert said[-1].startswith("no pipeline: ")


@pytest.mark.parametrize("stages", ["auto", 2])
def test_the_search_time_is_all_that_was_waited_for(stages):
    def step(weights, x):
        def loss(weights):
            return jnp.sum(functools.reduce(lambda h, w: jnp.tanh(h @ w), weights, x))

        return jax.tree.map(jnp.subtract, weights, jax.grad(loss)(weights))

    weights, x = [jnp.ones((8, 8))] * 12, jnp.ones((16, 8))
    autoshard.search(step, weights[:2], x, cluster="2xH100-80GB")  # loads what any first call loads
    start_s = time.perf_counter()
    plan = autoshard.search(step, weights, x, cluster="2xH100-80GB", stages=stages)
    waited_s = time.perf_counter() - start_s
    parts = {"jit", "pipelines"} if stages == "auto" else {"spmd"}
    assert not parts.isdisjoint(plan.search_s)
    assert 0.8 * waited_s < sum(plan.search_s.values()) <= waited_s
    assert f"search time: {format_seconds(sum(plan.search_s.values()))} (trace " in str(plan)


def test_arrays_that_only_the_update_reads_are_none_of_the_loops_parameters():
    """Their numbers in the step include the loop's number among its ops."""
    masks = [np.tri(16, k=k, dtype="float32") for k in range(4)]

    def step(weights, x):
        def loss(weights):
            return jnp.mean(functools.reduce(lambda h, w: jnp.tanh(h @ w), weights, x) ** 2)

        return [w - m * g for w, g, m in zip(weights, jax.grad(loss)(weights), masks, strict=True)]

    array = jax.ShapeDtypeStruct((16, 16), "float32")
    plan = autoshard.search(step, [array] * 4, array, cluster="8xCPU", stages=2, microbatches=4)
    assert plan.executor == "mpmd"
    assert len(plan.stages) == 2
