"""What rides run beside, counted by hand in small programs."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.problem.traffic import HideableKind, Part, Pool
from autoshard.search.step_problem import StepProblem
from tests.search.chain import chain, mean_square

LAYERS = 4
DEVICE = parse_cluster("8xH100-80GB").device


def shapes(width):
    layers = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * LAYERS
    return layers, jax.ShapeDtypeStruct((64, width), jnp.float32)


def traffic(step, *args):
    traced = trace(step, *args)
    return StepProblem.of(traced, [""] * len(traced.arguments), DEVICE).traffic


def hideables(found, way, part):
    """Those that count, in the order of their windows."""
    every = (hideable for hideables in found.hideables for hideable in hideables)
    wanted = (
        hideable
        for hideable in every
        if hideable.is_counted and hideable.kind is way and hideable.pool.part is part
    )
    return sorted(wanted, key=lambda hideable: hideable.window)


def products(found, hideable):
    """How many products run beside a ride."""
    start, end = hideable.window
    runs = found.runs[found.pools[hideable.pool], start:end]
    ops = found.graph.folded.program.ops[start:end]
    return sum(run for run, op in zip(runs, ops, strict=True) if op.name == "dot_general")


def clipped(params, x):
    """As `chain`, by gradients of norm 1."""
    gradients = jax.grad(mean_square)(params, x)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
    return [w - 0.1 * g / norm for w, g in zip(params, gradients, strict=True)]


def scanned(params, x):
    """As `chain`, the layers under `scan`, and computed again behind the forward phase."""

    @jax.checkpoint
    def layer(y, w):
        return jnp.tanh(y @ w), None

    gradients = jax.grad(lambda params: jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2))(params)
    return params - 0.1 * gradients


def test_reductions_run_beside_what_makes_the_weight_gradients_behind_them():
    found = traffic(chain, *shapes(4096))
    reductions = hideables(found, HideableKind.REDUCTION, Part.LATE)
    assert [products(found, hideable) for hideable in reductions] == [3, 2, 1, 0]


def test_small_collectives_begin_with_the_last_and_end_with_the_first():
    """Gathers and reductions of 30 MiB all together: none of the gathers has a product before it, nor a reduction one behind
    it."""
    found = traffic(chain, *shapes(1024))
    for way, part in ((HideableKind.GATHER, Part.FORWARD), (HideableKind.REDUCTION, Part.LATE)):
        assert [products(found, hideable) for hideable in hideables(found, way, part)] == [0] * LAYERS


@pytest.mark.parametrize(("step", "is_beside"), [(chain, True), (clipped, False)])
def test_the_update_hides_reductions_if_it_does_not_wait_for_all(step, is_beside):
    found = traffic(step, *shapes(4096))
    (pool,) = {hideable.pool for hideable in hideables(found, HideableKind.REDUCTION, Part.LATE)}
    updates = found._parts == Part.UPDATE
    assert updates.any()
    assert found.runs[found.pools[pool]][updates].any() == is_beside


def test_a_loop_hides_its_collectives_in_the_iteration_that_they_are_of():
    stacked = jax.ShapeDtypeStruct((LAYERS, 4096, 4096), jnp.float32)
    found = traffic(scanned, stacked, shapes(4096)[1])
    (gather,), (reduction, behind) = (
        hideables(found, HideableKind.GATHER, Part.FORWARD),
        hideables(found, HideableKind.REDUCTION, Part.LATE),
    )
    (again,) = hideables(found, HideableKind.GATHER, Part.BACKWARD)
    assert {gather.pool.body, reduction.pool.body, again.pool.body} == set(found.graph.folded.program.loops)
    assert [products(found, hideable) for hideable in (gather, reduction, again, behind)] == [0] * 4


def test_nothing_runs_beside_a_loop():
    def step(params, head, x):
        def loss(params, head):
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, params)
            return jnp.mean((y @ head) ** 2)

        return params, head - 0.1 * jax.grad(loss, argnums=1)(params, head)

    stacked, x = jax.ShapeDtypeStruct((LAYERS, 4096, 4096), jnp.float32), shapes(4096)[1]
    found = traffic(step, stacked, jax.ShapeDtypeStruct((4096, 4096), jnp.float32), x)
    whole = Pool(Part.FORWARD, (0, len(found.graph.folded.program.ops)))
    (of_head,) = (
        hideable for hideable in hideables(found, HideableKind.GATHER, Part.FORWARD) if hideable.pool == whole
    )
    assert products(found, of_head) == 0
