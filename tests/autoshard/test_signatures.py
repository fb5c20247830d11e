"""Calls of another size, rank or type: each is planned once and gives the numbers of `jax.jit`, whatever JAX makes of it."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard import AutoshardWarning, InputError

pytestmark = pytest.mark.devices


def train_step(w, x, y=None):
    def loss(w):
        return jnp.mean(jnp.tanh(x @ w) ** 2) + (0.0 if y is None else jnp.sum(y))

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * gradient, value


def layered_step(params, x):
    value, gradients = jax.value_and_grad(lambda p: jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"]) / max(1, len(x)))(
        params
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


W = np.random.default_rng(0).standard_normal((16, 16)).astype("float32")


def examples(count):
    return np.random.default_rng(count).standard_normal((count, 16)).astype("float32")


def run(step, state, batches):
    """The state and results after all batches."""
    results = []
    for batch in batches:
        state, result = step(state, *batch)
        results.append(result)
    return state, results


def assert_close(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, wanted)


def check(step, state, batches):
    """That a step gives what `jax.jit` makes of its function."""
    copied = jax.tree.map(jnp.array, state)
    wanted = run(jax.jit(step.callee.step), copied, batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        found = run(step, jax.tree.map(jnp.copy, copied), batches)
    assert_close(found, wanted)


SPLIT = {"mesh": (8,), "pin": {"x": "P('data')"}}


# --- a last batch


@pytest.mark.parametrize(
    ("sizes", "as_array"), [((32, 32, 33, 32, 0, 33), np.asarray), ((33, 33, 32), jnp.asarray)]
)
def test_batches_of_other_sizes_are_planned_once_each(sizes, as_array):
    said: list[str] = []
    step = autoshard.parallelize(train_step, progress=said.append, **(SPLIT if sizes[0] == 32 else {}))
    with np.errstate(all="ignore"):
        check(step, W, [(as_array(examples(n)),) for n in sizes])
    assert said.count("tracing") == said.count("compiling") == len(set(sizes))


@pytest.mark.parametrize("other", [np.ones(9, "float32"), 2.0, None])
def test_an_argument_of_another_rank_or_size_than_the_pinned_one(other):
    pin = {"x": "P('data')", "y": "P('data')"}
    step = autoshard.parallelize(train_step, mesh=(8,), pin=pin)
    first = (examples(32), np.ones(32, "float32"))
    check(step, W, [first, first, (examples(32), other), first])


def test_weights_of_another_size():
    step = autoshard.parallelize(train_step, mesh=(8,), pin={"w": "P(None, 'data')"})
    for columns in (16, 9, 16, 24):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoshardWarning)
            found = step(jnp.array(W.repeat(2, 1)[:, :columns]), examples(32))
        wanted = jax.jit(train_step)(jnp.array(W.repeat(2, 1)[:, :columns]), examples(32))
        assert_close(found, wanted)


def test_a_last_batch_of_a_method_and_with_static_arguments():
    class Trainer:
        rate = 0.1

        @functools.partial(autoshard.parallelize, **SPLIT, static_argnames="times")
        def step(self, w, x, times):
            w, value = train_step(w, x)
            return w, times * value

    batches = [(examples(n),) for n in (32, 32, 33, 32)]
    wanted = run(jax.jit(train_step), jnp.array(W), batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        found = run(functools.partial(Trainer().step, times=1), jnp.array(W), batches)
    assert_close(found, wanted)


def test_a_last_batch_of_an_nnx_object():
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.array(W))

    def step(model, x):
        value, gradients = nnx.value_and_grad(lambda m: jnp.mean(jnp.tanh(x @ m.w[...]) ** 2))(model)
        model.w[...] = model.w[...] - 0.1 * gradients.w[...]
        return value

    ours, theirs = Model(), Model()
    parallelized, jitted = autoshard.parallelize(step, **SPLIT), nnx.jit(step)
    for n in (32, 32, 33, 32):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoshardWarning)
            np.testing.assert_allclose(
                parallelized(ours, examples(n)), jitted(theirs, examples(n)), rtol=1e-4
            )
    np.testing.assert_allclose(ours.w[...], theirs.w[...], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"stages": 2, "microbatches": 2}])
def test_a_last_batch_that_has_not_so_many_microbatches(options):
    step = autoshard.parallelize(layered_step, **options)
    batches = [(examples(n),) for n in (32, 32, 33, 32, 1, 33)]
    check(step, {"a": W, "b": W}, batches)


def test_what_a_last_batch_does_not_allow_is_said_once():
    step = autoshard.parallelize(train_step, **SPLIT)
    w, _ = step(jnp.array(W), examples(32))
    with pytest.warns(AutoshardWarning) as said:
        w, _ = step(w, examples(33))
    assert "does not allow: x of shape (33, 16) does not split as P('data')" in str(said[-1].message)
    step(w, examples(33))


def test_a_state_that_was_given_up_is_named_for_a_last_batch_too():
    step = autoshard.parallelize(train_step)
    w, _ = step(jnp.array(W), examples(32))
    step(w, examples(32))
    with pytest.warns(AutoshardWarning), pytest.raises(InputError, match="w is deleted: it was donated"):
        step(w, examples(33))


def test_an_array_that_its_owner_deleted_is_not_said_to_be_donated_for_sure():
    step, w = autoshard.parallelize(train_step), jnp.array(W)
    w.delete()
    with pytest.raises(
        InputError, match="w is deleted: it was donated to an earlier call, or its owner deleted"
    ):
        step(w, examples(32))


# --- arrays of no elements


def holding_empty(state, x):
    def loss(s):
        hidden, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ s["w"], s["layers"])
        return jnp.sum(hidden) + jnp.sum(x[:, :0] @ s["empty"]) + jnp.sum(s["table"][s["ids"]])

    value, gradients = jax.value_and_grad(loss, allow_int=True)(state)
    return {k: v if k == "ids" else v - 0.1 * gradients[k] for k, v in state.items()}, value


EMPTY = {
    "w": W,
    "layers": np.zeros((0, 16, 16), "float32"),
    "empty": np.zeros((0, 8), "float32"),
    "table": np.ones((8, 4), "float32"),
    "ids": np.zeros(0, "int32"),
}


@pytest.mark.parametrize(
    ("size", "options"),
    [(16, {}), (0, {"mesh": (2, 4)}), (16, {"microbatches": 2}), (0, {"stages": 2, "microbatches": 2})],
    ids=str,
)
def test_arrays_of_no_elements(size, options):
    check(autoshard.parallelize(holding_empty, **options), EMPTY, [(examples(size),)] * 2)


def test_an_empty_array_may_be_pinned():
    step = autoshard.parallelize(train_step, mesh=(8,), pin={"x": "P('data')"})
    with np.errstate(all="ignore"):
        check(step, W, [(examples(0),)])


# --- weak types


def counting_step(state, x):
    def loss(w):
        return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])

    value, gradients = jax.value_and_grad(loss)(state["w"])
    return {
        "w": jax.tree.map(lambda p, g: p - 0.1 * g, state["w"], gradients),
        "count": state["count"] + 1,
        "average": 0.9 * state["average"] + 0.1 * value,
        "is_odd": jnp.logical_not(state["is_odd"]),
        "last": 0.0,
    }, (value, state["count"])


def as_numbers():
    w = {"a": jnp.array(W), "b": jnp.array(W)}
    return {"w": w, "count": 0, "average": 0.0, "is_odd": False, "last": 1.0}


def as_restored():
    """The state as a checkpoint gives it back: arrays whose types adapt to no others."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, jnp.result_type(x))), as_numbers())


