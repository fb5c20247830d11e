"""The file with the shardings of a pipeline that has a program per stage: for each array its stage, and its spec there.

Such a step is no one function: a schedule dispatches the programs of the stages, microbatch by microbatch. So there is no
whole file of it. Those who have a pipeline of their own need the stages' devices and the specs of their arrays.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import jax

from autoshard.cost_model.errors import InputError
from autoshard.ejection import source
from autoshard.ejection.layout import path_text
from autoshard.ejection.shardings_file import IMPORT_SPEC, docstring
from autoshard.search.ir.spec import partition_spec
from autoshard.search.pipeline.pipeline_plan import Pipeline


def stage_shardings_file(found: Pipeline, names: Sequence[str]) -> str:
    """The file's text.

    Args:
      found: the plan on its step.
      names: of the step's arguments.

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
    trees = dict(zip(names, _places(found), strict=True))
    places = {name: _by_path(name, tree) for name, tree in trees.items()}
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


def _places(found: Pipeline) -> list[Any]:
    """For each argument, a pytree of its arrays' stages and specs."""
    step, stage_of = found.programs.step, found.programs.stage_of

    def place(v: int) -> tuple[int, str]:
        sharding = found.shardings[stage_of[v]]
        return stage_of[v], source.text(partition_spec(sharding.spec(v), sharding.axis_names))

    leaves = [_Leaf(place(v)) for v in step.graph.inputs]
    args, kwargs = jax.tree.unflatten(step.in_tree, leaves)
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


class _Leaf:
    """A stage and a spec, which are one leaf of a pytree."""

    def __init__(self, place: tuple[int, str]) -> None:
        self.place = place


def _by_path(name: str, tree: Any) -> dict[str, tuple[int, str]]:
    found = dict[str, tuple[int, str]]()
    for path, leaf in jax.tree.leaves_with_path(tree):
        text = path_text(path)
        if found.setdefault(text, leaf.place) != leaf.place:
            raise InputError(
                f"two arrays of {name} have the path {text!r} and lie apart, so that a path does not name one of them. "
                "Rename a key that holds a slash"
            )
    return found
