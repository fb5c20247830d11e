"""Plans of one program with other decisions."""

from dataclasses import replace

from autoshard.search.plan.plan import Decisions, Plan


def with_decisions(plan: Plan, decisions: Decisions, **others) -> Plan:
    """A plan that decides so, and has other values of these fields."""
    return replace(
        plan,
        shardings=(decisions.sharding,),
        retention=decisions.retention,
        microbatches=decisions.microbatches,
        **others,
    )
