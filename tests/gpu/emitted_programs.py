"""Compiles programs as they are emitted, with the options that they carry, for A100s that are not there; prints their names.

Run by `test_emitted` as `python -m tests.gpu.emitted_programs`, in a process of its own, as `compiled` is.
"""

from collections.abc import Iterator
from typing import Any

import autoshard
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import Program
from tests.gpu.compile_only import compile_only_devices
from tests.zoo import Case, make_gpt_scan, make_mlp

CLUSTER = parse_cluster("4xA100-80GB")

IN_PARTS = {"stages": 2, "microbatches": 2}


def emitted(case: Case, **options: Any) -> Iterator[Program]:
    """What becomes of a plan under a cap that is far below the device's memory."""
    args = case.abstract_args()
    plan = autoshard.search(case.step, *args, cluster=CLUSTER, memory="1GiB", **options)
    programs = autoshard.emit(case.step, *args, plan=plan, devices=compile_only_devices(CLUSTER))
    yield from (programs,) if isinstance(programs, Program) else programs


def of_every_kind() -> Iterator[Program]:
    """One program, a program for each stage, and one for all stages."""
    mlp, scanned = make_mlp(widths=(64, 64, 64)), make_gpt_scan(num_layers=2, hidden=16, heads=2)
    yield from emitted(mlp, stages=1)
    yield from emitted(mlp, **IN_PARTS, schedule="1f1b", executor="mpmd")
    yield from emitted(scanned, **IN_PARTS, schedule="gpipe", executor="spmd")


if __name__ == "__main__":
    for program in of_every_kind():
        program.fn.trace(*program.args).lower(lowering_platforms=("cuda",)).compile()
        print(program.name)
