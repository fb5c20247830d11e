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
    "slice of the second half": lambda x: lax.slice(x, (x.shape[0] // 2, 1), (x.shape[0], 5)),
    "pad": lambda x: lax.pad(x, 0.0, ((x.shape[0], -x.shape[0] // 2, 0), (1, 2, 1))),
    "split": lambda x: lax.split(x, (x.shape[0] // 2,) * 2, axis=0)[1],
    "tile": lambda x: jnp.tile(x, (1, 3)),
    "tile of a row": lambda x: jnp.tile(jnp.ones((1, 6)), (x.shape[0], 2)) * jnp.tile(x, 2)[:, :1],
    "concatenate": lambda x: jnp.concatenate([x, x], 0),
    "conv_general_dilated of groups of features": lambda x: lax.conv_general_dilated(
        x.reshape(1, x.shape[0] * 2, 3),
        jnp.ones((x.shape[0] * 5, 2, 2)),
        (1,),
        "VALID",
        feature_group_count=x.shape[0],
    ),
    "conv_general_dilated of groups of the batch": lambda x: lax.conv_general_dilated(
        x[:, :, None], jnp.ones((x.shape[0] * 5, 6, 1)), (1,), "VALID", batch_group_count=x.shape[0]
    ),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.uint32(0), jnp.uint32(2)), (x.shape[0], 3)),
    "gather": lambda x: jnp.take(x, jnp.array([4, 0, 1]), axis=1, mode="clip"),
    "transpose": lambda x: x.T,
    "cumsum": lambda x: jnp.cumsum(x, 1),
    "tanh": jnp.tanh,
}


def first_op(function, num_rows: int, name: str) -> tuple[Op, list[Value]]:
    """The first op of that name, with its operands."""
    graph = trace(function, jax.ShapeDtypeStruct((num_rows, 6), jnp.float32)).graph
    op = next(op for op in graph.ops if op.name == name.partition(" ")[0])
    return op, [graph.value(a) for a in op.inputs]


@pytest.mark.parametrize("name", OPS)
def test_parameters_are_those_of_a_smaller_batch(name):
    op, was = first_op(OPS[name], 8, name)
    small, now = first_op(OPS[name], 2, name)
    made = Resizer().resized(op, op.inputs, (was, now), small.result_values)
    assert made is not None
    assert made.result_values == small.result_values
    assert made.params == small.params


def test_sizes_that_no_rule_knows_are_not_guessed():
    op, was = first_op(lambda x: lax.rng_uniform(x[0, 0], x[1, 1], x.shape), 8, "rng_uniform")
    smaller = tuple(Value((v.shape[0] // 2, 6), v.dtype) for v in op.result_values)
    assert Resizer().resized(op, op.inputs, (was, was), smaller) is None
