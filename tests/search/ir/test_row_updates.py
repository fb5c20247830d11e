"""Which tables are updated by rows: those whose other rows stay as they are, as the optimizers' formulas say."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.search.ir.trace import trace

ROWS, WIDTH, IDS = 1 << 17, 64, 256


def row_wise_adagrad(rate):
    """One accumulator for each row (Mudigere et al. 2022, section 4.1.4)."""

    def update(grads, sums, params=None):
        del params
        sums = jax.tree.map(lambda s, g: s + jnp.mean(g * g, range(1, g.ndim)), sums, grads)
        return jax.tree.map(lambda s, g: -rate * g * jax.lax.rsqrt(s + 1e-8)[:, None], sums, grads), sums

    return optax.GradientTransformation(lambda p: jax.tree.map(lambda x: jnp.zeros(x.shape[:1]), p), update)


STAY = {
    "sgd": optax.sgd(0.1),
    "a schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 100)),
    "adagrad": optax.adagrad(0.1),
    "row-wise adagrad": row_wise_adagrad(0.1),
    "clipped norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)),
    "clipped values": optax.chain(optax.clip(1e-3), optax.sgd(0.1)),
}
CHANGE = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "weight decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
}


def squared_rows(params, ids):
    return jnp.sum(params["table"][ids] ** 2)


def of_all_rows(tx, loss=squared_rows, rows=ROWS, ids=(IDS,), *, also=lambda grads: None):
    """The ops of a traced step whose results have all rows of the table."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = tx.update(grads, state["moments"], state["params"])
        return (
            {"params": optax.apply_updates(state["params"], updates), "moments": moments},
            value,
            also(grads),
        )

    params = {"table": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}
    state = {"params": params, "moments": jax.eval_shape(tx.init, params)}
    graph = trace(step, state, jax.ShapeDtypeStruct(ids, jnp.int32)).graph
    return [op.name for op in graph.ops if any(v.shape[:1] == (rows,) for v in op.result_values)]


@pytest.mark.parametrize("name", STAY)
def test_only_the_new_state_has_all_rows(name):
    num_tables = 2 if "adagrad" in name or name == "clipped norm" else 1
    assert of_all_rows(STAY[name]) == ["scatter"] * num_tables


@pytest.mark.parametrize("name", CHANGE)
def test_an_optimizer_that_changes_other_rows_updates_all(name):
    assert "scatter-add" in of_all_rows(CHANGE[name])


def tied(params, ids):
    return jnp.sum(params["table"][ids] @ params["table"].T)


def of_a_mapped_table(params, ids):
    return jnp.sum((params["table"] ** 2)[ids])


@pytest.mark.parametrize(
    "others",
    [
        {"loss": tied},
        {"also": lambda grads: grads},
        {"rows": 1 << 14},
        {"ids": (ROWS // 64, 64)},
    ],
    ids=["tied", "returned", "small", "many ids"],
)
def test_other_uses_of_the_gradient_update_all_rows(others):
    assert "scatter-add" in of_all_rows(optax.sgd(0.1), **others)


def test_a_function_of_each_row_before_the_look_up_is_part_of_the_update():
    assert of_all_rows(optax.sgd(0.1), of_a_mapped_table) == ["integer_pow", "scatter"]


def test_several_look_ups_share_their_slots():
    def loss(params, ids):
        cast = params["table"].astype(jnp.bfloat16)
        return jnp.sum(params["table"][ids]) + jnp.sum(jnp.take(cast, ids[:9], axis=0, mode="clip")) ** 2

    assert sorted(of_all_rows(optax.adagrad(0.1), loss)) == ["convert_element_type", "scatter", "scatter"]
