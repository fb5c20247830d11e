"""Zeros that XLA:GPU stores, and those that it computes on the fly."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir.trace import trace
from autoshard.search.problem.constants import shared_constants
from autoshard.search.problem.flat_program import flatten

TABLE, ROWS = (4096, 64), 128


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def shared(number=0.0, shape=TABLE, dtype=jnp.float32) -> list[str]:
    """The ops that read an array of one number beside a scatter into zeros of the table's shape."""

    def step(table, other, at, rows):
        gradient = jnp.zeros(TABLE).at[at].add(rows, mode="clip")
        avoided = jax.lax.select(other > 1, other, jnp.full(shape, number, dtype))
        return table - gradient, avoided

    args = array(*TABLE), array(*shape, dtype=dtype), array(ROWS, dtype=jnp.int32), array(ROWS, TABLE[1])
    program = flatten(trace(step, *args))
    return [program.ops[u].name for v in shared_constants(program) for u in program.uses[v]]


def test_zeros_like_those_that_a_scatter_writes_over_are_an_array():
    """As XLA does where AdaGrad avoids a division by zero beside the gradient of a table."""
    assert shared() == ["select_n"]


@pytest.mark.parametrize("other", [{"number": 1.0}, {"shape": (64, 64)}, {"dtype": jnp.bfloat16}])
def test_others_are_computed_on_the_fly(other):
    assert shared(**other) == []


def test_without_a_scatter_there_are_none():
    program = flatten(trace(lambda x: jnp.where(x > 0, x, 0.0), array(*TABLE)))
    assert not shared_constants(program)
