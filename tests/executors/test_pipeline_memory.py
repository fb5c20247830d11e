"""What stages hold while they run: no more microbatches' residuals than the schedule keeps in flight."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import pytest

from executors.pipeline_program import PipelineProgram
from search.ir.trace import trace
from search.plan.schedule import Schedule, TaskKind
from search.plan.stage_programs import StagePrograms
from tests.executors.pipelines import pipelined, programs_of, schedule_of

WIDTH, BATCH, LAYERS = 32, 64, 8
NUM_STAGES, NUM_MICROBATCHES = 4, 8
DEVICES = 2
"""Of each stage."""


def step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def arguments():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    return params, {"x": jnp.ones((BATCH, WIDTH))}


def live_bytes() -> list[int]:
    """Bytes that each stage's devices hold."""
    held = [0] * len(jax.devices())
    for x in jax.live_arrays():
        for device in x.sharding.device_set:
            held[device.id] += prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return [sum(held[i : i + DEVICES]) for i in range(0, len(held), DEVICES)]


def most_held(program: PipelineProgram, args: tuple) -> list[int]:
    """The most bytes that each stage holds during the tasks, beyond what it holds before the first."""
    seen: list[list[int]] = []

    def watched(one):
        def function(*operands):
            seen.append(live_bytes())
            return one.function(*operands)

        return replace(one, function=function)

    is_task = [one.name.split()[0] in ("forward", "backward") for one in program.instructions]
    first, last = is_task.index(True), len(is_task) - is_task[::-1].index(True)
    numbered = enumerate(program.instructions)
    instructions = tuple(watched(one) if first <= i <= last else one for i, one in numbered)
    jax.block_until_ready(replace(program, instructions=instructions).fn(*args))
    return [max(at) - before for at, before in zip(zip(*seen, strict=True), seen[0], strict=True)]


def bytes_of_microbatch(programs: StagePrograms, stage: int) -> int:
    """What a stage keeps of a microbatch from its forward to its backward task, all of its devices together."""
    forward = programs.tasks[stage, TaskKind.FORWARD]
    there = {*forward.makes, *forward.reads}
    kept = {
        v
        for v in programs.tasks[stage, TaskKind.BACKWARD].reads
        if v in there and programs.is_of_microbatch(v)
    }
    return DEVICES * sum(programs.values[v].num_bytes for v in kept)


def passing_bytes(programs: StagePrograms, stage: int) -> int:
    """What comes in and goes out for a microbatch: an activation and its gradient, on either side."""
    moved = [t for t in programs.transfers if t.is_per_microbatch and stage in (t.source, t.target)]
    return DEVICES * sum(programs.values[t.value].num_bytes for t in moved)


def prologue_bytes(programs: StagePrograms, stage: int) -> int:
    """What a stage behind the first makes once, when its first task begins: sums, on each of its devices."""
    made = {v for program in programs.prologue if program.stage == stage > 0 for v in program.makes}
    return DEVICES * sum(programs.values[v].num_bytes for v in made)


def held_and_allowed(schedule: Schedule, in_flight: Sequence[int]) -> list[tuple[int, int]]:
    params, batch = arguments()
    traced = trace(step, params, batch)
    _, programs = programs_of(traced, schedule, num_replicas=DEVICES)
    program = pipelined(traced, schedule, num_replicas=DEVICES)
    placed = jax.device_put((params, batch), program.shardings)
    most = most_held(program, placed)
    allowed = [
        n * bytes_of_microbatch(programs, s) + passing_bytes(programs, s) + prologue_bytes(programs, s)
        for s, n in enumerate(in_flight)
    ]
    return list(zip(most, allowed, strict=True))


def test_under_1f1b_a_stage_holds_as_many_microbatches_as_stages_follow_and_its_own():
    in_flight = [NUM_STAGES - s for s in range(NUM_STAGES)]
    for held, allowed in held_and_allowed(schedule_of("1f1b", NUM_STAGES, NUM_MICROBATCHES), in_flight):
        assert 0 < held <= allowed


@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b"])
def test_schedules_that_keep_more_hold_more(name):
    in_flight = [NUM_STAGES - s for s in range(NUM_STAGES)]
    pairs = held_and_allowed(schedule_of(name, NUM_STAGES, NUM_MICROBATCHES), in_flight)
    assert any(held > allowed for held, allowed in pairs)
