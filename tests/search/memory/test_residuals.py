"""What is kept falls and what is recomputed grows as kept bytes get dearer; each choice is the cheapest at its price."""

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Phase, Site
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.memory.min_cut import Recomputation
from autoshard.search.memory.residuals import Residuals, residuals
from autoshard.search.step_problem import StepProblem
from tests.zoo import traced

CLUSTER = parse_cluster("8xH100-80GB")
PRICES = (0.0, 1e-13, 1e-12, 1e-11, 1e-10, 1e-9, 1e-6)
MODELS = (
    "mlp",
    "gpt_scan",
    "resnet",
    "lstm",
    *(pytest.param(m, marks=pytest.mark.slow) for m in ("gpt_linen", "unet")),
)


def residuals_of(step) -> tuple[Residuals, ...]:
    """On one node, with the strategies that are fastest without a cap."""
    step_problem = StepProblem.of(step, (), CLUSTER.device)
    on_mesh = step_problem.on(CLUSTER, (8,))
    labels = on_mesh.solve(on_mesh.pinned({}), 1 << 62, 2.0).labels
    return residuals(on_mesh.memory.costed, step_problem.live_ranges.fusion, labels)


@functools.cache
def of_model(model: str) -> tuple[Residuals, ...]:
    return residuals_of(traced(model))


@pytest.mark.parametrize("model", MODELS)
def test_bytes_fall_and_seconds_grow_with_the_price(model):
    for part in of_model(model):
        choices = [part.recomputed(price) for price in PRICES]
        kept = [part.kept_bytes(sites) for sites in choices]
        seconds = [part.seconds(sites) for sites in choices]
        assert seconds[0] <= part.seconds(frozenset())
        assert all(a >= b for a, b in pairwise(kept))
        assert all(a <= b for a, b in pairwise(seconds))


@pytest.mark.parametrize("model", MODELS)
def test_at_its_price_a_choice_is_no_dearer_than_those_at_others(model):
    for part in of_model(model):
        choices = [part.recomputed(price) for price in PRICES]
        for price, own in zip(PRICES, choices, strict=True):
            costs_s = [part.seconds(sites) + price * part.kept_bytes(sites) for sites in choices]
            assert costs_s[choices.index(own)] <= min(costs_s) + 1e-9 * max(costs_s) + 1e-11


def test_what_a_loop_over_microbatches_makes_is_no_residual():
    """It holds both phases: its sums of gradients may neither be made again nor wait on the host."""
    step = microbatched(traced("mlp"), 2)
    (loop,) = [(i,) for i, op in enumerate(step.graph.ops) if op.name == "scan"]
    parts = residuals_of(step)
    assert parts
    assert all(loop not in part.sites for part in parts)


LAYERS, WIDTH, BATCH = 6, 256, 1 << 15


def deep(w, x):
    def loss(w):
        y = x
        for i in range(LAYERS):
            y = y + jnp.tanh(y @ w[i, 0]) @ w[i, 1]
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


def scanned(w, x):
    def loss(w):
        y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w[0]) @ w[1], None), x, w)
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


ARGS = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((LAYERS, 2, WIDTH, WIDTH), (BATCH, WIDTH))]
ARRAY = BATCH * WIDTH * 4 / 8  # on one of eight devices


def test_residuals_of_a_scan_by_hand():
    """Each iteration hands over its input, the tanh, and the tanh's derivative; any of which but the input can be made of
    the input. At no price can the inputs, a loop's carry."""
    whole, loop = residuals_of(trace(scanned, *ARGS))
    assert not whole.recomputed(1e-6)
    assert loop.kept_bytes(frozenset()) >= 2 * LAYERS * ARRAY
    most = loop.recomputed(1e-6)
    assert loop.kept_bytes(most) == LAYERS * ARRAY
    assert all(site[1:3] == ("jaxpr", 0) for site in most)


def attending(weights, x):
    """Layers of attention with one head."""

    def loss(weights):
        y = x
        for w in weights:
            y = y + jax.nn.softmax((y @ w) @ y.mT, -1) @ y
        return jnp.mean(y**2)

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


