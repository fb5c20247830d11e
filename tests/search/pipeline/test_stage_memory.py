"""The memory of stages, for programs and layouts that are given by hand."""

import pytest

from autoshard.search.pipeline.programs import made_ready, stage_programs
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.stage_memory import StageMemory
from autoshard.search.plan.stage_programs import StageSharding
from tests.search.pipeline.test_programs import LAYERS, WIDTH, behind, layers, parts_of

WEIGHT_BYTES = WIDTH * WIDTH * 4


@pytest.mark.parametrize(("dim", "num_copies"), [(0, 0), (1, 1)])
def test_a_sum_is_copied_unless_replicas_get_parts_of_it_along_its_first_dimension(dim, num_copies):
    """XLA:GPU scatters along the major dimension; `tests/gpu/test_pipelines.py` compiles it."""
    parts = parts_of(layers, num_replicas=2)
    programs = stage_programs(*made_ready(parts, behind(parts, 1)))
    sharding = StageSharding((2, 1), ("replica", "data"), {v: (dim, -1) for v in programs.sums}, {})
    memory = StageMemory(programs, build_schedule("1f1b", 2, 2, 2), [sharding] * 2)
    for stage, num_sums in enumerate((1, LAYERS - 1)):
        resting = {v for v in programs.step.graph.inputs if programs.stage_of[v] == stage}
        resting_bytes = sum(programs.values[v].num_bytes for v in resting)
        own, parts_of_totals = num_sums * WEIGHT_BYTES, num_sums * WEIGHT_BYTES / 2
        assert memory.update_peak(stage, 0.0) == resting_bytes + (1 + num_copies) * own + parts_of_totals
