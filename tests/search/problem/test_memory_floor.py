"""The floor: by hand for a step whose arrays are few, and below whatever the kernels of any strategies hold."""

from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.problem.memory_floor import floor_bytes, working_bytes
from autoshard.search.step_problem import StepProblem

MIB = 2**20
CLUSTER = parse_cluster("4xH100-80GB")
W, X = jax.ShapeDtypeStruct((1024, 2048), jnp.float32), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)


def update(w, x):
    """Arguments of 8 and 16 MiB, activations of 32 MiB, a gradient of 8 MiB."""
    loss = lambda w: jnp.sum(jnp.tanh(jnp.tanh(x) @ w) ** 2)  # noqa: E731
    return w - 0.1 * jax.grad(loss)(w)


STEP = trace(update, W, X)


def on_mesh(step=STEP, sites=frozenset()):
    return StepProblem.of(step, ("", ""), CLUSTER.device, sites).on(CLUSTER, (4,))


def test_arguments_and_the_arrays_of_the_largest_product_are_there():
    one = on_mesh()
    kept = one.pinned({})
    # the gradient's: both operands split by the batch, and partial sums; with whole columns or rows an operand is whole
    assert working_bytes(one.memory, kept) == (16 / 4 + 32 / 4 + 8) * MIB
    assert floor_bytes(one.memory, kept) == working_bytes(one.memory, kept) + (8 + 16) / 4 * MIB


def test_in_microbatches_products_are_small_and_sums_stay():
    one, many = on_mesh(microbatched(STEP, 16)), on_mesh(microbatched(STEP, 512))
    assert working_bytes(one.memory, one.pinned({})) == (16 + 32 / 4 + 16 * 8 / 4) / 16 * MIB  # by columns
    assert working_bytes(many.memory, many.pinned({})) == pytest.approx(8 / 4 * MIB, rel=0.1)


@pytest.mark.parametrize("step", [STEP, microbatched(STEP, 4)], ids=["whole", "microbatches"])
def test_no_strategies_hold_less(step):
    one = on_mesh(step)
    kept = one.pinned({})
    floor = floor_bytes(one.memory, kept)
    fastest = one.solve(kept, 1 << 40, 1.0).labels
    assert one.predicted(fastest, inf).least.num_bytes >= floor
    assert one.smallest_peak(kept, 10.0)[1].num_bytes >= floor


def test_recomputation_holds_no_less():
    floor = floor_bytes(on_mesh().memory, on_mesh().pinned({}))
    sites = frozenset((i,) for i, op in enumerate(STEP.graph.ops) if op.name == "tanh")
    again = on_mesh(sites=sites)
    assert again.smallest_peak(again.pinned({}), 10.0)[1].num_bytes >= floor


def test_nothing_that_may_be_kept_is_infinitely_much():
    one = on_mesh()
    kept = [np.arange(0) for _ in one.memory.costed.strategies]
    assert floor_bytes(one.memory, kept) == working_bytes(one.memory, kept) == inf
