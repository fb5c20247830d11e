"""Values that all searches for pipelines of one step share: the step in parts, its bounds, and the time limit."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from autoshard.cost_model.cluster import Cluster
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.bounds import PipelineBounds, Pipelines
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_options import PipelineOptions
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

    def in_parts(self, count: int, step: Step, cluster: Cluster, options: PipelineOptions) -> Parts:
        """The step in a number of parts, on nodes of one kind."""
        if count not in self.parts:
            most_layers, pins, hosted = options.most_layers, options.pins, options.hosted
            self.parts[count] = Parts.of(
                step, cluster, count, clock=self.clock, most_layers=most_layers, pins=pins, hosted=hosted
            )
        return self.parts[count]

    def least_of(self, families: Iterable[Pipelines], num_stages: int | None) -> float:
        """The least bound of several families. Those whose hosts take longer to hand out their tasks are not worked out."""
        told_s, found_s = {family: self._told_s(family, num_stages) for family in families}, inf
        for family in sorted(told_s, key=told_s.__getitem__):
            if told_s[family] >= found_s:
                break
            found_s = min(found_s, self.least_s(family, num_stages))
        return found_s

    def least_s(self, family: Pipelines, num_stages: int | None) -> float:
        """Seconds of a step of pipelines with equal stages, at least; 0 until the work of the step is known."""
        return 0.0 if self.bounds is None else self.bounds.least_s(family, num_stages)

    def _told_s(self, family: Pipelines, num_stages: int | None) -> float:
        """Seconds in which the hosts hand out the tasks of a step; 0 until the work of the step is known."""
        return 0.0 if self.bounds is None else self.bounds.told_s(family, num_stages)
