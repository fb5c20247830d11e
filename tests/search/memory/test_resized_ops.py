"""An op for fewer examples is the op that JAX makes for them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.search.ir.graph import Op, Value
from autoshard.search.ir.trace import trace
from autoshard.search.memory.resized_ops import Resizer

OPS = {
    "broadcast_in_dim": lambda x: lax.broadcast_in_dim(x, (3, *x.shape), (1, 2)),
    "reshape": lambda x: lax.reshape(x, (x.shape[0] * 2, 3)),
    "slice": lambda x: lax.slice(x, (0, 1), (x.shape[0], 5), (1, 2)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.uint32(0), jnp.uint32(2)), (x.shape[0], 3)),
    "gather": lambda x: jnp.take(x, jnp.array([4, 0, 1]), axis=1, mode="clip"),
    "transpose": lambda x: x.T,
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "tanh": jnp.tanh,
}


def only_op(function, num_rows: int, name: str) -> tuple[Op, list[Value]]:
    """The op of that name, with its first operand."""
    graph = trace(function, jax.ShapeDtypeStruct((num_rows, 6), jnp.float32)).graph
    (op,) = (op for op in graph.ops if op.name == name)
    return op, [graph.value(a) for a in op.inputs]


@pytest.mark.parametrize("name", OPS)
def test_parameters_are_those_of_a_smaller_batch(name):
    op, was = only_op(OPS[name], 8, name)
    small, now = only_op(OPS[name], 2, name)
    made = Resizer().resized(op, op.inputs, (was, now), small.result_values)
    assert made is not None
    assert made.result_values == small.result_values
    assert made.params == small.params


def test_sizes_that_no_rule_knows_are_not_guessed():
    op, was = only_op(lambda x: lax.split(x, (2, 6), axis=0)[1], 8, "split")
    smaller = tuple(Value((v.shape[0] // 2, 6), v.dtype) for v in op.result_values)
    assert Resizer().resized(op, op.inputs, (was, [Value((4, 6), was[0].dtype)]), smaller) is None
