"""What recomputation leaves of the peak, before a step is rewritten: no more than the rewritten step holds."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.memory.peak_left import PeakLeft
from autoshard.search.memory.residuals import residuals
from autoshard.search.space.warm_starts import for_rewritten_step
from autoshard.search.step_problem import StepProblem
from tests.zoo import traced

CLUSTER = parse_cluster("1xH100-80GB")
PRICES = (1e-13, 1e-12, 1e-11, 1e-6)
ROUNDING = 1e-6

WIDTH, ROWS = 64, 1 << 16


def wide(w, x):
    """Two layers, each with a hidden array four times as wide as its operand."""

    def loss(w):
        y = x
        for up, down in w:
            y = y + jnp.tanh(y @ up) @ down
        return (y * y).mean()

    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))


def traced_wide():
    shape = jax.ShapeDtypeStruct
    layer = shape((WIDTH, 4 * WIDTH), jnp.float32), shape((4 * WIDTH, WIDTH), jnp.float32)
    return trace(wide, (layer, layer), shape((ROWS, WIDTH), jnp.float32))


def solved(step, sites=frozenset()):
    step_problem = StepProblem.of(step, (), CLUSTER.device, sites)
    return step_problem, step_problem.on(CLUSTER, (1,))


def choices(step):
    """The step's problem, its fastest strategies and what they leave, and sites to recompute at several prices, with the
    bytes that these keep no longer."""
    step_problem, on_mesh = solved(step)
    labels = on_mesh.solve(on_mesh.pinned({}), 1 << 62, 2.0).labels
    fusion = step_problem.live_ranges.fusion
    parts = residuals(on_mesh.memory.costed, fusion, labels)
    left = PeakLeft(on_mesh.memory, fusion, labels)
    found = {frozenset().union(*(part.recomputed(price) for part in parts)) for price in PRICES}
    saved = {sites: sum(part.all_bytes - part.kept_bytes(sites) for part in parts) for sites in found}
    return on_mesh, labels, left, saved


def rewritten_bytes(step, on_mesh, labels, sites) -> float:
    """The peak of the rewritten step under the same strategies."""
    _, after = solved(step, sites)
    return after.memory.peak(for_rewritten_step(on_mesh, labels, after)).num_bytes


@pytest.mark.parametrize("model", ["mlp", "resnet", pytest.param("gpt_linen", marks=pytest.mark.slow)])
def test_a_rewritten_step_without_loops_holds_at_least_what_is_left(model):
    step = traced(model)
    on_mesh, labels, left, saved = choices(step)
    before_bytes = on_mesh.memory.peak(labels).num_bytes
    assert left.num_bytes(frozenset()) == pytest.approx(before_bytes)
    for sites in saved:
        left_bytes = left.num_bytes(sites)
        assert left_bytes <= before_bytes
        assert left_bytes <= (1 + ROUNDING) * rewritten_bytes(step, on_mesh, labels, sites)


def test_a_loop_s_stacks_vanish_if_its_body_is_recomputed():
    on_mesh, labels, left, saved = choices(traced("gpt_scan"))
    before_bytes = on_mesh.memory.peak(labels).num_bytes
    sites, saved_bytes = max(saved.items(), key=lambda one: one[1])
    assert before_bytes - left.num_bytes(sites) >= saved_bytes


def test_each_layer_of_few_holds_its_own_arrays_in_the_backward_phase():
    """The peak falls by less than the bytes of all residuals, and by as much as the rewritten step's."""
    step = traced_wide()
    on_mesh, labels, left, saved = choices(step)
    before_bytes = on_mesh.memory.peak(labels).num_bytes
    sites, saved_bytes = max(saved.items(), key=lambda one: one[1])
    after_bytes = rewritten_bytes(step, on_mesh, labels, sites)
    assert before_bytes - after_bytes < saved_bytes
    assert left.num_bytes(sites) == pytest.approx(after_bytes)
