"""What each of several processes does in `test_across_processes`: it trains in several ways, writes what came of it to
a file, and then the last one dies."""

import faulthandler
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from tests.simulated import simulate_devices

NUM_STEPS = 3

HEARTBEAT_S = 3
"""How soon a process is missed."""

LIMIT_S = 300
"""A process that takes longer says where it waits, and ends."""


def connect(address: str, count: int, index: int) -> None:
    """Four simulated devices here, and the other processes'."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        transfers = f"127.0.0.1:{free.getsockname()[1]}"
    options = {
        "jax_num_cpu_devices": 4,
        "jax_enable_x64": True,
        "jax_cpu_collectives_implementation": "gloo",
        "jax_force_dcn_cross_host_transfers": True,
        "jax_cross_host_transfer_socket_address": transfers,
        "jax_cross_host_transfer_transfer_size": 65536,  # bytes
    }
    simulate_devices()
    for name, value in options.items():
        jax.config.update(name, value)
    jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=HEARTBEAT_S)


def scenes(folder: Path) -> Mapping[str, Callable[[], Any]]:
    """What is done, in this order, in all processes at once; with what the test is told of it."""
    import autoshard
    from autoshard.cost_model.errors import InputError
    from autoshard.search.ir.trace import trace
    from tests.executors.pipelines import pipelined, schedule_of
    from tests.executors.test_spmd import shared as layered
    from tests.zoo import Case, make_mlp

    case = make_mlp(widths=(32, 48, 16), dtype=jnp.float64)

    def losses(step: Any, state: Any, batches: range = range(NUM_STEPS), case: Case = case) -> list[float]:
        told = []
        for i in batches:
            state, metrics = step(state, case.batch(i), *case.extra())
            told.append(metrics)
        jax.block_until_ready(state)
        assert not any(x.is_deleted() for x in jax.tree.leaves(told))
        return [float(metrics["loss"]) for metrics in told]

    def telling_all(state: Any, batch: Any) -> Any:
        """The step, whose new state is among its metrics, too."""
        state, metrics = case.step(state, batch)
        return state, metrics | {"state": state}

    def trained(**options: Any) -> list[float]:
        step = autoshard.parallelize(case.step, **options)
        return losses(step, step.init(case.init, args=(case.batch(0),)))

    def on_unequal_submeshes() -> list[float]:
        step = trace(case.step, *case.abstract_args())
        program = pipelined(step, schedule_of("1f1b", 2, 2), sizes=(6, 2))
        state = jax.device_put(case.init(), program.shardings[0])
        return losses(program.fn, state)

    def of_one_program() -> list[float]:
        layers = layered()
        step = autoshard.parallelize(
            layers.step, stages=2, schedule="gpipe", microbatches=2, mesh=(4, 1), executor="spmd"
        )
        state = step.init(layers.init, args=(layers.batch(0), *layers.extra()))
        return losses(step, state, range(NUM_STEPS), layers)

    def from_a_checkpoint() -> list[float]:
        step = autoshard.parallelize(telling_all, stages=4, schedule="1f1b", microbatches=2, mesh=(2, 1))
        state, _ = step(step.init(case.init, args=(case.batch(0),)), case.batch(0))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", step.for_checkpoint(state))
        abstract = step.abstract_state(case.init, args=(case.batch(0),))
        with ocp.StandardCheckpointer() as checkpointer:
            state = checkpointer.restore(folder / "state", abstract)
        return losses(step, state, range(1, NUM_STEPS))

    def refused(widths: tuple[int, ...] = (32, 48, 16), **options: Any) -> str:
        own = make_mlp(widths)
        try:
            autoshard.parallelize(own.step, **options)(*own.args())
        except InputError as e:
            return str(e)
        return ""

    return {
        "one program": lambda: trained(mesh=(8,)),
        "unequal submeshes": on_unequal_submeshes,
        "one program for all stages": of_one_program,
        "two stages in each process, from a checkpoint": from_a_checkpoint,
        "disagreeing": lambda: refused((32, 16, 16) if jax.process_index() else (32, 48, 16)),
        "without a plan": lambda: refused(stages=2, microbatches=7),
    }


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    address, count, index, folder = sys.argv[1:]
    connect(address, int(count), int(index))
    told = {}
    for name, scene in scenes(Path(folder)).items():
        told[name] = scene()
        (Path(folder) / f"{index}.json").write_text(json.dumps(told))
    if jax.process_index():
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # until somebody notices


if __name__ == "__main__":
    main()
