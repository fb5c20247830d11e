"""How a step may be called: by position or keyword, with static arguments, as a method, with other shapes in turn."""

import functools
import logging
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import autoshard
from autoshard import AutoshardWarning, InputError

pytestmark = pytest.mark.devices

W, X = jnp.linspace(-1, 1, 256).reshape(16, 16), jnp.linspace(0, 1, 384).reshape(24, 16)


def gradient(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def step(w, x, rate=0.1):
    return w - rate * gradient(w, x)


def assert_close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), a, b)


parallelize = functools.partial(autoshard.parallelize, mesh=(8,))


# --- several signatures


def test_ragged_batches_are_planned_once_each():
    traced = []

    @parallelize(pin={"w": jax.P(None, "data")})
    def step(w, x):
        traced.append(x.shape)
        return w - 0.1 * gradient(w, x)

    w = wanted = W
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for size in (24, 8, 24, 16, 8, 16, 24):
            w, wanted = step(w, X[:size]), wanted - 0.1 * gradient(wanted, X[:size])
            assert w.sharding.spec == jax.P(None, "data")
            assert_close(w, wanted)
    assert traced == [(24, 16), (8, 16), (16, 16)]
    assert ["planning once for the new ones too" in str(w.message) for w in said] == [True, True]


def test_what_comes_anew_in_each_call_does_not_have_the_step_compiled_again(caplog):
    @parallelize
    def step(w, x, key):
        return w - 0.1 * gradient(w, x + jax.random.normal(key, x.shape))

    w = W
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for i in range(3):
            w = step(w, np.asarray(X), jax.random.key(i))
    assert sum("Compiling jit(step)" in line for line in caplog.messages) == 1


def test_state_rests_as_the_first_plan_says():
    @parallelize
    def step(state, x):
        return {k: v - 0.1 * gradient(v, x) for k, v in state.items()}

    many = jnp.tile(X, (64, 1))
    state = step({"a": W, "b": W}, many)
    first = jax.tree.map(lambda a: a.sharding, state)
    with pytest.warns(AutoshardWarning, match="planning once"):
        state = step(state, X[:8])
    assert jax.tree.map(lambda a: a.sharding, state) == first
    assert step.plan.decisions.mesh == {"data": 8}


def test_each_signature_has_its_plan():
    parallel = parallelize(step)
    parallel(W, X)
    first = parallel.plan
    with pytest.warns(AutoshardWarning, match="planning once"):
        parallel(W, X[:8])
    assert parallel.plan != first
    parallel(W, X)
    assert parallel.plan == first


