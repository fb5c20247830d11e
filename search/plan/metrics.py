"""A plan's numbers under stable names, for loggers; `print(plan)` says the same ones.

Each name has its unit: `_s` seconds, `_per_s` a rate, `_bytes` of one device. Predictions say so in their name: a run logs
measured values beside them. A number that is not known is left out, and so are predictions that were made for other
decisions, before an edit by hand.

Examples are counted along the first dimension of the batch's arrays. Tokens are the whole numbers of a batch's array
with two dimensions, such as ids of `int32[examples, positions]`: of the largest one.
"""

import math
import re
from collections.abc import Iterator, Mapping

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.mixed_cluster import from_json
from autoshard.search.plan.edits import is_edited
from autoshard.search.plan.headline import mfu
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.values import PlanValues

_BATCH = re.compile(r"(\w+)\[([\d,]+)\] batch")
"""An array of the batch in an outline."""

_WHOLE_NUMBERS = ("int", "uint")


def metrics(plan: PlanValues) -> dict[str, float]:
    """The numbers of a plan: see `Plan.metrics`."""
    known = {"devices": plan.num_devices, "memory_cap_bytes": plan.memory_bytes, **_work(plan)}
    try:
        predicted = {} if is_edited(plan) else dict(_predicted(plan, known))
    except InputError as e:
        raise PlanError(str(e)) from e
    return {name: float(value) for name, value in (known | predicted).items()}


def _work(plan: PlanValues) -> dict[str, float]:
    """The examples and tokens of a step."""
    if plan.outline is None:
        return {}
    counted = {"examples": examples(plan.outline), "tokens": tokens(plan.outline)}
    return {name: count for name, count in counted.items() if count}


def examples(outline: Outline) -> int:
    """The examples of a step: the size of the first dimension of the batch's arrays; 0 if it is not one size."""
    sizes = {dims[0] for _, dims in _arrays(outline)}
    return sizes.pop() if len(sizes) == 1 else 0


def tokens(outline: Outline) -> int:
    """The size of the largest array of whole numbers with two dimensions in the batch; 0 if there is none.

    Example:
      >>> tokens(Outline({"batch['tokens']": "int32[8,128] batch", "w": "float32[4,4] parameter"}, {}, {}))
      1024
    """
    ids = (dims for dtype, dims in _arrays(outline) if dtype.startswith(_WHOLE_NUMBERS) and len(dims) == 2)
    return max(map(math.prod, ids), default=0)


def _arrays(outline: Outline) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtypes and shapes of the batch's arrays."""
    for text in outline.arguments.values():
        if found := _BATCH.fullmatch(text):
            yield found[1], tuple(map(int, found[2].split(",")))


def _predicted(plan: PlanValues, known: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The predictions, and the results of the compiler and the solver."""
    estimates = plan.estimates
    yield "predicted_step_s", estimates.step_s
    yield from _throughput(plan, known)
    yield "predicted_peak_bytes", estimates.peak_bytes
    if estimates.compiled_peak_bytes is not None:
        yield "compiled_peak_bytes", estimates.compiled_peak_bytes
    yield "predicted_host_bytes", estimates.host_bytes
    if plan.is_pipeline:
        yield "predicted_bubble", estimates.bubble
    if plan.gap is not None:
        yield "certified_gap", plan.gap


def _throughput(plan: PlanValues, known: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The work of a step, and how fast it is done."""
    estimates, groups = plan.estimates, from_json(plan.cluster, "plan: cluster").groups
    utilization = mfu(estimates.shares, groups, estimates.step_s)
    if utilization is not None:
        yield "model_flops", sum(estimates.shares[0].model_flops.values())
        yield "predicted_mfu", utilization
    for name in ("examples", "tokens"):
        if name in known and estimates.step_s > 0:
            yield f"predicted_{name}_per_s", known[name] / estimates.step_s