def weak_types_of(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in map(jax.typeof, jax.tree.leaves(tree))]


EXECUTORS = [{}, {"microbatches": 2}, {"stages": 2, "microbatches": 2, "schedule": "1f1b", "mesh": (4, 1)}]


@pytest.mark.parametrize("options", EXECUTORS, ids=str)
def test_state_that_begins_as_python_numbers_is_searched_once(options):
    said: list[str] = []
    step = autoshard.parallelize(counting_step, progress=said.append, **options)
    jitted = jax.jit(counting_step)
    found, wanted = as_numbers(), as_numbers()
    for i in range(4):
        (found, values), (wanted, others) = step(found, examples(16)), jitted(wanted, examples(16))
        assert_close((found, values), (wanted, others))
        if "stages" not in options:
            assert weak_types_of((found, values)) == weak_types_of((wanted, others))
        if i == 0:
            searched = [line for line in said if line not in ("tracing", "compiling")]
    assert said.count("tracing") == jitted._cache_size() == 2
    assert [line for line in said if line not in ("tracing", "compiling")] == searched


@pytest.mark.parametrize("options", EXECUTORS[1:], ids=str)
@pytest.mark.parametrize(("made", "run"), [(as_numbers, as_restored), (as_restored, as_numbers)])
def test_a_plan_is_for_restored_state_too(made, run, options):
    step = autoshard.parallelize(counting_step, **options)
    step(made(), examples(16))
    other = autoshard.parallelize(counting_step, plan=step.plan)
    assert_close(other(run(), examples(16)), jax.jit(counting_step)(run(), examples(16)))


def test_a_type_that_changes_the_computation_is_searched_and_named():
    def step(state, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(x.astype(jnp.bfloat16) @ w))(state["w"])
        return {"w": state["w"] - gradient, "sum": state["sum"] + value}, value

    parallelized = autoshard.parallelize(step)
    with pytest.warns(AutoshardWarning, match=r"state\['sum'\] \(float32, then bfloat16 at "):
        state, _ = parallelized({"w": jnp.array(W, jnp.bfloat16), "sum": 0.0}, examples(16))
    message = r"changed in type \(state\['sum'\] is bfloat16\[\], and was weak float32\[\]\)"
    with pytest.warns(AutoshardWarning, match=message):
        parallelized(state, examples(16))
