"""The candidates that a search tried, for the plan's file: each with its bound and the best plan found of it.

The certificate of a plan rests on them: a candidate whose bound is above the plan's time cannot hold a better plan.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from autoshard.search.plan.values import Candidate
from autoshard.search.space.found import Found
from autoshard.search.step_problem import StepProblem

MAX_CANDIDATES = 40
"""Candidates in a file, those with the least bound: a line each in a report."""

_Key = tuple[int, frozenset, frozenset, frozenset, frozenset, tuple[int, ...]]
"""Number of microbatches, recomputed ops, offloaded residuals, arguments on the host and updated there, and the mesh."""


class Tried:
    """Takes note of candidates."""

    def __init__(self) -> None:
        self._by_key: dict[_Key, Candidate] = {}

    def proves(self, step_problem: StepProblem, shape: tuple[int, ...], bound_s: float) -> None:
        """A lower bound on the plans of a candidate; infinite if none fits."""
        key, known = self._known(step_problem, shape)
        is_ruled_out = known.is_ruled_out or bound_s == math.inf
        bound_s = max(known.bound_s, 0.0 if is_ruled_out else bound_s)
        self._by_key[key] = replace(known, bound_s=bound_s, is_ruled_out=is_ruled_out)

    def takes(self, found: Found) -> None:
        """A plan of a candidate."""
        key, known = self._known(found.step_problem, found.on_mesh.shape)
        least_s = found.cost_s if known.step_s is None else min(found.cost_s, known.step_s)
        self._by_key[key] = replace(known, step_s=least_s)

    def _known(self, step: StepProblem, shape: tuple[int, ...]) -> tuple[_Key, Candidate]:
        parts = step.traced.num_microbatches
        key = parts, step.sites, step.offloaded_sites, step.hosted, step.updated, shape
        fresh = Candidate(shape, parts, len(step.sites), len(step.offloaded_sites), len(step.hosted))
        return key, self._by_key.get(key, fresh)

    def candidates(self, best: Found, bounds_s: Mapping[tuple[int, ...], float]) -> tuple[Candidate, ...]:
        """Those with the least bound, the least first; those that are ruled out at the end.

        Args:
          best: the best plan. Strategies that are faster turned out not to fit: they are no plan.
          bounds_s: by mesh, a certified bound on plans with the best plan's microbatches, recomputation and host memory.
        """
        for shape, bound_s in bounds_s.items():
            self.proves(best.step_problem, shape, bound_s)
        ordered = sorted(self._by_key.values(), key=lambda c: (c.is_ruled_out, c.bound_s))
        return tuple(_without_unfit(one, best.cost_s) for one in ordered[:MAX_CANDIDATES])


def _without_unfit(one: Candidate, best_s: float) -> Candidate:
    return replace(one, step_s=None) if one.step_s is not None and one.step_s < best_s else one
