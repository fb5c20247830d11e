"""What a user can do wrong, and what is said about it."""

import copy
import functools
import json
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import AutoshardWarning, ClusterError, InfeasibleError, InputError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_mesh, format_seconds


def train_step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def other_step(w, x):
    return w * 0.9 + 0 * x.sum()


W, X = jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((24, 16), "float32")


def arrays(w=W, x=X):
    return jnp.ones(w.shape), jnp.ones(x.shape)


search = functools.partial(autoshard.search, train_step, cluster="8xCPU")


# --- the hardware and the cap


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            "8xH1000",
            r"unknown preset 'H1000' in '8xH1000' \(did you mean 'H100-80GB'\?\); presets: V100-16GB, .*CPU",
        ),
        ("H100-80GB", r"wanted a cluster as '<count>x<GPU>' or a JSON file, got 'H100-80GB'.*8xH100-80GB"),
        ("13xH100-80GB", "13 devices in '13xH100-80GB' do not divide into equal nodes; the nearest counts"),
        ("nowhere.json", "nowhere.json"),
        (8, "wanted a cluster as '<count>x<GPU>', a JSON file or a Cluster, got 8"),
    ],
)
def test_unknown_clusters(cluster, message):
    with pytest.raises(ClusterError, match=message):
        autoshard.search(train_step, W, X, cluster=cluster)


def cluster_file(tmp_path, **changes):
    data = parse_cluster("8xH100-80GB").to_json() | changes
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": float("nan")}, r"mine\.json.*(NaN|num_devices)"),
        ({"intra": {"bandwidth": "nanGB/s", "latency": "1us"}}, r"mine\.json.*intra\.bandwidth.*finite"),
        (
            {"intra": {"bandwidth": "450 furlongs", "latency": "1us"}},
            r"mine\.json.*intra\.bandwidth.*450 furlongs",
        ),
        ({"host_memory_per_node": "-1GiB"}, r"mine\.json.*host_memory_per_node.*not negative"),
    ],
)
def test_a_cluster_file_with_numbers_that_are_none(tmp_path, changes, message):
    with pytest.raises(ClusterError, match=message):
        autoshard.search(train_step, W, X, cluster=cluster_file(tmp_path, **changes))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            "70 gigs",
            r"wanted a size such as '70GiB', got the unit 'gigs' in '70 gigs'; units \(case matters\): B, KiB",
        ),
        ("70", "got '70' without a unit"),
        ("nanGiB", "must be finite"),
        (-1, "cannot be negative, got -1 bytes"),
        (0.5, "whole number of bytes, got 0.5"),
    ],
)
def test_unknown_units(memory, message):
    with pytest.raises(InputError, match=message):
        search(W, X, memory=memory)


def test_a_cap_that_nothing_fits():
    with pytest.raises(InfeasibleError) as caught:
        search(W, X, memory=16, stages=1)
    assert caught.value.exit_status == 3


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (
            "optimizer_state",
            "wanted offload=\"never\", some of .* in a tuple, or nothing to have it searched, got 'optimizer_state'",
        ),
        (
            ("weights",),
            r"has no argument 'weights'.* some of \('optimizer_state', 'frozen_weights', 'parameters', .*\) or the path",
        ),
        (("optimizer_state",), "has no optimizer_state that can rest on the host, of 64 KiB or more"),
        (
            ("frozen",),
            r"has no argument 'frozen' \(did you mean 'frozen_weights'\?\) that can rest on the host",
        ),
    ],
)
def test_what_cannot_be_on_the_host(offload, message):
    with pytest.raises(InputError, match=message):
        search(W, X, offload=offload)


def test_a_cluster_without_pinned_memory():
    bare = replace(parse_cluster("8xCPU"), host_bytes_per_node=0)
    step, w, x = momentum()
    with pytest.raises(InputError, match="8xCPU has none that can be pinned"):
        autoshard.search(step, w, x, cluster=bare, offload=("optimizer_state",))


def test_a_host_with_too_little_memory():
    small = replace(parse_cluster("8xCPU"), host_bytes_per_node=1 << 16)
    step, w, x = momentum()
    with pytest.raises(InfeasibleError, match="the host has 8 KiB for each device"):
        autoshard.search(step, w, x, cluster=small, offload=("optimizer_state",))


