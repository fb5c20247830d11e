"""A loop that finishes statistics in its body is cut in two, and makes what it made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.search.ir.trace import trace
from autoshard.search.memory.batch_split import batch_split
from autoshard.search.memory.batch_states import WHOLE, NotSplittableError, PerExample
from autoshard.search.memory.fission import with_loops_cut, without_unread_results
from autoshard.search.memory.positions import Scope
from autoshard.search.memory.statistics import with_statistics_apart
from tests.search.memory.evaluation import evaluated

BATCH, COUNT, LAYERS = 8, 2, 3
RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(BATCH, 4)), RNG.normal(size=(LAYERS, 4, 4))


def split(graph, *, is_strict=True):
    return batch_split(Scope.of(graph), [PerExample(0), WHOLE], COUNT, frozenset(), is_strict=is_strict)


def cut(graph):
    return with_statistics_apart(graph, lambda graph: split(graph, is_strict=False))


def loops(graph):
    return [op for op in graph.ops if op.name == "scan"]


def roots(x, w):
    """Each layer's root mean square, made of a sum; its largest value; and the layer's own norm."""

    def body(x, w):
        x = jnp.tanh(x @ w)
        return x, (jnp.sqrt(jnp.mean(x**2)), jnp.max(x), jnp.linalg.norm(w))

    return lax.scan(body, x, w)


def carried(x, w):
    """Finished values are carried on, with a number that counts the layers."""

    def body(carry, w):
        x, total, i = carry
        x = jnp.tanh(x @ w)
        total = 0.5 * total + (i + 1) * jnp.sqrt(jnp.mean(x**2))
        return (x, total, i + 1), total

    return lax.scan(body, (x, 1.0, 0), w)


def backwards(x, w):
    def body(x, w):
        x = jnp.tanh(x @ w)
        return x, jnp.std(x, 0)

    return lax.scan(body, x, w, reverse=True)


def nested(x, w):
    def inner(x, scale):
        x = jnp.tanh(scale * x)
        return x, (jnp.std(x), jnp.min(x))

    def body(x, w):
        x, (stds, smallest) = lax.scan(inner, x @ w, jnp.arange(1.0, 3.0))
        return x, (stds.max(), smallest)

    return lax.scan(body, x, w)


def behind_a_barrier(x, w):
    def body(x, w):
        x = jnp.tanh(x @ w)
        x, norm = lax.optimization_barrier((x, jnp.exp(jnp.sum(x))))
        return x, norm + 1

    return lax.scan(body, x, w)


def chosen(x, w):
    """Branches that make statistics of other kinds, of which one makes none; in a loop, too."""

    def large(x):
        return x, x.std(), jnp.max(x), x.sum()

    def small(x):
        return 2 * x, jnp.sqrt(jnp.mean(x**2)) + 1, x.min() + x.max(), x.min()

    def none(x):
        return x, jnp.zeros(()), 1.0, 2.0

    def body(x, w):
        x, *made = lax.switch((w[0, 0] > 0).astype(int), [none, large], jnp.tanh(x @ w))
        return x, made

    x, *made = lax.switch((w[0, 0, 0] > 0).astype(int) + (w[0, 0, 1] > 0), [large, none, small], x)
    return made, lax.scan(body, x, w)


def ever(x, w):
    """Carries that are reduced, without any loop after."""

    def body(carry, w):
        x, largest, by_place, some = carry
        x = jnp.tanh(x @ w)
        return (
            x,
            jnp.maximum(largest, x.max()),
            jnp.minimum(by_place, x.min(0)),
            some | jnp.any(x > 0.9),
        ), None

    return lax.scan(body, (x, -1.0, jnp.ones(4), False), w)[0]


@pytest.mark.devices
@pytest.mark.parametrize("function", [roots, carried, backwards, nested, behind_a_barrier, chosen])
def test_a_cut_loop_makes_what_it_made(function):
    with jax.enable_x64(True):
        graph = trace(function, X, W).graph
        with pytest.raises(NotSplittableError):
            split(graph)
        made = cut(graph)
        split(made)
        for one, other in zip(evaluated(made, X, W), jax.tree.leaves(jax.jit(function)(X, W)), strict=True):
            np.testing.assert_allclose(one, other, 1e-12, 1e-12, strict=True)


def test_the_second_part_reads_no_example():
    first, second = loops(cut(trace(roots, X, W).graph))
    assert any(v.shape == (BATCH, 4) for v in first.result_values)
    assert [v.shape for v in second.result_values] == [(LAYERS,)]
    assert not any(BATCH in v.shape for op in second.bodies["jaxpr"][0].ops for v in op.result_values)


def test_reductions_that_a_loop_carries_need_no_cut():
    states = split(trace(ever, X, W).graph).wanted
    assert [type(s).__name__ for s in states] == ["PerExample", "Reduced", "Reduced", "Reduced"]


@pytest.mark.parametrize(
    ("function", "reader"),
    [
        (lambda x, w: lax.scan(lambda x, w: (x @ w - jnp.mean(x, 0), None), x, w), "sub"),
        (lambda x, w: lax.scan(lambda x, w: (x @ w, jnp.abs(x - x.max()).sum()), x, w), "sub"),
        (lambda x, w: lax.scan(lambda x, w: (x @ w, jnp.argmax(x, 0)), x, w), "argmax"),
    ],
)
def test_what_examples_need_of_all_is_refused_with_the_op_that_reads_it(function, reader):
    graph = trace(function, X, W).graph
    with pytest.raises(NotSplittableError, match=rf"{reader} at \S*test_fission\.py:\d+"):
        split(cut(graph))


def test_a_loop_that_finishes_nothing_stays():
    graph = trace(lambda x, w: lax.scan(lambda x, w: (x @ w, x.sum()), x, w), X, W).graph
    assert with_loops_cut(graph, split(graph, is_strict=False)) is graph


def test_results_that_nobody_reads_go():
    def function(x, w):
        def body(x, w):
            made = lax.cond(w[0, 0] > 0, lambda x: (x.sum(), x), lambda x: (x.max(), 2 * x), x)
            return jnp.tanh(x @ w), (x, *made, 1.0)

        return lax.scan(body, x, w)[1][1]

    (loop,) = loops(without_unread_results(trace(function, X, W).graph))
    assert [v.shape for v in loop.result_values] == [(BATCH, 4), (LAYERS,)]
    (choice,) = (op for op in loop.bodies["jaxpr"][0].ops if op.name == "cond")
    assert [v.shape for v in choice.result_values] == [()]
