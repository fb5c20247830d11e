"""The meshes of a plan, and its collectives on them."""

from collections.abc import Iterator, Mapping, Sequence

from autoshard.search.plan.values import STAGE, Collective, PlanValues


def whole_mesh(plan: PlanValues) -> dict[str, int]:
    """The mesh of a plan's program; of a pipeline whose stages have programs of their own, that of its first ones."""
    if not plan.is_pipeline:
        return dict(plan.decisions.mesh)
    return {STAGE: plan.workers, **plan.mesh_of(plan.stages[0])}


def stage_meshes(plan: PlanValues) -> list[dict[str, int]]:
    """The mesh of each stage."""
    return [*map(plan.mesh_of, plan.stages)] if plan.is_pipeline else [whole_mesh(plan)]


def collectives(plan: PlanValues) -> Iterator[tuple[float, Mapping[str, int], Sequence[Collective]]]:
    """The share of the devices that take part, their mesh, and their collectives: of the whole plan and of each stage."""
    yield 1.0, whole_mesh(plan), plan.estimates.collectives
    for stage, taken in zip(plan.stages, plan.estimates.stages, strict=False):
        yield plan.devices_of(stage) / plan.num_devices, plan.mesh_of(stage), taken.collectives
