"""XLA:GPU leaves the probes of calibration as they are meant: nothing hoisted, joined, shrunk or copied."""

import json
import os
import subprocess
import sys
from pathlib import Path

from cost_model.xla.compiler import ENVIRONMENT

CHAIN = 32
"""Kernels of the launch probe; the counter is one more."""

UNROLLED = 4
"""Rounds of a product or a collective in the loop's body."""


def test_the_loops_hold_the_kernels_that_the_model_counts():
    kernels = _kernels()
    assert kernels["launch"] == {"fusion": CHAIN + 1}
    assert kernels["scale"] == {"fusion": 2}  # itself and the counter
    assert sum(kernels["sum"].values()) == 4  # two stages, the touch, the counter
    assert kernels["product"] == {"custom-call": UNROLLED, "fusion": UNROLLED + 1}
    for kind in ("all-reduce", "all-gather"):
        found = kernels[kind]
        assert found.pop(kind) == UNROLLED
        assert sum(found.values()) == UNROLLED + 1, found  # touches and the counter


def _kernels() -> dict[str, dict[str, int]]:
    root = Path(__file__).parents[2]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.gpu.probe_kernels"]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
