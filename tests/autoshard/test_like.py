"""Steps on another step's state: it rests where that one has it, by whatever name it is called."""

import dataclasses
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard import AutoshardWarning, InputError

pytestmark = pytest.mark.devices

NAMES = ("w0", "w1")
SPLIT = {"params['w0']": "P(None, 'model')", "params['w1']": "P('model', 'data')"}
X = np.linspace(-1, 1, 24 * 512, dtype="float32").reshape(24, 512)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    params: dict[str, jax.Array]
    momentum: dict[str, jax.Array]


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w0"]) @ params["w1"]) ** 2)


def train(state, x):
    grads = jax.grad(loss)(state.params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.momentum, grads)
    return State(jax.tree.map(lambda p, m: p - 0.1 * m, state.params, momentum), momentum)


def create(key):
    params = {name: jax.random.normal(key, (512, 512)) / 32 for name in NAMES}
    return State(params, jax.tree.map(jnp.zeros_like, params))


def of_params(params, x):
    return loss(params, x)


def of_variables(variables, x):
    return loss(variables["params"], x)


def of_state(state, x):
    return loss(state.params, x)


def given_params(state):
    return state.params


def given_variables(state):
    return {"params": state.params}


def given_state(state):
    return state


@pytest.fixture(scope="module")
def trained():
    step = autoshard.parallelize(train, mesh=(2, 4), pin=SPLIT)
    return step, step.init(create, jax.random.key(0), args=(X,))


def resting(step):
    arguments = step.plan.decisions.arguments
    return {path[-4:-2]: spec for path, spec in arguments.items() if path != "x" and "momentum" not in path}


@pytest.mark.parametrize(
    ("evaluate", "give", "given"),
    [
        (of_params, given_params, "step"),
        (of_variables, given_variables, "step"),
        (of_variables, given_variables, "plan"),
        (of_state, given_state, "file"),
    ],
)
def test_shared_arguments_rest_as_in_training_and_nothing_moves(trained, evaluate, give, given, tmp_path):
    step, state = trained
    step.plan.save(tmp_path / "plan.json")
    like = {"step": step, "plan": step.plan, "file": tmp_path / "plan.json"}[given]
    parallel = autoshard.parallelize(evaluate, like=like)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = parallel(give(state), X)
    np.testing.assert_allclose(value, loss(create(jax.random.key(0)).params, X), rtol=1e-4)
    assert resting(parallel) == {"w0": "P(None, 'model')", "w1": "P('model', 'data')"}
    assert parallel.plan.decisions.mesh == {"data": 2, "model": 4}


def test_a_smaller_last_batch_finds_them_there_too(trained):
    step, state = trained
    parallel = autoshard.parallelize(of_params, like=step)
    parallel(state.params, X)
    with pytest.warns(AutoshardWarning, match="planning once") as said:
        parallel(state.params, X[:3])
    assert len(said) == 1
    assert resting(parallel) == {"w0": "P(None, 'model')", "w1": "P('model', 'data')"}


