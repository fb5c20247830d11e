"""The costs of layers under a solution for a replica's devices: from kernels and live ranges to numbers per layer.

A solution gives a device's kernels with their times, and its arrays with their bytes (`search.device`,
`search.problem.live_ranges`). Each belongs to an op, and each op to one or several layers (`search.pipeline.layer_shares`).
So the cost of a run of layers is the sum of their costs. One cost is a maximum: the memory that a layer needs as it runs.

* *Of a microbatch*: the kernels in the loop over parts: forward, backward, and weight gradients apart. A replica runs its
  own parts only. The communication that computation hides is known for the whole step; all kernels get the same share.
* *Once*: all other kernels, mostly those of the update, on a replica's part of the state. The reduction of gradients over
  replicas comes on top, and the gathering of new parameters.
* *Memory*: residuals of a microbatch, from the forward to the backward pass; state, sums and values that tasks read whole,
  at any time; other values, as a layer runs. Values on the host take none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from autoshard.cost_model.cluster import Cluster, Link
from autoshard.cost_model.collectives import MeshModel
from autoshard.search.ir.graph import Value
from autoshard.search.ir.spec import WHOLE, Spec
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.layer_shares import IN_LOOP, ONCE, Array, LayerShares, only
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.stage_sharding import split_over_replicas
from autoshard.search.problem.costs import COMBINED_BYTES
from autoshard.search.problem.flat_program import ReadPhase, read_phase
from autoshard.search.problem.live_ranges import LiveRange


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """The costs of layers: arrays of shape [layers], bytes on a device.

    Attributes:
      forward_s: seconds of the forward pass of a microbatch.
      backward_s: seconds of the backward pass of a microbatch, without weight gradients.
      weight_gradient_s: seconds of the weight gradients of a microbatch.
      once_s: seconds of a step for all that runs once.
      residual_bytes: residuals of a microbatch, from the forward to the backward pass.
      weight_gradient_bytes: values of a microbatch that wait for weight gradients with tasks of their own.
      state_bytes: state and sums, which are always there.
      workspace_bytes: other values, as a layer runs.
      crossing_bytes: [layers + 1] of a microbatch: forward values that a device sends at each border.
    """

    forward_s: Array
    backward_s: Array
    weight_gradient_s: Array
    once_s: Array
    residual_bytes: Array
    weight_gradient_bytes: Array
    state_bytes: Array
    workspace_bytes: Array
    crossing_bytes: Array

    def transfer_s(self, link: Link) -> Array:
        """[layers + 1]: seconds of the transfer over a link at each border, one way."""
        return np.where(self.crossing_bytes > 0, link.copy_s(self.crossing_bytes), 0.0)


@dataclass(frozen=True, eq=False)
class Ledger:
    """The costs of layers under a solution.

    Attributes:
      intra_op: the solution.
      shares: the layers' shares of the same step.
      cluster: the nodes on which replicas stand.
    """

    intra_op: IntraOp
    shares: LayerShares
    cluster: Cluster

    def costs(self, num_replicas: int) -> LayerCosts:
        """The costs of layers on a number of replicas."""
        by_part, (residuals, later, kept, working) = self._seconds, self._made_bytes
        return LayerCosts(
            by_part["forward"],
            by_part["backward"],
            by_part["weight gradient"],
            by_part[ONCE] / num_replicas + self.reduction_s(num_replicas),
            residuals,
            later,
            kept + self._split_bytes(num_replicas) + self._whole_bytes,
            working,
            self._crossing_bytes,
        )

    @property
    def microbatch_s(self) -> float:
        """Seconds of all layers for a microbatch, forward and backward."""
        return float(sum(self._seconds[part].sum() for part in IN_LOOP))

    @property
    def _num_layers(self) -> int:
        return self.shares.num_layers

    @property
    def _step(self) -> PipelineStep:
        """The step in parts, with its loops cut between layers."""
        return self.shares.layers.step

    # --- seconds

    @cached_property
    def _seconds(self) -> dict[str, Array]:
        """Seconds of each layer, by part of the step."""
        found = {part: np.zeros(self._num_layers) for part in (*IN_LOOP, ONCE)}
        seen, count = self.intra_op.seen_share, self._step.step.num_microbatches
        for kernel in self.intra_op.device.lowered.kernels:
            part = self.shares.part(kernel.position)
            runs = 1 if part == ONCE else count
            found[part] += self.shares.of_op[kernel.position] * (seen * kernel.time.seconds / runs)
        return found

    def reduction_s(self, num_replicas: int) -> Array:
        """Seconds of each layer, once a step, to reduce-scatter gradients over replicas and to gather parameters."""
        if num_replicas == 1:
            return np.zeros(self._num_layers)
        size = int(np.prod(self.intra_op.mesh_shape))
        mesh = MeshModel(self.cluster, (num_replicas, size))
        scattered, gathered = self._sum_bytes, self._read_bytes
        seconds = mesh.time_s("reduce-scatter", (0,), scattered, COMBINED_BYTES)
        return np.asarray(seconds + mesh.time_s("all-gather", (0,), gathered, COMBINED_BYTES))

    # --- bytes

    def _held(self, values: Iterable[int]) -> Array:
        """Bytes of values of the pipeline, by layer: where they are made or rest. Results of the prologue count where tasks
        read them first."""
        found = np.zeros(self._num_layers)
        for v in values:
            found[self._layer_of(v)] += self._bytes_of(v)
        return found

    def _layer_of(self, v: int) -> int:
        """The layer of a value of the pipeline: where it is made or rests, or where tasks first read it."""
        return self.shares.first_reader.get(v, self.shares.layers.assigned.of_value.get(v, 0))

    def _bytes_of(self, v: int) -> float:
        """Bytes of a value of the pipeline on a device; 0 if it is on the host."""
        flat, whole = self._flat(v), self._step.values[v].num_bytes
        if self._step.values[v].is_on_host:
            return 0.0
        if flat is None or not whole:
            return float(whole)
        value, paths = self._step.values[self._step.original(v)], self.intra_op.paths
        return paths.local_bytes(flat, self.intra_op.handed_on(flat)) * whole / max(value.num_bytes, 1)

    def _flat(self, v: int) -> int | None:
        """The number of a value in the flat program; None if it has none."""
        place = self._step.place_of(v)
        return None if place is None else self.shares.program.value_at.get(place)

    @cached_property
    def _sum_bytes(self) -> Array:
        """Bytes of the sums, by layer; a sum of layers in a loop is shared by them."""
        maker, of_value = self.shares.program.maker, self.shares.layers.assigned.of_value
        found = np.zeros(self._num_layers)
        for v, term in self._step.terms.items():
            flat = self._flat(term)
            share = only(of_value.get(v, 0), self._num_layers)
            found += self._bytes_of(v) * (share if flat is None else self.shares.of_op[maker[flat][0]])
        return found

    @cached_property
    def _read_bytes(self) -> Array:
        """Bytes of the parameters that tasks read, by layer: each step makes new ones."""
        return self._held(self.shares.read_whole & self._step.learned)

    @cached_property
    def _made_bytes(self) -> tuple[Array, Array, Array, Array]:
        """Bytes of values that the loop makes, by layer: residuals, values that wait for weight gradients, values of all
        layers of a loop at once, and the peak of the values of one layer."""
        memory = replace(self.intra_op.on_mesh.memory, margin=0.0)
        start, end = self.shares.loop
        residuals, working = np.zeros(self._num_layers), np.zeros((self._num_layers, end - start + 1))
        sums, later = np.zeros(self._num_layers), np.zeros(self._num_layers)
        for item, held in zip(memory.items, memory.held(self.intra_op.labels), strict=True):
            if not (held and self.shares.is_in_loop(item.position) and self.shares.is_in_loop(item.start)):
                continue
            share = self.shares.of_op[item.position]
            if self._waits_for_weights(item):
                later += held * share
            if self._is_residual(item):
                residuals += held * share
            elif self._is_in_body(item.position):
                working[share > 0, item.start - start] += held
                working[share > 0, min(item.end, end - 1) - start + 1] -= held
            elif np.count_nonzero(share) > 1:
                sums += held * share
            else:
                layer = int(share.argmax())
                working[layer, item.start - start] += held
                working[layer, min(item.end, end - 1) - start + 1] -= held
        return residuals, later, sums, np.cumsum(working, axis=1).max(axis=1)

    def _waits_for_weights(self, item: LiveRange) -> bool:
        """True if weight gradients are the last readers of a value that they do not make."""
        return self.shares.is_later(item.end) and not self.shares.is_later(item.position)

    def _is_in_body(self, i: int) -> bool:
        """True if an op's results belong to one layer: the op is in the body of a loop over layers, and is no stack."""
        loops = self.intra_op.on_mesh.live_ranges.loops_at[i]
        return len(loops) > 1 and self.shares.program.ops[i].name != "stack"

    def _is_residual(self, item: LiveRange) -> bool:
        """True if a value lives from the forward to the backward pass."""
        born, last = (read_phase(self.shares.program.ops[i]) for i in (item.position, item.end))
        return born is ReadPhase.FORWARD and last is not ReadPhase.FORWARD

    def _split_bytes(self, num_replicas: int) -> Array:
        """Bytes of state, by layer: split over replicas if its dimensions allow that."""
        mesh_shape, found = (num_replicas, *self.intra_op.mesh_shape), np.zeros(self._num_layers)

        @cache
        def num_parts(value: Value, spec: Spec) -> int:
            return num_replicas if split_over_replicas(value, spec, mesh_shape)[0] != WHOLE else 1

        for v, (value, spec) in self._split_types.items():
            found[self._layer_of(v)] += self._bytes_of(v) / num_parts(value, spec)
        return found

    @cached_property
    def _split_types(self) -> dict[int, tuple[Value, Spec]]:
        """The arguments that may be split over replicas: their types, and their specs on a replica's devices."""
        step, spec_of = self._step, self.intra_op.spec_of
        return {
            v: (step.values[v], spec_of(step.place_of(v), step.values[v]))
            for v in sorted(self.shares.split_arguments)
        }

    @cached_property
    def _whole_bytes(self) -> Array:
        """Bytes of other arguments, of results of the prologue and of sums, by layer."""
        there = {*self._step.step.graph.inputs, *self.shares.read_whole}
        return self._held(there - self.shares.split_arguments - self._step.terms.keys()) + self._sum_bytes

    @cached_property
    def _crossing_bytes(self) -> Array:
        """[layers + 1]: bytes that the forward pass sends at each border."""
        change = np.zeros(self._num_layers + 2)
        for v, made, last in self.shares.crossing:
            change[made + 1] += self._bytes_of(v)
            change[last + 1] -= self._bytes_of(v)
        return np.maximum(np.cumsum(change)[: self._num_layers + 1], 0.0)
