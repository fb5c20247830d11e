"""The inter-op dynamic programming, against all plans of small problems, and at full size."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.search.pipeline.inter_op import NEAREST
from autoshard.search.pipeline.schedules.one_f_one_b import one_f_one_b
from autoshard.search.pipeline.simulator import StageCost, simulate
from autoshard.search.pipeline.stage_costs import ClusterNode, StageOption, Submesh
from autoshard.search.pipeline.stage_plan import InterOpPlan, InterOpProblem, NoCut
from tests.search.pipeline import cuts


def layers(
    num_layers: int, nodes: tuple[ClusterNode, ...], num_microbatches: int, **kwargs
) -> InterOpProblem:
    """Equal layers of a second on one device, perfectly shared by any submesh; a byte of state, one of residuals."""
    ones = np.ones(num_layers)
    options = tuple(
        StageOption(s, "keep", ones / s.size, ones / s.size, ones / s.size, 0 * ones, 0 * ones)
        for s in cuts.submeshes(nodes)
    )
    in_flight = tuple(range(1, num_microbatches + 1))
    free = np.zeros((2, num_layers + 1))
    return replace(InterOpProblem(nodes, options, num_microbatches, in_flight, free), **kwargs)


def plan(problem: InterOpProblem, gap: float = 0.0) -> InterOpPlan:
    found = cuts.plan_stages(problem, gap)
    assert isinstance(found, InterOpPlan), str(found)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_faster(seed: int):
    problem = cuts.drawn(seed)
    best_s, found = cuts.fastest_s(problem), cuts.plan_stages(problem, relative_gap=0.0)
    if isinstance(found, NoCut):
        assert best_s == np.inf
        return
    assert found.step_s == pytest.approx(best_s, rel=1e-7)
    assert found.bound_s == pytest.approx(best_s, rel=1e-7)
    chosen = [
        (
            next(
                o for o in problem.options if (o.submesh, o.variant, o.kind) == (s.submesh, s.variant, kind)
            ),
            s.first_layer,
            s.end_layer,
            s.first_device,
        )
        for s in found.stages
        for kind in [kind_at(problem, s.first_device)]
    ]
    assert chosen in list(cuts.every_cut(problem))
    assert cuts.step_s(problem, chosen) == pytest.approx(found.step_s, rel=1e-7)
    assert cuts.overflow_bytes(problem, chosen) <= 1e-6


def kind_at(problem: InterOpProblem, device: int) -> str:
    return [node.kind for node in problem.nodes for _ in range(node.num_devices)][device]


@pytest.mark.parametrize("seed", range(20))
def test_a_looser_gap_is_kept(seed: int):
    problem = cuts.drawn(seed)
    found = cuts.plan_stages(problem, relative_gap=0.2)
    if isinstance(found, InterOpPlan):
        best_s = cuts.fastest_s(problem)
        assert found.bound_s <= best_s * (1 + 1e-7)
        assert found.step_s <= best_s / 0.8 * (1 + 1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_what_does_not_fit_is_said_with_what_it_lacks(seed: int):
    problem = cuts.drawn(seed)
    scarce = replace(problem, nodes=tuple(replace(n, memory_bytes=0.3) for n in problem.nodes))
    found = cuts.plan_stages(scarce)
    assert isinstance(found, NoCut)
    least = min((cuts.overflow_bytes(scarce, cut) for cut in cuts.wanted(scarce)), default=np.inf)
    if np.isinf(least):
        assert found.nearest == ()
        assert "fewer layers than nodes" in str(found)
        return
    assert least - 1e-6 <= found.over_bytes <= least + NEAREST * (0.3 + least) + 1e-6


def test_the_stage_that_does_not_fit_is_named():
    """Of four equal stages of one layer the first holds the most: a byte of state, four of residuals."""
    nodes = tuple(ClusterNode(1, 4.0) for _ in range(4))
    problem = layers(4, nodes, 8)
    parts = tuple(option for option in problem.options if option.submesh == Submesh(1, 1))
    found = cuts.plan_stages(replace(problem, options=parts))
    assert isinstance(found, NoCut)
    assert found.over_bytes == pytest.approx(1.0, abs=NEAREST * 5)
    assert (
        "in the nearest, of 4 stages, stage 0 (layers 0 to 0 on devices 0 to 0 (1x1, keep), 4 in flight)"
        in str(found)
    )


def test_where_all_fits_and_nothing_is_lost_by_sharding_there_is_one_stage():
    found = plan(layers(8, (ClusterNode(8, 100.0),) * 2, 16))
    assert [stage.submesh for stage in found.stages] == [Submesh(2, 8)]
    assert found.step_s == pytest.approx(16 * 8 / 16)


def test_the_prediction_is_what_the_simulator_says_of_equal_stages():
    """1F1B with free transfers: m + p - 1 times a stage."""
    problem = layers(8, (ClusterNode(1, 100.0),) * 4, 12, num_stages=4)
    found = plan(problem)
    costs = [StageCost(stage.time_s / 3, stage.time_s * 2 / 3) for stage in found.stages]
    assert [stage.end_layer - stage.first_layer for stage in found.stages] == [2] * 4
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]
    assert (
        found.step_s == pytest.approx(simulate(one_f_one_b(4, 12), costs).makespan_s) == pytest.approx(15 * 2)
    )


def test_heavy_layers_get_more_devices():
    """Six devices of a node of four and one of two: a layer that is four times the others gets four."""
    nodes = (ClusterNode(4, 100.0, "large"), ClusterNode(2, 100.0, "small"))
    time_s, free = np.array([4.0, 1.0, 1.0]), np.zeros(3)
    options = tuple(
        StageOption(s, "keep", time_s / s.size**0.99, free, free, free, free, node.kind)
        for node in nodes
        for s in cuts.submeshes(nodes, node.kind)
    )
    found = plan(InterOpProblem(nodes, options, 64, (1,), np.zeros((2, 4))))
    first = found.stages[0]
    assert (first.first_layer, first.end_layer, first.submesh) == (0, 1, Submesh(1, 4))


def test_recomputation_where_memory_asks_for_it():
    """Stages in front hold more in flight: they recompute, the last one keeps."""
    nodes = (ClusterNode(1, 5.0),) * 4
    problem = layers(4, nodes, 8)
    options = tuple(
        replace(
            option,
            variant=variant,
            time_s=option.time_s * slower,
            residual_bytes=option.residual_bytes * share,
        )
        for option in problem.options
        if option.submesh.size == 1
        for variant, slower, share in (("keep", 1.0, 1.5), ("remat", 4 / 3, 0.1))
    )
    found = plan(replace(problem, options=options))
    assert [stage.variant for stage in found.stages] == ["remat", "remat", "keep", "keep"] or [
        stage.variant for stage in found.stages
    ] == ["remat", "keep", "keep", "keep"]
    assert all(stage.memory_bytes <= 5.0 for stage in found.stages)


def test_twelve_devices_in_one_node_are_all_used():
    problem = layers(5, (ClusterNode(12, 100.0),), 4, num_stages=2)
    found = plan(problem)
    assert sum(stage.submesh.size for stage in found.stages) == 12
    assert [stage.submesh.size for stage in found.stages] in ([4, 8], [8, 4])


def test_a_thousand_devices_are_all_used():
    problem = layers(32, (ClusterNode(8, 2.0),) * 125, 64, num_stages=4)
    found = plan(problem, 1e-3)
    assert sum(stage.submesh.size for stage in found.stages) == 1000
    assert len(found.stages) == 4


def test_transfers_between_nodes_are_avoided_where_those_inside_are_free():
    problem = layers(
        4, (ClusterNode(2, 1e9),) * 2, 1, num_stages=3, transfer_s=np.array([[0.0], [10.0]]) * np.ones(5)
    )
    found = plan(problem)
    assert found.step_s < 20
    assert [stage.submesh.size for stage in found.stages] in ([2, 1, 1], [1, 1, 2])


@pytest.mark.parametrize(
    ("num_layers", "num_gpus"), [(32, 128), pytest.param(128, 1024, marks=pytest.mark.slow)]
)
def test_many_layers_on_many_gpus(num_layers, num_gpus):
    """With the benchmark's three ways to run each layer, where their time is measured."""
    from benchmarks.inter_op import problem

    found = plan(problem(num_layers, num_gpus), 1e-3)
    assert found.gap <= 1e-3
    assert sum(stage.submesh.size for stage in found.stages) == num_gpus
