"""How the devices of a replica share its work: one search for the whole step, whatever its stages will be.

A stage's devices are replicas, which take other examples, times the devices of each, which share the work on them in any way
that the intra-op search knows: over a logical mesh of theirs. How they do is decided once for each such mesh, for the step
in as many parts as there are microbatches and replicas together, as if one replica ran all of it. A stage then does with its
layers what the whole step does with them. So a search asks for a few solutions, never for one per run of layers; blocks that
repeat are decided together there, so that layers of a kind are run alike.

Forward and backward passes are programs of their own, run for each microbatch. What one of them hands to another lies
between them as it is: it cannot be terms of a sum, and a copy that was resharded for the one is not there for the other.
Strategies that would have it otherwise are left out. Parameters one program would reshard once for all microbatches; these
do it for each, and are priced so. What is made of parameters once in a step is resharded once, by who makes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.search.device.prediction import Prediction
from autoshard.search.ir.graph import Role, Value
from autoshard.search.ir.sharding import Place, StepSharding
from autoshard.search.ir.spec import AXIS_NAMES, PARTIAL, WHOLE, Spec, divides
from autoshard.search.memory.microbatches import loop_over_microbatches
from autoshard.search.mesh_problem import NO_CAP, MeshProblem, StepProblem
from autoshard.search.plan.plan import Sharding
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.problem.flat_program import ENTER, FlatOp, FlatProgram
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.strategies import CopySource, port_specs
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.pbqp import Labels

NO_PINS: Mapping[str, Any] = MappingProxyType({})

LARGE_BYTES = 1 << 20
"""What tasks read of a parameter is large from there on. Source: a choice of ours, as biases and scales are not."""

SOLVE_S = 5.0
"""Nominal seconds (`search.solver.clock`) for the strategies of a replica's devices. Source: a choice of ours; most are
proved best in less."""


@dataclass(frozen=True, eq=False)
class IntraOp:
    """A solution.

    Attributes:
      step_problem: of the step with its loop over parts.
      on_mesh: the same on the mesh of a replica's devices.
      labels: a strategy for each node.
    """

    step_problem: StepProblem
    on_mesh: MeshProblem
    labels: Labels

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Of a replica's devices."""
        return self.on_mesh.shape

    @cached_property
    def paths(self) -> ReshardPaths:
        """How values lie and travel."""
        return ReshardPaths(self.on_mesh.memory.costed, self.labels)

    def lies(self, place: Place | None, value: Value) -> Spec:
        """How a value of the step lies; terms of a sum are added up before they leave a program.

        Args:
          place: where the step has it; None if it does not.
          value: its type.
        """
        values, whole = self._program.value_at, (WHOLE,) * len(self.mesh_shape)
        flat = None if place is None else values.get(place)
        if flat is None or not value.shape:
            return whole
        spec = tuple(WHOLE if d == PARTIAL else d for d in self.handed_on(flat))
        return spec if divides(spec, value.shape, self.mesh_shape) else whole

    def handed_on(self, flat: int) -> Spec:
        """How a value of the flat program lies between programs: what the prologue makes for tasks, as they get it."""
        return self.paths.resting(self._entered.get(flat, flat))

    @cached_property
    def _entered(self) -> dict[int, int]:
        """By value that the prologue makes, the one that it is in the loop over microbatches."""
        program, loop = self._program, (loop_over_microbatches(self._program.step.graph),)
        enters = (op for op in program.ops if op.name == ENTER and op.site == loop)
        return {op.operands[0]: op.results[0] for op in enters if op.operands[0] not in program.inputs}

    @property
    def _program(self) -> FlatProgram:
        return self.step_problem.graph.folded.program

    @cached_property
    def sharding(self) -> StepSharding:
        """What it imposes on the step."""
        return step_sharding(self.on_mesh.memory.costed, self.labels)

    @cached_property
    def device(self) -> Prediction:
        """What a device would do in the whole step."""
        return self.on_mesh.predicted(self.labels, NO_CAP)

    @cached_property
    def device_of_tasks(self) -> Prediction:
        """The same where each task of each stage is a program."""
        return self.on_mesh.predicted(self.labels, NO_CAP, is_one_program=False)


def replica_cluster(cluster: Cluster, num_devices: int) -> Cluster:
    """As many devices of a cluster as a replica has."""
    per_node = min(num_devices, cluster.devices_per_node)
    host_bytes = cluster.host_bytes_per_node * per_node // cluster.devices_per_node
    return replace(
        cluster, num_devices=num_devices, devices_per_node=per_node, host_bytes_per_node=host_bytes
    )


def as_tasks(program: FlatProgram) -> FlatProgram:
    """The same where each microbatch has programs of its own, which bring parameters from where they rest to where they read
    them; what the prologue makes comes as they read it."""
    count, loop = program.step.num_microbatches, (loop_over_microbatches(program.step.graph),)
    arguments = zip(program.inputs, program.step.arguments, strict=True)
    resting = {v for v, argument in arguments if argument.role is not Role.BATCH}

    def handed_over(op: FlatOp) -> FlatOp:
        is_brought = op.name == ENTER and op.site == loop and op.operands[0] in resting
        return replace(op, operand_counts=(count,)) if is_brought else op

    return replace(program, ops=tuple(map(handed_over, program.ops)))


