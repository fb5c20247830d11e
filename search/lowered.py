"""What one device runs under a full assignment: kernels, collectives, and the buffers between them.

The solver sees nodes and labels. A device sees kernels: an op that is not fused, with the light ops that it
computes on the fly; a collective for every step of a resharding chain; and buffers, each with its local
bytes. This module lowers the flat program to that form. `search.schedule` puts the kernels in an order, and
from the order follow the memory and the time of a step.

Kernels of a loop's body stand between those before and after it; `loops` says in which loops a kernel is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.layout import Route
from cost_model.compute import kernel_s
from cost_model.gpu_targets import is_hopper_or_later
from search.choices import Way, port_specs
from search.kernels import is_light
from search.liveness import VIEWS, Liveness, Resident
from search.pricing import Priced
from search.reshard import SLICE, Step
from search.sketch import Group, Port, group_of

Loops = tuple[tuple[int, int], ...]
"""Ranges of op positions, inner loops first."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array on one device.

    Attributes:
      num_bytes: what it takes; zero if it lies where another array was (a new state over the old one).
      resident: what it is.
      is_argument: whether it is there from the step's start to its end.
      loops: where it is made.
    """

    num_bytes: float
    resident: Resident
    is_argument: bool
    loops: Loops


@dataclass(frozen=True, slots=True)
class Collective:
    """What a kernel communicates: a collective's kind, its mesh axes, bytes per device each time, and the dtype."""

    kind: str
    axes: tuple[int, ...]
    num_bytes: float
    dtype: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on one device.

    Attributes:
      position: of its op in the flat program.
      reads: buffers.
      makes: buffers.
      after: kernels that must have run, besides those whose buffers it reads.
      collective: what it communicates; None when it computes.
      workspace_bytes: scratch memory while it runs.
      seconds: how long it takes in one step, all its runs together.
      loops: the loops that it is in.
    """

    position: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    after: tuple[int, ...]
    collective: Collective | None
    workspace_bytes: float
    seconds: float
    loops: Loops


@dataclass(frozen=True, eq=False)
class Lowered:
    """A device's kernels, in program order, and their buffers."""

    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]


def lower(priced: Priced, liveness: Liveness, labels: Sequence[int]) -> Lowered:
    """The kernels of one step under a full assignment of labels."""
    lowering = _Lowering(priced, liveness, labels)
    for i in range(len(lowering.program.ops)):
        lowering.op(i)
        lowering.loop_ends(i + 1)
    lowering.finish()
    return Lowered(tuple(lowering.kernels), tuple(lowering.buffers))


WORKSPACE_BYTES = 4 * 2**20
"""Of a matrix product. Source: XLA:GPU's default for cuBLASLt."""

SLICED_WORKSPACE_BYTES = 32 * 2**20
"""Of a matrix product that reads a slice in place. Source: XLA:GPU on Hopper, cuBLAS's recommended workspace."""


