"""How values travel: what is remembered for a kind of op holds for each of its members."""

import numpy as np
import pytest

from cost_model.hardware import parse_cluster
from search.ir.trace import trace
from search.mesh_problem import StepProblem
from search.problem.reshard_paths import ReshardPaths
from tests.zoo import make_gpt_scan, make_llama


@pytest.mark.parametrize("make", [make_llama, make_gpt_scan])
def test_members_of_a_kind_travel_alike(make):
    case = make(num_layers=6)
    ground = StepProblem.of(trace(case.step, *case.abstract_args()), (), parse_cluster("8xH100-80GB").device)
    on_mesh = ground.on(parse_cluster("8xH100-80GB"), (2, 4))
    labels = on_mesh.solve([np.arange(n) for n in on_mesh.problem.num_labels], 2**30, 5.0).labels
    paths = ReshardPaths(on_mesh.memory.costed, labels)
    for i, op in enumerate(paths.program.ops):
        for operand in range(len(op.operands)):
            alone = ReshardPaths(on_mesh.memory.costed, labels)
            assert paths.to_reader(i, operand) == alone.to_reader(i, operand)