def momentum():
    def step(state, x):
        w, v = state
        v = 0.9 * v + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return (w - 0.1 * v, v)

    w = jax.ShapeDtypeStruct((512, 512), "float32")
    return step, (w, w), jax.ShapeDtypeStruct((64, 512), "float32")


def test_only_more_devices_that_may_be_enough_are_tried():
    with pytest.raises(InfeasibleError, match=r"would fit: a cap of [\d.]+ K?i?B \(step [^)]*\)\.\n"):
        search(W, X, memory=1, microbatches=1)  # no multiple of the devices holds so little


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((3, 2), "has 6 devices, the cluster 8xCPU has 8"),
        ("2x4", r"wanted a mesh as sizes of its axes, such as \(2, 4\), got '2x4'"),
        ((2.0, 4.0), r"wanted a mesh as sizes of its axes, such as \(2, 4\), got \(2\.0, 4\.0\)"),
        ((0, 8), "positive size"),
        ((2, 2, 2, 1), "1 to 3 axes"),
    ],
)
def test_meshes_that_cannot_be(mesh, message):
    with pytest.raises(InputError, match=message):
        search(W, X, mesh=mesh)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"w": "data"}, r"pin 'w': wanted a jax\.sharding\.PartitionSpec, or its text .*, got 'data'"),
        ({"w": ("data",)}, r"pin 'w': wanted a jax\.sharding\.PartitionSpec, or its text .*got \('data',\)"),
        ({"['layers'][*]": "P()"}, r"matches no argument; .* or several as print\(plan\) shows them"),
        (
            {"w": "P() on host"},
            r"has no argument 'w' that can rest on the host",
        ),
        ({"ww": jax.P()}, r"pin 'ww' matches no argument \(did you mean w\?\)\. Name one argument"),
        ({"": jax.P()}, r"pin '' matches no argument; they are named like w"),
        ({"v": jax.P("data")}, r"pin 'v' matches no argument; they are named like w\. Name one argument"),
        ({"w": jax.P("dta")}, r"no mesh has an axis 'dta'; axes are named"),
        (
            {"w": jax.P(None, None, "data")},
            r"pin: w of shape \(16, 8\) cannot rest as P\(None, None, 'data'\) .*: it has 2 dimensions, and the spec",
        ),
    ],
)
def test_pins_that_cannot_be(pin, message):
    with pytest.raises(InputError, match=message):
        search(W, X, pin=pin)


def test_a_dimension_pinned_that_does_not_divide():
    odd = jax.ShapeDtypeStruct((9, 7), "float32"), jax.ShapeDtypeStruct((3, 9), "float32")
    with pytest.raises(
        InputError, match=r"w of shape \(9, 7\) cannot rest as P\('data'.*does not divide evenly"
    ):
        search(*odd, pin={"w": jax.P("data")})


def test_pins_that_contradict_each_other():
    def step(state, x):
        return {"params": {"w": train_step(state["params"]["w"], x)}}

    pins = {"['w']": jax.P("data"), "state['params']['w']": jax.P(None, "data")}
    with pytest.raises(
        InputError, match=r"state\['params'\]\['w'\], and pin \"\['w'\]\" says .*Keep one of them"
    ):
        autoshard.search(step, {"params": {"w": W}}, X, cluster="8xCPU", pin=pins)


def test_an_axis_that_the_mesh_lacks_is_named_with_its_pin():
    with pytest.raises(InputError, match=r"pin 'w': axis 'model' is not in the mesh \('data',\)"):
        search(W, X, mesh=(8,), pin={"w": jax.P("model")})


@pytest.mark.parametrize("memory", ["81GiB", "1e30GiB", 1 << 60])
def test_a_cap_that_no_device_has(memory):
    said = rf"memory={memory!r} is more than the 79\.1 GiB that one H100-80GB has, of which the runtime leaves 7\d"
    with pytest.raises(InputError, match=said):
        autoshard.search(train_step, W, X, cluster="8xH100-80GB", memory=memory)


