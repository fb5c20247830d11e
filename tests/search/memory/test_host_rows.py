"""What travels between a device and its host, where tables rest on the host: bytes that follow from the step's formulas."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.search.ir.trace import trace
from autoshard.search.memory.offload import may_rest_on_host, offloaded

ROWS, WIDTH, IDS = 1 << 17, 64, 256
TABLE = ROWS, WIDTH


def copies(tx, mode=None):
    """The shapes that come to the device, and that go to the host, in a step whose state is all on the host."""

    def step(state, ids):
        grads = jax.grad(lambda p: jnp.sum(jnp.take(p, ids, axis=0, mode=mode) ** 2))(state["table"])
        updates, moments = tx.update(grads, state["moments"], state["table"])
        return {"table": optax.apply_updates(state["table"], updates), "moments": moments}

    table = jax.ShapeDtypeStruct(TABLE, jnp.float32)
    state = {"table": table, "moments": jax.eval_shape(tx.init, table)}
    traced = trace(step, state, jax.ShapeDtypeStruct((IDS,), jnp.int32))
    graph = offloaded(traced, frozenset(may_rest_on_host(traced))).step.graph
    moved = [op.result_values[0] for op in graph.ops if op.name == "device_put"]
    assert all(graph.value(a).is_on_host for a in graph.outputs if graph.value(a).shape == TABLE)
    return [sorted(v.shape for v in moved if v.is_on_host is there) for there in (False, True)]


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_rows_travel_each_way(mode):
    to_device, to_host = copies(optax.adagrad(0.1), mode)
    assert to_device == [(IDS, WIDTH)] * 3  # looked up, and the old rows of the table and its sums
    assert to_host == [(IDS, 1)] * 2 + [(IDS, WIDTH)] * 2


def test_an_optimizer_of_all_rows_reads_the_table_for_its_update_only():
    to_device, to_host = copies(optax.adam(0.1), "clip")
    assert to_device == [(IDS, WIDTH), *[TABLE] * 3]
    assert to_host == [(IDS, 1), *[TABLE] * 3]
