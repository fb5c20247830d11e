"""Programs compile with the options that they carry: on GPUs those go through JAX, in `verify` through XLA's flags."""

import os
import subprocess
import sys
from pathlib import Path

from cost_model.xla.compiler import ENVIRONMENT


def test_programs_compile_with_the_options_that_they_carry():
    root = Path(__file__).parents[2]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.gpu.emitted_programs"]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"forward 0", "backward 1", "update 1"} < set(done.stdout.split("\n"))
