"""A pipeline's workers over the time of a step: a lane for each worker, a block for each task.

A schedule of a thousand microbatches has more tasks than a page can hold. Then tasks of one kind that follow one another
become one block, and short ones are left to the table.
"""

from itertools import groupby

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.report.markup import Html, behind, element, table
from autoshard.report.sentences import percent
from autoshard.report.step_chart import ticks
from autoshard.search.pipeline.simulator import Run, Simulation
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import PlanValues

MAX_BLOCKS = 600
"""Blocks with a text of their own on a page: each takes a hundred bytes."""

LEAST_NUMBERED = 0.014
"""Share of the step that a task takes at least to have its number in it: two digits fit then."""

MAX_LANES = 64
"""Workers that are drawn."""


def schedule_chart(plan: PlanValues, simulation: Simulation) -> Html:
    """Lanes of a schedule in time, a key, and a table of the workers."""
    num_tasks = sum(map(len, simulation.workers))
    workers = simulation.workers[:MAX_LANES]
    lanes = (_lane(n, runs, simulation, num_tasks > MAX_BLOCKS) for n, runs in enumerate(workers))
    kinds = dict.fromkeys(run.task.kind for runs in simulation.workers for run in runs)
    keys = (
        element("li", f"{kind.letter}: {kind.value.replace('_', ' ')}", class_=f"task-{kind.letter}")
        for kind in kinds
    )
    left = len(simulation.workers) - len(workers)
    more = element("p", f"and {plural(left, 'worker')} more", class_="note") if left else None
    return element(
        "figure",
        element("div", *lanes, class_="lanes"),
        more,
        ticks(simulation.makespan_s),
        element("ul", *keys, class_="keys", aria_label="kinds of tasks; a number is a microbatch"),
        behind("Table of the workers", _table(plan, simulation)),
        class_="schedule",
    )


def _lane(number: int, runs: tuple[Run, ...], simulation: Simulation, is_merged: bool) -> Html:
    stages = ", ".join(map(str, simulation.schedule.stages_of(number)))
    blocks = (
        _merged(runs)
        if is_merged
        else [(run.task.kind.letter, str(run.task.microbatch), (run,)) for run in runs]
    )
    spans = (_block(letter, said, group, simulation) for letter, said, group in blocks)
    busy = percent(simulation.busy_s[number], simulation.makespan_s)
    label = f"worker {number}, stage {stages}: busy for {busy} of the step"
    return element(
        "div",
        element("span", f"worker {number}"),
        element("div", *spans, class_="track", role="img", aria_label=label),
        element("span", busy, class_="number"),
        class_="lane",
    )


def _merged(runs: tuple[Run, ...]) -> list[tuple[str, str, tuple[Run, ...]]]:
    """Tasks of one kind that follow one another."""
    groups = (tuple(group) for _, group in groupby(runs, lambda run: run.task.kind))
    return [(group[0].task.kind.letter, "", group) for group in groups]


def _block(letter: str, said: str, runs: tuple[Run, ...], simulation: Simulation) -> Html:
    whole_s, start_s, end_s = simulation.makespan_s, runs[0].start_s, runs[-1].end_s
    place = f"left:{100 * start_s / whole_s:.2f}%;width:{100 * (end_s - start_s) / whole_s:.2f}%"
    is_wide = end_s - start_s >= LEAST_NUMBERED * whole_s
    return element("i", said if is_wide else None, class_=letter, style=place)


def _table(plan: PlanValues, simulation: Simulation) -> Html:
    rows = [
        (
            str(n),
            ", ".join(map(str, simulation.schedule.stages_of(n))),
            str(len(runs)),
            format_seconds(simulation.busy_s[n]),
            percent(simulation.busy_s[n], simulation.makespan_s),
            format_bytes(simulation.peak_bytes[n]),
        )
        for n, runs in enumerate(simulation.workers)
    ]
    head = ("worker", "stages", "tasks", "busy", "of the step", "residuals at most")
    title = f"Workers under the schedule {plan.schedule}"
    return table(title, head, rows, right=(0, 2, 3, 4, 5))
