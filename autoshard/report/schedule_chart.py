"""A pipeline's workers over the time of a step: a lane for each worker, a block for each task.

A schedule of a thousand microbatches has more tasks than a page can hold, or an eye can tell apart. Then a lane has slices
of equal time, each as dark as its worker is busy.
"""

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.report.markup import Html, behind, element, table
from autoshard.report.step_chart import lane, ticks
from autoshard.report.worker_memory import NUM_SLICES
from autoshard.search.pipeline.simulator import Run, Simulation
from autoshard.search.plan.text_table import percent, plural
from autoshard.search.plan.values import PlanValues

MAX_BLOCKS = 600
"""Blocks with a text of their own on a page: each takes a hundred bytes."""

LEAST_NUMBERED = 0.014
"""Share of the step that a task takes at least to have its number in it: two digits fit then."""

MAX_LANES = 32
"""Workers that are drawn; the table has all."""


def schedule_chart(plan: PlanValues, simulation: Simulation) -> Html:
    """Lanes of a schedule in time, a key, and a table of the workers."""
    has_tasks = sum(map(len, simulation.workers)) <= MAX_BLOCKS
    workers = simulation.workers[:MAX_LANES]
    draw = _tasks if has_tasks else _slices
    lanes = (draw(n, runs, simulation) for n, runs in enumerate(workers))
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
        element("ul", *keys, class_="keys", aria_label="kinds of tasks") if has_tasks else None,
        behind("Table of the workers", _table(plan, simulation)),
        class_="schedule",
    )


def _tasks(number: int, runs: tuple[Run, ...], simulation: Simulation) -> Html:
    """A lane with a block for each task."""
    name, busy = f"worker {number}", percent(simulation.busy_s[number], simulation.makespan_s)
    blocks = (_block(run, simulation.makespan_s) for run in runs)
    stages = ", ".join(map(str, simulation.schedule.stages_of(number)))
    label = f"{name}, stage {stages}: busy for {busy} of the step"
    track = element("div", *blocks, class_="track", role="img", aria_label=label)
    return element("div", element("span", name), track, element("span", busy, class_="number"), class_="lane")


def _block(run: Run, whole_s: float) -> Html:
    share = (run.end_s - run.start_s) / whole_s
    place = f"left:{100 * run.start_s / whole_s:.2f}%;width:{100 * share:.2f}%"
    number = str(run.task.microbatch) if share >= LEAST_NUMBERED else None
    return element("i", number, class_=run.task.kind.letter, style=place)


def _slices(number: int, runs: tuple[Run, ...], simulation: Simulation) -> Html:
    """A lane with slices of equal time."""
    whole_s, shares = simulation.makespan_s, [0.0] * NUM_SLICES
    for run in runs:
        start, end = (NUM_SLICES * at_s / whole_s for at_s in (run.start_s, run.end_s))
        for n in range(int(start), min(int(end) + 1, NUM_SLICES)):
            shares[n] += min(end, n + 1) - max(start, n)
    return lane(f"worker {number}", shares, "computes", percent(simulation.busy_s[number], whole_s))


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
