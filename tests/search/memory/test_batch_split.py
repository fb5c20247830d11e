"""What each result of a small function is to the examples of its first argument."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.search.ir.trace import trace
from autoshard.search.memory.batch_split import batch_split
from autoshard.search.memory.batch_states import WHOLE, NotSplittableError, PerExample, local_value
from autoshard.search.memory.positions import Scope
from tests.extended_dtypes import added_as_gradients

BATCH, COUNT = 12, 2
X, W = jnp.ones((BATCH, 4)), jnp.ones((4, 4))


def states(function, *others, is_first=False):
    """Of its results: per example as (dim, stride), the others by their names."""
    graph = trace(function, X, *others).graph
    firsts = frozenset(graph.inputs if is_first else ())
    inputs = [PerExample(0), *(WHOLE for _ in others)]
    split = batch_split(Scope.of(graph), inputs, COUNT, firsts)
    return [(s.dim, s.stride) if isinstance(s, PerExample) else type(s).__name__ for s in split.wanted]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.T, (1, 1)),
        (lambda x: x.reshape(-1), (0, 4)),
        (lambda x: x.T.reshape(-1), (0, 1)),
        (lambda x: x.reshape(-1).reshape(BATCH, 2, 2), (0, 1)),
        (lambda x: x.reshape(3, 4, 4), (1, 1)),
        (lambda x: x.reshape(3, 4, 4).swapaxes(0, 1).reshape(12, 4), (0, 3)),
        (lambda x: x @ x.sum(0, keepdims=True).T * 0 + x[:, :1], None),
        (lambda x: jnp.sort(x, 1), (0, 1)),
        (lambda x: jnp.cumsum(x, 1), (0, 1)),
        (lambda x: jnp.flip(x, 1), (0, 1)),
        (lambda x: jnp.concatenate([x, 2 * x], 1), (0, 1)),
        (lambda x: x[:, None, 1:3], (0, 1)),
        (lambda x: jnp.take(x, jnp.array([2, 0]), 1), (0, 1)),
        (lambda x: jnp.concatenate([x, x], 0), (0, 1)),
        (lambda x: jnp.concatenate([x, x, jnp.zeros((2, 4))], 0)[12:], (0, 1)),
        (lambda x: jnp.pad(x.reshape(-1), (8, 16)), (0, 4)),
        (lambda x: jnp.split(x, 3)[1], (0, 1)),
        (lambda x: x[4:-2], (0, 1)),
        (lambda x: jnp.roll(x, 4, 0), (0, 1)),
        (lambda x: jnp.tile(x, (3, 2)), (0, 1)),
        (lambda x: x.at[jnp.arange(BATCH), 1].multiply(2.0), (0, 1)),
    ],
)
def test_dims_that_carry_examples_are_followed(function, expected):
    if expected is None:
        with pytest.raises(NotSplittableError):
            states(function)
    else:
        assert states(function) == [expected]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.sum(0), "Partial"),
        (lambda x: x.T @ x, "Partial"),
        (lambda x: 3 * -x.sum(0).reshape(2, 2).T / 5, "Partial"),
        (lambda x: x.sum(0) + x.T.sum(1), "Partial"),
        (lambda x: jnp.where(jnp.arange(4) > 1, x.sum(0), 0), "Partial"),
        (lambda x: x.sum(0) @ jnp.ones((4, 4)), "Partial"),
        (lambda x: x.sum(0) + 1, "Finished"),
        (lambda x: x.sum(0) * x.sum(0), "Finished"),
        (lambda x: 1 / x.sum(0), "Finished"),
        (lambda x: jnp.exp(x.sum(0)), "Finished"),
        (lambda x: (x > 0).sum(0).astype(float), "Finished"),
        (lambda x: x.max(0), "Reduced"),
        (lambda x: (x > 0).all(0), "Reduced"),
        (lambda x: -x.max(0), "Finished"),
        (lambda x: added_as_gradients(x.sum(0), 2 * x.sum(0)), "Finished"),
        (lambda x: jnp.zeros(4), "Whole"),
        (lambda x: jax.vmap(lambda x: lax.pmean(x, "b"), axis_name="b", out_axes=None)(x), "Partial"),
        (lambda x: jax.vmap(lambda x: lax.pmax(x, "b"), axis_name="b", out_axes=None)(x), "Reduced"),
    ],
)
def test_sums_stay_sums_as_long_as_all_is_linear(function, expected):
    assert states(function) == [expected]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.T,
        lambda x: x - x.mean(0),
        lambda x: jax.vmap(lambda x: x - lax.pmean(x, "b"), axis_name="b")(x),
        lambda x: jax.vmap(lambda x: lax.pshuffle(x, "b", range(BATCH)[::-1]), axis_name="b")(x),
        lambda x: jnp.sort(x, 0),
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.flip(x, 0),
        lambda x: x.argmax(0),
        lambda x: jnp.concatenate([x, jnp.ones((3, 4))], 0),
        lambda x: jnp.pad(x, ((2, 1), (0, 0))),
        lambda x: lax.split(x, (5, 7)),
        lambda x: jnp.roll(x, 1, 0),
        lambda x: x[::2],
        lambda x: x[1:],
        lambda x: x[jnp.array([3, 1])],
        lambda x: jax.vmap(lambda i: lax.dynamic_slice(x, (i, 0), (1, 4)))(jnp.array([3, 1])),
        lambda x: lax.dynamic_slice(x, (3, 0), (6, 4)),
        lambda x: jnp.zeros((BATCH, 4)).at[jnp.array([3, 1])].add(x[:, 1].sum()) + x,
        lambda x: x.reshape(6, 2, 4).reshape(6, 8)[:, :6],
        lambda x: x.reshape(12, 2, 2).reshape(3, 16)[:, :7],
        lambda x: lax.map(jnp.sum, x),
        lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    ],
)
def test_examples_that_meet_are_refused_but_come_first_where_the_inputs_decide_them(function):
    with pytest.raises(NotSplittableError):
        states(function)
    assert states(function, is_first=True)[0] in ("Whole", (0, 1))


@pytest.mark.devices
def test_a_ragged_product_is_not_linear_in_the_sizes_of_its_groups():
    def function(x, rows, matrices):
        return lax.ragged_dot(rows, matrices, jnp.int32(1) * (x > 0).sum(0).astype(jnp.int32))

    assert states(function, jnp.ones((8, 3)), jnp.ones((4, 3, 2))) == ["Finished"]


def test_what_the_inputs_decide_is_whole_only_where_it_has_to_be():
    assert states(lambda x: (x > 0, x.sum()), is_first=True) == [(0, 1), "Whole"]


@pytest.mark.devices
def test_a_loop_is_followed_until_its_carries_stay():
    def function(x, w):
        def body(carry, w):
            _, b, total, number = carry
            return (b, jnp.tanh(x @ w), total + b.sum(0), number + 1), (b, b.sum(), 2 * w)

        return lax.scan(body, (jnp.zeros_like(x), jnp.zeros_like(x), jnp.zeros(4), 0), w)

    assert states(function, jnp.ones((5, 4, 4))) == [
        *[(0, 1), (0, 1), "Partial", "Alike"],
        *[(1, 1), "Partial", "Alike"],
    ]


@pytest.mark.devices
def test_a_loop_may_not_need_what_is_finished():
    def function(x, w):
        return lax.scan(lambda c, w: (c + jnp.exp(c @ w), None), x.sum(0), w)[0]

    assert states(function, jnp.ones((5, 4, 4))) == ["Finished"]
    with pytest.raises(NotSplittableError, match="exp"):
        states(
            lambda x, w: lax.scan(lambda c, w: (jnp.exp(x.sum()), (x @ w)[0]), 0.0, w), jnp.ones((5, 4, 4))
        )


def test_a_part_has_fewer_examples():
    (v,) = trace(lambda x: x, X).graph.inputs
    value = trace(lambda x: x, X).graph.values[v]
    assert local_value(value, PerExample(0), 3).shape == (4, 4)
    assert local_value(value, WHOLE, 3) == value


def test_a_barrier_leaves_each_operand_what_it_is():
    def function(x, w):
        return lax.optimization_barrier((x, w, x.sum(0)))

    assert states(function, W) == [(0, 1), "Alike", "Partial"]


def test_a_scatter_adds_sums_to_what_is_counted_once():
    index = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    graph = trace(lambda i, w: w.at[i].add(1.0), index, W).graph
    split = batch_split(Scope.of(graph), [PerExample(0), WHOLE], COUNT, frozenset())
    assert [type(s).__name__ for s in split.wanted] == ["Partial"]
