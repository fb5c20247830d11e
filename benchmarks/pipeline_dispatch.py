"""What handing out a pipeline's tasks costs, where a stage takes 5 ms of a microbatch.

The host does not wait for devices, so its time only counts where a device waits for it. That is reckoned: how long after
the step's beginning each task was handed out is measured, on simulated devices and a model so small that they have nothing
to do; that no task begins before is added to what the schedule says, with 5 ms a stage. What the step takes longer than
with a host that costs nothing is the overhead. The host's time is its thread's on a processor, as simulated devices and
whatever else runs here share the cores with it; what a device computes in that thread counts, too. More simulated devices
for a stage cost the host more than real ones do. The least of many steps counts, as what disturbs the host only adds to it.

    python benchmarks/pipeline_dispatch.py

"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

sys.path.insert(0, str(Path(__file__).parents[1]))

from autoshard.executors.pipeline import PipelineProgram  # noqa: E402
from autoshard.search.ir.trace import trace  # noqa: E402
from autoshard.search.plan.schedule import Schedule, TaskKind  # noqa: E402
from autoshard.search.plan.task_order import task_order  # noqa: E402
from tests.executors.pipelines import pipelined, schedule_of  # noqa: E402
from tests.zoo import make_gpt_nnx  # noqa: E402

STAGE_S = 5e-3
SHARE = {TaskKind.FORWARD: 1 / 3, TaskKind.BACKWARD: 2 / 3}
"""Of a stage's time."""

NUM_STEPS = 30


def step_s(schedule: Schedule, handed_out_s: list[float]) -> float:
    """Until the last task ends, if none begins before it is handed out."""
    ends, free = {}, [0.0] * schedule.num_workers
    for (worker, task), at in zip(task_order(schedule), handed_out_s, strict=True):
        reads = [ends[one] for one in task.reads(schedule.num_stages)]
        ends[task] = free[worker] = max(at, free[worker], *reads) + SHARE[task.kind] * STAGE_S
    return max(free)


def dispatched(program: PipelineProgram, args: tuple) -> tuple[list[float], float, tuple]:
    """Seconds after its beginning at which a step's tasks were handed out, and at which all of it was; its results."""
    handed_out: list[float] = []

    def watched(one):
        def function(*operands):
            made = one.function(*operands)
            handed_out.append(time.thread_time())
            return made

        return replace(one, function=function)

    is_task = [one.name.startswith(("forward", "backward")) for one in program.instructions]
    instructions = [
        watched(one) if task else one for one, task in zip(program.instructions, is_task, strict=True)
    ]
    running = replace(program, instructions=tuple(instructions))
    start = time.thread_time()
    results = running.fn(*args)
    end = time.thread_time()
    return [at - start for at in handed_out], end - start, jax.block_until_ready(results)


def measured(num_stages: int, num_microbatches: int, num_devices: int) -> str:
    case = make_gpt_nnx(num_layers=num_stages, hidden=8, heads=2, vocab=16, seq=4, batch=4 * num_microbatches)
    schedule = schedule_of("1f1b", num_stages, num_microbatches)
    program = pipelined(trace(case.step, *case.abstract_args()), schedule, [num_devices] * num_stages)
    state = jax.device_put(case.init(), program.shardings[0])
    batch = jax.device_put(case.batch(0), program.shardings[1])
    ideal_s, taken, host = step_s(schedule, [0.0] * 2 * num_stages * num_microbatches), [], []
    for _ in range(NUM_STEPS):
        handed_out_s, host_s, (state, _) = dispatched(program, (state, batch))
        taken.append(step_s(schedule, handed_out_s))
        host.append(host_s)
    num_tasks = 2 * num_stages * num_microbatches
    overhead, host_s = min(taken) / ideal_s - 1, min(host)
    return (
        f"{num_stages:6} {num_devices:7} {num_microbatches:12} {num_tasks:6} {len(program.instructions):12} "
        f"{ideal_s * 1e3:9.1f} {host_s * 1e3:8.1f} {host_s / num_tasks * 1e6:11.0f} {overhead:9.2%}"
    )


if __name__ == "__main__":
    print("stages devices microbatches  tasks instructions  ideal ms  host ms  us per task  overhead")
    for num_stages, num_microbatches, num_devices in (
        (2, 8, 1),
        (4, 8, 1),
        (4, 32, 1),
        (8, 32, 1),
        (4, 8, 2),
    ):
        print(measured(num_stages, num_microbatches, num_devices), flush=True)
