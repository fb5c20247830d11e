"""What stages hold while they run: no more microbatches' residuals than the schedule keeps in flight."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
import pytest

from autoshard.executors.pipeline import build, followed
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.search.ir.spec import WHOLE, shard_size
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.stage_memory import StageMemory
from autoshard.search.plan.schedule import Schedule, TaskKind
from autoshard.search.plan.stage_programs import StagePrograms, StageSharding
from tests.executors.pipelines import alike, programs_of, schedule_of

WIDTH, BATCH, LAYERS = 32, 64, 8
NUM_STAGES, NUM_MICROBATCHES = 4, 8
DEVICES = 2
"""Of each stage."""
UINT_BYTES = 4


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


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a stage's devices hold, all of them together, of microbatches one each."""

    programs: StagePrograms
    shardings: Sequence[StageSharding]

    def of(self, values: Iterable[int], stage: int) -> int:
        """Each replica has its own."""
        lying = self.shardings[stage]
        shapes = ((self.programs.values[v], lying.spec(v)[1:]) for v in values)
        held = (x.itemsize * shard_size(spec, x.shape, lying.mesh_shape[1:]) for x, spec in shapes)
        return DEVICES * sum(held)

    def of_microbatch(self, stage: int) -> int:
        """What a stage keeps of a microbatch from its forward to its backward task."""
        forward = self.programs.tasks[stage, TaskKind.FORWARD]
        there = {*forward.makes, *forward.reads}
        read = self.programs.tasks[stage, TaskKind.BACKWARD].reads
        return self.of({v for v in read if v in there and self.programs.is_of_microbatch(v)}, stage)

    def passing(self, stage: int) -> int:
        """What comes in and goes out for a microbatch: an activation and its gradient, on either side."""
        moved = [t for t in self.programs.transfers if t.is_per_microbatch and stage in (t.source, t.target)]
        return self.of((t.value for t in moved), stage)

    def prologue(self, stage: int) -> int:
        """What a stage behind the first makes once, when its first task begins: sums, on each of its devices."""
        made = {v for program in self.programs.prologue if program.stage == stage > 0 for v in program.makes}
        return self.of(made, stage)

    def allowed(self, in_flight: Sequence[int]) -> list[int]:
        """What each stage may hold with so many microbatches in flight."""
        return [
            n * self.of_microbatch(s) + self.passing(s) + self.prologue(s) for s, n in enumerate(in_flight)
        ]


IN_FLIGHT = [NUM_STAGES - s for s in range(NUM_STAGES)]
"""Under 1F1B."""


def held_and_allowed(
    programs: StagePrograms, schedule: Schedule, shardings: Sequence[StageSharding]
) -> list[tuple[int, int]]:
    """What each stage holds at most, and what it may under 1F1B."""
    program = build(programs, schedule, shardings, jax.devices())
    most = most_held(program, jax.device_put(arguments(), program.shardings))
    return list(zip(most, Sizes(programs, shardings).allowed(IN_FLIGHT), strict=True))


def on_replicas(name: str) -> list[tuple[int, int]]:
    schedule = schedule_of(name, NUM_STAGES, NUM_MICROBATCHES)
    _, programs = programs_of(trace(step, *arguments()), schedule, num_replicas=DEVICES)
    return held_and_allowed(programs, schedule, [alike(DEVICES, DEVICES)] * NUM_STAGES)


def test_under_1f1b_a_stage_holds_as_many_microbatches_as_stages_follow_and_its_own():
    for held, allowed in on_replicas("1f1b"):
        assert 0 < held <= allowed


def test_devices_that_share_a_replica_hold_their_parts_of_so_many():
    schedule = schedule_of("1f1b", NUM_STAGES, NUM_MICROBATCHES)
    _, programs = programs_of(trace(step, *arguments()), schedule)
    rows = {v: (WHOLE, 0) for v in programs.of_microbatch if programs.values[v].shape}
    shared = [StageSharding((1, DEVICES), ("replica", "data"), rows, {})] * NUM_STAGES
    whole = Sizes(programs, [alike(DEVICES, 1)] * NUM_STAGES).allowed(IN_FLIGHT)
    for (held, allowed), alone in zip(held_and_allowed(programs, schedule, shared), whole, strict=True):
        assert 0 < held <= allowed < alone


@pytest.mark.parametrize("name", ["gpipe", "eager-1f1b"])
def test_schedules_that_keep_more_hold_more(name):
    assert any(held > allowed for held, allowed in on_replicas(name))


@pytest.mark.parametrize("name", ["zb-h1", "chimera"])
def test_what_a_schedule_is_said_to_hold_is_what_lies_there(name):
    schedule = schedule_of(name, NUM_STAGES, NUM_MICROBATCHES)
    _, programs = programs_of(trace(step, *arguments()), schedule, num_replicas=DEVICES)
    shardings = [alike(DEVICES, DEVICES)] * NUM_STAGES
    runs = followed(programs, schedule, shardings, None).runs
    others = live_bytes()
    program = build(programs, schedule, shardings, jax.devices())
    args = jax.device_put(arguments(), program.shardings)
    held: dict[str, list[list[int]]] = {}

    def watched(one):
        def function(*operands):
            held.setdefault(one.name, []).append(live_bytes())
            return one.function(*operands)

        return replace(one, function=function)

    instructions = tuple(map(watched, program.instructions))
    jax.block_until_ready(replace(program, instructions=instructions).fn(*args))
    for run in (run for run in runs if programs.tasks.get((run.location[0], TaskKind.FORWARD))):
        worker = run.location[1]
        if name != "chimera":  # of whose programs each runs on two workers
            there = [(at[worker] - others[worker]) // DEVICES for at in held[run.program.name]]
            assert run.held_bytes == max(there), run.program.name
            assert run.count == len(there)
    tasks = [run for run in runs if run.program.name.split()[0] in ("forward", "backward", "weight")]
    peaks = [
        max(run.beside_bytes + run.program.resting_bytes for run in tasks if run.location[1] == worker)
        for worker in range(schedule.num_workers)
    ]
    predicted = StageMemory(programs, schedule, shardings).task_peaks({})
    assert predicted == pytest.approx(peaks, abs=NUM_MICROBATCHES * UINT_BYTES)  # parts' numbers aside