def test_without_it_a_warning_says_what_moves(trained):
    _, state = trained
    parallel = autoshard.parallelize(of_params, mesh=(8,), pin={"params['w0']": jax.P("data")})
    message = (
        r"MiB of the arguments of of_params are not sharded as in its plan.*params\['w0'\].*like=that_step"
    )
    with pytest.warns(AutoshardWarning, match=message):
        parallel(state.params, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(create(jax.random.key(0)).params, X)


def test_who_is_in_doubt_is_left_to_the_search():
    """Parameters and momentum lie apart; which of them the evaluation reads, its names do not tell."""
    pins = {"state.params['w0']": jax.P("data"), "state.momentum['w0']": jax.P(None, "data")}
    step = autoshard.parallelize(train, mesh=(8,), pin=pins)
    abstract = step.abstract_state(create, jax.random.key(0), args=(X,))
    options = {"like": step, "pin": {"net['w1']": "P()"}}
    parallel = autoshard.parallelize(lambda net, x: loss(net, x), **options)
    parallel.lower(abstract.params, X)
    assert "net['w0']" not in parallel.plan.options["pin"]


def test_a_step_that_has_no_plan_cannot_be_followed():
    step = autoshard.parallelize(train)
    with pytest.raises(InputError, match=r"train has no plan yet: call it, its \.init"):
        autoshard.parallelize(of_params, like=step)(create(jax.random.key(0)).params, X)


def test_a_step_that_shares_no_argument_is_no_model(trained):
    step, _ = trained
    said = r"like= is a plan for 'train', which shares no argument with 'other': .* there; y"
    for one, shapes in ((step, r" \(24, 512\) here"), (step.plan, " here")):
        with pytest.raises(InputError, match=said + shapes):
            autoshard.parallelize(other, like=one)(X)
    small = {name: jnp.ones((256, 256)) for name in NAMES}
    said = r"params\['w0'\] \(512, 512\), .* there; params\['w0'\] \(256, 256\), "
    with pytest.raises(InputError, match=said):
        autoshard.parallelize(of_params, like=step)(small, X[:, :256])


@pytest.mark.parametrize("options", [{"mesh": (8,)}, {"cluster": "8xCPU"}, {"plan": "plan.json"}])
def test_what_it_decides_cannot_be_asked_for(trained, options):
    with pytest.raises(InputError, match=r"= has decided what .*= would say"):
        autoshard.parallelize(of_params, like=trained[0].plan, **options)


def test_devices_are_those_of_the_step():
    step = autoshard.parallelize(train, devices=jax.devices()[4:])
    state = step.init(create, jax.random.key(0), args=(X,))
    value = autoshard.parallelize(of_params, like=step)(state.params, X)
    assert value.devices() == set(jax.devices()[4:])


def test_objects_are_found_by_their_attributes():
    def update(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))

    def make():
        model = nnx.Linear(512, 512, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    pin = {"model.kernel": jax.P(None, "data"), "model.bias": jax.P("data")}
    step = autoshard.parallelize(update, mesh=(8,), pin=pin)
    model, optimizer = step.init(make, args=(X,))
    step(model, optimizer, X)
    parallel = autoshard.parallelize(lambda net, x: jnp.mean(net(x) ** 2), like=step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value = parallel(model, X)
    np.testing.assert_allclose(value, jnp.mean(model(X) ** 2), rtol=1e-4)
    assert parallel.plan.decisions.arguments["net.kernel"] == "P(None, 'data')"


# --- pins


def test_a_plan_as_pin(trained):
    step, _ = trained
    shapes = jax.eval_shape(create, jax.random.key(0)).params, X
    plan = autoshard.search(of_params, *shapes, cluster="8xCPU", pin=step.plan)
    assert plan.decisions.arguments["params['w1']"] == "P('model', 'data')"
    assert plan.decisions.mesh == {"data": 2, "model": 4}
    with pytest.raises(
        InputError, match=r"shares no argument with 'other'.*state\.params\['w0'\], .* there; y here"
    ):
        autoshard.search(other, X, cluster="8xCPU", pin=step.plan)


def other(y):
    return y + 1


@pytest.mark.parametrize("path", ["params['w*']", "['w*']", "state.params|momentum['w0-1']"])
def test_a_folded_path_pins_all_that_it_stands_for(path):
    state = jax.eval_shape(create, jax.random.key(0))
    plan = autoshard.search(train, state, X, cluster="8xCPU", mesh=(8,), pin={path: "P(None, 'data')"})
    wanted = [f"state.{part}['{name}']" for part in ("params", "momentum") for name in NAMES]
    assert [*plan.options["pin"]] == sorted(
        name for name in wanted if path != "params['w*']" or "params" in name
    )
    assert all(plan.decisions.arguments[name] == "P(None, 'data')" for name in plan.options["pin"])


def test_a_plans_own_text_may_say_that_it_rests_on_the_host():
    state, cluster = jax.eval_shape(create, jax.random.key(0)), "8xH100-80GB"
    pin = {"momentum['w0']": "P('data') on host"}
    plan = autoshard.search(train, state, X, cluster=cluster, mesh=(8,), pin=pin)
    on_host = {name: spec for name, spec in plan.decisions.arguments.items() if "on host" in spec}
    assert on_host == {"state.momentum['w0']": "P('data') on host"}
    with pytest.raises(InputError, match=r"rests on the host, and offload=\"never\" forbids it"):
        autoshard.search(train, state, X, cluster=cluster, pin=pin, offload="never")


# --- what fails


def test_state_that_was_given_up_is_named():
    step = autoshard.parallelize(train, mesh=(8,))
    state = step.init(create, jax.random.key(0), args=(X,))
    new = step(step(state, X), X)
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"state\.params\['w0'\] is deleted: .* Pass the state that train returned"
        ):
            step(dataclasses.replace(new, params=state.params), X)
    step(new, X)


def test_what_a_step_raises_is_raised_once():
    """Also where an argument lies as the plan has it, by another name."""
    calls = []

    def fail_later(x):
        calls.append(None)
        if len(calls) > 1:
            raise ValueError("no such example")
        return np.float32(0)

    def step(w, x):
        return w - jax.pure_callback(fail_later, jax.ShapeDtypeStruct((), "float32"), x).sum()

    parallel = autoshard.parallelize(step, devices=jax.devices()[:1])
    there = jax.device_put(jnp.ones(4), jax.devices()[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        w = parallel(jnp.ones(4), there)
        for count in (2, 3):
            with pytest.raises(jax.errors.JaxRuntimeError, match="no such example"):
                parallel(jnp.ones(4), there).block_until_ready()
            assert len(calls) == count
    assert w.sum() == 4
