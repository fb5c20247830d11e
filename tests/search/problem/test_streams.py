"""What is hidden, against what no schedule could exceed, and against streams of experts' plans counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.compute import Product, product_s
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.estimates import estimate
from autoshard.search.problem.streams import CONTENTION
from autoshard.search.problem.traffic import HideableKind, Part
from autoshard.search.step_problem import StepProblem
from tests.search.chain import chain

LAYERS, WIDTH, BATCH = 6, 2048, 1 << 17
ARGS = (
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS,
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)
STEP = trace(chain, *ARGS)


def on_mesh(cluster, mesh):
    cluster = parse_cluster(cluster)
    return StepProblem.of(STEP, [""] * len(STEP.arguments), cluster.device).on(cluster, mesh)


def found(cluster, mesh, spec):
    pins = {name: spec for name in (f"params[{i}]" for i in range(LAYERS))} | {"x": P("data")}
    return driver.find(STEP, parse_cluster(cluster), Options(70 << 30, mesh=mesh, pins=pins))


def test_simulated_devices_hide_nothing():
    problem = on_mesh("8xCPU", (8,))
    assert not any(np.any(seconds) for seconds in problem.hiding.seconds)


@pytest.mark.parametrize("cluster", ["8xH100-80GB", "16xA100-80GB-Ethernet"])
def test_no_more_is_hidden_of_an_edge_than_there_is(cluster):
    problem = on_mesh(cluster, (8,) if cluster.startswith("8x") else (2, 8))
    costed = problem.memory.costed
    for edge, hidden in zip(costed.graph.edges, problem.hiding.seconds, strict=True):
        seconds = costed.edge_seconds(edge)
        assert np.all(hidden <= (1 - CONTENTION) * seconds + 1e-12)
        assert np.all(np.asarray(hidden) >= 0)


def test_shares_are_no_more_than_the_computation_that_they_share():
    hiding = on_mesh("16xA100-80GB-Ethernet", (16,)).hiding
    shares_s = dict.fromkeys(hiding.traffic.pools, 0.0)
    for hideables, windows_s in zip(hiding.traffic.hideables, hiding._windows_s, strict=True):
        for hideable, window_s in zip(hideables, windows_s, strict=True):
            share_s = min(window_s, hiding._rates[hideable.pool] * hideable.num_elements)
            shares_s[hideable.pool] += share_s * hideable.is_counted
    assert {pool.part for pool in shares_s} >= {Part.FORWARD, Part.LATE}
    for pool, share_s in shares_s.items():
        assert share_s <= hiding._total_s(pool) * (1 + 1e-9), pool


def test_what_lies_between_activations_is_paid_in_full():
    problem = on_mesh("8xH100-80GB", (8,))
    graph = problem.memory.costed.graph
    ways = {}
    for edge, hideables in zip(graph.edges, problem.hiding.traffic.hideables, strict=True):
        ways.setdefault(graph.folded.op(edge.maker[0]).name, set()).update(
            hideable.kind for hideable in hideables
        )
    assert ways["tanh"] == set()
    assert ways["dot_general"] <= {HideableKind.REDUCTION}
    assert ways["sub"] == {HideableKind.RETURN}
    assert ways["input"] == {HideableKind.GATHER}


def test_what_takes_less_than_the_computation_beside_it_costs_its_contention_alone():
    """On one node, collectives of six equal layers: but the first gather and the last reduction, which have no window."""
    estimates = found("8xH100-80GB", (8,), P("data")).plan.estimates
    communication_s, num = (
        sum(c.seconds for c in estimates.collectives),
        sum(c.count for c in estimates.collectives),
    )
    assert communication_s < 0.2 * estimates.compute_s
    assert num >= 2 * LAYERS
    hidden = estimates.hidden_s / (1 - CONTENTION) / communication_s
    assert (num - 3) / num < hidden < 1


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_on_a_slow_network_reductions_hide_behind_weight_gradients_and_no_more(spec):
    """Whether all-reduced for parameters that are whole, or scattered for those that are split. The last one made has
    nothing but the update."""
    result = found("16xA100-80GB-Ethernet", (16,), spec)
    labels, hiding = result.chosen, result.on_mesh.hiding
    edges = zip(hiding.costed.graph.edges, hiding.traffic.hideables, hiding.seconds, strict=True)
    hidden_s = sum(
        seconds[labels[edge.source.node], labels[edge.target.node]] / (1 - CONTENTION)
        for edge, hideables, seconds in edges
        if hideables and hideables[0].kind is HideableKind.REDUCTION and np.ndim(seconds)
    )
    device, rows = hiding.costed.device, BATCH // 16
    num_bytes = 4 * (WIDTH**2 + 2 * rows * WIDTH)
    late_s = LAYERS * product_s(
        device, Product(1, WIDTH, WIDTH, rows), num_bytes, device.peak_flops_per_s("float32")
    )
    by_kind = {c.kind: c.seconds for c in result.plan.estimates.collectives}
    assert by_kind["all-reduce" if spec == P() else "reduce-scatter"] > late_s
    assert 0.9 * late_s < hidden_s < 1.1 * late_s


def test_a_plan_takes_what_the_solver_minimised():
    result = driver.find(STEP, parse_cluster("16xA100-80GB-Ethernet"), Options(70 << 30))
    estimates = result.plan.estimates
    assert estimates.step_s == pytest.approx(result.on_mesh.problem.cost_s(result.chosen), rel=1e-6)
    communication_s = sum(c.seconds for c in estimates.collectives)
    assert estimates.step_s == pytest.approx(estimates.compute_s + communication_s - estimates.hidden_s)


@pytest.mark.parametrize("mesh", [(64,), (8, 8), (2, 4, 8), (8, 2, 4)])
@pytest.mark.parametrize("batch", [BATCH, 4 * BATCH])
def test_a_plan_hides_no_more_than_there_is_however_many_legs_values_travel(batch, mesh):
    step = trace(chain, ARGS[0], jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))
    result = driver.find(step, parse_cluster("64xA100-80GB-Ethernet"), Options(70 << 30, mesh=mesh))
    labels, hiding = result.chosen, result.on_mesh.hiding
    hidden_s = dict.fromkeys(hiding.traffic.pools, 0.0)
    for edge, hideables, seconds in zip(
        hiding.costed.graph.edges, hiding.traffic.hideables, hiding.seconds, strict=True
    ):
        if hideables and np.ndim(seconds):
            hidden_s[hideables[0].pool] += seconds[labels[edge.source.node], labels[edge.target.node]]
    assert sum(hidden_s.values()) == pytest.approx(result.plan.estimates.hidden_s)
    for pool, seconds in hidden_s.items():
        assert seconds <= 1.05 * (1 - CONTENTION) * hiding._total_s(pool), pool


def test_what_two_readers_share_is_hidden_once():
    """Parameters that the update decays where they are whole, too: gathered once for both."""

    def decayed(params, x):
        return [0.9 * w + new for w, new in zip(params, chain(params, x), strict=True)]

    traced, cluster = trace(decayed, *ARGS), parse_cluster("8xH100-80GB")
    problem = StepProblem.of(traced, [""] * len(traced.arguments), cluster.device).on(cluster, (8,))
    kept = list(problem.pinned({f"params[{i}]": P("data") for i in range(LAYERS)} | {"x": P("data")}))
    for node, (name, *_) in enumerate(problem.codec.names):
        if name.startswith("update mul"):
            kept[node] = np.array([problem.codec.texts(node).index("P() -> P()")])
    labels = problem.fitting(kept, 70 << 30, 10.0)[0].labels
    predicted = problem.predicted(labels, 70 << 30)
    hidden_s = problem.hiding.hidden_once_s(labels)
    estimates = estimate(problem.memory.costed, labels, predicted, hidden_s)
    gathered = sum(c.seconds for c in estimates.collectives if c.kind == "all-gather")
    others = sum(c.seconds for c in estimates.collectives if c.kind != "all-gather")
    apart_s = problem.hiding.hidden_s(labels)
    assert apart_s > (1 - CONTENTION) * (gathered + others)
    assert hidden_s <= (1 - CONTENTION) * (gathered + others) * (1 + 1e-9)
    assert hidden_s > 0.4 * apart_s
