"""The strategies of a replica's devices: one search for the whole step, whatever its stages will be.

The devices of a stage are replicas, which take different examples, times the devices of each replica. These share its
work in any way that the intra-op search knows, on a logical mesh. There is one solution for each such mesh, for the
step in as many parts as there are microbatches and replicas together, as if one replica ran all of it. A stage runs its
layers with the strategies that they have in the whole step. So a search needs a few solutions, not one per run of
layers. Repeated blocks are decided together, so equal layers run alike.

Forward and backward passes are programs of their own, which run for each microbatch. A value that one program hands to
another has one spec in between: it cannot be partial, and a copy that was resharded for one program does not exist in
the other. Strategies that need this are excluded. One program for all would reshard parameters once for all
microbatches; these programs reshard them for each microbatch, and are priced so. Values that the prologue makes of
parameters are resharded once, there.
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
from autoshard.search.mesh_problem import NO_CAP, MeshProblem
from autoshard.search.plan.plan import Sharding
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.problem.flat_program import ENTER, FlatOp, FlatProgram
from autoshard.search.problem.reshard import Resharder
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.strategies import CopySource, port_specs
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.pbqp import Labels
from autoshard.search.step_problem import StepProblem

NO_PINS: Mapping[str, Any] = MappingProxyType({})

LARGE_BYTES = 1 << 20
"""Smallest size of a parameter that tasks should read in parts. Source: between the largest biases of GPT-3 175B (4 x
12,288 numbers, 192 KiB in float32; Brown et al. 2020, table 2.1) and its matrices."""

SOLVE_S = 5.0
"""Nominal seconds (`search.solver.clock`) for the strategies of a replica's devices. Source: a choice of ours; most are
proved best in less."""


@dataclass(frozen=True, eq=False)
class IntraOp:
    """The strategies of a replica's devices.

    Attributes:
      step_problem: the problem of the step with its loop over parts.
      on_mesh: this problem on the mesh of a replica's devices.
      labels: a strategy for each node.
    """

    step_problem: StepProblem
    on_mesh: MeshProblem
    labels: Labels

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The mesh of a replica's devices."""
        return self.on_mesh.shape

    @cached_property
    def paths(self) -> ReshardPaths:
        """The specs and the reshards of values."""
        return ReshardPaths(self.on_mesh.memory.costed, self.labels)

    def spec_of(self, place: Place | None, value: Value) -> Spec:
        """The spec of a value between programs. Partial values are reduced before they leave a program.

        Args:
          place: the value's place in the step; None if the step does not have it.
          value: its type.
        """
        values, whole = self._program.value_at, (WHOLE,) * len(self.mesh_shape)
        flat = None if place is None else values.get(place)
        if flat is None or not value.shape:
            return whole
        spec = tuple(WHOLE if d == PARTIAL else d for d in self.handed_on(flat))
        return spec if divides(spec, value.shape, self.mesh_shape) else whole

    def handed_on(self, flat: int) -> Spec:
        """The spec of a value of the flat program between programs. Results of the prologue have the spec in which
        tasks read them."""
        return self.paths.resting(self._entered.get(flat, flat))

    @cached_property
    def _entered(self) -> dict[int, int]:
        """By result of the prologue, the value that it is inside the loop over microbatches."""
        program, loop = self._program, (loop_over_microbatches(self._program.step.graph),)
        enters = (op for op in program.ops if op.name == ENTER and op.site == loop)
        return {op.operands[0]: op.results[0] for op in enters if op.operands[0] not in program.inputs}

    @property
    def _program(self) -> FlatProgram:
        return self.step_problem.graph.folded.program

    @cached_property
    def sharding(self) -> StepSharding:
        """The solution's sharding of the step."""
        return step_sharding(self.on_mesh.memory.costed, self.labels)

    @cached_property
    def device(self) -> Prediction:
        """The prediction of a device in the whole step."""
        return self.on_mesh.predicted(self.labels, NO_CAP)

    @cached_property
    def seen_share(self) -> float:
        """The share of the kernels' time in the whole step that is not hidden behind other kernels."""
        busy_s = sum(kernel.time.seconds for kernel in self.device.lowered.kernels)
        return max(1 - self.on_mesh.hiding.hidden_s(self.labels) / busy_s, 0.0) if busy_s else 1.0

    @cached_property
    def device_of_tasks(self) -> Prediction:
        """The prediction of a device if each task of each stage is a program."""
        return self.on_mesh.predicted(self.labels, NO_CAP, is_one_program=False)