class _Lowering:
    def __init__(self, priced: Priced, liveness: Liveness, labels: Sequence[int]) -> None:
        self.priced, self.liveness, self.labels = priced, liveness, labels
        self.sketch, self.folded = priced.sketch, priced.sketch.folded
        self.program, self.maker, self.uses = liveness.program, liveness.maker, liveness.uses
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []
        self.made_by: dict[int, int] = {}
        self.sources: dict[int, tuple[int, ...]] = {}
        self.copies: dict[tuple[int, Route, str], tuple[int, ...]] = {}
        self.seconds_of: dict[int, float] = {}
        self.reduced: dict[int, list] = {}
        self.specs: dict[Port, tuple[int, ...]] = {}
        self.last_backward: int | None = None
        self.device = priced.resharder.mesh.cluster.device
        self.is_hopper = is_hopper_or_later(self.device.name)
        self.resharded = self._resharded()
        self.carried = self._carried()

    # --- specs and chains

    def spec(self, port: Port) -> tuple[int, ...]:
        if port not in self.specs:
            row = port_specs(port, self.priced.choices[port.node])[self.labels[port.node]]
            self.specs[port] = tuple(int(d) for d in row)
        return self.specs[port]

    def made(self, v: int) -> tuple[int, ...]:
        i, r = self.maker[v]
        return self.spec(self.sketch.ports[self.folded.kind_of[i], r, True])

    def resting(self, v: int) -> tuple[int, ...]:
        i, r = self.maker[v]
        rest = self.sketch.copy_of.get((self.folded.kind_of[i], r, Group.REST))
        return self.spec(Port(rest.node, ())) if rest else self.made(v)

    def chain(self, v: int, here, there) -> tuple[Step, ...]:
        if here == there:
            return ()
        made_at, r = self.maker[v]
        kind = self.folded.kind_of[made_at]
        how = self.priced.handling(self.sketch.node_of[kind], (kind, r))
        return self.priced.resharder.chain(self.program.values[v], here, there, how)

    def ways(self, i: int, operand: int) -> tuple[tuple[Step, ...], str]:
        """The chain by which an op gets an operand, and the phase that its steps are shared within ("" for all)."""
        op = self.program.ops[i]
        v, group = op.operands[operand], group_of(op)
        made_at, r = self.maker[v]
        kind = self.folded.kind_of[made_at]
        port = self.sketch.ports[self.folded.kind_of[i], operand, False]
        here, need = self.resting(v), self.spec(port)
        if port == self.sketch.ports[kind, r, True] and here == self.made(v):
            return (), ""
        copy = self.sketch.copy_of.get((kind, r, group))
        held, lap = here, ""
        if copy is not None:
            way = self.priced.choices[copy.node].ways[self.labels[copy.node]]
            if way is not Way.SAME:
                held = self.spec(Port(copy.node, ()))
                lap = group.value if copy.kept_from and way is Way.FRESH else ""
        return (*self.chain(v, here, held), *self.chain(v, held, need)), lap

    def _resharded(self) -> frozenset[int]:
        """Values that a collective reads, so that they are arrays whoever makes them."""
        found = set()
        for i, op in enumerate(self.program.ops):
            for operand, v in enumerate(op.operands):
                if self.program.values[v].shape and any(s.kind != SLICE for s in self.ways(i, operand)[0]):
                    found.add(v)
        return frozenset(found)

    # --- kernels

    def op(self, i: int) -> None:
        op, liveness = self.program.ops[i], self.liveness
        if op.name == "input":
            v = op.results[0]
            num_bytes = self._local(v, self.made(v))
            role = liveness.resident_of_argument(op)
            self.sources[v] = (self._buffer(num_bytes, role, (), True),)
            return
        read = self._reads(i)
        if op.name in VIEWS and len(op.operands) == 1 and not self.resharded.intersection(op.results):
            self.sources[op.results[0]] = read
            return
        arrays = [v for v in op.results if v in liveness.anchors[v] or v in self.resharded]
        if not arrays:
            for v in op.results:
                self.sources[v] = read
            return
        makes = []
        for v in op.results:
            buffer = self._buffer(self._bytes_made(v), liveness.resident(v), self._loops(i, op), False)
            makes.append(buffer)
            self.sources[v] = (buffer,)
        kernel = self._kernel(i, read, tuple(makes), ())
        if op.op is not None and group_of(op) is Group.BACKWARD:
            self.last_backward = kernel
        for axes, num_bytes in self.reductions(self.folded.kind_of[i]):
            for v in op.results:
                self.sources[v] = self._launched(i, v, self.sources[v], "all-reduce", axes, num_bytes, ())
        for v in op.results:
            if self.program.values[v].shape and self.resting(v) != self.made(v):
                self.sources[v] = self._sent(
                    i, v, self.sources[v], self.chain(v, self.made(v), self.resting(v)), ""
                )

    def _reads(self, i: int) -> tuple[int, ...]:
        """The buffers that an op reads, fused ops' included."""
        op = self.program.ops[i]
        read: dict[int, None] = {}
        for operand, v in enumerate(op.operands):
            if op.name == "carry" and v not in self.sources:
                continue  # the body's result, which is made later
            steps, lap = self.ways(i, operand) if self.program.values[v].shape else ((), "")
            read |= dict.fromkeys(self._sent(i, v, self.sources[v], steps, lap))
        return tuple(read)

    def _sent(
        self, i: int, v: int, source: tuple[int, ...], steps: Sequence[Step], lap: str
    ) -> tuple[int, ...]:
        """The buffers where a chain ends; steps that were made before are shared."""
        here, route = source, ()
        for step in steps:
            route = (*route, step.after)
            key = (v, route, lap)
            if key not in self.copies:
                self.copies[key] = here if step.kind == SLICE else self._collective(i, v, here, step, lap)
            here = self.copies[key]
        return here

    def _collective(self, i: int, v: int, source: tuple[int, ...], step: Step, lap: str) -> tuple[int, ...]:
        tie = (self.last_backward,) if lap == Group.BACKWARD.value and self.last_backward is not None else ()
        num_bytes = self._local(v, step.after)
        return self._launched(i, v, source, step.kind, step.axes, step.num_bytes, tie, num_bytes)

    def _launched(self, i, v, source, kind, axes, moved_bytes, tie, num_bytes=None) -> tuple[int, ...]:
        loops = self.liveness.loops_at[i]
        made = self._buffer(
            moved_bytes if num_bytes is None else num_bytes, self.liveness.resident(v), loops, False
        )
        seconds = self.program.ops[i].count * float(self.priced.resharder.mesh.time_s(kind, axes, moved_bytes))
        what = Collective(kind, axes, moved_bytes, str(self.program.values[v].dtype))
        self.kernels.append(Kernel(i, source, (made,), tie, what, 0.0, seconds, loops))
        self.made_by[made] = len(self.kernels) - 1
        return (made,)

    def reductions(self, kind: int):
        """The all-reduces that an op's own cluster resolves: mesh axes and bytes per device."""
        if kind not in self.reduced:
            label = self.labels[self.sketch.node_of[kind]]
            self.reduced[kind] = [
                (axes, float(local[at.tolist().index(label)]))
                for axes, at, local, _ in self.priced.reductions(kind)
                if label in at
            ]
        return self.reduced[kind]

    def _kernel(self, i: int, reads: tuple[int, ...], makes: tuple[int, ...], after: tuple[int, ...]) -> int:
        kind = self.folded.kind_of[i]
        loops = self.liveness.loops_at[i]
        seconds = self.program.ops[i].count * self._seconds(kind, reads, makes)
        self.kernels.append(Kernel(i, reads, makes, after, None, self._workspace(i), seconds, loops))
        for b in makes:
            self.made_by[b] = len(self.kernels) - 1
        return len(self.kernels) - 1

    def _workspace(self, i: int) -> float:
        """What cuBLAS and cuDNN ask for: scratch, and a padded copy of what they cannot pad themselves."""
        op = self.program.ops[i]
        if self.device.name == "CPU":
            return 0.0
        if op.name == "conv_general_dilated":
            return WORKSPACE_BYTES + self._padded(i)
        if op.op is None or not self.folded.is_heavy[self.folded.kind_of[i]] or not op.rule.flops_per_point:
            return 0.0
        is_sliced = any(self._is_sliced(i, operand) for operand in range(len(op.operands)))
        return SLICED_WORKSPACE_BYTES if is_sliced and self.is_hopper else WORKSPACE_BYTES

    def _is_sliced(self, i: int, operand: int) -> bool:
        """Whether an op reads a part of a larger array in place."""
        v = self.program.ops[i].operands[operand]
        before: tuple[int, ...] | None = None
        for step in self.ways(i, operand)[0]:
            if step.kind == SLICE:
                return self._is_leading(v, before or self.resting(v), step.after)
            before = step.after
        made = self.program.ops[self.maker[v][0]]
        while made.name in VIEWS - {"slice"} and made.operands:
            made = self.program.ops[self.maker[made.operands[0]][0]]
        return made.name == "slice" and made.is_boundary

    def _is_leading(self, v: int, here, there) -> bool:
        """Whether a slice is of one piece: along the first dimension that is not of size 1."""
        first = next((d for d, n in enumerate(self.program.values[v].shape) if n > 1), 0)
        return all(b == first for a, b in zip(here, there, strict=True) if a != b)

    def _padded(self, i: int) -> float:
        """Bytes of a convolution's operand with the zeros that cuDNN does not imagine: those of a dilated operand, unless
        its kernel is reversed (it is the gradient of a strided convolution), and those of uneven padding."""
        op = self.program.ops[i]
        assert op.op is not None
        params, v = op.op.params, op.operands[0]
        is_gradient = self.program.ops[self.maker[op.operands[1]][0]].name == "rev"
        is_uneven = any(low != high for low, high in params["padding"])
        if is_gradient or not (is_uneven or max(params["lhs_dilation"], default=1) > 1):
            return 0.0
        shape = self.program.values[v].shape
        growth = 1.0
        spatial = params["dimension_numbers"].lhs_spec[2:]
        for d, (low, high), dilation in zip(spatial, params["padding"], params["lhs_dilation"], strict=True):
            growth *= ((shape[d] - 1) * dilation + 1 + max(low, 0) + max(high, 0)) / shape[d]
        return growth * self._local(v, self.spec(self.sketch.ports[self.folded.kind_of[i], 0, False]))

    def _seconds(self, kind: int, reads: tuple[int, ...], makes: tuple[int, ...]) -> float:
        if self.folded.op(kind).is_boundary or is_light(self.folded, kind):
            moved = sum(self.buffers[b].num_bytes for b in (*reads, *makes))
            return float(kernel_s(self.device, moved))
        if kind not in self.seconds_of:
            seconds = self.priced.op_seconds(kind)
            self.seconds_of[kind] = float(
                seconds[self.labels[self.sketch.node_of[kind]]] if seconds.ndim else seconds
            )
        return self.seconds_of[kind]

    def _buffer(self, num_bytes: float, resident: Resident, loops: Loops, is_argument: bool) -> int:
        self.buffers.append(Buffer(num_bytes, resident, is_argument, loops))
        return len(self.buffers) - 1

    def _loops(self, i: int, op) -> Loops:
        """Where a result lives: what a loop carries or stacks lives outside of it."""
        inside = self.liveness.loops_at[i]
        return inside[1:] if op.name == "stack" else inside

    def _local(self, v: int, spec) -> float:
        shards = 1
        for d, n in zip(spec, self.priced.resharder.mesh.shape, strict=True):
            shards *= n if d >= 0 else 1
        return self.program.values[v].num_bytes / shards

    def _bytes_made(self, v: int) -> float:
        uses = self.uses.get(v, ())
        becomes_state = any(self.program.ops[u].name == "input" for u in uses)
        if becomes_state and v not in self.resharded:
            return 0.0
        return self._local(v, self.made(v))

    def _carried(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """By loop: (position of the carry, its operand) of what the body hands to its next run."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, op in enumerate(self.program.ops):
            if op.name == "carry":
                for operand, v in enumerate(op.operands):
                    for loop in self.liveness.loops_at[self.maker[v][0]]:
                        if loop not in self.liveness.loops_at[i] and loop[0] > i:
                            found.setdefault(loop, []).append((i, operand))
                            break
        return found

    def loop_ends(self, position: int) -> None:
        """What a body hands on is there until its end."""
        for loop in [k for k in self.carried if k[1] == position]:
            read: dict[int, None] = {}
            for i, operand in self.carried[loop]:
                v = self.program.ops[i].operands[operand]
                steps, lap = self.ways(i, operand) if self.program.values[v].shape else ((), "")
                read |= dict.fromkeys(self._sent(position - 1, v, self.sources[v], steps, lap))
            self._kernel(position - 1, tuple(read), (), ())

    def finish(self) -> None:
        """The new state's way to where the old one rests."""
        for i, op in enumerate(self.program.ops):
            if op.name == "input":
                for operand, v in enumerate(op.operands):
                    steps, lap = self.ways(i, operand) if self.program.values[v].shape else ((), "")
                    if any(s.kind != SLICE for s in steps):
                        at = self.maker[v][0]
                        last = self._sent(at, v, self.sources[v], steps, lap)
                        for b in last:
                            self.buffers[b] = replace(self.buffers[b], num_bytes=0.0)
