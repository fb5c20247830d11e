"""Which result is which argument's successor: what is certainly state, and what only looks like it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import autoshard
from autoshard.cost_model.errors import InputError
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.trace import trace, trace_call

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def gradients(params, x):
    """Of a loss in which every leaf takes part."""

    def loss(params):
        for w in jax.tree.leaves(params):
            x_ = jnp.tanh(x @ w)
        return sum(jnp.mean(jnp.tanh(x_ @ w) ** 2) for w in jax.tree.leaves(params))

    return jax.grad(loss)(params)


def descended(params, x, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients(params, x))


def averaged(average, params):
    return jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def replaced(step, *args):
    """For each result, the argument that it replaces."""
    return trace(step, *args).replaces


# --- not state, though it looks like it


def test_a_batch_shaped_like_a_parameter():
    def step(ws, x):
        return descended(ws, x)

    assert replaced(step, (W, W), X) == (0, 1)


def test_a_batch_shaped_like_the_parameter_before_it():
    assert replaced(lambda x, w: descended(w, x), X, W) == (1,)


def test_two_batches_structured_like_two_parameters():
    def step(batch, ws):
        return descended(ws, batch[0] + batch[1])

    assert replaced(step, (X, X), (W, W)) == (2, 3)


@pytest.mark.devices
def test_a_batch_that_is_used_again_is_still_there():
    @autoshard.parallelize(mesh=(8,))
    def step(ws, x):
        return descended(ws, x)

    x, ws = jnp.ones(X.shape) / 16, (jnp.eye(16), jnp.eye(16) / 2)
    wanted = descended(descended(ws, x), x)
    got = step(step(ws, x), x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, wanted)
    assert not x.is_deleted()


def test_gradients_that_are_clipped_in_the_update():
    def step(params, x):
        grads = gradients(params, x)
        total = norm(grads)
        return jax.tree.map(lambda g: g / jnp.maximum(total, 1.0), grads), total

    assert replaced(step, {"w": W}, X) == (None, None)


def test_a_prediction_made_with_the_new_parameters():
    def step(w, x):
        w = descended(w, x)
        return w, x @ w

    assert replaced(step, W, X) == (0, None)


def test_a_batch_handed_back():
    def step(params, batch):
        return descended(params, batch["x"]), batch

    assert replaced(step, {"w": W}, {"x": X, "y": X}) == (0, None, None)


def test_metrics_beside_a_rate():
    def step(w, x, rate):
        new = descended(w, x, rate)
        return new, rate * norm(new), jnp.sum(new)

    assert replaced(step, W, X, SCALAR) == (0, None, None)


def test_a_mixture_that_could_replace_either():
    """The results are in a dict, so nothing says which of the two it is."""

    def step(slow, fast, x):
        return {"loss": jnp.sum(x), "new": averaged(slow, descended(fast, x))}

    assert replaced(step, W, W, X) == (None, None)


# --- state


def test_parameters_and_their_average():
    def step(params, average, x):
        params = descended(params, x)
        return params, averaged(average, params)

    assert replaced(step, {"w": W}, {"w": W}, X) == (0, 1)
    assert replaced(lambda a, p, x: step(p, a, x), {"w": W}, {"w": W}, X) == (1, 0)
    assert replaced(lambda p, a, x: step(p, a, x)[::-1], {"w": W}, {"w": W}, X) == (1, 0)


def test_moments_in_arguments_of_their_own():
    def step(x, second, first, params):
        grads = gradients(params, x)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, second, grads)
        new = jax.tree.map(lambda p, m, v: p - 0.1 * m / jnp.sqrt(v + 1e-8), params, first, second)
        return new, first, second

    assert replaced(step, X, {"w": W}, {"w": W}, {"w": W}) == (3, 2, 1)


def test_two_players_handed_back_in_the_other_order():
    def step(generator, critic, x):
        return descended(critic, x), descended(generator, x)

    assert replaced(step, [W], [W], X) == (1, 0)


def test_where_either_may_be_either_position_decides():
    def step(slow, fast, x):
        fast = descended(fast, x)
        mixed = averaged(slow, fast)
        return mixed, averaged(fast, mixed)

    assert replaced(step, {"w": W}, {"w": W}, X) == (0, 1)


@st.composite
def twins(draw):
    """Trees of one structure, each updated from itself and from some before it; arguments and results in any order."""
    count = draw(st.integers(2, 4))
    mixed = [draw(st.lists(st.integers(0, i - 1), unique=True)) if i else [] for i in range(count)]
    arguments = draw(st.permutations([*range(count), None]))
    results = draw(st.permutations(range(count)))
    return mixed, arguments, results


@given(twins())
def test_twin_trees_keep_their_pairing_in_any_order(case):
    mixed, arguments, results = case

    def step(*args):
        given = dict(zip(arguments, args, strict=True))
        x, new = given.pop(None), {}
        for i, others in enumerate(mixed):
            new[i] = descended(given[i], x)
            for j in others:
                new[i] = averaged(new[i], new[j])
        return *(new[i] for i in results), jnp.sum(x)

    found = replaced(step, *(X if i is None else {"a": W, "b": W} for i in arguments))
    starts = np.cumsum([0, *(1 if i is None else 2 for i in arguments)])
    wanted = [starts[arguments.index(i)] + leaf for i in results for leaf in range(2)]
    assert found == (*wanted, None)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "adafactor": optax.adafactor(1e-3),
    "lion": optax.lion(1e-3),
    "scheduled": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1e-3, 9))
    ),
    "accumulated": optax.MultiSteps(optax.adam(1e-3), 2),
    "if-finite": optax.apply_if_finite(optax.adam(1e-3), 5),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "sam": optax.contrib.schedule_free_adamw(1e-3),
    "muon": optax.contrib.muon(1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_the_state_of_any_optimizer(name):
    optimizer = OPTIMIZERS[name]

    def step(x, opt_state, params):
        updates, opt_state = optimizer.update(gradients(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.sum(x)

    params = {"v": W, "w": W}
    opt_state = jax.eval_shape(optimizer.init, params)
    count = len(jax.tree.leaves(opt_state))
    assert replaced(step, X, opt_state, params) == (count + 1, count + 2, *range(1, count + 1), None)


def test_an_update_in_a_kernel():
    def step(x, w):
        def kernel(w_ref, g_ref, new_ref):
            new_ref[...] = w_ref[...] - 0.1 * g_ref[...]

        update = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(W.shape, W.dtype), interpret=True)
        return update(w, gradients(w, x))

    assert replaced(step, X, W) == (1,)


def test_a_retraction_to_a_manifold():
    def step(x, w):
        return jnp.linalg.qr(descended(w, x))[0]

    assert replaced(step, X, W) == (1,)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_keys_that_are_folded(key):
    def step(w, x, key):
        noise = jax.random.normal(key, x.shape)
        return descended(w, x + noise), jax.random.fold_in(key, 1)

    assert replaced(step, W, X, key) == (0, 2)


def test_state_that_no_longer_depends_on_itself_beside_state_that_does():
    def step(state, x):
        grads = gradients(state["params"], x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"last": jnp.sum(x), "params": new, "previous": grads}

    assert replaced(step, {"last": SCALAR, "params": W, "previous": W}, X) == (0, 1, 2)


def test_keyword_arguments():
    def step(*, x, params, average):
        params = descended(params, x)
        return params, averaged(average, params)

    assert trace(step, x=X, params=W, average=W).replaces == (1, 0)


# --- state that comes back in another nesting


def adam(params, moments, x):
    grads = gradients(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


def test_arguments_that_come_back_together():
    def step(params, moments, x):
        return adam(params, moments, x), jnp.sum(x)

    assert replaced(step, {"w": W}, {"w": W}, X) == (0, 1, None)


def test_a_dict_of_two_arguments():
    def step(params, x, moments):
        params, moments = adam(params, moments, x)
        return {"moments": moments, "params": params, "x": jnp.sum(x)}

    assert replaced(step, [W, W], X, [W, W]) == (3, 4, 0, 1, None)


def test_a_list_that_comes_back_as_a_tuple():
    def step(ws, x):
        return tuple(descended(ws, x)), jnp.sum(x)

    assert replaced(step, [W, W], X) == (0, 1, None)


def test_a_part_of_an_argument():
    def step(state, x):
        return descended(state["params"], x), state["rate"] * norm(state["params"])

    assert replaced(step, {"frozen": W, "params": {"v": W, "w": W}, "rate": SCALAR}, X) == (1, 2, None)


def test_state_deep_in_the_result():
    def step(params, moments, x):
        params, moments = adam(params, moments, x)
        return jnp.sum(x), {"new": {"model": params, "optimizer": {"mu": moments}}}

    assert replaced(step, {"v": W, "w": W}, {"v": W, "w": W}, X) == (None, 0, 1, 2, 3)


def test_gradients_added_up_in_a_loop():
    optimizer = optax.adam(1e-3)

    def step(params, opt_state, batches):
        def add(total, x):
            return jax.tree.map(jnp.add, total, gradients(params, x)), jnp.sum(x)

        grads, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses

    params = {"v": W, "w": W}
    opt_state = jax.eval_shape(optimizer.init, params)
    traced = trace(step, params, opt_state, jax.ShapeDtypeStruct((4, 16, 16), jnp.float32))
    assert traced.replaces == (*range(7), None)
    assert [a.role.value for a in traced.arguments[:2]] == ["parameter"] * 2
    assert [a.role.value for a in traced.arguments[3:7]] == ["optimizer_state"] * 4
    by_phase = (
        {op.phase for op in traced.graph.ops if op.name == "scan"},
        {op.phase for op in traced.graph.ops if op.name == "sqrt"},
    )
    assert by_phase == ({Phase.FORWARD}, {Phase.UPDATE})


def test_gradients_that_a_loop_adds_up_are_not_new_parameters():
    def step(params, batches):
        zeros = jax.tree.map(jnp.zeros_like, params)
        add = lambda total, x: (jax.tree.map(jnp.add, total, gradients(params, x)), None)  # noqa: E731
        return jax.lax.scan(add, zeros, batches)[0]

    assert replaced(step, {"w": W}, jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)) == (None,)


def test_many_steps_in_one():
    def step(params, batches):
        return jax.lax.scan(lambda p, x: (descended(p, x), jnp.sum(x)), params, batches)

    assert replaced(step, [W], jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)) == (0, None)


def test_steps_until_something_holds():
    def step(params, x):
        going = lambda carry: norm(carry[0]) > carry[1]  # noqa: E731
        return jax.lax.while_loop(going, lambda c: (descended(c[0], x), c[1] * 1.1), (params, jnp.sum(x)))[0]

    assert replaced(step, [W], X) == (0,)


def test_a_step_that_may_be_skipped():
    def step(params, x):
        return jax.lax.cond(jnp.sum(x) > 0, lambda p: descended(p, x), lambda p: p, params)

    assert replaced(step, [W], X) == (0,)


# --- steps without gradients


def decode(params, cache, tokens):
    cache = jax.lax.dynamic_update_slice(cache, tokens @ params, (0, 3, 0))
    return jnp.einsum("bd,bsd->bs", (tokens @ params)[:, 0], cache), cache


def test_a_cache_that_is_written_into():
    cache, tokens = jax.ShapeDtypeStruct((4, 9, 16), "float32"), jax.ShapeDtypeStruct((4, 1, 16), "float32")
    assert replaced(decode, W, cache, tokens) == (None, 1)
    assert replaced(lambda c, p, t: decode(p, c, t)[::-1], cache, W, tokens) == (0, None)


def test_a_cache_by_name():
    def step(params, cache, x):
        return x @ params, {"keys": cache["keys"] + x, "values": cache["values"] * 0.9}

    assert replaced(step, W, {"keys": X, "values": X}, X) == (None, 1, 2)


def test_an_average_by_name():
    def step(state, params):
        return {"average": averaged(state["average"], params), "decay": state["decay"]}

    assert replaced(step, {"average": W, "decay": SCALAR}, W)[0] == 0


def test_metrics_that_add_up():
    def step(metrics, logits):
        return {"confusion": metrics["confusion"] + logits.T @ logits, "count": metrics["count"] + 1}

    assert replaced(step, {"confusion": W, "count": SCALAR}, X) == (0, 1)


# --- what is not certain


def test_an_average_of_two_alike_is_in_doubt():
    def step(average, params):
        return averaged(average, params)

    traced = trace(step, W, W)
    assert traced.replaces == (None,)
    assert traced.doubtful == ((0, (0, 1)),)


def test_a_batch_before_the_state_is_not_taken_for_it():
    assert replaced(lambda batch, p: p + 0.1 * batch, X, W) == (None,)
    assert replaced(lambda batch, p: [p[0] + 0.1 * batch[0]], [X], [W]) == (None,)


def test_a_prediction_with_a_skip_connection():
    assert replaced(lambda w, x: x + jnp.tanh(x @ w), W, X) == (None,)
    assert replaced(lambda w, x: (descended(w, x), x + 1), W, X) == (0, None)


@pytest.mark.parametrize("named", ["average", "params"])
def test_the_user_says_which(named):
    def step(average, params):
        return averaged(average, params)

    found = trace_call(None, step, ({"a": W}, {"a": W}), {}, (named,))
    assert found.replaces == ({"average": 0, "params": 1}[named],)


def test_a_part_that_the_user_names():
    def step(state, x):
        return [x + 1, averaged(state["slow"], state["fast"])]

    found = trace_call(None, step, ({"fast": W, "slow": W}, SCALAR), {}, ("state['slow']",))
    assert found.replaces == (None, 1)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("avg", r"state 'avg' is no argument; they are average, x\."),
        ("x", r"state 'x' does not come back: no result has its structure and shapes"),
    ],
)
def test_state_that_the_user_names_wrongly(named, message):
    with pytest.raises(InputError, match=message):
        trace_call(
            None,
            lambda average, x: (average + jnp.sum(x["a"]), x["a"] + 1),
            (W, {"a": jax.ShapeDtypeStruct((3,), "float32"), "b": W}),
            {},
            (named,),
        )


def test_large_results_in_doubt_are_said():
    large = jax.ShapeDtypeStruct((1024, 1024), "float32")

    def step(average, params):
        return averaged(average, params)

    said = r"4 MiB of what step returns may replace .* result may be the new average or params\..*state='average'"
    with pytest.warns(autoshard.AutoshardWarning, match=said):
        autoshard.search(step, large, large, cluster="8xCPU")
    autoshard.search(step, large, large, cluster="8xCPU", state="average")


@pytest.mark.devices
def test_only_the_part_that_comes_back_is_donated():
    @autoshard.parallelize(mesh=(8,))
    def step(state, x):
        return descended(state["params"], x)

    frozen, params = jnp.eye(16), {"v": jnp.eye(16), "w": jnp.eye(16) / 2}
    x = jnp.ones((16, 16)) / 16
    wanted = descended(descended(params, x), x)
    state = {"frozen": frozen, "params": step({"frozen": frozen, "params": params}, x)}
    got = step(state, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, wanted)
    assert state["params"]["v"].is_deleted()
    assert not frozen.is_deleted()


@pytest.mark.devices
def test_an_array_that_a_call_has_twice():
    @autoshard.parallelize(mesh=(8,))
    def step(params, target, x):
        return jax.tree.map(lambda p, t, g: p - 0.1 * (g + p - t), params, target, gradients(params, x))

    x, params = jnp.ones((16, 16)) / 16, {"w": jnp.eye(16)}
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients(params, x))
    for _ in range(2):
        got = step(params, params, x)
        np.testing.assert_allclose(got["w"], wanted["w"], rtol=1e-5, atol=1e-6)
    again = step(got, got, x)
    np.testing.assert_allclose(again["w"], descended(wanted, x)["w"], rtol=1e-5, atol=1e-6)


# --- state that comes back in another type

BF16 = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def widened(params, x):
    """What a learning rate that is a NumPy float32 scalar makes of bfloat16."""
    return descended(params, x, np.float32(0.1))


def paired(step, *args):
    """All results that replace an argument, and those of them that have another type."""
    traced = trace(step, *args)
    same = {o: i for o, i in enumerate(traced.replaces) if i is not None}
    return same | dict(traced.retyped), [o for o, _ in traced.retyped]


def test_widened_parameters_are_state_beside_what_keeps_its_type():
    def step(state, x):
        return {"count": state["count"] + 1, "params": widened(state["params"], x)}, jnp.sum(x)

    state = {"count": COUNT, "params": {"v": BF16, "w": BF16}}
    traced = trace(step, state, BF16)
    assert traced.replaces == (0, None, None, None)
    assert traced.retyped == ((1, 1), (2, 2))
    assert [a.role.value for a in traced.arguments] == ["state", "parameter", "parameter", "batch"]


@pytest.mark.parametrize(
    ("old", "update"),
    [
        (BF16, lambda w, x: w - np.float32(0.1) * gradients(w, x)),
        (W, lambda w, x: descended(w, x).astype(jnp.bfloat16)),
        (jax.ShapeDtypeStruct((16, 16), jnp.int8), lambda w, x: w - gradients(w.astype(jnp.float32), x)),
        (
            W,
            lambda w, x: jax.lax.scan(lambda w, x: (descended(w, x), 0.0), w, x[None])[0].astype(jnp.float16),
        ),
        (W, lambda w, x: jax.lax.cond(x[0, 0] > 0, descended, lambda w, x: w, w, x).astype(jnp.bfloat16)),
    ],
    ids=["widened", "narrowed", "int to float", "behind a loop", "behind a branch"],
)
def test_state_whose_dtype_changes(old, update):
    assert paired(lambda w, x: (update(w, x), jnp.sum(x)), old, X) == ({0: 0}, [0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("average", "params"), [(BF16, W), (W, BF16)])
def test_an_average_in_another_dtype_is_told_from_the_parameters(average, params, order):
    def step(*args):
        average, params = (args[order.index(n)] for n in range(2))
        params = (params - 0.1 * gradients(params, args[2].astype(params.dtype))).astype(params.dtype)
        new = jnp.float32(0.9) * average + 0.1 * params, params
        return tuple(new[n] for n in order)

    found = paired(step, *((average, params)[n] for n in order), X)[0]
    assert found == {0: 0, 1: 1}


def test_a_copy_in_another_dtype_is_not_the_master():
    def step(master, x):
        master = descended(master, x)
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), master), master

    assert paired(step, {"w": W}, X) == ({1: 0}, [])
    assert paired(lambda m, x: step(m, x)[::-1], {"w": W}, X) == ({0: 0}, [])


def test_a_comparison_with_the_labels_does_not_replace_them():
    def step(params, batch):
        params = descended(params, batch["x"])
        return params, {"y": (batch["x"] @ params["w"]).argmax(-1) == batch["y"]}

    labels = jax.ShapeDtypeStruct((16,), jnp.int32)
    assert paired(step, {"w": W}, {"x": X, "y": labels}) == ({0: 0}, [])


def test_state_that_grows_is_found_by_its_siblings_and_so_is_a_counter_beside_it():
    def step(state, x):
        history = jnp.concatenate([state["history"], jnp.mean(x)[None]])
        return {"count": state["count"] + 1, "history": history, "w": descended(state["w"], x)}

    state = {"count": COUNT, "history": jax.ShapeDtypeStruct((3,), jnp.float32), "w": W}
    assert paired(step, state, X) == ({0: 0, 1: 1, 2: 2}, [1])


def test_what_shares_an_argument_with_state_is_not_replaced_by_what_is_not_made_of_it():
    def step(given):
        return {"w": descended(given["w"], given["x"]), "x": given["w"] @ given["w"]}

    assert paired(step, {"w": W, "x": X, "y": X}) == ({0: 0}, [])


def test_state_that_the_user_names_may_change_its_dtype():
    found = trace_call(None, lambda a, p: averaged(a, p), (BF16, W), {}, ("a",))
    assert (found.replaces, found.retyped) == ((None,), ((0, 0),))


def test_a_change_of_type_is_said_with_the_leaf_its_dtypes_and_the_line():
    def step(state, x):
        rate = np.float32(0.1)
        grads = gradients(state["w"], x)
        return {"w": state["w"] - rate * grads}, jnp.sum(x)

    line = step.__code__.co_firstlineno + 3
    said = (
        rf"state\['w'\] \(bfloat16, then float32 at .*test_state.py:{line}\)\. .* old and new take 1\.5 KiB"
    )
    with pytest.warns(autoshard.AutoshardWarning, match=said):
        autoshard.search(step, {"w": BF16}, BF16, cluster="8xCPU", mesh=(8,), remat="never")


@pytest.mark.devices
def test_widened_state_stays_the_users_and_comes_to_rest_where_it_is_donated_from_then_on():
    @autoshard.parallelize(mesh=(8,), remat="never")
    def step(state, x):
        return {"w": widened(state["w"], x.astype(state["w"].dtype))}, jnp.sum(x)

    state, x = {"w": jnp.eye(16, dtype=jnp.bfloat16)}, jnp.ones((16, 16)) / 16
    plain = jax.jit(step.__wrapped__)
    wanted = plain(plain(plain(state, x)[0], x)[0], x)
    with pytest.warns(autoshard.AutoshardWarning, match="in another type"):
        first, _ = step(state, x)
    with pytest.warns(autoshard.AutoshardWarning, match="planning once"):
        second, _ = step(first, x)
    got = step(second, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, wanted)
    assert not state["w"].is_deleted()
    assert first["w"].is_deleted()
    assert second["w"].is_deleted()