@pytest.mark.parametrize("price", PRICES)
def test_a_softmax_s_maxima_and_sums_are_taken_again(price):
    """The forward phase makes it in one kernel then, and the backward phase too."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (64, 1024, 64)))
    step = trace(attending, [w] * 4, x)
    (part,) = residuals_of(step)
    again = {step.graph.ops[i].name for (i,) in part.recomputed(price)}
    assert ("exp" in again) == (price >= 1e-12)
    assert {"exp", "reduce_max", "reduce_sum"} <= again or not again & {"exp", "reduce_max", "reduce_sum"}


def test_layers_are_recomputed_from_what_is_between_them():
    """Not from the arguments: then everything would be there at once."""
    (part,) = residuals_of(trace(deep, *ARGS))
    assert part.kept_bytes(part.recomputed(1e-6)) >= ARRAY


def test_the_first_ops_pay_the_high_price():
    (part,) = residuals_of(trace(deep, *ARGS))
    some = part.recomputed(part.prices(0.0, 1e-6, 0.5))
    every = part.recomputed(1e-6)
    assert some
    assert some < every
    assert max(some) < max(every)
    assert np.mean([site[0] for site in some]) < np.mean([site[0] for site in every])
    assert part.kept_bytes(every) < part.kept_bytes(some) < part.kept_bytes(frozenset())


def test_of_blocks_that_stand_for_many_a_share_counts_all():
    """Half of sixteen blocks are the first two and the six of the third; the five of the fourth would be too many."""
    blocks = tuple((block, repeats) for block, repeats in enumerate((1, 1, 6, 5, 2, 1)) for _ in range(3))
    ops = len(blocks)
    problem = Recomputation(np.ones(ops), [[]] * ops, np.arange(ops), np.ones(ops), range(ops), np.zeros(ops))
    part = Residuals(problem, tuple((op,) for op in range(ops)), (True,) * ops, blocks, is_loop=False)
    for share, wanted in ((0.0, set()), (0.25, {0, 1, 4}), (0.5, {0, 1, 2}), (1.0, set(range(6)))):
        dear = part.prices(0.0, 1.0, share) == 1.0
        assert {block for (block, _), is_dear in zip(blocks, dear, strict=True) if is_dear} == wanted
        assert sum(dear) == 3 * len(wanted)


def halved(w, x):
    """Layers of which one op makes an array and what is computed on the fly."""

    def loss(w):
        y = x
        for i in range(LAYERS):
            gate, values = jnp.split(y @ w[i, 0], 2, axis=-1)
            y = y + jnp.concatenate(
                [values @ w[i, 1, : WIDTH // 2, : WIDTH // 2] * jnp.tanh(gate)] * 2, axis=-1
            )
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


def test_an_op_may_make_an_array_and_what_is_computed_on_the_fly():
    """What a split hands to a product is an array, what it hands to a light op is not."""
    (part,) = residuals_of(trace(halved, *ARGS))
    by_site: dict[Site | None, set[bool]] = {}
    for site, is_stored in zip(part.sites, part.is_stored, strict=True):
        by_site.setdefault(site, set()).add(is_stored)
    assert sum(kinds == {False, True} for kinds in by_site.values()) == LAYERS
    kept = [part.kept_bytes(part.recomputed(price)) for price in PRICES]
    assert LAYERS * ARRAY / 2 < kept[0] < np.inf
    assert all(a >= b for a, b in pairwise(kept))
    assert kept[-1] < kept[0] / 2


def noted(y):
    jax.debug.callback(lambda y: None, jnp.max(y))
    return jnp.sin(y)


def branching(note):
    """Layers of which each chooses between a note and a tanh; where the choices stand, and what is recomputed."""

    def step(w, x):
        def loss(w):
            y = x
            for i in range(LAYERS):
                y = y + jax.lax.cond(i + w[0, 0, 0, 0] > 0, note, jnp.tanh, y @ w[i, 0]) @ w[i, 1]
            return jnp.mean(y**2)

        return w - 0.1 * jax.grad(loss)(w)

    traced = trace(step, *ARGS)
    choices = {
        (i,) for i, op in enumerate(traced.graph.ops) if op.name == "cond" and op.phase is Phase.FORWARD
    }
    recomputed = [part.recomputed(1e-6) for part in residuals_of(traced)]
    return choices, frozenset[Site]().union(*recomputed)


def test_what_does_more_than_compute_runs_once():
    choices, recomputed = branching(jnp.sin)
    assert choices & recomputed
    choices, recomputed = branching(noted)
    assert choices
    assert not choices & recomputed


@pytest.mark.devices
def test_where_nothing_is_kept_nothing_is_recomputed():
    def layer(h, w):
        return jnp.log(h @ w), None

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)

    step = trace(step, jnp.ones((2, 8, 8)), jnp.ones((16, 8)))
    empty = [part for part in residuals_of(step) if not part.sites]
    assert [part.recomputed(1.0) for part in empty] == [frozenset()] * len(empty) != []
