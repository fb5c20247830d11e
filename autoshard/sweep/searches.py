"""The searches of a sweep, one after another; `pool` does several at once.

A step is traced once for all GPUs whose kernels JAX chooses alike. A combination without a plan is an answer, with the
reason; a step that cannot be traced is an error.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from autoshard import api
from autoshard.cost_model.errors import AutoshardError, InfeasibleError, InputError, first_line
from autoshard.cost_model.hardware import parse_hardware
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla.gpu_targets import compute_capability
from autoshard.options import Options
from autoshard.search.ir.graph import Step
from autoshard.search.plan.plan import Plan
from autoshard.sweep.cases import Case
from autoshard.target import target


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search: a plan, or the reason why there is none.

    Attributes:
      plan: the plan.
      reason: one sentence.
      warned: the warnings, of a search in another process.
    """

    plan: Plan | None = None
    reason: str = ""
    warned: tuple[str, ...] = ()


class Source(Protocol):
    """A step that can be traced for a cluster."""

    def traced(self, hardware: AnyCluster) -> Step:
        """The traced step."""
        ...


@dataclass(frozen=True, eq=False)
class OfCall:
    """A step and its arguments."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: Any = None

    def traced(self, hardware: AnyCluster) -> Step:
        """The step, traced for a cluster."""
        return api.tracer("what_if", self.step, self.args, dict(self.kwargs), self.state)(hardware)


@dataclass(frozen=True, slots=True)
class OfTarget:
    """A step by the command line's name for it."""

    target: str
    state: tuple[str, ...] | None = None

    def traced(self, hardware: AnyCluster) -> Step:
        """The step, loaded and traced for a cluster."""
        with target(self.target) as (step, args):
            return OfCall(step, args, {}, self.state).traced(hardware)


@dataclass(frozen=True, eq=False)
class Searches:
    """Searches of one step, each with the same options.

    Attributes:
      source: the step.
      time_limit_s: of each search.
    """

    source: Source
    time_limit_s: float | None = None
    _steps: dict[tuple[Any, ...], Step] = field(default_factory=dict, init=False)

    def answer(self, case: Case) -> Answer:
        """The plan for a combination.

        Raises:
          InputError: the step cannot be traced.
        """
        try:
            hardware = parse_hardware(case.cluster)
        except InputError as e:
            return Answer(reason=sentence(e))
        step = self._traced(hardware)
        asked = Options(memory=case.memory_bytes, time_limit_s=self.time_limit_s)
        try:
            return Answer(api.planned(step, hardware, asked))
        except InfeasibleError as e:
            least = f"; the least that was found needs {format_bytes(e.smallest_bytes)}"
            return Answer(reason=sentence(e) + least * math.isfinite(e.smallest_bytes))
        except AutoshardError as e:
            return Answer(reason=sentence(e))

    def _traced(self, hardware: AnyCluster) -> Step:
        """The step as it is traced for such GPUs."""
        kernels = (hardware.platform, *(compute_capability(group.device.name) for group in hardware.groups))
        if kernels not in self._steps:
            self._steps[kernels] = self.source.traced(hardware)
        return self._steps[kernels]


def sentence(error: AutoshardError) -> str:
    """The first sentence of a message.

    Example:
      >>> sentence(InputError("no plan fits 1.5 GiB a device. Allow more"))
      'no plan fits 1.5 GiB a device'
    """
    return re.split(r"\.\s|\.$", first_line(error))[0]


def in_turn(
    source: Source, cases: Sequence[Case], time_limit_s: float | None
) -> Iterator[tuple[int, Answer]]:
    """The answers, one after another, each with the number of its combination."""
    searches = Searches(source, time_limit_s)
    for number, case in enumerate(cases):
        yield number, searches.answer(case)
