"""Values that all searches for pipelines of one step share: the step in parts, its bounds, and the time limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.bounds import Bounds
from autoshard.search.pipeline.intra_op import NO_PINS
from autoshard.search.pipeline.proposals import Parts
from autoshard.search.solver.clock import Deadline, SearchClock, WorkClock


@dataclass(slots=True)
class Prepared:
    """What is known of a step.

    Attributes:
      deadline: after it nothing more is begun; all that is done for the step goes by its clock.
      parts: by how many it is in, the step in them.
      bounds: the least times of its pipelines, once its work is known.
    """

    deadline: Deadline
    parts: dict[int, Parts] = field(default_factory=dict[int, Parts])
    bounds: Bounds | None = None

    @classmethod
    def within(cls, nominal_s: float = inf) -> "Prepared":
        """Nothing is known yet, and so much time is left."""
        return cls(Deadline.after(nominal_s, WorkClock()))

    @property
    def clock(self) -> SearchClock:
        """Counts the work that is done."""
        return self.deadline.clock

    def in_parts(
        self,
        count: int,
        step: Step,
        marks: Sequence[str],
        cluster: Cluster,
        most_layers: int,
        pins: Mapping[str, Any] = NO_PINS,
        hosted: frozenset[int] = frozenset(),
    ) -> Parts:
        """The step in so many parts; arguments as of `Parts.of`."""
        if count not in self.parts:
            self.parts[count] = Parts.of(
                step,
                marks,
                cluster,
                count,
                clock=self.clock,
                most_layers=most_layers,
                pins=pins,
                hosted=hosted,
            )
        return self.parts[count]