@pytest.mark.parametrize(
    "call",
    [
        lambda step: step(W, x=X),
        lambda step: step(x=X, w=W),
        lambda step: step(w=W, x=X),
    ],
)
def test_keywords_are_the_same_signature(call):
    traced = []

    @parallelize
    def step(w, x):
        traced.append(None)
        return w - 0.1 * gradient(w, x)

    assert_close(step(W, X), W - 0.1 * gradient(W, X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(call(step), W - 0.1 * gradient(W, X))
    assert len(traced) == 1


def test_a_wrapper_gets_its_keywords_as_they_are():
    def scaled(function):
        @functools.wraps(function)
        def wrapper(*args, scale=1.0):
            return function(*args, rate=0.1 * scale)

        return wrapper

    assert_close(parallelize(scaled(step))(W, X, scale=2.0), step(W, X, 0.2))


# --- what is given up


@pytest.mark.parametrize("donate", [None, "x", ("x['b']", "w")])
def test_what_is_given_up_is_reused_where_a_result_is_like_it(donate):
    """One result is: so one array is used. The state is given up in any case."""

    def step(w, x):
        return w - 0.1 * gradient(w, x["a"]), jnp.sin(x["b"]), x["c"].sum()

    parallel = parallelize(
        step, donate=donate, pin=dict.fromkeys(("w", "x['a']", "x['b']", "x['c']"), "P('data')")
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    wanted = step(W, dict.fromkeys("abc", X))
    for _ in range(2):
        w, x = jax.device_put((W, {name: X + 0 for name in "abc"}), jax.NamedSharding(mesh, jax.P("data")))
        assert_close(parallel(w, x), wanted)
        assert w.is_deleted()
        assert sum(array.is_deleted() for array in x.values()) == (donate is not None)
        assert x["b"].is_deleted() or donate != ("x['b']", "w")


@pytest.mark.parametrize("mean_is_weight", [False, True])
def test_an_array_that_is_given_twice_may_be_given_up_once(mean_is_weight):
    """It lies as the plan has it, on a mesh of its owner's: no copy is made for the first of its places."""

    def step(w, x, mean, teacher):
        w = w - 0.1 * gradient(w, x)
        return w, (0.9 * mean + 0.1 * w, (teacher**2).sum())

    names = ("w", "mean", "teacher")
    parallel = parallelize(step, state="mean", pin=dict.fromkeys(names, "P('data')"))
    mine = jax.sharding.Mesh(np.array(jax.devices()), ("mine",))
    w, mean, teacher = (jax.device_put(W + 0, jax.NamedSharding(mine, jax.P("mine"))) for _ in range(3))
    mean, teacher = (w, teacher) if mean_is_weight else (mean, w)
    wanted = step(W, X, W, W)
    assert_close(parallel(w, X, mean, teacher), wanted)


def test_what_is_given_up_is_an_argument():
    with pytest.raises(InputError, match=r"donate='y' is no argument of step; they are named like w"):
        parallelize(step, donate="y")(W, X)


# --- static arguments


def choosing(w, x, mode="plain", *, clip=False):
    update = gradient(w, x)
    update = jnp.clip(update, -1e-3, 1e-3) if clip else update
    return w - {"plain": 0.1, "slow": 0.01}[mode] * update


@pytest.mark.parametrize(
    "parallel",
    [
        lambda: parallelize(choosing, static_argnames=("mode", "clip")),
        lambda: parallelize(choosing, static_argnums=2, static_argnames="clip"),
        lambda: parallelize(choosing, static_argnums=(-2,), static_argnames="clip"),
        lambda: parallelize(jax.jit(choosing, static_argnames=("mode", "clip"))),
        lambda: parallelize(jax.jit(choosing, static_argnums=2, static_argnames="clip")),
    ],
)
def test_static_arguments_have_a_plan_each(parallel):
    parallel = parallel()
    assert_close(parallel(W, X, "slow"), choosing(W, X, "slow"))
    with pytest.warns(AutoshardWarning, match="planning once"):
        assert_close(parallel(W, X, "plain", clip=True), choosing(W, X, clip=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(parallel(W, X, mode="slow"), choosing(W, X, "slow"))
        assert_close(parallel(W, x=X, mode="plain", clip=True), choosing(W, X, clip=True))
    assert [*parallel.plan.decisions.arguments] == ["w", "x"]


def test_static_arguments_of_other_types_are_others():
    parallel = parallelize(lambda w, x, kind: w + x.sum() * (2 if kind is True else 1), static_argnums=2)
    assert_close(parallel(W, X, True), W + 2 * X.sum())
    with pytest.warns(AutoshardWarning, match="planning once"):
        assert_close(parallel(W, X, 1), W + X.sum())


def test_a_static_argument_before_others():
    def step(w, power, x):
        return w - 0.1 * gradient(w, x) * (2 if power == "two" else 1)

    parallel = parallelize(step, static_argnums=1, pin={"x": jax.P("data")})
    assert_close(parallel(W, "two", X), step(W, "two", X))
    assert [*parallel.plan.decisions.arguments] == ["w", "x"]
    _, static, x = parallel.in_shardings(W, "two", X)
    assert (static, x.spec) == (None, jax.P("data"))


def test_a_jitted_step_is_searched_with_what_is_bound():
    bound = functools.partial(jax.jit(choosing, static_argnames=("mode", "clip")), mode="slow")
    assert autoshard.search(bound, W, X, cluster="8xCPU").step == "choosing"


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        (
            {"static_argnames": "mood"},
            ("slow",),
            "choosing has no argument 'mood' to be static; it takes w, x, mode, clip",
        ),
        ({"static_argnums": 7}, ("slow",), "choosing has no argument 7 to be static"),
        (
            {"static_argnames": "mode"},
            (["slow"],),
            r"the static argument 2 of choosing must be hashable, got list \['slow'\]",
        ),
        ({}, ("slow",), r"argument \[2\] is str 'slow'\..*functools\.partial.*static_argnames"),
    ],
)
def test_static_arguments_that_cannot_be(options, call, message):
    with pytest.raises(InputError, match=message):
        parallelize(choosing, **options)(W, X, *call)


def test_a_python_bool_that_the_step_branches_on():
    def step(w, x, train):
        return w - 0.1 * gradient(w, x) if train else w

    with pytest.raises(InputError, match=r"(?s)Python bool or int .*functools\.partial.*static_argnames"):
        parallelize(step)(W, X, True)
    assert_close(parallelize(step, static_argnames="train")(W, X, True), step(W, X, True))
    assert_close(parallelize(functools.partial(step, train=True))(W, X), step(W, X, True))


# --- whatever can be called


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @parallelize
    def step(self, w, x):
        return w - self.rate * gradient(w, x)


def test_a_method():
    slow, fast = Trainer(0.01), Trainer(0.1)
    assert_close(slow.step(W, X), step(W, X, 0.01))
    with pytest.warns(AutoshardWarning, match="planning once"):
        assert_close(fast.step(W, X), step(W, X, 0.1))
    assert_close(slow.step(W, x=X), step(W, X, 0.01))
    assert slow.step.plan.step == "step"
    assert slow.step.lower(W, X).compile()
    assert_close(fast.step.init(lambda: W, args=(X,)), W)


def test_a_partial_has_its_functions_name():
    parallel = parallelize(functools.partial(functools.partial(step, rate=0.2)))
    assert parallel.__name__ == "step"
    assert_close(parallel(W, X), step(W, X, 0.2))
    assert parallel.plan.step == "step"


def test_state_in_several_arguments_is_created():
    def step(w, momentum, x):
        momentum = 0.9 * momentum + gradient(w, x)
        return w - 0.1 * momentum, momentum

    parallel = parallelize(step, pin={"w": jax.P("data")})
    w, momentum = parallel.init(lambda: (W, jnp.zeros_like(W)), args=(X,))
    assert w.sharding.spec == jax.P("data")
    assert_close(parallel(w, momentum, X), step(W, jnp.zeros_like(W), X))


@pytest.mark.parametrize("is_tuple", [False, True], ids=["arguments", "tuple"])
def test_state_before_an_argument_with_a_default(is_tuple):
    """By its numbers of arguments alone, the tuple that is created could be the first argument, or the first two."""

    def two(w, momentum, x=X):
        momentum = 0.9 * momentum + gradient(w, x)
        return w - 0.1 * momentum, momentum

    def one(state, x, rate=0.1):
        w, momentum = state
        momentum = 0.9 * momentum + gradient(w, x)
        return w - rate * momentum, momentum

    parallel = parallelize(one if is_tuple else two)
    state = parallel.init(lambda: (W, jnp.zeros_like(W)), args=(X[:8],))
    got = parallel(state, X[:8]) if is_tuple else parallel(*state, X[:8])
    assert_close(got, two(W, jnp.zeros_like(W), X[:8]))


# --- what arrays come as


def test_doubles_are_narrowed_as_by_jit():
    parallel, wide = parallelize(step), np.asarray(X, np.float64)
    w = parallel(W, wide)
    assert w.dtype == jnp.float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(parallel(parallel(W, np.asarray(wide, np.float32)), wide), step(step(W, X), X))
    autoshard.search(step, W, jax.ShapeDtypeStruct(X.shape, "float64"), cluster="8xCPU")


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("is_placed", [False, True], ids=["single", "sharded"])
def test_inside_a_mesh_of_the_users(axis_type, is_placed):
    with jax.set_mesh(jax.make_mesh((8,), ("batch",), axis_types=(axis_type,))):
        w, x = (
            (jax.device_put(W, jax.P(None, "batch")), jax.device_put(X, jax.P("batch")))
            if is_placed
            else (W, X)
        )
        parallel = parallelize(step)
        got = parallel(parallel(w, x), x)
        made = parallel.init(lambda key: jax.random.normal(key, (16, 16)), jax.random.key(0), args=(x,))
        assert made.sharding == got.sharding
        assert parallel.lower(w, x).compile()
    assert_close(got, step(step(W, X), X))
    assert_close(parallel(got, X), step(step(step(W, X), X), X))
    assert_close(made, jax.random.normal(jax.random.key(0), (16, 16)))


def test_inside_a_mesh_of_more_devices_than_the_plan_has():
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        parallel = parallelize(step, cluster="4xCPU", mesh=(4,))
        created = jax.lax.with_sharding_constraint
        made = parallel.init(lambda: created(jnp.asarray(W), jax.P("batch")), args=(X,))
        got = parallel(parallel(made, X), X)
        assert parallel.lower(got, X).compile()
    assert len(got.sharding.device_set) == 4
    assert_close(got, step(step(W, X), X))


def test_a_constraint_of_the_users_is_in_no_program_and_a_warning_says_so():
    whole = jax.sharding.NamedSharding(jax.make_mesh((8,), ("batch",)), jax.P())

    def constrained(w, x):
        return step(w, jax.lax.with_sharding_constraint(x, whole))

    line = constrained.__code__.co_firstlineno + 1
    parallel = parallelize(constrained, pin={"x": jax.P("data"), "w": jax.P()})
    with pytest.warns(
        autoshard.AutoshardWarning, match=f"test_calls.py:{line} names devices and is left out.*pin="
    ):
        text = parallel.lower(W, X).compile().as_text()
    assert "all-gather" not in text
    assert_close(parallel(W, X), step(W, X))
