"""A pipeline's memory over the time of a step: a lane for each worker, with the arrays that it holds.

A worker holds the state of its stages all the time, the residuals of the microbatches in flight, and the workspace of the
task that runs. Residuals rise with each forward pass and fall with each backward pass, so the lanes show which worker fills
first.
"""

from collections.abc import Sequence

from autoshard.cost_model.units import format_bytes
from autoshard.report.markup import Html, behind, element, table
from autoshard.report.schedule_chart import MAX_LANES
from autoshard.report.stacked import HEIGHT, areas, drawing
from autoshard.report.step_chart import ticks
from autoshard.report.worker_memory import NUM_SLICES, Slices, held
from autoshard.search.pipeline.simulator import Simulation
from autoshard.search.plan.text_table import percent, plural
from autoshard.search.plan.values import PlanValues

SHOWN_CAP = 4
"""Largest multiple of the fullest worker's memory at which the cap is the height of a lane. Above it, bars would be too low
to see."""

KINDS = {"state": "optimizer_state", "residuals": "residuals", "workspace": "temporaries"}
"""Parts of a worker's memory, from the bottom up, with the kind of array whose colour they have."""


def pipeline_memory(plan: PlanValues, simulation: Simulation) -> Html:
    """Lanes of memory in time, a key, and a table of the workers."""
    stacks = [held(plan, simulation, worker) for worker in range(len(simulation.workers))]
    highest = max(max(map(sum, zip(*stack, strict=True))) for stack in stacks)
    cap = plan.memory_bytes
    top = cap if highest <= cap <= SHOWN_CAP * highest else highest
    lanes = (_lane(n, stack, top) for n, stack in enumerate(stacks[:MAX_LANES]))
    keys = (element("li", name, class_=f"kind-{kind}") for name, kind in reversed(KINDS.items()))
    left = len(stacks) - MAX_LANES
    more = element("p", f"and {plural(left, 'worker')} more", class_="note") if left > 0 else None
    height = "the cap" if top == cap else "the most that a worker holds"
    sentence = (
        f"Memory of each worker by the costs of its stages; a lane is as high as {height}, {format_bytes(top)}. The "
        "predicted peak also counts values that wait for a reader, and the update."
    )
    return element(
        "figure",
        element("p", sentence, class_="axis"),
        element("div", *lanes, class_="lanes"),
        more,
        ticks(simulation.makespan_s),
        element("ul", *keys, class_="keys", aria_label="kinds of memory, from the top down"),
        behind("Table of the workers' memory", _table(plan, simulation, stacks)),
        class_="schedule",
    )


def _lane(worker: int, stack: Sequence[Slices], top: float) -> Html:
    most = format_bytes(max(map(sum, zip(*stack, strict=True))))
    parts = [*zip(KINDS.values(), stack, strict=True)]
    chart = drawing(NUM_SLICES, HEIGHT, f"worker {worker}: holds at most {most}", areas(parts, top))
    name = element("span", f"worker {worker}")
    return element("div", name, chart, element("span", most, class_="number"), class_="lane holds")


def _table(plan: PlanValues, simulation: Simulation, stacks: Sequence[Sequence[Slices]]) -> Html:
    rows = [
        (
            str(n),
            ", ".join(map(str, stages := simulation.schedule.stages_of(n))),
            *(format_bytes(max(slices)) for slices in stack),
            format_bytes(peak := max(plan.estimates.stages[stage].peak_bytes for stage in stages)),
            percent(peak, plan.memory_bytes),
        )
        for n, stack in enumerate(stacks)
    ]
    head = ("worker", "stages", *KINDS, "peak", "of the cap")
    title = "Memory of the workers, per device: each kind at its most, and the predicted peak"
    return table(title, head, rows, right=(0, 2, 3, 4, 5, 6))
