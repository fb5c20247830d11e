"""What a step does is handed over to what it was rewritten to, so that a search of that begins with it."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import Known
from autoshard.search.problem.seeds import seeds
from autoshard.search.space.warm_starts import for_finer_mesh, for_rewritten_step
from autoshard.search.step_problem import StepProblem
from tests.search.chain import chain
from tests.zoo import make_gpt_scan

WIDTH, BATCH = 2048, 1 << 16
CLUSTER, MESH = parse_cluster("16xH100-80GB"), (2, 8)
STEP = trace(
    chain,
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4,
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)
PLAIN = StepProblem.of(STEP, [""] * len(STEP.arguments), CLUSTER.device)
AGAIN = frozenset((i,) for i, op in enumerate(STEP.graph.ops) if op.name == "tanh")
ON_PLAIN, ON_REWRITTEN = (
    StepProblem.of(STEP, [""] * len(STEP.arguments), CLUSTER.device, sites).on(CLUSTER, MESH)
    for sites in (frozenset(), AGAIN)
)


@pytest.mark.parametrize("number", [0, 4, 9])
def test_a_steps_own_ops_do_as_before(number):
    chosen = [*seeds(ON_PLAIN.memory.costed, ON_PLAIN.problem, ON_PLAIN.pinned({}))][number]
    carried = for_rewritten_step(ON_PLAIN, chosen, ON_REWRITTEN)
    before, after = ON_PLAIN.codec.decisions(chosen), ON_REWRITTEN.codec.decisions(carried)
    assert after.arguments == before.arguments
    assert after != before
    products = [name for name in before.ops if "dot_general" in name and name.startswith("forward")]
    assert products
    assert {name: after.ops[name] for name in products} == {name: before.ops[name] for name in products}


def test_ops_of_loops_do_as_before_too():
    """Those of two loops have the same numbers."""
    case = make_gpt_scan()
    step = trace(case.step, *case.abstract_args())
    on_mesh = StepProblem.of(step, [""] * len(step.arguments), CLUSTER.device).on(CLUSTER, MESH)
    chosen = on_mesh.fitting(on_mesh.pinned({}), 1 << 50, 10.0)[0].labels
    carried = for_rewritten_step(on_mesh, chosen, on_mesh)
    assert on_mesh.problem.cost_s(carried) == pytest.approx(on_mesh.problem.cost_s(chosen), rel=1e-3)


@pytest.mark.parametrize("mesh", [(2, 2, 4), (2, 4, 2)])
def test_a_mesh_that_splits_an_axis_takes_what_the_other_does(mesh):
    best = ON_PLAIN.fitting(ON_PLAIN.pinned({}), 1 << 50, 10.0)[0]
    split = PLAIN.on(CLUSTER, mesh)
    carried = for_finer_mesh(ON_PLAIN, best.labels, split)
    assert split.problem.cost_s(carried) == pytest.approx(best.cost_s, rel=1e-3)
    assert split.memory.peak(carried).num_bytes == pytest.approx(ON_PLAIN.memory.peak(best.labels).num_bytes)


def test_what_is_new_costs_as_little_as_it_can():
    kept = ON_PLAIN.pinned({})
    best = ON_PLAIN.fitting(kept, 1 << 50, 10.0)[0]
    carried = for_rewritten_step(ON_PLAIN, best.labels, ON_REWRITTEN)
    rewritten = ON_REWRITTEN.fitting(ON_REWRITTEN.pinned({}), 1 << 50, 10.0)[0]
    assert ON_REWRITTEN.problem.cost_s(carried) <= 1.01 * rewritten.cost_s


def test_a_search_that_begins_there_finds_nothing_worse():
    chosen = ON_PLAIN.fitting(ON_PLAIN.pinned({}), 1 << 50, 10.0)[0].labels
    start = for_rewritten_step(ON_PLAIN, chosen, ON_REWRITTEN)
    kept = ON_REWRITTEN.pinned({})
    found = ON_REWRITTEN.fitting(kept, 1 << 50, 10.0, known=Known(start))[0]
    assert found.cost_s <= ON_REWRITTEN.problem.cost_s(start)
    assert found.bound_s <= found.cost_s
