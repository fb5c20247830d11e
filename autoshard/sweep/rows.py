"""What a sweep finds: a row for each combination, with its time and its price, and which rows no other beats.

A row is on the Pareto front if no other row is at least as fast and at least as cheap, and better in one of the two
(V. Pareto, "Manuale di economia politica", 1906). Price is money where each GPU has one, and GPU hours otherwise.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.mixed_cluster import AnyCluster, from_json
from autoshard.search.plan.headline import headline
from autoshard.search.plan.plan import Plan

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A step on one cluster under one memory cap.

    Attributes:
      cluster: the cluster's name.
      memory_bytes: the memory cap of a device.
      plan: the fastest plan found; None if there is none.
      reason: why there is no plan, in one sentence; empty if there is one.
      steps: the number of steps that `time_s`, `gpu_hours` and `cost` are for.
      cost: the price of these steps; None without a price for each kind of GPU.
      is_on_front: whether no other row is as fast and as cheap, and better in one of both.
    """

    cluster: str
    memory_bytes: int
    plan: Plan | None
    reason: str = ""
    steps: int = 0
    cost: float | None = None
    is_on_front: bool = False

    @property
    def metrics(self) -> Mapping[str, float]:
        """The numbers of the plan (`Plan.metrics`); none without one."""
        return {} if self.plan is None else self.plan.metrics()

    @property
    def step_s(self) -> float | None:
        """Predicted seconds of a step."""
        return None if self.plan is None else self.plan.estimates.step_s

    @property
    def mfu(self) -> float | None:
        """Predicted MFU, between 0 and 1."""
        return self.metrics.get("predicted_mfu")

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of a device at the peak: compiled if the plan was compiled, or else predicted."""
        found = self.metrics.get("compiled_peak_bytes", self.metrics.get("predicted_peak_bytes"))
        return None if found is None else int(found)

    @property
    def time_s(self) -> float | None:
        """Predicted seconds of all steps."""
        return None if self.step_s is None else self.steps * self.step_s

    @property
    def gpu_hours(self) -> float | None:
        """Hours of all GPUs together for all steps."""
        if self.plan is None or self.time_s is None:
            return None
        return self.plan.num_devices * self.time_s / SECONDS_PER_HOUR

    @property
    def price(self) -> float:
        """The cost, or the GPU hours where there is none; infinite without a plan."""
        return next((one for one in (self.cost, self.gpu_hours) if one is not None), math.inf)

    def to_json(self) -> dict[str, Any]:
        """The row as JSON-ready values, with the plan's first line in place of the plan."""
        return {
            "cluster": self.cluster,
            "memory_bytes": self.memory_bytes,
            "fits": self.plan is not None,
            "reason": self.reason,
            "plan": "" if self.plan is None else headline(self.plan),
            "step_s": self.step_s,
            "mfu": self.mfu,
            "peak_bytes": self.peak_bytes,
            "steps": self.steps,
            "time_s": self.time_s,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "is_on_front": self.is_on_front,
        }


def with_front(rows: Sequence[WhatIf]) -> tuple[WhatIf, ...]:
    """The rows, those marked that are on the Pareto front of time and price."""
    points = [None if row.time_s is None else (row.time_s, row.price) for row in rows]
    known = [point for point in points if point is not None]
    return tuple(
        replace(row, is_on_front=point is not None and not any(_beats(other, point) for other in known))
        for row, point in zip(rows, points, strict=True)
    )


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether a point of time and price is as good in both, and better in one."""
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def steps_for(tokens: int, plan: Plan) -> int:
    """The steps that go through so many tokens.

    Raises:
      InputError: the step's batch does not tell its tokens.
    """
    of_step = plan.metrics().get("tokens")
    if not of_step:
        raise InputError(
            f"{plan.step} takes no array of whole numbers with two dimensions, whose size would be the tokens of a step: "
            "give steps= (--steps) instead of tokens= (--tokens)"
        )
    return math.ceil(tokens / of_step)


def check_prices(prices: Mapping[str, float], clusters: Iterable[AnyCluster]) -> None:
    """Refuses a price of no GPU of these clusters, and one that is no price.

    Raises:
      InputError: names it.
    """
    kinds = list(dict.fromkeys(group.device.name for cluster in clusters for group in cluster.groups))
    for kind, price in prices.items():
        if not (math.isfinite(price) and price >= 0):
            raise InputError(f"wanted a price per GPU hour such as 2.5 for {kind}, got {price}")
        if not any(_is_of(kind, name) for name in kinds):
            raise InputError(f"there is a price for {kind!r}, and GPUs are {', '.join(kinds)}")


def cost(plan: Plan, steps: int, prices: Mapping[str, float]) -> float | None:
    """The price of steps; None if a kind of GPU has none."""
    hours = steps * plan.estimates.step_s / SECONDS_PER_HOUR
    groups = from_json(plan.cluster).groups
    rates = [(group.num_devices, _price(group.device.name, prices)) for group in groups]
    known = [count * rate for count, rate in rates if rate is not None]
    return hours * sum(known) if len(known) == len(rates) else None


def _price(gpu: str, prices: Mapping[str, float]) -> float | None:
    """The price of a GPU: that of the longest name that its own begins with."""
    fitting = [kind for kind in prices if _is_of(kind, gpu)]
    return prices[max(fitting, key=len)] if fitting else None


def _is_of(kind: str, gpu: str) -> bool:
    """Whether a GPU is of a kind: `h100` is H100-80GB, and L4 is not L40S.

    Example:
      >>> _is_of("h100", "H100-80GB"), _is_of("L4", "L40S")
      (True, False)
    """
    return f"{gpu.lower()}-".startswith(f"{kind.lower()}-")
