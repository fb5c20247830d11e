"""XLA:GPU compiles for the GPU of every preset, over all devices of its full node."""

import json

import pytest

from autoshard.cost_model.presets import PRESETS
from autoshard.cost_model.xla.gpu_targets import compute_capability
from tests.gpu.apart import said
from tests.gpu.preset_programs import ROWS, WIDTH

BF16_BYTES = 2
RESTING_BYTES = BF16_BYTES * (ROWS * WIDTH + WIDTH * WIDTH + WIDTH)
"""A device's rows, the weights and the result."""

MOST_WORKSPACE_BYTES = 32 << 20
"""cuBLAS's workspace on Hopper. Source: NVIDIA cuBLAS documentation, cublasSetWorkspace."""


GPUS = [preset for preset in PRESETS if preset != "CPU"]
OF_CAPABILITIES = list({compute_capability(gpu): gpu for gpu in GPUS}.values())
"""A GPU of each compute capability: the compiler's code differs between them, and little else does."""


@pytest.mark.parametrize(
    "presets",
    [OF_CAPABILITIES, pytest.param(GPUS, marks=pytest.mark.slow)],
    ids=["one of each capability", "all"],
)
def test_a_program_compiles_for_the_presets(presets):
    found = json.loads(said("preset_programs", *presets)[-1])
    assert found.keys() == {*presets}
    for preset, (collectives, peak_bytes) in found.items():
        assert collectives == ["all-reduce"], preset
        assert RESTING_BYTES < peak_bytes < RESTING_BYTES + MOST_WORKSPACE_BYTES, preset
