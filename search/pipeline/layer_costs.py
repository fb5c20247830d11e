"""What layers cost when a replica's devices run them by a solution: from kernels and live ranges to numbers per layer.

The solution says what a device would do in the whole step: kernels with their times, arrays with their bytes
(`search.device`, `search.problem.live_ranges`). Each belongs to an op, and that to a layer; a loop over layers is shared out
among them. So what a run of layers costs is a sum over them, but for the memory that one of them needs while it runs.

* *Of a microbatch*: what runs in the loop over parts, forward and backward, and of the latter what makes weight gradients
  alone. A replica runs its own parts only. What of the communication runs behind computation is known for the whole step;
  each layer is given as much of it.
* *Once*: the rest, mostly the update, on its share of the state, as that lies in as many parts as there are replicas. To
  that come the gradients' reduction over replicas, and the gathering of what tasks read of the new state.
* *Memory*: residuals of a microbatch, from the forward pass to the backward pass; state, sums and what tasks read whole,
  always there; what else a layer makes, while it runs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cost_model.cluster import Cluster, Link
from cost_model.collectives import MeshModel
from search.device.lowering import Kernel
from search.ir.graph import Role, Site
from search.ir.sharding import Place
from search.pipeline.intra_op import IntraOp
from search.pipeline.layers import Layers
from search.pipeline.programs import left_for_later
from search.problem.costs import COMBINED_BYTES
from search.problem.flat_program import FlatOp, ReadPhase, read_phase
from search.problem.live_ranges import LiveRange

Array = np.ndarray

IN_LOOP = ("forward", "backward", "weight gradient")
"""The parts of the step that run for each microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerCosts:
    """Of layers; arrays are [layers], bytes are per device.

    Attributes:
      forward_s: of a microbatch.
      backward_s: likewise, without weight gradients.
      weight_gradient_s: likewise.
      once_s: in a step.
      residual_bytes: of a microbatch, from the forward to the backward pass.
      weight_gradient_bytes: likewise, from the backward pass to the weight gradients, where these are apart.
      state_bytes: always there.
      workspace_bytes: while a layer runs.
      crossing_bytes: [layers + 1] of a microbatch: what a device hands on at each border, in the forward pass.
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
        """[layers + 1]: seconds for what crosses to arrive over a link, one way."""
        return np.where(self.crossing_bytes > 0, link.copy_s(self.crossing_bytes), 0.0)


@dataclass(frozen=True, eq=False)
class Ledger:
    """What layers cost when they run by a solution.

    Attributes:
      intra_op: the solution.
      layers: of the same step.
      cluster: on which replicas stand.
    """

    intra_op: IntraOp
    layers: Layers
    cluster: Cluster

    def costs(self, num_replicas: int) -> LayerCosts:
        """Of layers on so many replicas."""
        by_part, (residuals, later, kept, working) = self._seconds, self._made_bytes
        return LayerCosts(
            by_part["forward"],
            by_part["backward"],
            by_part["weight gradient"],
            by_part["once"] / num_replicas + self._reduction_s(num_replicas),
            residuals,
            later,
            kept + self._split_bytes / num_replicas + self._whole_bytes,
            working,
            self._crossing_bytes,
        )

    @property
    def microbatch_s(self) -> float:
        """All layers, forward and backward."""
        return float(sum(self._seconds[part].sum() for part in IN_LOOP))

    # --- what belongs to which layer

    @property
    def _num_layers(self) -> int:
        return self.layers.num_layers

    @property
    def _ops(self) -> tuple[FlatOp, ...]:
        return self.intra_op.step_problem.graph.folded.program.ops

    @cached_property
    def _of_site(self) -> dict[Site, Array]:
        """By op of the step: the share of it that each layer has."""
        step, found = self.layers.step, dict[Site, Array]()
        for op, layer in self.layers.assigned.of_op.items():
            if (site := step.site_of(op)) is not None:
                share = found.setdefault(site, np.zeros(self._num_layers))
                share[layer] += int(op.params.get("length", 1)) if op.name == "scan" else 1
        return {site: share / share.sum() for site, share in found.items()}

    @cached_property
    def _of_argument(self) -> list[int]:
        assigned = self.layers.assigned.of_value
        return [assigned.get(v, 0) for v in self.layers.step.step.graph.inputs]

    @cached_property
    def _shares(self) -> list[Array]:
        """Of each op of the flat program; one that no stage has, such as an addition to a sum, goes with what it reads."""
        maker = self.intra_op.step_problem.graph.folded.program.maker
        found, nowhere = dict[int, Array](), _only(0, self._num_layers)
        for i, op in enumerate(self._ops):
            if op.name == "input":
                found[i] = _only(self._of_argument[op.number], self._num_layers)
            elif op.name != "output" and self._outermost(op) in self._of_site:
                found[i] = self._of_site[self._outermost(op)]
            else:
                read = [maker[v][0] for v in op.operands]
                known = [m for m in read if m in found and found[m] is not nowhere]
                found[i] = found[known[0]] if known else nowhere
        return [found[i] for i in range(len(self._ops))]

    def _outermost(self, op: FlatOp) -> Site:
        """The op of the step, or of its loop's body, that a flat op is in."""
        loop = self.layers.step.loop
        return op.site[:4] if op.site[:1] == (loop,) else op.site[:1]

    def _is_in_loop(self, i: int) -> bool:
        start, end = self._loop
        return start <= i < end

    @cached_property
    def _loop(self) -> tuple[int, int]:
        """The positions of the loop over parts: the outermost one around its first op."""
        inside = [i for i, op in enumerate(self._ops) if op.site[:1] == (self.layers.step.loop,) and op.op]
        ranges = self.intra_op.step_problem.graph.folded.program.loops
        around = [r for r in ranges if r[0] <= min(inside) and max(inside) < r[1]]
        return max(around, key=lambda r: r[1] - r[0])

    # --- seconds

    @cached_property
    def _seconds(self) -> dict[str, Array]:
        """Of each layer, by part of the step."""
        found = {part: np.zeros(self._num_layers) for part in (*IN_LOOP, "once")}
        lowered = self.intra_op.device.lowered
        busy_s = sum(k.time.seconds for k in lowered.kernels)
        hidden_s = self.intra_op.on_mesh.hiding.hidden_s(self.intra_op.labels)
        seen = max(1 - hidden_s / busy_s, 0.0) if busy_s else 1.0
        count = self.layers.step.step.num_microbatches
        for kernel in lowered.kernels:
            part = self._part(kernel)
            runs = 1 if part == "once" else count
            found[part] += self._shares[kernel.position] * (seen * kernel.time.seconds / runs)
        return found

    def _part(self, kernel: Kernel) -> str:
        if not self._is_in_loop(kernel.position):
            return "once"
        op = self._ops[kernel.position]
        if read_phase(op) is ReadPhase.FORWARD:
            return "forward"
        return "weight gradient" if self._outermost(op) in self._later else "backward"

    @cached_property
    def _later(self) -> frozenset[Site | None]:
        """The ops that only weight gradients need; of a loop over layers, if that is so in each of them."""
        step, assigned = self.layers.step, self.layers.assigned
        later = left_for_later(step, assigned)
        return frozenset(map(step.site_of, later)) - {step.site_of(op) for op in assigned.backward - later}

    def _reduction_s(self, num_replicas: int) -> Array:
        """Once a step: gradients are added up over replicas, each gets its part, and what tasks read is gathered."""
        if num_replicas == 1:
            return np.zeros(self._num_layers)
        size = int(np.prod(self.intra_op.mesh_shape))
        mesh = MeshModel(self.cluster, (num_replicas, size))
        scattered, gathered = self._sum_bytes, self._read_bytes
        seconds = mesh.time_s("reduce-scatter", (0,), scattered, COMBINED_BYTES)
        return np.asarray(seconds + mesh.time_s("all-gather", (0,), gathered, COMBINED_BYTES))

    # --- bytes

    @cached_property
    def _local_bytes(self) -> Mapping[int, float]:
        """By value of the flat program: what a device holds of it between programs."""
        paths = self.intra_op.paths
        return {v: paths.local_bytes(v, paths.resting(v)) for op in self._ops for v in op.results}

    @cached_property
    def _flat(self) -> dict[Place | None, int]:
        """By place in the step, the value of the flat program that appears there."""
        found: dict[Place | None, int] = {}
        for op in self._ops:
            for v, places in zip(op.results, op.result_places, strict=True):
                found |= dict.fromkeys(places, v)
        return found

    def _held(self, values: Iterable[int]) -> Array:
        """Of values of the pipeline, by layer where they are made or rest; what the prologue makes for tasks, where these
        read it."""
        found, of_value = np.zeros(self._num_layers), self.layers.assigned.of_value
        for v in values:
            found[self._first_reader.get(v, of_value.get(v, 0))] += self._bytes_of(v)
        return found

    @cached_property
    def _first_reader(self) -> Mapping[int, int]:
        """By value that the prologue makes, the first layer whose tasks read it."""
        made = {v for op in self.layers.step.prologue for v in op.outputs} - self.layers.step.terms.keys()
        found: dict[int, int] = {}
        for op, layer in self.layers.assigned.of_op.items():
            for v in made.intersection(op.operands):
                found[v] = min(found.get(v, layer), layer)
        return found

    def _bytes_of(self, v: int) -> float:
        """Of a value of the pipeline, on a device."""
        step, flat = self.layers.step, self._flat.get(self.layers.step.place_of(v))
        whole = step.values[v].num_bytes
        if flat is None or not whole:
            return float(whole)
        value = step.values[step.original(v)]
        return self._local_bytes[flat] * whole / max(value.num_bytes, 1)

    @cached_property
    def _sum_bytes(self) -> Array:
        """The sums; those of layers in a loop are apart."""
        maker = self.intra_op.step_problem.graph.folded.program.maker
        found = np.zeros(self._num_layers)
        for v, term in self.layers.step.terms.items():
            flat = self._flat.get(self.layers.step.place_of(term))
            share = _only(self.layers.assigned.of_value.get(v, 0), self._num_layers)
            found += self._bytes_of(v) * (share if flat is None else self._shares[maker[flat][0]])
        return found

    @cached_property
    def _once_read(self) -> frozenset[int]:
        """What tasks read that there is once."""
        step = self.layers.step
        read = {v for op in step.body if op not in step.made_anew for v in op.operands}
        read |= {v for op in step.body if op in step.made_anew for v in op.operands}
        constants = {v for v, _ in step.constants}
        return frozenset(v for v in read if not step.is_of_microbatch(v) and v != step.index) - constants

    @cached_property
    def _read_bytes(self) -> Array:
        """Of that, what is learned, and so is another in each step."""
        return self._held(self._once_read & self.layers.step.learned)

    @cached_property
    def _made_bytes(self) -> tuple[Array, Array, Array, Array]:
        """Of what the loop makes: residuals, what waits for weight gradients, what is there for all layers of a loop at
        once, and what for one at a time."""
        memory = self.intra_op.on_mesh.memory
        start, end = self._loop
        residuals, working = np.zeros(self._num_layers), np.zeros((self._num_layers, end - start + 1))
        sums, later = np.zeros(self._num_layers), np.zeros(self._num_layers)
        for item, held in zip(memory.items, memory.held(self.intra_op.labels), strict=True):
            if not (held and self._is_in_loop(item.position) and self._is_in_loop(item.start)):
                continue
            share = self._shares[item.position]
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
        """Whether weight gradients are the last to read it, and it is not theirs alone."""
        of_weights = [self._outermost(self._ops[i]) in self._later for i in (item.position, item.end)]
        return of_weights == [False, True]

    def _is_in_body(self, i: int) -> bool:
        """Whether an op's results are a layer's own: it is in the body of a loop over layers, and stacks nothing up."""
        loops = self.intra_op.on_mesh.live_ranges.loops_at[i]
        return len(loops) > 1 and self._ops[i].name != "stack"

    def _is_residual(self, item: LiveRange) -> bool:
        """Whether it waits from the forward pass to the backward pass."""
        born, last = read_phase(self._ops[item.position]), read_phase(self._ops[item.end])
        return born is ReadPhase.FORWARD and last is not ReadPhase.FORWARD

    @cached_property
    def _split(self) -> frozenset[int]:
        """The arguments that lie in as many parts as there are replicas."""
        arguments = zip(self.layers.step.step.graph.inputs, self.layers.step.step.arguments, strict=True)
        state = frozenset(v for v, argument in arguments if argument.role is not Role.BATCH)
        return state - self._once_read

    @cached_property
    def _split_bytes(self) -> Array:
        return self._held(self._split)

    @cached_property
    def _whole_bytes(self) -> Array:
        """Other arguments, what the prologue makes for tasks, and sums."""
        step = self.layers.step
        return (
            self._held({*step.step.graph.inputs, *self._once_read} - self._split - step.terms.keys())
            + self._sum_bytes
        )

    @cached_property
    def _crossing_bytes(self) -> Array:
        """What the forward pass hands on at each border, on a device."""
        of_op, backward = self.layers.assigned.of_op, self.layers.assigned.backward
        forward = [op for op in self.layers.step.body if op in of_op and op not in backward]
        made = {v: of_op[op] for op in forward for v in op.outputs}
        last: dict[int, int] = {}
        for op in forward:
            for v in op.operands:
                if v in made:
                    last[v] = max(last.get(v, 0), of_op[op])
        change = np.zeros(self._num_layers + 2)
        for v, layer in last.items():
            if layer > made[v]:
                change[made[v] + 1] += self._bytes_of(v)
                change[layer + 1] -= self._bytes_of(v)
        return np.maximum(np.cumsum(change)[: self._num_layers + 1], 0.0)


def _only(layer: int, num_layers: int) -> Array:
    share = np.zeros(num_layers)
    share[layer] = 1.0
    return share
