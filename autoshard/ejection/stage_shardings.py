"""The file with the shardings of a pipeline that has a program per stage: for each array its stage, and its spec there.

Such a step is no one function: a schedule dispatches the programs of the stages, microbatch by microbatch. So there is no
whole file of it. Those who have a pipeline of their own need the stages' devices and the specs of their arrays.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

import jax

from autoshard.ejection import source
from autoshard.ejection.layout import by_path
from autoshard.ejection.shardings_file import IMPORT_SPEC, docstring
from autoshard.search.ir.spec import partition_spec
from autoshard.search.pipeline.pipeline_plan import Pipeline


def stage_shardings_file(found: Pipeline, names: Sequence[str]) -> str:
    """The file's text.

    Raises:
      InputError: two arrays of an argument have one path and lie apart.
    """
    plan = found.plan
    paragraphs = [
        f"The shardings of the arguments of `{plan.step}` on {plan.cluster['name']}, a pipeline of {len(plan.stages)} "
        f"stages under the schedule {plan.schedule}, {plan.microbatches} microbatches.",
        "`STAGES[n]` is the mesh of stage n, and `DEVICES[n]` the numbers of its devices. `SPECS[argument]` has a spec for "
        'each array by its path, `jax.tree_util.keystr(path, simple=True, separator="/")`, on the mesh of the stage that '
        "`STAGE[argument]` has for it. State that the step returns rests as the state that it replaces.",
        f"Ejected by autoshard from the plan with the fingerprint {plan.fingerprint}.",
    ]
    return "\n\n".join([docstring(paragraphs), IMPORT_SPEC, _constants(found, names)]) + "\n"


def _constants(found: Pipeline, names: Sequence[str]) -> str:
    trees = zip(names, _arguments(found), strict=True)
    places = {name: by_path(name, tree, partial(_place, found)) for name, tree in trees}
    meshes = [
        dict(zip(sharding.axis_names, sharding.mesh_shape, strict=True)) for sharding in found.shardings
    ]
    specs = {name: {path: spec for path, (_, spec) in own.items()} for name, own in places.items()}
    stages = {name: {path: str(stage) for path, (stage, _) in own.items()} for name, own in places.items()}
    assigned = [
        f"STAGES = {_tuple(map(_mesh, meshes))}",
        f"DEVICES = {_tuple(map(source.text, _devices(found)))}",
        source.dictionary("SPECS", specs),
        source.dictionary("STAGE", stages),
    ]
    return "\n".join(assigned)


def _tuple(items: Any) -> str:
    return "\n".join(["(", *(f"    {item}," for item in items), ")"])


def _mesh(mesh: dict[str, int]) -> str:
    return f"{{{', '.join(f'{source.quoted(axis)}: {size}' for axis, size in mesh.items())}}}"


def _devices(found: Pipeline) -> list[tuple[int, ...]]:
    """The numbers of each stage's devices; a worker's follow those of the worker before."""
    schedule = found.schedule
    stages = [schedule.stages_of(worker) for worker in range(schedule.num_workers)]
    sizes = [prod(found.shardings[own[0]].mesh_shape) for own in stages]
    firsts = accumulate(sizes[:-1], initial=0)
    there = dict[int, tuple[int, ...]]()
    for first, size, own in zip(firsts, sizes, stages, strict=True):
        for stage in own:
            there.setdefault(
                stage, tuple(range(first, first + size))
            )  # Chimera's second copy is made in the step
    return [there[stage] for stage in sorted(there)]


def _arguments(found: Pipeline) -> list[Any]:
    """For each argument, a pytree of its arrays' values."""
    step = found.programs.step
    args, kwargs = jax.tree.unflatten(step.in_tree, step.graph.inputs)
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


def _place(found: Pipeline, v: int) -> tuple[int, str]:
    """The stage of a value, and its spec there."""
    stage = found.programs.stage_of[v]
    sharding = found.shardings[stage]
    return stage, source.text(partition_spec(sharding.spec(v), sharding.axis_names))