def between_programs(
    on_mesh: MeshProblem, kept: Sequence[np.ndarray], is_lean: bool = False
) -> tuple[np.ndarray, ...]:
    """Of some strategies, those under which forward and backward passes can be programs of their own; if these are to be
    lean, each device has a part only of what tasks read of parameters."""
    costed = on_mesh.memory.costed
    graph, program = costed.graph, costed.graph.folded.program
    left = list(kept)
    loop = (loop_over_microbatches(program.step.graph),)
    for copy in graph.copies:
        ways = costed.strategies[copy.node].copy_sources
        left[copy.node] = np.array([s for s in left[copy.node] if ways[s] is not CopySource.KEPT], int)
    for op_class, members in enumerate(graph.folded.members):
        if is_lean and any(_is_large_entry(program, program.ops[i], loop) for i in members):
            port = graph.ports[op_class, 0, True]
            is_split = (port_specs(port, costed.strategies[port.node]) >= 0).any(axis=1)
            in_parts = np.array([s for s in left[port.node] if is_split[s]], int)
            left[port.node] = in_parts if len(in_parts) else left[port.node]
        if any(_is_sum_of(program.ops[i], loop) for i in members):
            port = graph.ports[op_class, 0, True]
            is_partial = (port_specs(port, costed.strategies[port.node]) == PARTIAL).any(axis=1)
            left[port.node] = np.array([s for s in left[port.node] if not is_partial[s]], int)
    return tuple(left)


def _is_large_entry(program: FlatProgram, op: FlatOp, loop: tuple[int, ...]) -> bool:
    """Whether an op stands for what the loop over microbatches reads of parameters, if that is large."""
    if op.name != ENTER or op.site != loop:
        return False
    arguments = dict(zip(program.inputs, program.step.arguments, strict=True))
    argument, value = arguments.get(op.operands[0]), program.values[op.operands[0]]
    return value.num_bytes >= LARGE_BYTES and (argument is None or argument.role is not Role.BATCH)


def _is_sum_of(op: FlatOp, loop: tuple[int, ...]) -> bool:
    """Whether an op stands for what the loop over microbatches adds up."""
    return op.is_accumulator and op.site == loop


def solved(
    step_problem: StepProblem,
    cluster: Cluster,
    shape: tuple[int, ...],
    is_lean: bool = False,
    pins: Mapping[str, Any] = NO_PINS,
) -> IntraOp:
    """The fastest strategies on such a mesh of a replica's devices, lean ones or any, without a cap: that is for stages.

    Raises:
      InputError: a pin is impossible on this mesh, or pins contradict one another.
    """
    on_mesh = _of_replica(step_problem, cluster, shape)
    try:
        kept = between_programs(on_mesh, on_mesh.pinned(pins), is_lean)
        return IntraOp(step_problem, on_mesh, on_mesh.solve(kept, NO_CAP, SOLVE_S).labels)
    except PlanError as e:  # there is no plan yet, so a pin is impossible
        raise InputError(str(e)) from e
    except NoFitError as e:
        assert pins, "without pins, some strategies go together"
        raise InputError("the pins contradict one another: no plan keeps them all. Remove one") from e


def decided(step_problem: StepProblem, cluster: Cluster, sharding: Sharding, place: str) -> IntraOp:
    """What a plan decides for a mesh of a replica's devices.

    Raises:
      PlanError: it decides something impossible; `place` says of which plan.
    """
    on_mesh = _planned_on(step_problem, cluster, sharding, place)
    kept = between_programs(on_mesh, on_mesh.codec.allowed(sharding, place))
    try:
        return IntraOp(step_problem, on_mesh, on_mesh.solve(kept, NO_CAP, SOLVE_S).labels)
    except NoFitError as e:
        shape = on_mesh.shape
        raise PlanError(f"{place}: its decisions for replicas of mesh {shape} contradict each other") from e


def replica_choices(
    step_problem: StepProblem, cluster: Cluster, sharding: Sharding, name: str, place: str
) -> tuple[str, ...]:
    """All that a decision of a plan can be on a mesh of a replica's devices, whatever the others are.

    Raises:
      PlanError: nothing is decided under this name.
    """
    on_mesh = _planned_on(step_problem, cluster, sharding, place)
    return on_mesh.codec.choices(name, place, between_programs(on_mesh, on_mesh.pinned(NO_PINS)))


def _planned_on(step_problem: StepProblem, cluster: Cluster, sharding: Sharding, place: str) -> MeshProblem:
    """The problem on the mesh that a plan is for."""
    shape = tuple(sharding.mesh.values())
    if tuple(sharding.mesh) != AXIS_NAMES.get(len(shape)):
        raise PlanError(f"{place}: wanted mesh axes named {AXIS_NAMES}, got {tuple(sharding.mesh)}")
    return _of_replica(step_problem, cluster, shape)


def _of_replica(step_problem: StepProblem, cluster: Cluster, shape: tuple[int, ...]) -> MeshProblem:
    return step_problem.on(replica_cluster(cluster, prod(shape)), shape)
