"""What crosses a cut, and the work between cuts."""

import jax
import jax.numpy as jnp

from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.stage_cut import crossing_bytes, num_flops


def ops_of(function, *args):
    graph = trace(function, *args).graph
    return graph.ops, graph.values


def test_what_is_read_later_crosses_all_cuts_in_between():
    def function(x):
        first = jnp.tanh(x)
        return jnp.sin(jnp.cos(jnp.exp(first))) + first

    ops, values = ops_of(function, jax.ShapeDtypeStruct((4,), "float32"))
    assert crossing_bytes(ops, values, [1] * 5).tolist() == [0, 16, 32, 32, 32, 0]


def test_inside_a_loop_its_carry_crosses_beside_what_is_read_behind_it():
    def function(x, ws):
        first = jnp.tanh(x)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), first, ws)[0] + first

    shapes = jax.ShapeDtypeStruct((2, 2), "float32"), jax.ShapeDtypeStruct((3, 2, 2), "float32")
    ops, values = ops_of(function, *shapes)
    assert [op.name for op in ops] == ["tanh", "scan", "add"]
    assert crossing_bytes(ops, values, [1, 3, 1]).tolist() == [0, 16, 32, 32, 32, 0]


def test_a_loops_work_is_its_bodys_as_often_as_it_runs():
    def looped(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    (loop,), values = ops_of(
        looped, jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((5, 4, 4), "float32")
    )
    assert num_flops(loop, values) == 5 * 2 * 4**3
