"""The least time of a pipeline, before anything of it is made ready.

*Of given stages.* Tasks of a microbatch form a chain: forward through all stages, then backward. So whatever its order, a
worker cannot begin before the first microbatch has passed all stages in front of its first stage; it is busy with all of its
tasks; and after the last backward pass of one of its stages, that microbatch's gradient passes all stages in front of that
one. A step takes at least

    start + all tasks of a worker                                                              (1)
    start + its forward and backward passes + the way back + a weight gradient of stage 1      (2)
    one microbatch through all stages and back + a weight gradient of stage 1                  (3)

for each worker. The last backward pass of the first stage ends all ways back, and its weight gradient follows. Where weight
gradients are no tasks of their own they belong to the backward pass, and (1) is part of (2).
Under GPipe a stage has no task between its last forward and its first backward pass, in which the last microbatch passes
all stages behind it and comes back: so it also waits for these (4).

*Of a family.* A family is a schedule, a number of microbatches m, of replicas r, and of devices z of a replica: on D devices
it has p = D / (r z) workers. All families are compared as if their stages took equally long and shared the work of the step
evenly: the work of a step in m r parts on z devices each (`search.pipeline.step_work`), transfers left out. To that comes

* the update, and all else that may run once, shared evenly by all devices;
* the sums of gradients over replicas. A stage with P_s bytes of gradients takes rho P_s / z, since each of its devices holds
  P_s / z of them; rho are the seconds of a byte in a reduce-scatter and an all-gather. The longest stage takes no less than
  the average over devices, which is rho r P / D for every cut. Where c workers hold a copy of each stage, gradients are
  summed over c r devices, and the average is c times as much;

and the hosts have to hand out all tasks.

Stages of different lengths can fill a pipeline sooner, if those behind are shorter: a cut of divisible layers may be faster
by some percent than equal stages are. Layers are not divisible. So a family's bound is one for its cuts into equal stages,
and ranks families whose stages differ.

*Of any cut.* In a step in c parts, all devices together spend the work of the step in c parts on z devices each, wherever
stages begin, in any schedule. The busiest of D devices spends a D-th of it at least. The work never falls as z grows
(`search.pipeline.step_work`), so the smallest z bounds stages of several sizes, too. This bound certifies a plan. It leaves
out the bubble, all communication and the hosts' dispatch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil, inf, prod

import jax.numpy as jnp
import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Graph, Role, Step, Value, walk
from autoshard.search.pipeline.schedules.registry import FAMILIES
from autoshard.search.pipeline.simulator import StageCost
from autoshard.search.pipeline.step_work import StepWork
from autoshard.search.problem.costs import COMBINED_BYTES

DISPATCH_S = 2e-4
"""Seconds in which a host hands out a task. Source: `benchmarks/pipeline_dispatch.py`, on a core of a server."""


def least_makespan_s(name: str, costs: Sequence[StageCost], num_microbatches: int, num_workers: int) -> float:
    """Seconds from the first start to the last end, at least, of any schedule of a family.

    Args:
      num_microbatches: microbatches of each replica.
      num_workers: groups of devices.
    """
    m, splits_backward = num_microbatches, FAMILIES[name].splits_backward
    forward_s = np.array([cost.forward_s for cost in costs])
    later_s = np.array([cost.weight_gradient_s if splits_backward else 0.0 for cost in costs])
    backward_s = np.array([cost.backward_s + cost.weight_gradient_s for cost in costs]) - later_s
    passes_s, to_front_s = forward_s + backward_s, np.concatenate([[0.0], np.cumsum(backward_s)[:-1]])
    before_s = np.concatenate([[0.0], np.cumsum(forward_s)[:-1]])
    stages, runs = _stages_of_workers(name, len(costs), num_workers), m / FAMILIES[name].copies
    ends_s = np.maximum(runs * later_s[stages].sum(axis=1), to_front_s[stages].min(axis=1) + later_s[0])
    busy_s = before_s[stages].min(axis=1) + runs * passes_s[stages].sum(axis=1) + ends_s
    waiting_s = (m - 1) * passes_s.max() if name == "gpipe" else 0.0
    return max(float(busy_s.max()), float(passes_s.sum() + later_s[0] + waiting_s))


@lru_cache
def _stages_of_workers(name: str, num_stages: int, num_workers: int) -> np.ndarray:
    """[workers, stages of each]."""
    return np.array(FAMILIES[name].stages_of_workers(num_stages, num_workers))


def dispatch_s(name: str, num_microbatches: int, stages_of_a_node: int) -> float:
    """Seconds in which a node's host hands out the tasks of so many stages."""
    kinds = 3 if FAMILIES[name].splits_backward else 2
    return stages_of_a_node * kinds * num_microbatches * DISPATCH_S