@pytest.mark.devices
def test_more_devices_wanted_than_there_are():
    step = autoshard.parallelize(train_step, cluster="16xCPU")
    with pytest.raises(InputError, match="the cluster 16xCPU has 16 devices, and there are 8 to run on"):
        step(*arrays())


# --- the step and its arguments


@pytest.mark.devices
def test_a_batch_that_does_not_divide_is_no_mistake():
    w, x = jnp.arange(63.0).reshape(9, 7) / 63, jnp.linspace(-1, 1, 27).reshape(3, 9)
    wanted = train_step(w, x)  # first: the step donates w
    np.testing.assert_allclose(autoshard.parallelize(train_step)(w, x), wanted, rtol=1e-5)


@pytest.mark.parametrize("argument", ["adam", object()])
def test_arguments_that_are_no_arrays(argument):
    with pytest.raises(
        InputError, match=r"must be an array.*argument \[1\] is (str|object).*functools\.partial"
    ):
        search(W, argument)


def test_an_argument_inside_a_tree_is_named_by_its_path():
    with pytest.raises(InputError, match=r"argument \[0\]\['name'\] is str 'gpt'"):
        autoshard.search(lambda state: state, {"w": W, "name": "gpt"}, cluster="8xCPU")


BRANCHING = """
def branching_step(w, x):
    if x.sum() > 0:
        return w
    return -w
"""


def test_a_step_that_cannot_be_jitted(tmp_path):
    names = {}
    exec(compile(BRANCHING, tmp_path / "train.py", "exec"), names)
    reason = "Attempted boolean conversion of traced array with shape bool"
    with pytest.raises(InputError, match=rf"the step 'branching_step' cannot be traced.*{reason}") as caught:
        autoshard.search(names["branching_step"], W, X, cluster="8xCPU")
    assert str(caught.value).endswith(f"({tmp_path / 'train.py'}:3)")


def test_too_few_arguments():
    with pytest.raises(
        InputError, match=r"'train_step' cannot be traced.*missing 1 required positional argument: 'x'"
    ):
        search(W)


def test_what_is_no_function():
    with pytest.raises(InputError, match="parallelize wants a function, got int"):
        autoshard.parallelize(3)


def unknown_to_us(w, x):
    y = x @ jax.lax.stop_gradient(w)
    return w + jax.pure_callback(np.tanh, jax.eval_shape(lambda: y), y).sum()


def test_an_op_without_a_rule_is_named_with_its_line_and_the_remedy():
    line = unknown_to_us.__code__.co_firstlineno + 2
    where = rf"pure_callback has no factor rule .*1 in the step, first at .*test_errors\.py:{line}\)"
    with pytest.warns(AutoshardWarning, match=rf"{where}.*custom_partitioning with a sharding_rule"):
        autoshard.search(unknown_to_us, W, X, cluster="8xCPU")


# --- decoration


@pytest.mark.parametrize("options", [{}, {"memory": "1GiB"}])
def test_nested_decoration(options):
    once = autoshard.parallelize(train_step)
    with pytest.raises(InputError, match="the step 'train_step' is parallelized already; decorate it once"):
        autoshard.parallelize(**options)(once)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("transform", "named"),
    [
        (jax.jit, "another jitted function, a loop or jax.eval_shape"),
        (
            lambda step: functools.partial(jax.eval_shape, step),
            "another jitted function, a loop or jax.eval_shape",
        ),
        (jax.checkpoint, "another jitted function"),
        (lambda step: jax.vmap(step, (0, None)), "jax.vmap"),
        (lambda step: jax.grad(lambda w, x: step(w, x).sum()), "jax.grad, jax.vjp or jax.linearize"),
        (lambda step: functools.partial(jax.vjp, step), "jax.grad, jax.vjp or jax.linearize"),
        (lambda step: lambda *args: jax.jvp(step, args, args), "jax.jvp or jax.grad"),
    ],
)
def test_a_parallelized_step_inside_a_transformation(transform, named):
    said = f"train_step is a parallelized step and cannot be called inside {named}"
    with pytest.raises(InputError, match=said):
        transform(autoshard.parallelize(train_step))(*arrays())


