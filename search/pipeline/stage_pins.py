"""Pins of arguments whose stage has a mesh of its own.

A stage's devices are replicas times the mesh of each. A pin says how an argument rests on the mesh of a replica, whose axes
are those of one program: "data", or "data" and "model". Each replica of a stage holds the argument so. State that only the
update reads is otherwise split over the replicas, too (`search.pipeline.stage_sharding`); pinned state is not.

Unasked, the mesh of a replica has one axis. Pins that name both axes make it one of two. Meshes that do not divide a pinned
argument are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import AXIS_NAMES, divides, from_partition_spec
from autoshard.search.options import named_axes

MOST_AXES = 2
"""Largest number of axes of a replica's mesh. Source: `mesh=`, as it is documented."""


def check_axes(pins: Mapping[str, Any]) -> None:
    """Refuses pins to axes that no stage's mesh has.

    Raises:
      InputError: a pin names another axis.
    """
    known, named = AXIS_NAMES[MOST_AXES], named_axes(pins)
    for axis in sorted(named.keys() - set(known)):
        raise InputError(
            f"pin {named[axis]!r}: no stage's mesh has an axis {axis!r} for pins. Replicas of a stage hold pinned arguments "
            f"alike, and the axes of each one's devices are named {' and '.join(map(repr, known))}"
        )


def shapes_for(pins: Mapping[str, Any], step: Step, num_devices: int) -> Iterator[tuple[int, ...]]:
    """The meshes of a replica's devices on which all pinned arguments can rest."""
    is_flat = named_axes(pins).keys() <= set(AXIS_NAMES[1])
    sizes = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    shapes = [(num_devices,)] if is_flat else [(num_devices // n, n) for n in sizes]
    yield from (shape for shape in shapes if may_rest(pins, step, shape))


def may_rest(pins: Mapping[str, Any], step: Step, shape: Sequence[int]) -> bool:
    """True if a mesh has the axes of all pins and divides the pinned arguments."""
    names, sizes = AXIS_NAMES[len(shape)], tuple(shape)
    shapes = {a.name: step.graph.values[v].shape for v, a in step.inputs}
    return named_axes(pins).keys() <= set(names) and all(
        len(spec) <= len(shapes[name]) and divides(from_partition_spec(spec, names), shapes[name], sizes)
        for name, spec in pins.items()
    )
