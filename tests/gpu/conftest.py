"""Tests here compile many programs: each in a fork of one process, that of the worker's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.cost_model.xla import compiler, process

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _forked_compilers(tmp_path_factory):
    address = str(tmp_path_factory.mktemp("forks") / "socket")
    environment = os.environ | compiler.ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "tests.gpu.forks", address)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        server.stdout.readline()  # it listens
        stand_in = (sys.executable, "-S", "-E", str(Path(__file__).with_name("forks.py")), "of", address)
        patch.setattr(process, "_COMMAND", stand_in)
        yield
        server.stdin.close()