@pytest.mark.devices
@pytest.mark.parametrize("returned", [None, (), {"metrics": None}])
def test_a_step_that_returns_nothing(returned):
    def step(w, x):
        train_step(w, x)
        return returned

    with pytest.raises(InputError, match=r"step returns no array, .* perhaps its `return` is missing"):
        autoshard.search(step, W, X, cluster="8xCPU")
    with pytest.raises(InputError, match="step returns no array"):
        autoshard.parallelize(step)(*arrays())


def test_no_plan_before_the_first_call():
    with pytest.raises(
        InputError, match=r"train_step has no plan yet: call it, its \.init or its \.lower first"
    ):
        autoshard.parallelize(train_step).plan  # noqa: B018
    with pytest.raises(InputError, match="train_step has no plan yet"):
        autoshard.parallelize(functools.partial(train_step)).plan  # noqa: B018


def test_repr_says_the_name_and_the_plan(plan):
    assert repr(autoshard.parallelize(train_step)) == "<parallelized train_step: not planned yet>"
    predicted = f"mesh {format_mesh(tuple(plan.decisions.mesh.values()))}, {format_seconds(plan.estimates.step_s)} a step"
    given = autoshard.parallelize(train_step, plan=plan)
    assert repr(given) == f"<parallelized train_step: {predicted} predicted>"
    by_hand = plan.to_json()
    by_hand["shardings"][0]["arguments"]["x"] = "P(None, 'data')"
    given = autoshard.parallelize(train_step, plan=autoshard.Plan.from_json(by_hand, "my.json"))
    assert repr(given).endswith(", edited by hand>")


class Trainer:
    """A model of one number, with its step."""

    def __init__(self, rate):
        self.rate = rate
        self.step = autoshard.parallelize(self.plain, mesh=(8,))

    def plain(self, w):
        return w - self.rate * w


@pytest.mark.devices
def test_a_parallelized_step_is_copied_with_its_object_and_not_pickled():
    trainer = Trainer(0.5)
    w = jnp.ones(8)
    for _ in ("before its first call", "after it"):
        with pytest.raises(
            InputError, match=r"plain is a parallelized step and cannot be pickled.* save its plan"
        ):
            pickle.dumps(trainer)
        other = copy.deepcopy(trainer)
        other.rate = 0.25
        np.testing.assert_array_equal(trainer.step(jnp.ones(8)), 0.5 * w)
    assert repr(other.step) == "<parallelized plain: not planned yet>"
    np.testing.assert_array_equal(other.step(jnp.ones(8)), 0.75 * w)
    assert copy.copy(trainer.step).plan is trainer.step.plan


@pytest.mark.devices
def test_other_shapes_are_planned_again_with_a_warning():
    step = autoshard.parallelize(train_step)
    step(*arrays())
    first = step.plan
    longer = jax.ShapeDtypeStruct((48, 16), "float32")
    with pytest.warns(
        AutoshardWarning,
        match=r"arguments of train_step changed in shape or structure \(x is float32\[48,16\], and was float32\[24,16\]\); "
        "planning once for the new",
    ):
        result = step(*arrays(x=longer))
    np.testing.assert_allclose(result, train_step(*arrays(x=longer)), rtol=1e-5)
    assert step.plan.fingerprint != first.fingerprint


@pytest.mark.devices
@pytest.mark.parametrize(
    ("create", "message"),
    [
        (
            lambda key: "no array",
            r"<lambda>, which shall create the state, cannot be traced by jax\.jit: .*not a valid JAX type",
        ),
        (
            lambda key: jnp.ones(int(key[0])),
            r"<lambda>, which .* cannot be traced by jax\.jit: .*concrete value",
        ),
    ],
)
def test_a_state_that_cannot_be_created(create, message):
    with pytest.raises(InputError, match=message) as caught:
        autoshard.parallelize(train_step).init(create, jnp.zeros(2, "uint32"), args=(X,))
    assert "\n" not in str(caught.value)


# --- a plan for something else


@pytest.fixture(scope="module")
def plan():
    return search(W, X)


def test_a_plan_for_another_step(plan):
    said = r"another step, 'train_step'\. In 'other_step', the role of w is batch instead of parameter; it .* Search again"
    with pytest.raises(PlanError, match=said):
        autoshard.emit(other_step, W, X, plan=plan)


