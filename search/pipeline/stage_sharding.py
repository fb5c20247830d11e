"""The sharding of each stage's values and programs, from a solution for the whole step.

A stage's programs consist of ops of the step, some of them in parts. So the solution's decisions for an op or a value
hold here, too. Values have one more mesh axis, that of replicas. A value that each replica has for itself is not split
over it. Values that exist once for all replicas are: state, finished gradients and results of the update (ZeRO's first
stage; Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models", section 5.1).
Values that tasks read whole, and pinned arguments, are not.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Op, Role, Value
from autoshard.search.ir.spec import AXIS_NAMES, WHOLE, Spec, divides
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.op_shardings import OpShardings
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.plan.stage_programs import StagePrograms, StageSharding
from autoshard.search.plan.values import REPLICA

MIN_BYTES = 1 << 16
"""Smaller values are not split over replicas: latency would dominate their collectives. Derived: the bytes that a PCIe
4.0 link moves in its latency, 31.5 GB/s x 0.76 x 2.5 us = 60 kB (`cost_model.presets`); faster links move more."""


def stage_sharding(
    intra_op: IntraOp,
    step: PipelineStep,
    programs: StagePrograms,
    stage: int,
    pinned: Collection[str] = (),
) -> StageSharding:
    """The specs of a stage's values, and the sharding inside its tasks.

    Args:
      intra_op: the solution for the step that `step` takes apart.
      step: the step in parts, cut like the programs.
      programs: the programs of all stages.
      stage: the stage.
      pinned: pytree paths of arguments that are not split over replicas.
    """
    return _StageSpecs(intra_op, step, programs, stage, frozenset(pinned)).run()


def split_over_replicas(
    value: Value, spec: Spec, mesh_shape: tuple[int, ...], becomes: Sequence[int] = ()
) -> Spec:
    """The spec of a value that is split over replicas: along its largest dimension that divides; if none does, it is
    whole on each.

    Args:
      value: its type.
      spec: its spec on the devices of a replica.
      mesh_shape: replicas, then the mesh of the devices of each.
      becomes: for each dimension, the dimension of the new state that it becomes; it decides between dimensions of one
        size.
    """
    if value.num_bytes < MIN_BYTES or mesh_shape[0] == 1:
        return WHOLE, *spec
    becomes = becomes or range(len(value.shape))
    dims = sorted(range(len(value.shape)), key=lambda d: (d in spec, -value.shape[d], becomes[d]))
    split = ((d, *spec) for d in dims)
    return next((s for s in split if divides(s, value.shape, mesh_shape)), (WHOLE, *spec))


@dataclass(frozen=True, eq=False)
class _StageSpecs:
    """Decides the specs of one stage."""

    intra_op: IntraOp
    step: PipelineStep
    programs: StagePrograms
    stage: int
    pinned: frozenset[str]

    def run(self) -> StageSharding:
        mine = [program for program in self.programs.programs if program.stage == self.stage]
        there = {v for program in mine for v in (*program.reads, *program.makes)}
        there |= {v for v in self.programs.step.graph.inputs if self.programs.stage_of[v] == self.stage}
        specs = {v: self._spec_of(v) for v in sorted(there)}
        specs |= {new: specs[old] for new, old in self._replaced.items() if new in specs and old in specs}
        tasks = [program for program in mine if program in self.programs.tasks.values()]
        of_ops = OpShardings.of(self.intra_op, self.step)
        inside = {program.name: of_ops.on(program.graph.ops) for program in tasks}
        return StageSharding(
            self._mesh_shape,
            self._axis_names,
            {v: spec for v, spec in specs.items() if max(spec) >= 0},
            inside,
        )

    @property
    def _mesh_shape(self) -> tuple[int, ...]:
        return self.programs.num_replicas, *self.intra_op.mesh_shape

    @property
    def _axis_names(self) -> tuple[str, ...]:
        return REPLICA, *AXIS_NAMES[len(self.intra_op.mesh_shape)]

    @cached_property
    def _replaced(self) -> dict[int, int]:
        """By new state that is no argument itself, the argument that it replaces."""
        step, inputs = self.programs.step, self.programs.step.graph.inputs
        pairs = zip(self.programs.results, step.rests_as, strict=True)
        new = {v: inputs[r] for v, r in pairs if r is not None and isinstance(v, int)}
        return {v: old for v, old in new.items() if v not in inputs}

    # --- values

    def _spec_of(self, v: int) -> Spec:
        """The spec of a value between programs."""
        made = self._made(v)
        is_own = self.programs.is_of_replica(v) or v in self.programs.pieces
        if is_own or v in self._read_by_tasks or v in self._held_whole:
            return WHOLE, *made
        value = self.step.values[v]
        becomes = [self._state_dims.get((v, d), d) for d in range(len(value.shape))]
        return split_over_replicas(value, made, self._mesh_shape, becomes)

    @cached_property
    def _state_dims(self) -> dict[tuple[int, int], int]:
        """By value of the epilogue and dimension, the dimension of the new state that it becomes. The sum of a
        product's terms may be that of a transposed weight."""
        mine = [v for v in self._replaced if self.programs.stage_of[v] == self.stage]
        found = {(v, d): d for v in mine for d in range(len(self.step.values[v].shape))}
        known = {*mine}
        for op in reversed(self.step.epilogue):
            if not op.bodies and not known.isdisjoint(op.outputs):
                found |= self._read_dims(op, found)
                known.update(op.operands)
        return found

    def _read_dims(self, op: Op, found: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
        """By operand and dimension, the dimension of the new state, if operand and result share a factor there."""
        values = [self.step.values[a] if isinstance(a, int) else Value.of(a.aval) for a in op.inputs]
        rule = rule_for(op.name, values, op.result_values, op.params)
        results = zip(op.outputs, rule.results, strict=True)
        at = {dim: found[v, d] for v, dims in results for d, dim in enumerate(dims) if (v, d) in found}
        operands = ((a, dims) for a, dims in zip(op.inputs, rule.operands, strict=True) if isinstance(a, int))
        return {(a, d): at[dim] for a, dims in operands for d, dim in enumerate(dims) if dim in at}

    def _made(self, v: int) -> Spec:
        """The spec of a value on a replica's devices, by the solution."""
        return self.intra_op.spec_of(self.step.place_of(v), self.step.values[v])

    @cached_property
    def _read_by_tasks(self) -> frozenset[int]:
        """The values that tasks of any stage read whole."""
        tasks = self.programs.tasks.values()
        return frozenset(v for t in tasks for v in t.reads if v not in self.programs.sums)

    @cached_property
    def _held_whole(self) -> frozenset[int]:
        """Examples, of which each replica takes its own, and pinned arguments."""
        inputs = self.programs.step.inputs
        return frozenset(v for v, a in inputs if a.role is Role.BATCH or a.name in self.pinned)
