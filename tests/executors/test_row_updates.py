"""Tables that are updated by rows come to the numbers of one device that updates all rows."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.executors.jit import build
from autoshard.search.ir import row_updates
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched
from tests import zoo
from tests.executors import plans
from tests.executors.agreement import Reference, assert_equal
from tests.search.ir.test_row_updates import row_wise_adagrad

ROWS, WIDTH, BATCH = 1 << 9, 8, 48


def look_ups(params, batch):
    """Look-ups with repeated ids, of several for each example, and of ids outside of the table."""
    table, ids = params["table"], batch["ids"]
    wrapped = table[ids - 3]
    clipped = jnp.take(table, ids + ROWS - 30, axis=0, mode="clip")
    dropped = jnp.nan_to_num(jnp.take(table, 2 * ids[:, :1] + ROWS - 90, axis=0, mode="fill"))
    return wrapped.sum(1) + jnp.tanh(clipped).sum(1) + dropped.sum(1)


def case(tx) -> zoo.Case:
    def init():
        keys = jax.random.split(jax.random.key(0))
        params = {
            "table": jax.random.normal(keys[0], (ROWS, WIDTH), jnp.float64),
            "w": jax.random.normal(keys[1], (WIDTH, WIDTH), jnp.float64),
        }
        return {"params": params, "moments": tx.init(params)}

    def loss_fn(params, batch):
        return jnp.mean((look_ups(params, batch) @ params["w"]) ** 2)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, moments = tx.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, {"loss": loss}

    return zoo.Case("look-ups", step, init, {"ids": zoo.case.Integers((BATCH, 2), 60)})


OPTIMIZERS = {
    "adagrad": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)),
    "row-wise": row_wise_adagrad(0.1),
}


@functools.cache
def on_one_device(name):
    return Reference.of(case(OPTIMIZERS[name]), 2)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(row_updates, "LEAST_BYTES", 0)
    with jax.enable_x64(True):
        yield


@pytest.mark.slow  # the rows on the host, below, are split by a drawn plan, too
@pytest.mark.parametrize(("name", "mesh", "seed"), [("adagrad", (2, 4), 0), ("row-wise", (8,), 1)])
def test_drawn_plans_come_to_one_devices_numbers(name, mesh, seed):
    single = on_one_device(name)
    assert any(op.name == "sort" for op in single.step.graph.ops)
    assert_equal(single.on_many_devices(plans.drawn(single.step, mesh, seed)), single.results)


def test_rows_of_a_table_on_the_host_come_to_one_devices_numbers():
    single = on_one_device("adagrad")
    hosted = frozenset(i for i, a in enumerate(single.step.arguments) if "table" in a.name)
    found = plans.drawn(single.step, (2, 4), 0, hosted)
    copied = [op.result_values[0].shape for op in found.step.graph.ops if op.name == "device_put"]
    assert copied
    assert all(ROWS not in shape for shape in copied)
    assert_equal(single.on_many_devices(found), single.results)


def test_microbatches_add_up_gradients_of_rows():
    single = on_one_device("adagrad")
    step = microbatched(single.step, 4)
    (loop,) = [op for op in step.graph.ops if op.name == "scan"]
    assert all(ROWS not in value.shape for value in loop.result_values)
    assert_equal(single.on_many_devices(plans.fastest(step, (2,))), single.results)


def test_steps_without_ids_in_the_table_change_nothing():
    def step(table, ids):
        grads = jax.grad(lambda t: jnp.sum(jnp.take(t, ids, axis=0, mode="fill", fill_value=0)))(table)
        return table - 0.1 * grads, jnp.sum(grads**2)

    table, ids = jnp.ones((ROWS, WIDTH)), jnp.asarray([ROWS, ROWS + 5, -ROWS - 1, ROWS])
    traced = trace(step, table, ids)
    assert [op.name for op in traced.graph.ops].count("sort") == 1
    new, norm = on_one_program(traced, table, ids)
    assert_equal((new, norm), (table, jnp.zeros(())))


def on_one_program(traced, *args):
    program = build(traced, plans.fastest(traced, (1,)).sharding, jax.devices())
    return program.fn(*jax.device_put(args, program.shardings, may_alias=False))