def test_a_plan_is_a_value(plan):
    assert {plan, copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))} == {plan}
    assert search(W, X) == plan != edited(plan, memory_bytes=1 << 30)


@pytest.mark.devices
def test_a_plan_file_for_another_step_is_named(plan, tmp_path):
    plan.save(tmp_path / "mine.json")
    with pytest.raises(PlanError, match=r"mine\.json was made for another step"):
        autoshard.parallelize(other_step, plan=tmp_path / "mine.json")(*arrays())


@pytest.mark.devices
def test_a_plan_for_other_shapes(plan):
    said = r"made for another step\. In 'train_step', x is float32\[48,16\] instead of float32\[24,16\]\. Search again"
    with pytest.raises(PlanError, match=said):
        autoshard.parallelize(train_step, plan=plan)(*arrays(x=jax.ShapeDtypeStruct((48, 16), "float32")))


@pytest.mark.devices
def test_other_shapes_where_a_plan_is_given_are_planned_beside_it(plan):
    step, longer = autoshard.parallelize(train_step, plan=plan), jax.ShapeDtypeStruct((48, 16), "float32")
    step(*arrays())
    with pytest.warns(AutoshardWarning, match="planning once for the new ones"):
        got = step(*arrays(x=longer))
    np.testing.assert_allclose(got, train_step(*arrays(x=longer)), rtol=1e-5)
    np.testing.assert_allclose(step(*arrays()), train_step(*arrays()), rtol=1e-5)
    assert step.plan == plan


@pytest.mark.devices
def test_fewer_devices_than_the_plan_has(plan):
    few = jax.devices()[:4]
    with pytest.raises(InputError, match=r"the plan's mesh \d(x\d)? needs 8 devices, and there are 4"):
        autoshard.parallelize(train_step, plan=plan, devices=few)(*arrays())
    with pytest.raises(InputError, match="needs 8 devices, and there are 4"):
        autoshard.emit(train_step, W, X, plan=plan, devices=few)


@pytest.mark.devices
def test_a_plan_of_another_jax_for_the_same_step_is_used_with_a_warning(plan):
    step = autoshard.parallelize(train_step, plan=replace(plan, jax="0.11.2"))
    with pytest.warns(
        AutoshardWarning,
        match=r"the plan was made with JAX 0\.11\.2, and this is JAX .*; the step is the same",
    ):
        np.testing.assert_allclose(step(*arrays()), train_step(*arrays()), rtol=1e-5)


def test_a_plan_of_another_jax_for_a_step_that_is_traced_otherwise(plan):
    old = replace(plan, jax="0.11.2", fingerprint="0" * 16)
    with pytest.raises(PlanError, match=r"another step.*It was made with JAX 0\.11\.2, and this is JAX"):
        autoshard.emit(train_step, W, X, plan=old)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "1GiB"},
        {"mesh": (8,)},
        {"pin": {"w": jax.P()}},
        {"cluster": "8xCPU", "offload": "never"},
        {"remat": "never", "microbatches": 2},
    ],
)
def test_what_a_plan_has_decided_is_not_asked_for_beside_it(plan, options):
    said = ", ".join(f"{name}=" for name in options)
    with pytest.raises(InputError, match=f"plan= has decided what {said} would say: leave that out"):
        autoshard.parallelize(train_step, plan=plan, **options)


def edited(plan, **changes):
    data = plan.to_json()
    return autoshard.Plan.from_json(data | changes, "my.json")


def test_a_plan_under_a_cap_that_no_device_has(plan):
    with pytest.raises(PlanError, match=r"the plan: memory_bytes 1180591620717411303424 is more than the"):
        autoshard.emit(train_step, W, X, plan=edited(plan, memory_bytes=1 << 70))


def test_a_plan_whose_mesh_is_not_the_cluster_s(plan):
    small = edited(plan, shardings=[plan.to_json()["shardings"][0] | {"mesh": {"data": 2, "model": 2}}])
    with pytest.raises(
        PlanError,
        match=r"the plan: its mesh 2x2 has 4 devices, its cluster 8xCPU has 8\. Give the axes sizes whose",
    ):
        autoshard.emit(train_step, W, X, plan=small)
