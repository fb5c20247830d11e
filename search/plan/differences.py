"""The differences between two plans, decision by decision, in the groups in which people think of them.

A decision is *changed* if both plans have it with different values, *added* if this plan alone has it, and *removed* if the
other one alone has it. Groups come in the order of their weight: the whole plan (executor, schedule, cap), the mesh,
microbatches, stages, the arguments by role, what is recomputed or offloaded, and last ops and copies, which mostly follow
from the others. Of a pipeline, whose stages may have different meshes, an argument has all of its specs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.cost_model.units import format_bytes, format_mesh
from autoshard.search.plan.values import PlanValues

CHANGED, ADDED, REMOVED = "changed", "added", "removed"
"""The kinds of difference."""

SIGNS = MappingProxyType({CHANGED: "~", ADDED: "+", REMOVED: "-"})
"""The first letter of a difference's line."""

ARGUMENTS = "arguments"
"""The group of arguments whose role is unknown, as in files of earlier versions."""

Values = Mapping[str, str]
"""Decisions in words, by name."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that two plans make differently.

    Attributes:
      group: `plan`, `mesh`, `microbatches`, `stages`, the role of an argument such as `optimizer state`, `retention`, `ops`
        or `copies`.
      name: the decision's name in its group.
      this: its value in the plan that is compared; None if that lacks it.
      other: its value in the plan that it is compared with; None if that lacks it.
      is_argument: whether it is the spec of an argument.
    """

    group: str
    name: str
    this: str | None
    other: str | None
    is_argument: bool = False

    @property
    def kind(self) -> str:
        """`changed`, `added` or `removed`."""
        return ADDED if self.other is None else REMOVED if self.this is None else CHANGED


def differences(plan: PlanValues, against: PlanValues) -> tuple[Difference, ...]:
    """All decisions that two plans make differently, group by group."""
    return (
        *_differing("plan", plan, against, _whole),
        *_differing("mesh", plan, against, _mesh),
        *_differing("microbatches", plan, against, lambda p: {"microbatches": str(p.microbatches)}),
        *_differing("stages", plan, against, _stages),
        *_arguments(plan, against),
        *_differing("retention", plan, against, lambda p: p.retention),
        *_differing("ops", plan, against, lambda p: joined(p, "ops")),
        *_differing("copies", plan, against, lambda p: joined(p, "copies")),
    )


def _differing(
    group: str, plan: PlanValues, against: PlanValues, values: Callable[[PlanValues], Values]
) -> Iterator[Difference]:
    this, other = values(plan), values(against)
    for name in {**this, **other}:
        if this.get(name) != other.get(name):
            yield Difference(group, name, this.get(name), other.get(name))


def _whole(plan: PlanValues) -> Values:
    texts = {
        "cluster": str(plan.cluster.get("name")),
        "executor": plan.executor,
        "schedule": plan.schedule,
        "workers": str(plan.workers) if plan.is_pipeline else "",
        "memory cap": format_bytes(plan.memory_bytes),
        "overlap": f"{plan.overlap:.0%}" if plan.overlap < 1 else "",
    }
    return {name: value for name, value in texts.items() if value}


def _mesh(plan: PlanValues) -> Values:
    """Sizes of the axes of one program's mesh; those of stages are said with the stages."""
    return {} if plan.is_pipeline else {axis: str(size) for axis, size in plan.shardings[0].mesh.items()}


def _stages(plan: PlanValues) -> Values:
    if not plan.is_pipeline:
        return {}
    return {
        f"stage {n}": f"from op {stage.first_op}, {format_mesh(tuple(plan.mesh_of(stage).values()))}"
        for n, stage in enumerate(plan.stages)
    }


def _arguments(plan: PlanValues, against: PlanValues) -> list[Difference]:
    """Arguments by role: one with a spec that names an axis lies otherwise, too, if that axis has another size."""
    this, other = joined(plan, "arguments"), joined(against, "arguments")
    axes, others = _axis_sizes(plan), _axis_sizes(against)
    resized = {a for a in {**axes, **others} if axes.get(a, {1}) != others.get(a, {1})}
    roles, found = {**_roles(against), **_roles(plan)}, list[Difference]()
    for name in {**this, **other}:
        specs = this.get(name), other.get(name)
        if specs[0] != specs[1] or resized & set(re.findall(r"\w+", specs[0] or "")):
            found.append(Difference(roles.get(name, ARGUMENTS), name, *specs, is_argument=True))
    order = [*dict.fromkeys(one.group for one in found)]
    return sorted(found, key=lambda one: order.index(one.group))


def _roles(plan: PlanValues) -> dict[str, str]:
    """By argument, its role in words, if the plan's file knows its step's outline."""
    texts: Mapping[str, str] = plan.outline.arguments if plan.outline else {}
    return {name: text.rpartition(" ")[2].replace("_", " ") for name, text in texts.items()}


def joined(plan: PlanValues, table: str) -> dict[str, str]:
    """The decisions of one of a sharding's tables; those of several meshes joined, if they differ."""
    texts: dict[str, dict[str, None]] = {}
    for sharding in plan.shardings:
        for name, value in getattr(sharding, table).items():
            texts.setdefault(name, {})[value] = None
    return {name: " or ".join(values) for name, values in texts.items()}


def _axis_sizes(plan: PlanValues) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for sharding in plan.shardings:
        for axis, size in sharding.mesh.items():
            found.setdefault(axis, set()).add(size)
    return found
