"""Which look-ups find each example's own row."""

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.search.ir.trace import trace
from autoshard.search.memory.positions import own_row

ROWS = 6
X, LABELS = jnp.ones((ROWS, 5)), jnp.zeros(ROWS, jnp.int32)


def found(function):
    """Of its one look-up."""
    graph = trace(function, X, LABELS).graph
    maker = {v: op for op in graph.ops for v in op.outputs}
    (op,) = (op for op in graph.ops if op.name in ("gather", "scatter-add"))
    return own_row(op, graph, maker, 0)


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
