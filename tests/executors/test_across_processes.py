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

from tests.executors.agreement import run_steps
from tests.executors.test_spmd import shared
from tests.executors.training_process import NUM_STEPS
from tests.zoo import Case, make_mlp

ROOT = Path(__file__).parents[2]
NUM_PROCESSES = 2


def test_processes_train_as_one_and_end_together(tmp_path):
    processes = launched(tmp_path)
    with jax.enable_x64(True):
        wanted, of_layers = (losses(case) for case in (make_mlp((32, 48, 16), dtype=jnp.float64), shared()))
    errors = [process.communicate(timeout=120)[1] for process in processes]
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


def launched(folder: Path) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    program = (sys.executable, "-m", "tests.executors.training_process")
    return [
        subprocess.Popen(
            [*program, address, str(NUM_PROCESSES), str(i), str(folder)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(NUM_PROCESSES)
    ]
