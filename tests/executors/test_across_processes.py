"""Two processes of four devices each train as one process does, and none waits for ever for the other."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.executors.agreement import run_steps
from tests.executors.test_spmd import shared
from tests.executors.training_process import LIMIT_S, NUM_STEPS
from tests.zoo import Case, make_mlp

ROOT = Path(__file__).parents[2]
NUM_PROCESSES = 2


@pytest.mark.first
@pytest.mark.timeout(2 * LIMIT_S)
def test_processes_train_as_one_and_end_together(tmp_path):
    processes = launched(tmp_path)
    with jax.enable_x64(True):
        wanted, of_layers = (losses(case) for case in (make_mlp((32, 48, 16), dtype=jnp.float64), shared()))
    for process in processes:
        process.wait()
    errors = [(tmp_path / f"{i}.err").read_text() for i in range(NUM_PROCESSES)]
    for i in range(NUM_PROCESSES):
        file = tmp_path / f"{i}.json"
        told = json.loads(file.read_text()) if file.exists() else {}
        assert set(told) >= {"without a plan"}, errors
        disagreeing, without_a_plan = told.pop("disagreeing"), told.pop("without a plan")
        np.testing.assert_allclose(told.pop("one program for all stages"), of_layers, rtol=1e-9)
        for name, got in told.items():
            np.testing.assert_allclose(got, wanted[-len(got) :], rtol=1e-9, err_msg=name)
        assert "process 0 runs step with the fingerprint" in disagreeing
        assert "but not process 1: process 1 runs step with the fingerprint" in disagreeing
        assert "not a multiple of 7" in without_a_plan
    survivor, died = processes
    assert died.returncode == -signal.SIGKILL
    assert survivor.returncode != 0
    assert "tasks are unhealthy (stopped sending heartbeats):\n1\n" in errors[0]


def losses(case: Case) -> np.ndarray:
    _, metrics = run_steps(jax.jit(case.step), case, case.init(), NUM_STEPS)
    return np.array([m["loss"] for m in metrics])


def launched(folder: Path) -> list[subprocess.Popen[bytes]]:
    """The processes, which write to files: one that nobody reads may not block on a full pipe while others wait for it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = (sys.executable, "-m", "tests.executors.training_process")
    processes = []
    for i in range(NUM_PROCESSES):
        with (folder / f"{i}.out").open("wb") as out, (folder / f"{i}.err").open("wb") as errors:
            arguments = [*program, address, str(NUM_PROCESSES), str(i), str(folder)]
            env = os.environ | {"JAX_PLATFORMS": "cpu"}
            processes.append(subprocess.Popen(arguments, cwd=ROOT, env=env, stdout=out, stderr=errors))
    return processes
