"""Rules' plans on small steps: where arguments lie, and what follows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.problem.seeds import SeedRule, _Propagation, batch_factors, rules, seeds
from autoshard.search.step_problem import StepProblem
from tests.search.chain import chain

WIDTH = 2048
ARGS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4,
    jax.ShapeDtypeStruct((1 << 16, WIDTH), jnp.float32),
)
CLUSTER = parse_cluster("16xH100-80GB")


def on_mesh(step=chain, args=ARGS, mesh=(2, 8)):
    traced = trace(step, *args)
    return StepProblem.of(traced, [""] * len(traced.arguments), CLUSTER.device).on(CLUSTER, mesh)


def by_rule(problem, rule):
    """What a rule decides, by name, in words."""
    (labels,) = _Propagation(problem.memory.costed, problem.problem, problem.pinned({})).run([rule])
    return {
        name: problem.codec.text(node, labels[node])
        for node, names in enumerate(problem.codec.names)
        for name in names
    }


def products(found):
    return [text for name, text in found.items() if name.startswith("forward") and "dot_general" in name]


def test_the_rules_of_a_mesh():
    assert set(rules((8,))) == {
        SeedRule((0,), (), ()),
        SeedRule((0,), (), (0,)),
        SeedRule((0,), (0,), (0,)),
        SeedRule((0,), None, None),
    }
    assert len(set(rules((2, 8)))) == 3 * 6 + 2
    assert set(rules((1, 8))) == {
        SeedRule((1,), *rest) for rest in [((), ()), ((), (1,)), ((1,), (1,)), (None, None)]
    }


def test_data_parallelism():
    found = by_rule(on_mesh(), SeedRule((0, 1), (), ()))
    assert found["x"] == "P(('data', 'model'))"
    assert found["params[0]"] == found["params[3]"] == "P()"
    assert set(products(found)) == {"P(('data', 'model')), P() -> P(('data', 'model'))"}


def test_hybrid_sharding_computes_as_data_parallelism():
    found = by_rule(on_mesh(), SeedRule((0, 1), (1,), (1,)))
    assert found["params[0]"] == "P('model')"
    assert set(products(found)) == {"P(('data', 'model')), P() -> P(('data', 'model'))"}


def test_megatron_follows_where_the_batch_leaves_an_axis_free():
    """Columns first, then rows, whose sum is reduced once."""
    found = by_rule(on_mesh(), SeedRule((0,), None, None))
    first, second, *_ = products(found)
    assert first == "P('data'), P(None, 'model') -> P('data', 'model')"
    assert second == "P('data', 'model'), P('model') -> P('data', unreduced={'model'})"
    assert found["params[0]"] == "P(None, 'model')"


def test_a_frugal_rule_computes_alike_where_the_batch_leaves_an_axis_free():
    found = by_rule(on_mesh(), SeedRule((1,), (0, 1), (0, 1), splits_storage_only=True))
    assert set(products(found)) == {"P('model'), P() -> P('model')"}
    assert found["params[0]"] == "P('model', 'data')"


def test_what_cannot_be_split_evenly_stays_whole():
    args = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)], jax.ShapeDtypeStruct((30, WIDTH), jnp.float32)
    assert by_rule(on_mesh(args=args), SeedRule((0, 1), (), ()))["x"] == "P()"
    assert by_rule(on_mesh(args=args), SeedRule((0,), (), ()))["x"] == "P('data')"


def test_the_loop_over_examples_is_followed_through_reshapes_and_products():
    def loss(w, x):
        heads = (x @ w).reshape(64, 128, 8, 16).transpose(0, 2, 1, 3)
        return jnp.sum(jnp.einsum("bhsd,bhtd->bhst", heads, heads) ** 2)

    args = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((64, 128, 128), jnp.float32)
    problem = on_mesh(lambda w, x: w - jax.grad(loss)(w, x), args)
    graph = problem.memory.costed.graph
    followed = batch_factors(graph)
    for node, group in enumerate(graph.groups):
        if graph.folded.op(group.op_classes[0]).name == "dot_general":
            assert group.sizes[followed[node]] == 64
    assert graph.node_of[graph.folded.class_of[0]] not in followed, "a parameter has no examples"


@pytest.mark.parametrize("mesh", [(16,), (2, 8)])
def test_seeds_keep_to_what_is_kept_and_one_of_them_is_nearly_the_best(mesh):
    problem = on_mesh(mesh=mesh)
    rng = np.random.default_rng(0)
    kept = [np.sort(rng.choice(n, size=max(1, n // 2), replace=False)) for n in problem.problem.num_labels]
    for labels in seeds(problem.memory.costed, problem.problem, kept):
        assert all(label in some for label, some in zip(labels, kept, strict=True))
    whole = problem.pinned({})
    best_s = problem.solve(whole, 1 << 40, 10.0).cost_s
    least_s = min(map(problem.problem.cost_s, seeds(problem.memory.costed, problem.problem, whole)))
    assert best_s <= least_s < 1.3 * best_s
