"""XLA:GPU compiles for the GPU of every preset, over all devices of its full node."""

import json

from autoshard.cost_model.presets import PRESETS
from tests.gpu.apart import said
from tests.gpu.preset_programs import ROWS, WIDTH

BF16_BYTES = 2
RESTING_BYTES = BF16_BYTES * (ROWS * WIDTH + WIDTH * WIDTH + WIDTH)
"""A device's rows, the weights and the result."""

MOST_WORKSPACE_BYTES = 32 << 20
"""cuBLAS's workspace on Hopper. Source: NVIDIA cuBLAS documentation, cublasSetWorkspace."""


def test_a_program_compiles_for_every_preset():
    found = json.loads(said("preset_programs")[-1])
    assert found.keys() == PRESETS.keys() - {"CPU"}
    for preset, (collectives, peak_bytes) in found.items():
        assert collectives == ["all-reduce"], preset
        assert RESTING_BYTES < peak_bytes < RESTING_BYTES + MOST_WORKSPACE_BYTES, preset
