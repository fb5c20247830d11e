"""Scripts beside the tests that need XLA's GPU compiler in their own process, as its environment is read when JAX starts."""

import os
import subprocess
import sys
from pathlib import Path

from autoshard.cost_model.xla.compiler import ENVIRONMENT


def said(module: str, *arguments: str) -> list[str]:
    """The lines that a module of this folder prints, by its name, when it is run in a process of its own."""
    root = Path(__file__).parents[2]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", f"tests.gpu.{module}", *arguments]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()
