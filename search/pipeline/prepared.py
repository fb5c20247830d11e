"""Values that all searches for pipelines of one step share: the step in parts, its bounds, and the time limit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.bounds import PipelineBounds
from autoshard.search.pipeline.intra_op import NO_PINS
from autoshard.search.pipeline.parts import Parts
from autoshard.search.solver.clock import Deadline, SearchClock, WorkClock


@dataclass(slots=True)
class Prepared:
    """A step, as far as it is made ready for pipelines.

    Attributes:
      deadline: no work is begun later; its clock counts all work for the step.
      parts: the step in parts, by their number.
      bounds: the least times of its pipelines; None until the work of the step is known.
    """

    deadline: Deadline
    parts: dict[int, Parts] = field(default_factory=dict[int, Parts])
    bounds: PipelineBounds | None = None

    @classmethod
    def within(cls, nominal_s: float = inf) -> "Prepared":
        """A step of which nothing is known yet, with nominal seconds of work."""
        return cls(Deadline.after(nominal_s, WorkClock()))

    @property
    def clock(self) -> SearchClock:
        """The clock that counts the work."""
        return self.deadline.clock

    def in_parts(
        self,
        count: int,
        step: Step,
        cluster: Cluster,
        most_layers: int,
        pins: Mapping[str, Any] = NO_PINS,
        hosted: frozenset[int] = frozenset(),
    ) -> Parts:
        """The step in a number of parts; the arguments are those of `Parts.of`."""
        if count not in self.parts:
            self.parts[count] = Parts.of(
                step,
                cluster,
                count,
                clock=self.clock,
                most_layers=most_layers,
                pins=pins,
                hosted=hosted,
            )
        return self.parts[count]
