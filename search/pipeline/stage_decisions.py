"""The part of a pipeline's plan that no executor changes: its step, its recomputation, and how replicas share the work."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from autoshard.search.ir.graph import Site, Step
from autoshard.search.memory.microbatches import looped
from autoshard.search.options import pin_marks
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.measured_shares import measured_shares
from autoshard.search.plan.plan import Estimates, Plan, Sharding
from autoshard.search.plan.recognition import outlined
from autoshard.search.plan.retention import RetentionCodec
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.step_problem import StepProblem


def written_down(
    step: Step, problem: StepProblem, solutions: Sequence[IntraOp], estimates: Estimates, **decided: Any
) -> Plan:
    """A pipeline's decisions as a plan.

    Args:
      problem: the problem of the step in parts.
      solutions: the strategies of a replica's devices, for each of the plan's shardings.
      estimates: the predictions for it, shares left out.
      **decided: the plan's other fields.
    """
    shares = (measured_shares(one.on_mesh.memory.costed, one.labels) for one in solutions)
    plan = Plan(
        step=step.name,
        fingerprint=fingerprint(step),
        jax=jax.__version__,
        retention=RetentionCodec(problem.traced_program).decisions(problem.sites) if problem.sites else {},
        estimates=replace(estimates, shares=tuple(shares)),
        outline=outlined(step),
        **{"shardings": tuple(map(decided_sharding, solutions)), **decided},
    )
    return replace(plan, marks=marks_of(plan))


def decided_sharding(solution: IntraOp) -> Sharding:
    """How the devices of a replica share the work."""
    return solution.on_mesh.codec.decisions(solution.labels).sharding


def recomputed_sites(
    step: Step, plan: Plan, count: int, pins: Mapping[str, Any], place: str
) -> frozenset[Site]:
    """The ops that a plan recomputes, of the step in `count` parts.

    Raises:
      PlanError: a decision is impossible.
    """
    if not plan.retention:
        return frozenset()
    folded = fold(flatten(looped(step, count)), pin_marks(step, pins))
    sites, _ = RetentionCodec(folded).read(plan.retention, place)
    return sites
