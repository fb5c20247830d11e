"""What travels between a device and its host, where tables rest on the host: bytes that follow from the step's formulas."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.trace import trace
from autoshard.search.memory.offload import may_rest_on_host, offloaded
from autoshard.search.step_problem import StepProblem

ROWS, WIDTH, IDS = 1 << 17, 64, 256
TABLE = ROWS, WIDTH


def on_host(tx, mode=None):
    """A step, and its arguments that may rest on the host."""

    def step(state, ids):
        grads = jax.grad(lambda p: jnp.sum(jnp.take(p, ids, axis=0, mode=mode) ** 2))(state["table"])
        updates, moments = tx.update(grads, state["moments"], state["table"])
        return {"table": optax.apply_updates(state["table"], updates), "moments": moments}

    table = jax.ShapeDtypeStruct(TABLE, jnp.float32)
    state = {"table": table, "moments": jax.eval_shape(tx.init, table)}
    traced = trace(step, state, jax.ShapeDtypeStruct((IDS,), jnp.int32))
    return traced, frozenset(may_rest_on_host(traced))


def copies(tx, mode=None):
    """The shapes that come to the device, and that go to the host, in a step whose state is all on the host."""
    graph = offloaded(*on_host(tx, mode)).step.graph
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


def test_columns_may_be_split_and_rows_cost_what_the_link_takes():
    cluster = parse_cluster("8xH100-80GB")
    step, hosted = on_host(optax.sgd(0.1), "clip")
    problem = StepProblem.of(step, [""] * len(step.arguments), cluster.device, hosted=hosted).on(
        cluster, (8,)
    )
    costed = problem.memory.costed
    folded = costed.graph.folded
    (look_up,) = [k for k in range(len(folded.members)) if is_look_up(folded.op(k))]
    kinds = {f.size: f.kind for f in folded.op(look_up).rule.factors}
    assert (kinds[ROWS], kinds[WIDTH]) == (Kind.UNSPLITTABLE, Kind.PARALLEL)
    least_s = cluster.host_link.copy_s(2 * IDS * WIDTH * 4 / 8)
    assert costed.op_seconds(look_up).min() >= least_s


def is_look_up(op):
    return op.name == "gather" and op.phase is Phase.FORWARD