def replica_cluster(cluster: Cluster, num_devices: int) -> Cluster:
    """A cluster of as many devices as a replica has."""
    per_node = min(num_devices, cluster.devices_per_node)
    return replace(
        cluster,
        num_devices=num_devices,
        devices_per_node=per_node,
        host_bytes_per_node=cluster.host_bytes_per_node * per_node // cluster.devices_per_node,
        host_bytes_per_s=cluster.host_bytes_per_s * per_node / cluster.devices_per_node,
        host_cores=cluster.host_cores * per_node // cluster.devices_per_node,
    )


def as_tasks(program: FlatProgram) -> FlatProgram:
    """The program as tasks run it: each microbatch brings the parameters from the spec in which they rest to that in
    which it reads them. Results of the prologue have the latter already."""
    count, loop = program.step.num_microbatches, (loop_over_microbatches(program.step.graph),)
    arguments = zip(program.inputs, program.step.arguments, strict=True)
    resting = {v for v, argument in arguments if argument.role is not Role.BATCH}

    def brought(op: FlatOp) -> FlatOp:
        is_brought = op.name == ENTER and op.site == loop and op.operands[0] in resting
        return replace(op, operand_counts=(count,)) if is_brought else op

    return replace(program, ops=tuple(map(brought, program.ops)))


def between_programs(
    on_mesh: MeshProblem, kept: Sequence[np.ndarray], splits_parameters: bool = False
) -> tuple[np.ndarray, ...]:
    """The strategies, among some, under which forward and backward passes can be programs of their own. With
    `splits_parameters`, each device holds only a part of each parameter that tasks read."""
    costed = on_mesh.memory.costed
    graph, program = costed.graph, costed.graph.folded.program
    left = list(kept)
    loop = (loop_over_microbatches(program.step.graph),)
    for copy in graph.copies:
        ways = costed.strategies[copy.node].copy_sources
        left[copy.node] = np.array([s for s in left[copy.node] if ways[s] is not CopySource.KEPT], int)
    for op_class, members in enumerate(graph.folded.members):
        if splits_parameters and any(_is_large_entry(program, program.ops[i], loop) for i in members):
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
    """True if an op brings a parameter, or a value made of parameters, into the loop over microbatches, and it is
    large."""
    if op.name != ENTER or op.site != loop:
        return False
    arguments = dict(zip(program.inputs, program.step.arguments, strict=True))
    argument, value = arguments.get(op.operands[0]), program.values[op.operands[0]]
    return value.num_bytes >= LARGE_BYTES and (argument is None or argument.role is not Role.BATCH)


def _is_sum_of(op: FlatOp, loop: tuple[int, ...]) -> bool:
    """True if an op represents a sum of the loop over microbatches."""
    return op.is_accumulator and op.site == loop


def solved(
    step_problem: StepProblem,
    on_mesh: MeshProblem,
    splits_parameters: bool = False,
    pins: Mapping[str, Any] = NO_PINS,
) -> IntraOp:
    """The fastest strategies on a mesh of a replica's devices. They have no cap: caps are for stages.

    Raises:
      InputError: a pin is impossible on this mesh, or pins contradict one another.
    """
    try:
        kept = between_programs(on_mesh, on_mesh.pinned(pins), splits_parameters)
        return IntraOp(step_problem, on_mesh, on_mesh.solve(kept, NO_CAP, SOLVE_S).labels)
    except PlanError as e:  # there is no plan yet, so a pin is impossible
        raise InputError(str(e)) from e
    except NoFitError as e:
        assert pins, "without pins, some strategies go together"
        raise InputError("the pins contradict one another: no plan keeps them all. Remove one") from e


def decided(step_problem: StepProblem, cluster: Cluster, sharding: Sharding, place: str) -> IntraOp:
    """The strategies that a plan decides for a mesh of a replica's devices.

    Raises:
      PlanError: a decision is impossible; `place` names the plan.
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
    """The possible values of a decision on a mesh of a replica's devices, whatever the other decisions are.

    Raises:
      PlanError: nothing is decided under this name.
    """
    on_mesh = _planned_on(step_problem, cluster, sharding, place)
    return on_mesh.codec.choices(name, place, between_programs(on_mesh, on_mesh.pinned(NO_PINS)))


def _planned_on(step_problem: StepProblem, cluster: Cluster, sharding: Sharding, place: str) -> MeshProblem:
    """The problem on the mesh of a plan's sharding."""
    shape = tuple(sharding.mesh.values())
    if tuple(sharding.mesh) != AXIS_NAMES.get(len(shape)):
        raise PlanError(f"{place}: wanted mesh axes named {AXIS_NAMES}, got {tuple(sharding.mesh)}")
    return of_replica(step_problem, cluster, shape)


def of_replica(
    step_problem: StepProblem, cluster: Cluster, shape: tuple[int, ...], resharder: Resharder | None = None
) -> MeshProblem:
    """The problem on a mesh of a replica's devices. A given resharder shares its known costs."""
    return step_problem.on(replica_cluster(cluster, prod(shape)), shape, resharder)
