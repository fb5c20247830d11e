"""Runs of layers under all options at once, against one by one."""

import numpy as np
import pytest

from autoshard.search.pipeline.stage_costs import StageTable, prefix_sums
from autoshard.search.pipeline.stage_plan import InterOpProblem
from tests.search.pipeline import cuts


def table(problem: InterOpProblem) -> StageTable:
    caps = {node.kind: node.memory_bytes for node in problem.nodes}
    time_s = prefix_sums([option.time_s for option in problem.options])
    return StageTable(problem.options, np.array([caps[o.kind] for o in problem.options]), time_s, 2 * time_s)


@pytest.mark.parametrize("seed", range(20))
def test_how_far_a_stage_reaches(seed: int):
    of = table(cuts.drawn(seed))
    in_memory, in_time = of.reach_in_memory(3), of.reach_in_time(2.5)
    for o, option in enumerate(of.options):
        for k in range(of.num_layers):
            ends = range(k + 1, of.num_layers + 1)
            fits = [j for j in ends if option.memory_bytes(k, j, 3) <= of.cap_bytes[o]]
            quick = [j for j in ends if 2 * option.time_s[k:j].sum() <= 2.5]
            assert in_memory[o, k] == max(fits, default=k)
            assert in_time[o, k] == max(quick, default=k)


@pytest.mark.parametrize("seed", range(5))
def test_reversed_layers_cost_the_same(seed: int):
    of = table(cuts.drawn(seed))
    back, size = of.reversed(), of.num_layers
    for k in range(size):
        for j in range(k + 1, size + 1):
            there = of.latency_s[:, j] - of.latency_s[:, k]
            assert back.latency_s[:, size - k] - back.latency_s[:, size - j] == pytest.approx(there)
            assert np.array_equal(back.workspace_bytes[:, size - j, size - k], of.workspace_bytes[:, k, j])
