"""Updates of state that rests in the host's memory, computed by the host's processors.

The state stays where it is. Only gradients and scalars go to the host, and parameters that rest on the device come back
(ZeRO-Offload's CPU Adam, Ren et al. 2021). This pays where the host's memory is faster than the bus.

State is updated together if one new value depends on it together: both moments of a parameter, and the parameter. The host
can update it if the ops between the old state and the new are elementwise, on arrays of the state's shape and on scalars.
A product (Shampoo, Muon) or a norm of the state (LAMB) keeps the update on the device.

These ops become one op (`search.memory.host_update_ops`). If other elementwise ops compute an operand of it from no larger
arrays, so does the host: a clipped gradient from the gradient, which then need not wait for the norm, and decayed weights
from the weights.

XLA:GPU joins all such ops into one call to the host. It begins when the last gradient has arrived, and nothing runs
beside it. It never writes over its operands: the new state lies beside the old one (read in compiled programs).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.cost_model.cluster import Cluster
from autoshard.search.ir.factors.elementwise import POINTWISE
from autoshard.search.ir.graph import Atom, Graph, Phase, Step
from autoshard.search.memory.host_rows import by_rows


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """State that the host can update, and the ops that it then computes.

    Attributes:
      state: the old state's values.
      moved: the ops that only the host computes, by number.
      repeated: the ops that it computes for itself, by number.
      arrays: the arrays that are copied to the host for it.
      scalars: the scalars that are copied to the host for it.
      fills: the ops among the repeated ones that fill an array with a constant, which is copied to the host as well.
      results: the values that are read elsewhere, or are results of the step.
    """

    state: tuple[int, ...]
    moved: tuple[int, ...]
    repeated: tuple[int, ...]
    arrays: tuple[int, ...]
    scalars: tuple[int, ...]
    fills: tuple[int, ...]
    results: tuple[int, ...]

    @property
    def brought(self) -> tuple[int, ...]:
        """The operands that are copied to the host."""
        return (*self.arrays, *self.scalars)

    @property
    def operands(self) -> tuple[int, ...]:
        """All operands but constants, the state first."""
        return (*self.state, *self.brought)


def host_updates(step: Step, hosted: Iterable[int]) -> tuple[HostUpdate, ...]:
    """The updates that the host can compute.

    Args:
      step: a step.
      hosted: numbers of the arguments that rest in the host's memory.
    """
    graph = step.graph
    new_state = _new_state(step)
    there = [graph.inputs[i] for i in sorted(hosted) if graph.inputs[i] in new_state]
    of_rows = by_rows(graph, there, new_state)
    return tuple(_Finding(graph, [v for v in there if (v, Phase.UPDATE) not in of_rows]).found())


def updatable(step: Step, hosted: Iterable[int]) -> frozenset[int]:
    """Those arguments on the host that the host can update."""
    number = {v: i for i, v in enumerate(step.graph.inputs)}
    return frozenset(number[v] for update in host_updates(step, hosted) for v in update.state)


def least_update_s(step: Step, updates: Iterable[HostUpdate], cluster: Cluster) -> float:
    """Seconds of updates by the host for each device, if all devices share them: the update itself, and the copies of its
    results to the device."""
    values, new_state = step.graph.values, _new_state(step)
    moved_bytes = copied_bytes = 0.0
    for update in updates:
        new = {new_state[v] for v in update.state}
        back = (v for v in update.results if v not in new)
        copied_bytes += _num_repeats(step, update) * sum(values[v].num_bytes for v in back)
        there = (*update.operands, *update.results)
        moved_bytes += _num_repeats(step, update) * sum(values[v].num_bytes for v in there)
    copied_s = copied_bytes / cluster.host_link.sustained_bytes_per_s
    return (moved_bytes / cluster.host_update_bytes_per_s + copied_s) / cluster.num_devices


def least_copy_s(step: Step, updates: Iterable[HostUpdate], cluster: Cluster) -> float:
    """Seconds in which each device fetches the state of these updates and stores it again, if all devices share it and
    it goes both ways at once."""
    values = step.graph.values
    state = (_num_repeats(step, one) * sum(values[v].num_bytes for v in one.state) for one in updates)
    return sum(state) / cluster.num_devices / cluster.host_link.sustained_bytes_per_s


def _num_repeats(step: Step, update: HostUpdate) -> int:
    """The number of updates that one represents, in a shortened step."""
    return step.arguments[step.graph.inputs.index(update.state[0])].repeats


def _new_state(step: Step) -> dict[int, Atom]:
    """By argument, the value that replaces it."""
    inputs, outputs = step.graph.inputs, zip(step.graph.outputs, step.replaces, strict=True)
    return {inputs[r]: a for a, r in outputs if r is not None and inputs[r] != a}


class _Finding:
    """The search for updates in one graph."""

    def __init__(self, graph: Graph, there: Sequence[int]) -> None:
        self.graph, self.there = graph, there
        self.maker = graph.made_at
        self.readers: dict[int, list[int]] = {}
        for i, op in enumerate(graph.ops):
            for v in op.operands:
                self.readers.setdefault(v, []).append(i)

    def found(self) -> Iterator[HostUpdate]:
        for state, moved in self._groups():
            shape = self.graph.values[state[0]].shape
            is_alike = all(self.graph.values[v].shape == shape for v in state)
            if is_alike and moved and all(self._is_pointwise(i, shape) for i in moved):
                yield self._update(state, moved, shape)

    def _groups(self) -> list[tuple[list[int], list[int]]]:
        """State that is updated together, with the ops of the update that depend on it."""
        group = {v: v for v in self.there}
        moved: dict[int, list[int]] = {v: [] for v in self.there}
        behind = {v: v for v in self.there}

        def root(v: int) -> int:
            while group[v] != v:
                v = group[v]
            return v

        for i, op in enumerate(self.graph.ops):
            roots = list(dict.fromkeys(root(behind[v]) for v in op.operands if v in behind))
            if op.phase is not Phase.UPDATE or not roots:
                continue
            for other in roots[1:]:
                group[other] = roots[0]
                moved[roots[0]] += moved.pop(other)
            moved[roots[0]].append(i)
            behind |= dict.fromkeys(op.outputs, roots[0])
        return [([v for v in self.there if root(v) == r], sorted(ops)) for r, ops in moved.items()]

    def _is_pointwise(self, i: int, shape: tuple[int, ...]) -> bool:
        op = self.graph.ops[i]
        sizes = {self.graph.value(a).shape for a in op.inputs} - {()}
        is_filled = op.name == "broadcast_in_dim" and not sizes
        return (op.name in POINTWISE or is_filled) and sizes <= {shape} and op.result_values[0].shape == shape

    def _update(self, state: Sequence[int], moved: Sequence[int], shape: tuple[int, ...]) -> HostUpdate:
        made = {v for i in moved for v in self.graph.ops[i].outputs}
        read = dict.fromkeys(v for i in moved for v in self.graph.ops[i].operands)
        outside = [v for v in read if v not in made and v not in state]
        arrays, repeated = self._brought([v for v in outside if self.graph.values[v].shape], shape, state)
        scalars = dict.fromkeys(v for v in outside if not self.graph.values[v].shape)
        scalars |= dict.fromkeys(
            v for i in repeated for v in self.graph.ops[i].operands if not self.graph.values[v].shape
        )
        inside, results = frozenset(moved), frozenset(self.graph.made)
        read_outside = (v for v in made if v in results or not inside.issuperset(self.readers.get(v, ())))
        return HostUpdate(
            tuple(state),
            tuple(moved),
            tuple(sorted(repeated)),
            tuple(arrays),
            tuple(scalars),
            tuple(i for i in sorted(repeated) if not self.graph.ops[i].operands),
            tuple(sorted(read_outside)),
        )

    def _brought(
        self, wanted: Sequence[int], shape: tuple[int, ...], state: Sequence[int]
    ) -> tuple[list[int], set[int]]:
        """The arrays to copy to the host, and the ops that compute the wanted ones from these."""
        cones = {v: self._cone(v, shape) for v in wanted}
        arrays = dict.fromkeys(v for v, (_, ops) in cones.items() if not ops)
        repeated: set[int] = set()
        for v, (sources, ops) in cones.items():
            more = [u for u in sources if u not in arrays and u not in state]
            if sum(self.graph.values[u].num_bytes for u in more) <= self.graph.values[v].num_bytes:
                repeated |= ops
                arrays |= dict.fromkeys(more)
            else:
                arrays[v] = None
        return list(arrays), repeated

    def _cone(self, v: int, shape: tuple[int, ...]) -> tuple[list[int], set[int]]:
        """The arrays from which elementwise ops of the update compute a value, and these ops."""
        sources, ops, left = dict[int, None](), set[int](), [v]
        while left:
            u = left.pop()
            i = self.maker.get(u)
            if i is None or self.graph.ops[i].phase is not Phase.UPDATE or not self._is_pointwise(i, shape):
                sources[u] = None
            elif i not in ops:
                ops.add(i)
                left += [a for a in self.graph.ops[i].operands if self.graph.values[a].shape]
        return list(sources), ops
