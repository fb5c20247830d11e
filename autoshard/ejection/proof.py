"""An ejected step beside its plan's program, both compiled for the plan's cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.process import Compiler, Job, compile_all_apart
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.executors.jit import Program
from autoshard.progress import Progress
from autoshard.verification.records import Footprint, Moved, compiled_footprint, paired

PEAK_SHARE = 0.01
"""Largest difference of two compiled peaks that does not count, as a share of the plan's. Source: a choice of ours; XLA
orders equal programs with other names otherwise."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The compiled statistics of a plan's program and of an ejected step."""

    planned: CompiledStats
    ejected: CompiledStats

    @property
    def collectives(self) -> tuple[Moved, ...]:
        """Each kind over each set of axes, of the plan's program and of the ejected step."""
        return paired(self.planned.collectives, self.ejected.collectives)

    @property
    def footprints(self) -> tuple[Footprint, Footprint]:
        """The memory of the plan's program and of the ejected step."""
        return compiled_footprint(self.planned), compiled_footprint(self.ejected)

    @property
    def differences(self) -> tuple[str, ...]:
        """The differences, a sentence each; none if both are alike."""
        moved = [_worded(c) for c in self.collectives if c.differs]
        return (*moved, *self._peak_difference())

    def _peak_difference(self) -> list[str]:
        ours, theirs = self.planned.peak_bytes, self.ejected.peak_bytes
        if abs(theirs - ours) <= PEAK_SHARE * ours:
            return []
        side = "more" if theirs > ours else "less"
        difference = f"{format_bytes(abs(theirs - ours))} {side} than the plan's program"
        return [f"peak memory: {format_bytes(theirs)} a device, {difference}"]


def _worded(moved: Moved) -> str:
    return (
        f"{moved.kind} over {', '.join(moved.axes)}: {format_bytes(moved.compiled_bytes)} a device and step, and the plan's "
        f"program {format_bytes(moved.predicted_bytes)}"
    )


@dataclass(frozen=True, slots=True)
class Oracle:
    """The compiler for the plan's cluster, aimed at the plan's cap.

    Attributes:
      cluster: the cluster.
      cap_bytes: the plan's cap.
      overlap: the plan's share of the scheduler's budget.
      mesh: the size of each mesh axis by name.
      compiler: how to ask the compiler.
      progress: called with a line per stage.
    """

    cluster: Cluster
    cap_bytes: int
    overlap: float
    mesh: Mapping[str, int]
    compiler: Compiler
    progress: Progress

    def stats(self, programs: Sequence[tuple[Any, Sequence[Any]]], resting_bytes: int) -> list[CompiledStats]:
        """The statistics of jitted functions over an abstract mesh, given with their arguments."""
        memory_bytes = compiler.memory_for_cap(self.cap_bytes, resting_bytes, self.overlap)
        jobs = [Job(module_bytes(lower(*program)), self.cluster, memory_bytes) for program in programs]
        return [
            CompiledStats.of(one, self.mesh) for one in compile_all_apart(jobs, self.compiler, self.progress)
        ]


def loaded(
    text: str, constants: Mapping[str, np.ndarray], step: Any, args: Sequence[Any], program: Program
) -> tuple[Any, Sequence[Any]]:
    """The jitted function of an ejected file, over the mesh of a program, and its arguments' shapes.

    Args:
      constants: the arrays in the `.npz` beside it.
      args: the shapes of its arguments, with the objects among them.
    """
    with TemporaryDirectory() as folder:
        namespace: dict[str, Any] = {"__name__": "ejected", "__file__": f"{folder}/ejected.py"}
        if constants:
            arrays: dict[str, Any] = dict(constants)
            np.savez(f"{folder}/ejected.npz", **arrays)
        exec(compile(text, "<ejected>", "exec"), namespace)
    if "OBJECTS" in namespace:
        made = namespace["sharded"](step, *args, mesh=program.mesh)
        return made.jitted, namespace["apart"](args)[1]
    shapes = jax.tree.map(_without_sharding, program.args)
    return namespace["sharded"](step, *shapes, mesh=program.mesh), program.args


def _without_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