@dataclass(frozen=True, slots=True)
class Pipelines:
    """A family of pipelines.

    Attributes:
      schedule: the name of its schedule.
      num_microbatches: microbatches of each replica.
      num_replicas: replicas of each stage.
      shape: the mesh of a replica's devices.
      is_one_program: whether one program runs all stages, so that no host hands out tasks.
    """

    schedule: str
    num_microbatches: int
    num_replicas: int
    shape: tuple[int, ...]
    is_one_program: bool = False

    @property
    def count(self) -> int:
        """Number of parts in which the step goes through its batch."""
        return self.num_microbatches * self.num_replicas


@dataclass(frozen=True, eq=False)
class PipelineBounds:
    """The least times of a step's pipelines on a cluster.

    Attributes:
      step: the traced step.
      cluster: the devices.
      work: the step's work.
    """

    step: Step
    cluster: Cluster
    work: StepWork

    def work_s(self, count: int, size: int) -> float:
        """Seconds of a step of any pipeline, at least, wherever its stages begin.

        Args:
          count: number of parts in which the step goes through its batch.
          size: the fewest devices of a replica; it divides those of all replicas.
        """
        return (self.work.passes(count, size).total_s + self.work.once_s) / self.cluster.num_devices

    @memo
    def least_s(self, one: Pipelines, num_stages: int | None) -> float:
        """Seconds of a step of pipelines with equal stages, at least; infinite where there are none. The number of stages
        may be given."""
        if (told_s := self.told_s(one, num_stages)) == inf:
            return inf
        total, size, m = self.cluster.num_devices, prod(one.shape), one.num_microbatches
        family, workers = FAMILIES[one.schedule], self._num_workers(one, num_stages)
        stages = workers * family.stages_each
        passes, longest_s = self.work.passes(one.count, size), self.work.longest_s(one.count, size)
        cost = StageCost(*passes.times(1 / (total * m * family.stages_each)))
        busy_s = max(least_makespan_s(one.schedule, [cost] * stages, m, workers), m * longest_s)
        reduction_s = one.num_replicas * self._reduction_s(family.copies * one.num_replicas, size)
        once_s = family.copies * (self.work.once_s + reduction_s) / total
        return max(busy_s + once_s, told_s)

    def told_s(self, one: Pipelines, num_stages: int | None) -> float:
        """Seconds in which the hosts hand out the tasks of a step; infinite where there are no such pipelines."""
        family, workers = FAMILIES[one.schedule], self._num_workers(one, num_stages)
        stages, m = workers * family.stages_each, one.num_microbatches
        if not workers or stages > self._most_stages or not family.suits(workers, m):
            return inf
        return (
            0.0 if one.is_one_program else dispatch_s(one.schedule, m, ceil(stages / self.cluster.num_nodes))
        )

    def _num_workers(self, one: Pipelines, num_stages: int | None) -> int:
        """Groups of devices, zero for none. Where each has a stage, replicas may be of several sizes: then as few as there
        would be of this size."""
        family, (workers, rest) = (
            FAMILIES[one.schedule],
            divmod(self.cluster.num_devices, one.num_replicas * prod(one.shape)),
        )
        if not family.shares_workers:
            return num_stages or max(workers, 2)
        is_asked = num_stages in (None, workers * family.stages_each)
        return workers if not rest and workers > 1 and is_asked else 0

    @property
    def _most_stages(self) -> float:
        """A stage has at least a kernel of the forward pass."""
        return self.work.num_forward_kernels or inf

    @memo
    def _reduction_s(self, num_copies: int, size: int) -> float:
        """Seconds in which as many devices as a replica has add up all gradients over so many copies of a stage, and
        gather the new parameters that are read."""
        if num_copies == 1 or not self._gradient_bytes:
            return 0.0
        mesh, num_bytes = MeshModel(self.cluster, (num_copies, size)), self._gradient_bytes
        kinds = ("reduce-scatter", "all-gather")
        return sum(float(mesh.time_s(kind, (0,), num_bytes, COMBINED_BYTES)) for kind in kinds)

    @cached_property
    def _gradient_bytes(self) -> float:
        """Lower bound on the bytes of all gradients. A gradient, or a parameter where it is read, may have a narrower
        dtype than the parameter, but none that no op of the step makes."""
        graph = self.step.graph
        dtypes = dict.fromkeys(value.dtype for value in _made(graph))
        inexact = (dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))
        narrow_bytes = min((dtype.itemsize for dtype in inexact), default=0)
        learned = [graph.values[v] for v, a in self.step.inputs if a.role is Role.PARAMETER]
        return sum(v.num_bytes * min(1.0, narrow_bytes / v.itemsize) for v in learned)


def _made(graph: Graph) -> Iterator[Value]:
    """All values that ops make, those of loops' bodies too."""
    for _, inner in walk(graph):
        for op in inner.ops:
            yield from op.result_values
