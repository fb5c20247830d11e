"""Sums of powers of the distance from a mean are what they were, made of what each microbatch makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.search.ir.trace import trace
from autoshard.search.memory.batch_split import batch_split
from autoshard.search.memory.batch_states import NotSplittableError, PerExample
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.memory.moments import with_moments
from autoshard.search.memory.positions import Scope
from tests.search.memory.evaluation import evaluated

BATCH, COUNT = 12, 3
RNG = np.random.default_rng(0)
X, MASK = RNG.normal(3.0, 0.5, (BATCH, 4)), np.arange(BATCH) % 3 > 0


def split(graph, *, is_strict):
    inputs = [PerExample(0), PerExample(0)]
    return batch_split(Scope.of(graph), inputs, COUNT, frozenset(graph.inputs[1:]), is_strict=is_strict)


def rewritten(function, x):
    graph = trace(function, x, MASK).graph
    return graph, with_moments(graph, split(graph, is_strict=False))


def distance(x, *axes):
    return x - jnp.mean(x, axes or None, keepdims=True)


def masked_variance(x, mask):
    weight = mask.astype(x.dtype)[:, None]
    mean = jnp.sum(x * weight, 0) / 8
    return jnp.sum(weight * (x - mean) ** 2, 0)


MOMENTS = {
    "standard deviation": lambda x, mask: jnp.std(x),
    "variance of each feature": lambda x, mask: jnp.var(x, 0, ddof=1),
    "all features' own means": lambda x, mask: jnp.mean(distance(x, 0) ** 2),
    "mean of each feature's": lambda x, mask: jnp.std(x, 0).mean(),
    "fourth power": lambda x, mask: jnp.mean(distance(x) ** 4),
    "third, of each feature": lambda x, mask: jnp.sum(distance(x, 0) ** 3, 0),
    "product": lambda x, mask: (lambda d: jnp.sum(d * d / 5))(distance(x, 0)),
    "standard deviation where": lambda x, mask: jnp.std(x, where=mask[:, None]),
    "linear": lambda x, mask: jnp.sum(3 * distance(x, 0) + 1),
    "norm": lambda x, mask: jnp.linalg.norm(distance(x, 0)),
    "masked": masked_variance,
    "chosen": lambda x, mask: jnp.sum(jnp.where(mask[:, None], jnp.mean(x) - x, 0.5) ** 2),
    "of the largest": lambda x, mask: jnp.std(x.max(1)),
    "merged dims": lambda x, mask: jnp.std(x.reshape(-1)),
    "examples last": lambda x, mask: jnp.var(x.T, 1),
    "converted": lambda x, mask: jnp.var(x.astype(jnp.float32)).astype(x.dtype),
}


@pytest.mark.devices
@pytest.mark.parametrize("name", MOMENTS)
def test_a_power_of_the_distance_from_a_mean_is_made_in_microbatches(name):
    with jax.enable_x64(True):
        graph, made = rewritten(MOMENTS[name], X)
        with pytest.raises(NotSplittableError):
            split(graph, is_strict=True)
        assert [type(s).__name__ for s in split(made, is_strict=True).wanted] == ["Finished"]
        rtol = 1e-6 if name == "converted" else 1e-12
        np.testing.assert_allclose(
            evaluated(made, X, MASK)[0], MOMENTS[name](X, MASK), rtol, 1e-12, strict=True
        )


@pytest.mark.devices
def test_the_variance_of_numbers_far_from_zero_keeps_its_digits():
    """As sums of squares less the square of the sum, it would keep none."""
    x = np.asarray(1e4 + RNG.normal(size=(BATCH, 4)), np.float32)
    _, made = rewritten(lambda x, mask: jnp.var(x), x)
    np.testing.assert_allclose(evaluated(made, x, MASK)[0], np.var(x.astype(np.float64)), 1e-5)


@pytest.mark.devices
def test_what_a_mask_leaves_out_may_be_anything():
    x = np.where(MASK[:, None], X, np.inf)
    with jax.enable_x64(True):
        _, made = rewritten(MOMENTS["standard deviation where"], x)
        np.testing.assert_allclose(evaluated(made, x, MASK)[0], np.std(X[MASK]), 1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: jnp.mean(jnp.abs(distance(x))),
        lambda x, mask: jnp.sum(jnp.exp(x - x.mean())),
        lambda x, mask: jnp.sum((x - x.max()) ** 2),
        lambda x, mask: jnp.sum((distance(x) / x.std()) ** 3),
        lambda x, mask: jnp.sum(1 / distance(x)),
        lambda x, mask: jnp.sum(distance(x) ** 5),
        lambda x, mask: jnp.sum(jnp.where(distance(x) > 0, x, 0)),
        lambda x, mask: jnp.sum(distance(x, 0) ** 2, 1),
        lambda x, mask: lax.cumsum(distance(x)).sum(),
    ],
)
def test_what_is_no_polynomial_in_one_mean_is_refused(function):
    _, made = rewritten(function, X)
    with pytest.raises(NotSplittableError):
        split(made, is_strict=True)


@pytest.mark.devices
def test_what_flows_back_into_the_work_on_examples_is_refused_all_the_same():
    def step(w, x):
        def loss(w):
            h = x @ w
            return jnp.mean(((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)) ** 3)

        return w - 0.1 * jax.grad(loss)(w)

    with pytest.raises(NotSplittableError, match=r"sub at \S*test_moments\.py:\d+ needs"):
        microbatched(trace(step, jnp.eye(4), jnp.ones((BATCH, 4))), COUNT)
