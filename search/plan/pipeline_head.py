"""What the summaries of all pipelines begin with, whoever runs them."""

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, from_json
from autoshard.search.plan.pipeline_plan import PipelinePlan
from autoshard.search.plan.spmd_plan import SpmdPlan
from autoshard.search.plan.summary import compiler_options
from autoshard.search.plan.text_table import aligned, plural


def cluster_of(plan: PipelinePlan | SpmdPlan) -> AnyCluster:
    """The cluster that a plan is for.

    Raises:
      PlanError: what a loaded plan says of it does not make sense.
    """
    try:
        return from_json(plan.cluster, "plan: cluster")
    except InputError as e:
        raise PlanError(str(e)) from e


def head(plan: PipelinePlan | SpmdPlan, *rows: tuple[str, str]) -> list[str]:
    """The step and the cluster that a plan is for, and rows of its own: (what, said).

    Raises:
      PlanError: a loaded plan's cluster does not make sense.
    """
    cluster = cluster_of(plan)
    step = ("step", f"{plan.step} (fingerprint {plan.fingerprint}, JAX {plan.jax})")
    where = f"{cluster.name}: {cluster}"
    said = dict.fromkeys(compiler_options(group) for group in cluster.groups)
    options = [("compiler", one) for one in said if one]
    return aligned([step, ("cluster", where), *rows, *options], indent=0)


def recomputed(plan: PipelinePlan | SpmdPlan) -> list[str]:
    """What its backward pass computes again, if anything."""
    again = [name for name, said in plan.retention.items() if "remat" in said]
    return [f"recomputed in the backward pass: {plural(len(again), 'kind')} of ops"] if again else []
