"""Lower bounds on the plans of one step, by mesh.

A rewritten step computes all that the baseline computes, so the bounds of uncapped baselines hold for it, too. There is one
exception: to recompute a residual may be faster than to write and read it. Then the bounds fall by the estimated gain, and
in steps with loops only a step's own bounds count.
"""

import math

from autoshard.search.memory.residuals import has_loops
from autoshard.search.mesh_problem import Known
from autoshard.search.space.found import Bounds, Found
from autoshard.search.space.trials import Baseline, Trials
from autoshard.search.step_problem import StepProblem


class Certificate:
    """The lower bounds of one search.

    Attributes:
      trials: the trials of the step.
      first: the step as it is written, solved without a cap.
    """

    def __init__(self, trials: Trials, first: Baseline) -> None:
        self.trials, self.first = trials, first
        self._has_loops = has_loops(first.step_problem.step)

    def known(self, step_problem: StepProblem, shape: tuple[int, ...]) -> Known:
        """A lower bound on a step's plans on a mesh before it is solved there.

        A step with loops has none, because recomputation may make it much faster.
        """
        if self._has_loops:
            return Known()
        floor_s = self.first.floors_s.get(shape, -math.inf)
        return Known(bound_s=floor_s - self.trials.gains_s.get(step_problem, 0.0))

    def proven_s(self, step_problem: StepProblem, shape: tuple[int, ...]) -> float:
        """The best lower bound on a step's plans on a mesh that fit."""
        own_s = self.trials.proven_s(step_problem).get(shape, -math.inf)
        return max(own_s, self.known(step_problem, shape).bound_s)

    def bounds_s(self, best: Found) -> Bounds:
        """By mesh, a lower bound on plans with the best plan's microbatches, recomputation and offloading: on all meshes of
        one and two axes, on the plan's own, and on others of three axes if they are ruled out."""
        own_s = self.trials.proven_s(best.step_problem)
        ruled_out = (shape for shape, bound_s in own_s.items() if bound_s >= self.trials.least_s)
        own = (shape for shape in own_s if shape == best.on_mesh.shape)
        return {shape: self._bound_s(best, shape) for shape in (*self.trials.shapes, *ruled_out, *own)}

    def _bound_s(self, best: Found, shape: tuple[int, ...]) -> float:
        """A lower bound on plans of the best plan's step on one mesh.

        Loops may be faster with recomputation. Then the baseline's bound counts only if the step has no bound of its
        own, and less the estimated gain.
        """
        own_s = self.trials.proven_s(best.step_problem)
        gain_s = self.trials.gains_s.get(best.step_problem, 0.0)
        floor_s = self.first.floors_s.get(shape, -math.inf) - gain_s
        if self._has_loops or gain_s:
            return own_s.get(shape, floor_s)
        return max(own_s.get(shape, -math.inf), floor_s)
