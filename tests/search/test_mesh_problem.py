"""One mesh's problem against every assignment of a small step; which meshes are tried."""

from itertools import product
from math import ceil, inf, prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.device.prediction import MARGIN, Prediction
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import RELATIVE_GAP, MeshProblem, TooLargeError
from autoshard.search.options import Options, candidate_shapes
from autoshard.search.problem.strategies import port_specs
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline
from autoshard.search.solver.pbqp import MemoryConstraint
from autoshard.search.step_problem import StepProblem
from tests.search.chain import chain

CLUSTER = parse_cluster("2xH100-80GB")


def step(w, x):
    return jnp.tanh(x @ w) + 1.0


def problem(step=step, *args, mesh=(2,), cluster=CLUSTER, marks=()) -> MeshProblem:
    args = args or (
        jax.ShapeDtypeStruct((512, 4096), jnp.float32),
        jax.ShapeDtypeStruct((4096, 512), jnp.float32),
    )
    traced = trace(step, *args)
    return StepProblem.of(traced, marks or [""] * len(traced.arguments), cluster.device).on(cluster, mesh)


ON_MESH = problem()
ALL = [np.arange(n) for n in ON_MESH.problem.num_labels]
ASSIGNMENTS = [
    (ON_MESH.problem.cost_s(labels), ON_MESH.memory.peak(labels).num_bytes, labels)
    for labels in product(*(range(n) for n in ON_MESH.problem.num_labels))
]
PEAKS = sorted({ceil(num_bytes) for cost_s, num_bytes, _ in ASSIGNMENTS if cost_s < inf})


def cheapest_s(limit_bytes: float, *, allowed=lambda labels: True) -> float:
    return min(
        (c for c, num_bytes, labels in ASSIGNMENTS if num_bytes <= limit_bytes and allowed(labels)),
        default=inf,
    )


# --- the solver's answer


def test_the_step_is_small_enough_to_try_all_and_has_more_than_one_peak():
    assert len(ASSIGNMENTS) == prod(ON_MESH.problem.num_labels) < 5000
    assert len(PEAKS) > 3
    assert cheapest_s(PEAKS[0]) > cheapest_s(inf)


@pytest.mark.parametrize("limit_bytes", [*PEAKS, 1 << 40])
def test_the_cheapest_strategies_that_fit_are_found(limit_bytes):
    found = ON_MESH.solve(ALL, limit_bytes, 10.0, relative_gap=0.0)
    assert found.cost_s == pytest.approx(cheapest_s(limit_bytes), rel=1e-9)
    assert ON_MESH.problem.cost_s(found.labels) == pytest.approx(found.cost_s)
    assert ON_MESH.memory.peak(found.labels).num_bytes <= limit_bytes


def test_nothing_is_found_that_fits_less_than_the_smallest_peak():
    with pytest.raises(NoFitError) as raised:
        ON_MESH.solve(ALL, PEAKS[0] - 1, 10.0)
    assert raised.value.is_proven


def test_nothing_is_found_that_costs_less_than_the_cutoff():
    best_s = cheapest_s(inf)
    with pytest.raises(NoFitError):
        ON_MESH.solve(ALL, 1 << 40, 10.0, cutoff_s=best_s * 0.99)
    assert ON_MESH.solve(ALL, 1 << 40, 10.0, cutoff_s=best_s * 1.01).cost_s == pytest.approx(best_s)


@pytest.mark.parametrize("node", range(len(ALL)))
def test_of_the_kept_strategies_the_cheapest_are_found_in_their_own_numbers(node):
    for label in ALL[node].tolist():
        kept = [np.array([label]) if n == node else labels for n, labels in enumerate(ALL)]
        best_s = cheapest_s(PEAKS[1], allowed=lambda labels, label=label: labels[node] == label)
        if best_s < inf:
            found = ON_MESH.solve(kept, PEAKS[1], 10.0, relative_gap=0.0)
            assert found.labels[node] == label
            assert ON_MESH.problem.cost_s(found.labels) == pytest.approx(best_s)
        else:
            with pytest.raises(NoFitError):
                ON_MESH.solve(kept, PEAKS[1], 10.0)


