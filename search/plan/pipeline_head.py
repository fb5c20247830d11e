"""Parts of the summaries of all pipelines, whichever executor runs them."""

from collections.abc import Sequence

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, from_json
from autoshard.search.plan.executors import EXECUTORS
from autoshard.search.plan.headline import PlanShape, headline, mfu
from autoshard.search.plan.pipeline_plan import PipelinePlan
from autoshard.search.plan.spmd_plan import SpmdPlan
from autoshard.search.plan.summary import EDITED, UNPRICED, compiler_options, labelled, time_line
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.work_shares import WorkShares


def cluster_of(plan: PipelinePlan | SpmdPlan) -> AnyCluster:
    """The cluster that a plan is for.

    Raises:
      PlanError: a loaded plan's cluster does not make sense.
    """
    try:
        return from_json(plan.cluster, "plan: cluster")
    except InputError as e:
        raise PlanError(str(e)) from e


def front(
    plan: PipelinePlan | SpmdPlan, shape: PlanShape, shares: Sequence[WorkShares], memory: list[str]
) -> list[str]:
    """The answer: the kind of plan, its time, its memory and its certificate."""
    cluster, step_s = cluster_of(plan), plan.estimates.step_s
    return [
        headline(shape),
        time_line(step_s, mfu(shares, cluster.groups, step_s), cluster.caveat, plan.estimates.bubble),
        *memory,
        "certified gap: none for pipelines",
    ]


def head(plan: PipelinePlan | SpmdPlan, *rows: tuple[str, str]) -> list[str]:
    """The step, the cluster and the executor of a plan, and rows of its own: (name, value).

    Raises:
      PlanError: a loaded plan's cluster does not make sense.
    """
    cluster = cluster_of(plan)
    where = ("cluster", f"{cluster.name}: {cluster}")
    executor = ("executor", f"{plan.executor}: {EXECUTORS[plan.executor]}")
    return labelled([("step", plan.step), where, executor, *rows])


def origin(plan: PipelinePlan | SpmdPlan) -> list[str]:
    """The traced step, and the compiler's options."""
    options = dict.fromkeys(compiler_options(group) for group in cluster_of(plan).groups)
    traced = ("traced", f"fingerprint {plan.fingerprint}, JAX {plan.jax}")
    return labelled([traced, *(("compiler", one) for one in options if one)])


def edited(plan: PipelinePlan | SpmdPlan) -> list[str]:
    """What is said in place of a plan's estimates if these were made before an edit by hand."""
    return [EDITED, UNPRICED] if plan.is_edited else []


def recomputed(plan: PipelinePlan | SpmdPlan) -> list[str]:
    """The number of recomputed kinds of ops, if there are any."""
    again = [name for name, text in plan.retention.items() if "remat" in text]
    return [f"recomputed in the backward phase: {plural(len(again), 'kind')} of ops"] if again else []
