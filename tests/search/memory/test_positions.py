"""Which look-ups find each example's own row."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.search.ir.trace import trace
from autoshard.search.memory.positions import Scope, own_row

ROWS = 6
X, LABELS = jnp.ones((ROWS, 5)), jnp.zeros(ROWS, jnp.int32)


def found(function):
    """Of its one look-up."""
    graph = trace(function, X, LABELS).graph
    (op,) = (op for op in graph.ops if op.name in ("gather", "scatter-add"))
    return own_row(op, Scope.of(graph), 0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, i: x[jnp.arange(ROWS), i], (0, 0)),
        (lambda x, i: x.T[i, jnp.arange(ROWS)], (1, 1)),
        (lambda x, i: x[jnp.arange(ROWS, dtype=jnp.uint8), i], (0, 0)),
        (lambda x, i: x[jnp.arange(ROWS)[:, None], jnp.stack([i, i], 1)], (0, 0)),
        (lambda x, i: x.at[jnp.arange(ROWS), i].add(1.0), (0, 0)),
        (lambda x, i: x[jnp.arange(ROWS)], (0, 0)),
        (lambda x, i: x[jnp.arange(1, ROWS + 1), i], None),
        (lambda x, i: x[ROWS - 1 - jnp.arange(ROWS), i], None),
        (lambda x, i: x[jnp.arange(ROWS) // 2, i], None),
        (lambda x, i: x[i, i], None),
        (lambda x, i: x[np.array([3, 1, 0, 2, 4, 5]), i], None),
        (lambda x, i: jnp.concatenate([x, x])[jnp.arange(ROWS), i], None),
        (lambda x, i: x[jnp.where(i < 0, jnp.arange(ROWS) + 1, jnp.arange(ROWS)), i], None),
    ],
)
def test_an_index_that_counts_the_rows_is_told_from_any_other(function, expected):
    assert found(function) == expected


@pytest.mark.parametrize(
    ("index", "expected"), [(lambda: jnp.arange(ROWS), (0, 0)), (lambda: jnp.arange(ROWS) // 2, None)]
)
def test_a_loop_knows_what_an_index_counts_that_it_reads_from_outside(index, expected):
    def looped(x, i):
        rows = index()
        return lax.scan(lambda x, _: (x.at[rows, i].mul(2.0), None), x, None, length=2)[0]

    scope = Scope.of(trace(looped, X, LABELS).graph)
    (loop,) = (op for op in scope.graph.ops if op.name == "scan")
    inner = scope.of_body(loop.bodies["jaxpr"][0], loop)
    (op,) = (op for op in inner.graph.ops if op.name == "scatter-mul")
    assert own_row(op, inner, 0) == expected