def test_rows_beside_the_profile_s_are_held_to_the_limit_too():
    """One that lets a node take no strategy but one, numbered as they are before others are left out."""
    costs = {n: cheapest_s(inf, allowed=lambda labels, n=n: labels[0] == n) for n in ALL[0].tolist()}
    dearest = max((n for n in costs if costs[n] < inf), key=costs.__getitem__)
    forbidden = np.where(ALL[0] == dearest, 0.0, 2.0**41)
    row = MemoryConstraint("only this", ((0, forbidden),), 0.0)
    for kept_first in (ALL[0], np.array([dearest, *(n for n in costs if n > dearest)])):
        found = ON_MESH.solve([kept_first, *ALL[1:]], 1 << 40, 10.0, rows=[row], relative_gap=0.0)
        assert found.labels[0] == dearest
        assert found.cost_s == pytest.approx(costs[dearest])


def test_a_row_of_the_kernels_knows_the_origin_of_all_their_arrays():
    for _, _, labels in ASSIGNMENTS:
        found = ON_MESH.predicted(labels, inf).least
        row = ON_MESH.memory.row_of(found, labels)
        assert row.total_bytes(labels) == pytest.approx(found.num_bytes)
        workspace_bytes = ON_MESH.memory.workspaces.get(found.position, 0.0)
        assert row.fixed_bytes <= workspace_bytes + MARGIN * found.num_bytes


def test_the_smallest_peak_is_near_the_smallest_of_all():
    labels, peak = ON_MESH.smallest_peak(ALL, 10.0)
    of_kernels = ON_MESH.predicted(labels, 0.0).least
    assert ON_MESH.problem.cost_s(labels) < inf
    assert peak.num_bytes == max(ON_MESH.memory.peak(labels).num_bytes, of_kernels.num_bytes)
    least = min(
        max(num_bytes, ON_MESH.predicted(other, 0.0).least.num_bytes)
        for cost_s, num_bytes, other in ASSIGNMENTS
        if cost_s < inf and num_bytes <= 1.1 * PEAKS[0]
    )
    assert peak.num_bytes <= 1.05 * least


# --- what is fixed beforehand


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")])
def test_a_pin_leaves_the_strategies_that_rest_as_it_says(spec):
    wanted = {P(): -1, P("data"): 0, P(None, "data"): 1}[spec]
    kept = ON_MESH.pinned({"w": spec})
    node = ON_MESH.memory.costed.graph.node_of[ON_MESH.memory.costed.graph.folded.class_of[0]]
    port = ON_MESH.memory.costed.graph.ports[ON_MESH.memory.costed.graph.folded.class_of[0], 0, True]
    specs = port_specs(port, ON_MESH.memory.costed.strategies[node])[:, 0]
    assert kept[node].tolist() == np.flatnonzero(specs == wanted).tolist() != []
    assert all(
        k.tolist() == list(range(n))
        for i, (k, n) in enumerate(zip(kept, ON_MESH.problem.num_labels, strict=True))
        if i != node
    )


def test_a_pin_on_an_axis_that_the_mesh_lacks_is_refused():
    with pytest.raises(PlanError, match="axis 'model' is not in the mesh"):
        ON_MESH.pinned({"w": P("model")})


def test_marks_keep_arguments_apart_that_would_be_decided_together():
    def adds(params):
        return [p + 1.0 for p in params]

    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4
    nodes = [
        len(problem(adds, params, marks=marks).problem.num_labels)
        for marks in (["", "", "", ""], ["", "", "x", ""])
    ]
    assert nodes[0] < nodes[1]


def test_a_problem_knows_its_mesh():
    assert ON_MESH.shape == (2,)
    assert problem(mesh=(1, 2)).shape == (1, 2)


# --- which meshes


@pytest.mark.parametrize(
    ("pins", "shapes"),
    [
        ({}, ((16,), (2, 8), (4, 4), (8, 2))),
        ({"w": P("data")}, ((16,), (2, 8), (4, 4), (8, 2))),
        ({"w": P("data"), "x": P(None, "model")}, ((2, 8), (4, 4), (8, 2))),
        ({"w": P(("data", "model"))}, ((2, 8), (4, 4), (8, 2))),
    ],
)
def test_meshes_are_tried_that_have_the_axes_of_all_pins(pins, shapes):
    assert candidate_shapes(parse_cluster("16xH100-80GB"), Options(1, pins=pins)) == shapes


