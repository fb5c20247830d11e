"""A schedule in time, to look at: as text, and as trace events for ui.perfetto.dev.

The text has a line per worker, each column a slice of time. `F5` is the forward pass on microbatch 5, `B5` the backward
pass, `W5` the weight gradient, in small letters on a worker's later stages; a task goes on in dashes, and is its letter
alone where it has a single column. Dots are idle.

The trace has a track per worker, a slice per task, an arrow for each value that goes from one worker to another, and a
counter of the residuals held.
"""

from collections.abc import Iterator
from typing import Any

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.simulator import Run, Simulation, StageCost, simulate
from autoshard.search.plan.text_table import WIDTH
from autoshard.search.plan.trace_events import MICROSECONDS, Event, counter, span, trace_file, track
from autoshard.search.plan.values import PlanValues

IDLE, GOING_ON = ".", "-"


def simulated(plan: PlanValues) -> Simulation:
    """A pipeline's schedule in time, by the estimates of its plan."""
    costs = [
        StageCost(
            s.forward_s,
            s.backward_s,
            s.weight_gradient_s,
            s.send_s,
            s.return_s,
            s.residual_bytes,
            s.residual_bytes,
        )
        for s in plan.estimates.stages
    ]
    return simulate(build_schedule(plan.schedule, len(costs), plan.microbatches, plan.workers), costs)


def text(simulation: Simulation, width: int = WIDTH) -> str:
    """The schedule as lines of at most `width` columns: its times, and each worker over time.

    Example:
      >>> print(text(simulate(build_schedule("1f1b", 2, 2, 2), [StageCost(1, 2)] * 2), 40))  # doctest: +SKIP
      1f1b: 2 stages, 2 microbatches, 9 s, 33.3% idle
      0 F0--F1--.........B0------.....B1------
      1 ....F0--B0-------F1--B1-------........
    """
    schedule = simulation.schedule
    title = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches, "
        f"{format_seconds(simulation.makespan_s)}, {simulation.bubble_share:.1%} idle"
    )
    margin = len(str(schedule.num_workers - 1)) + 1
    columns = width - margin
    rows = [f"{w:>{margin - 1}} {_line(simulation, w, columns)}" for w in range(schedule.num_workers)]
    held = max(simulation.peak_bytes)
    note = [f"residuals held: at most {format_bytes(held)} per device"] if held else []
    return "\n".join([title, *rows, *note])


def _line(simulation: Simulation, worker: int, columns: int) -> str:
    """A worker's tasks, each from the column next to its start to the one next to its end."""
    cells = [IDLE] * columns
    first_stage = simulation.schedule.stages_of(worker)[:1]
    for run in simulation.workers[worker]:
        start, end = (round(at_s / simulation.makespan_s * columns) for at_s in (run.start_s, run.end_s))
        letter = run.task.kind.letter if run.task.stage in first_stage else run.task.kind.letter.lower()
        cells[start:end] = _word(letter, run.task.microbatch, end - start)
    return "".join(cells)


def _word(letter: str, microbatch: int, room: int) -> str:
    """A task's word, as far as there is room."""
    word = f"{letter}{microbatch}"
    return (word if len(word) <= room else letter[:room]).ljust(room, GOING_ON)


def trace_events(simulation: Simulation) -> dict[str, Any]:
    """The schedule as JSON-ready trace events."""
    events = [
        event
        for worker, runs in enumerate(simulation.workers)
        for event in (_track(worker, simulation), *_spans(worker, runs), *_counters(worker, runs))
    ]
    return trace_file((*events, *_arrows(simulation)))


def _track(worker: int, simulation: Simulation) -> Event:
    stages = ", ".join(map(str, simulation.schedule.stages_of(worker)))
    return track(worker, f"worker {worker} (stage {stages})")


def _spans(worker: int, runs: tuple[Run, ...]) -> Iterator[Event]:
    for run in runs:
        task, seconds = run.task, run.end_s - run.start_s
        args = {"stage": task.stage, "microbatch": task.microbatch}
        yield span(worker, str(task), run.start_s, seconds, cat=task.kind.value, args=args)


def _counters(worker: int, runs: tuple[Run, ...]) -> Iterator[Event]:
    for run in runs:
        yield counter(f"residual bytes, worker {worker}", run.start_s, {"bytes": run.held_bytes})


def _arrows(simulation: Simulation) -> Iterator[Event]:
    """From the end of a task to the start of each on another worker that reads it."""
    schedule = simulation.schedule
    end_s = {run.task: run.end_s for runs in simulation.workers for run in runs}
    number = 0
    for worker, runs in enumerate(simulation.workers):
        for run in runs:
            for source in run.task.reads(schedule.num_stages):
                maker = schedule.worker_of[source]
                if maker != worker:
                    arrow = {"name": str(source), "cat": "transfer", "id": number, "pid": 0}
                    yield arrow | {"ph": "s", "tid": maker, "ts": end_s[source] * MICROSECONDS}
                    yield arrow | {"ph": "f", "bp": "e", "tid": worker, "ts": run.start_s * MICROSECONDS}
                    number += 1
