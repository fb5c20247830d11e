"""The executors, by name: a plan on its step, its programs, and its verification.

One program under `jit`, a program per stage, and one program for all stages are three lowerings of one plan. The table
`LOWERINGS` is the only place that asks which executor a plan has.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autoshard import planning, programs
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.executors import jit, spmd
from autoshard.executors.jit import Program
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline import planning as mpmd_planning
from autoshard.search.pipeline import spmd_planning
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.plan.executors import JIT, MPMD, SPMD
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from autoshard.verification import pipeline_judge
from autoshard.verification.judge import CompilerVerifier, Proof

Found = SearchResult | Pipeline | SpmdPipeline
"""A plan on its step."""

type Emitted = Program | tuple[Program, ...]
type Runnable = Program | PipelineProgram


@dataclass(frozen=True, slots=True)
class Lowering:
    """The functions of an executor. All but the first take its own kind of `Found`.

    Attributes:
      apply: applies a plan to its step; the plan's name is for messages.
      emit: the programs on these devices, in the order of the cluster.
      run: the executable; as `emit`, with a callback for new traces and the arguments that are donated besides the state.
      verify: verifies the programs; the flag asks for all of the equal blocks.
      choices: all that a decision of a plan can be: of a step, a plan, the decision's name and the plan's name in messages.
      whole: the one program of the step, over an abstract mesh; None if there are several.
    """

    apply: Callable[[Step, Plan, str], Found]
    emit: Callable[[Any, AnyCluster, Sequence[Any]], Emitted]
    run: Callable[[Any, AnyCluster, Sequence[Any], Callable[[], None], AbstractSet[int]], Runnable]
    verify: Callable[[CompilerVerifier, Any, bool], Proof]
    choices: Callable[[Step, Plan, str, str], tuple[str, ...]]
    whole: Callable[[Any], Program | None]


LOWERINGS: Mapping[str, Lowering] = MappingProxyType(
    {
        JIT: Lowering(
            planning.applied,
            programs.emitted,
            programs.applied,
            CompilerVerifier.verified,
            planning.choices,
            lambda found: jit.build(found.step, found.sharding, None),
        ),
        MPMD: Lowering(
            planning.as_planned(mpmd_planning.apply),
            programs.emitted_per_stage,
            programs.run_per_stage,
            pipeline_judge.verified_per_stage,
            mpmd_planning.choices,
            lambda found: None,
        ),
        SPMD: Lowering(
            planning.as_planned(spmd_planning.apply),
            programs.emitted_for_all,
            programs.run_for_all,
            pipeline_judge.verified_for_all,
            spmd_planning.choices,
            lambda found: spmd.build(found.program, found.sharding, None),
        ),
    }
)


def of(found: Found) -> Lowering:
    """The executor of a plan on its step."""
    return LOWERINGS[found.plan.executor]


def applied(step: Step, plan: Plan, place: str) -> Found:
    """Applies a given plan to its step.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InfeasibleError: what it decides does not fit its memory cap.
    """
    return LOWERINGS[plan.executor].apply(step, plan, place)


def choices(step: Step, plan: Plan, name: str, place: str) -> tuple[str, ...]:
    """All that a decision of a plan can be.

    Raises:
      PlanError: the plan is for another step, or decides nothing under this name.
    """
    return LOWERINGS[plan.executor].choices(step, plan, name, place)


def verified(verifier: CompilerVerifier, found: Found, full: bool) -> Proof:
    """Verifies a plan on its step; the flag asks for all of the equal blocks."""
    return of(found).verify(verifier, found, full)