def test_of_a_mesh_that_is_asked_for_no_other_is_tried():
    for mesh in ((16,), (2, 8), (2, 2, 4), (1, 16)):
        assert candidate_shapes(parse_cluster("16xH100-80GB"), Options(1, mesh=mesh)) == (mesh,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": (2, 4)}, r"the mesh \(2, 4\) has 8 devices, the cluster 16xH100-80GB has 16"),
        ({"mesh": (2, 2, 2, 2)}, "wanted a mesh of 1 to 3 axes of positive size"),
        ({"mesh": ()}, "wanted a mesh of 1 to 3 axes of positive size"),
        ({"mesh": (-4, -4)}, "wanted a mesh of 1 to 3 axes of positive size"),
        (
            {"pins": {"w": P("tensor")}},
            "pin 'w': no mesh has an axis 'tensor'; axes are named 'replica', 'data', 'model'",
        ),
    ],
)
def test_meshes_that_do_not_suit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        candidate_shapes(parse_cluster("16xH100-80GB"), Options(1, **options))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"memory_bytes": 0}, "the memory cap must be positive, got 0 bytes"),
        ({"memory_bytes": -1}, "the memory cap must be positive, got -1 bytes"),
        ({"time_limit_s": 0.0}, "the time limit must be positive, got 0.0 s"),
    ],
)
def test_caps_and_times_are_positive(wrong, message):
    with pytest.raises(InputError, match=message):
        Options(**{"memory_bytes": 1} | wrong)
    assert Options(1, time_limit_s=0.1).memory_bytes == 1


def test_no_plan_that_fits_has_less_than_the_smallest_peak_by_much():
    """Of a chain of wide layers the kernels hold far more than the rows know, where little is kept by the rows."""

    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 4
    step = trace(chain, weights, jax.ShapeDtypeStruct((1 << 16, 4096), jnp.bfloat16))
    cluster = parse_cluster("16xH100-80GB")
    on_mesh = StepProblem.of(step, (), cluster.device).on(cluster, (16,))
    kept = on_mesh.pinned({})
    _, fits = on_mesh.fitting(kept, 300 * 2**20, 5.0)
    _, smallest = on_mesh.smallest_peak(kept, 6.0)
    assert smallest.num_bytes <= 300 * 2**20
    assert fits.least.num_bytes <= 300 * 2**20


@pytest.mark.parametrize(("above", "num_limits"), [(0.5 * RELATIVE_GAP, 1), (1.0, 2)])
def test_what_is_hardly_faster_than_the_cutoff_is_not_looked_for_under_lower_limits(
    monkeypatch, above, num_limits
):
    """Where kernels hold more than they may."""
    kept = ON_MESH.pinned({})
    cheapest = ON_MESH.solve(kept, 1 << 40, 5.0)
    limits, solve = [], MeshProblem.solve

    def spied(on_mesh, kept, limit_bytes, *args, **more):
        limits.append(limit_bytes)
        return solve(on_mesh, kept, limit_bytes, *args, **more)

    monkeypatch.setattr(MeshProblem, "solve", spied)
    monkeypatch.setattr(Prediction, "needed_bytes", 2.0 * PEAKS[-1])
    with pytest.raises(TooLargeError):
        ON_MESH.fitting(kept, PEAKS[-1], 5.0, (1 + above) * cheapest.cost_s)
    assert len(limits) >= num_limits
    assert (len(limits) == 1) == (num_limits == 1)


@pytest.mark.parametrize("kept", [ALL, [labels[:2] for labels in ALL]])
def test_what_is_lightened_holds_little_where_it_held_most_and_costs_hardly_more(kept):
    """Where all bytes there together are worth the gap, nothing is better by brute force."""
    allowed = [one for one in ASSIGNMENTS if all(label in k for label, k in zip(one[2], kept, strict=True))]
    for cost_s, num_bytes, labels in sorted(one for one in allowed if one[0] < inf)[:20]:
        row = ON_MESH.memory.row(ON_MESH.memory.peak(labels).position)
        price_s = RELATIVE_GAP * cost_s / num_bytes
        found = ON_MESH.with_less_memory(kept, labels, Deadline.after(10.0, ON_MESH.clock))
        assert ON_MESH.problem.cost_s(found) <= (1 + RELATIVE_GAP) * cost_s
        least_s = min(c + price_s * row.total_bytes(others) for c, _, others in allowed)
        assert ON_MESH.problem.cost_s(found) + price_s * row.total_bytes(found) == pytest.approx(least_s)
