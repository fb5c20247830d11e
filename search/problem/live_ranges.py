"""Which arrays are in memory when: the program's liveness on a device, before any mesh.

Program order is taken as the schedule. Not every value becomes an array:

* XLA fuses elementwise ops into their consumers, so a light value exists only if an op that reads whole
  arrays wants it (a contraction, a loop, a result of the step), if it is a reduction or random, or if it
  crosses into another phase and cannot be recomputed there from one array of its size. What is not stored
  keeps its *fusion sources*, the stored arrays that it is computed from, alive as long as it is used.
* Reshapes and other views share their operand's array.
* State is donated: the new state is written where the old one was.

A loop's operands live to its end; what it stacks is there from its start. A `LiveRange` is a stretch of the
program over which a node's strategy costs bytes.
"""

from dataclasses import dataclass
from enum import StrEnum

from cost_model.cluster import Device
from search.ir.factors import Kind
from search.ir.graph import Role
from search.problem.flat_program import FlatOp, FlatProgram
from search.problem.folding import FoldedProgram
from search.problem.strategies import CopySource
from search.problem.strategy_graph import Port, ReadPhase, StrategyGraph, read_phase

VIEWS = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "transpose",
        "rev",
        "optimization_barrier",
        "copy",
        "stop_gradient",
        "name",
        "enter",
    }
)
"""Ops that give their operand's array back."""

LOOKUPS = frozenset({"gather", "dynamic_slice"})
"""Ops that read a few elements of what may itself be computed on the fly."""

EXPENSIVE = frozenset(
    {"tanh", "erf", "erfc", "erf_inv", "logistic", "log", "log1p", "expm1", "pow", "sin", "cos", "tan"}
)
"""Elementwise ops that the compiler does not compute twice, where moving the result is cheap."""

_ACTIVATION = frozenset({"mul", "add", "sub", "div", "integer_pow", "square", "convert_element_type"})
"""Ops that activation functions are made of, besides the expensive ones."""

CHEAPER = frozenset({"logistic"})
"""Of these, what is taken for stored in 16 bits at most, on every device. Source: a choice of ours. XLA computes a logistic
again even then; ours stands in for copies in another layout around 16-bit softmaxes, which we do not know."""

CHEAPER_ITEMSIZE = 2
"""Bytes of an element up to which they are. Source: as above."""

EXPENSIVE_FLOPS = 50.0
"""What an expensive op is taken to cost for an element. Source: XLA's fusion stores a tanh in bfloat16 on an H100 and in
float32 on an A100, but computes it again in float32 on an H100: 40 to 80."""


def expensive_itemsize(device: Device) -> float:
    """Bytes of an element up to which moving it beats computing it again with an expensive op."""
    return EXPENSIVE_FLOPS * device.memory_bytes_per_s / device.vector_flops_per_s


DRAWS = frozenset({"random_bits", "threefry2x32"})
"""Ops whose random bits the compiler draws inside the kernel that reads them: a mask is stored, never its bits."""

MAX_FUSION_SOURCES = 2
"""A value computed from more stored arrays is stored itself: fusions do not grow without end."""


def is_part(op: FlatOp) -> bool:
    """Whether an op is a loop's part of a stacked array."""
    return op.name == "slice" and op.is_boundary


def is_view(op: FlatOp) -> bool:
    """Whether an op makes no array of its own; a loop's part of a stacked array is read where it is."""
    return len(op.operands) == 1 and (op.name in VIEWS or is_part(op))


class Resident(StrEnum):
    """What an array in memory is."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer_state"
    OTHER_STATE = "other_state"
    BATCH = "batch"
    GRADIENTS = "gradients"
    RESIDUALS = "residuals"
    TEMPORARIES = "temporaries"


_RESIDENT_OF = {
    Role.PARAMETER: Resident.PARAMETERS,
    Role.OPTIMIZER_STATE: Resident.OPTIMIZER_STATE,
    Role.STATE: Resident.OTHER_STATE,
    Role.KEY: Resident.OTHER_STATE,
    Role.BATCH: Resident.BATCH,
}


ARGUMENTS = frozenset(_RESIDENT_OF.values())
"""What is there before the step and after it."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """From op `start` to op `end`, both included, the value at a port is in memory.

    Attributes:
      port: the node whose strategy decides, and the value's dimensions there.
      num_bytes: of the whole value.
      start: first op position.
      end: last op position.
      copy_source: for a copy: only strategies that come by it in this way count.
      resident: what it is.
      position: the op that made the value.
    """

    port: Port
    num_bytes: int
    start: int
    end: int
    way: CopySource | None
    resident: Resident
    position: int


class LiveRanges:
    """Which values are arrays, and for how long.

    `most_dear` says up to how many bytes an element is stored that is expensive to compute: see `dear_itemsize`.
    """

    def __init__(self, graph: StrategyGraph, expensive_itemsize: float) -> None:
        self.graph, self.expensive_itemsize = graph, expensive_itemsize
        self.folded: FoldedProgram = graph.folded
        self.program: FlatProgram = graph.folded.program
        self.maker, self.uses = self.program.maker, self.program.uses
        self.loops_at = self._loops_at()
        self.is_light = [self._light(k) for k in range(len(self.folded.members))]
        self.is_reduction = [self._reduces(k) for k in range(len(self.folded.members))]
        self.drawn = self._drawn()
        self.stored: dict[int, bool] = {}
        self.computed_in = self._computed_in()
        self.fusion_sources: dict[int, frozenset[int]] = {}
        self.held_until: dict[int, int] = {}
        for i, op in enumerate(self.program.ops):
            for v in op.results:
                self.fusion_sources[v] = self._fusion_sources(i, v)

    def _loops_at(self) -> list[tuple[tuple[int, int], ...]]:
        at: list[tuple[tuple[int, int], ...]] = [()] * len(self.program.ops)
        for loop in self.program.loops:
            for i in range(*loop):
                at[i] = (*at[i], loop)
        return at

    def _light(self, op_class: int) -> bool:
        op = self.folded.op(op_class)
        stuck = any(f.kind is Kind.UNSPLITTABLE and f.size > 1 for f in op.rule.factors)
        return not (op.is_boundary or self.folded.is_heavy[op_class] or stuck)

    def _reduces(self, op_class: int) -> bool:
        return any(
            f.kind in (Kind.SUM, Kind.REDUCE) and f.size > 1 for f in self.folded.op(op_class).rule.factors
        )

    def resident(self, v: int) -> Resident:
        """What a value is that is made inside the step."""
        born = read_phase(self.program.ops[self.maker[v][0]])
        read = self.computed_in[v]
        if born is ReadPhase.BACKWARD and ReadPhase.UPDATE in read:
            return Resident.GRADIENTS
        if born is ReadPhase.FORWARD and read - {ReadPhase.FORWARD}:
            return Resident.RESIDUALS
        return Resident.TEMPORARIES

    def resident_of_argument(self, op) -> Resident:
        """What an argument of the step is."""
        return _RESIDENT_OF[self.program.step.arguments[op.site[0]].role]

    def items(self) -> tuple[LiveRange, ...]:
        """Everything that is ever in memory."""
        for i in reversed(range(len(self.program.ops))):
            for v in self.program.ops[i].results:
                self._hold(v)
        found: list[LiveRange] = []
        for i in range(len(self.program.ops)):
            for v in self.program.ops[i].results:
                if v in self.fusion_sources[v]:
                    found += self._of_value(v)
                else:
                    found += self._copies_of_light(v)
        return tuple(found)

    def _fusion_sources(self, i: int, v: int) -> frozenset[int]:
        """The stored arrays that a value is computed from: itself, if it is stored."""
        op, own = self.program.ops[i], frozenset((v,))
        if op.is_boundary and not is_view(op):
            return own
        below = frozenset().union(*(self.fusion_sources.get(o, frozenset((o,))) for o in op.operands))
        if is_view(op):
            return below
        if not self.is_light[self.folded.class_of[i]] or self._is_stored(i, v):
            return own
        size = self.program.values[v].num_bytes
        large = [a for a in below if 4 * self.program.values[a].num_bytes >= size]
        most = (
            min(self.expensive_itemsize, CHEAPER_ITEMSIZE) if op.name in CHEAPER else self.expensive_itemsize
        )
        is_cheap_to_move = self.program.values[v].itemsize <= most
        is_expensive = op.name in EXPENSIVE if is_cheap_to_move else self._is_gate(v, below)
        return (
            own
            if len(large) > MAX_FUSION_SOURCES or (is_expensive and len(self.computed_in[v]) > 1)
            else below
        )

    def _is_gate(self, v: int, below: frozenset[int]) -> bool:
        """Whether an expensive activation is multiplied with another array in the forward phase and in the backward one: the
        kernel that makes the forward product then writes the activation too (XLA, measured on GELU in float32)."""
        times = [u for u in self.uses.get(v, ()) if self.program.ops[u].name == "mul"]
        if len({read_phase(self.program.ops[u]) for u in times}) < 2 or not self._is_expensive_to_make(v):
            return False
        forward = [self.program.ops[u] for u in times if read_phase(self.program.ops[u]) is ReadPhase.FORWARD]
        others = [self._seen_through(o) for op in forward for o in op.operands if o != v]
        return any(o not in below and self._is_made_by_heavy(o) for o in others)

    def _is_expensive_to_make(self, v: int) -> bool:
        """Whether an expensive op is among those that a value is computed from on the fly."""
        seen, left = {v}, [v]
        while left:
            op = self.program.ops[self.maker[left.pop()][0]]
            if op.name in EXPENSIVE - CHEAPER:
                return True
            if op.name in _ACTIVATION:
                fresh = [o for o in op.operands if o not in seen]
                seen.update(fresh)
                left += fresh
        return False

    def _seen_through(self, v: int) -> int:
        """The value that a view is of."""
        op = self.program.ops[self.maker[v][0]]
        return self._seen_through(op.operands[0]) if is_view(op) else v

    def _is_made_by_heavy(self, v: int) -> bool:
        op_class = self.folded.class_of[self.maker[v][0]]
        return self.folded.is_heavy[op_class] and not self.folded.op(op_class).is_boundary

    def _drawn(self) -> frozenset[int]:
        """Values computed from random bits and single numbers alone: masks and noise."""
        drawn: set[int] = set()
        plain: set[int] = set()
        for i, op in enumerate(self.program.ops):
            if op.name in DRAWS:
                drawn.update(op.results)
            elif all(self.program.values[v].num_bytes == self.program.values[v].itemsize for v in op.results):
                plain.update(op.results)
            elif self.is_light[self.folded.class_of[i]] and all(
                v in drawn or v in plain for v in op.operands
            ):
                (plain if plain.issuperset(op.operands) else drawn).update(op.results)
        return frozenset(drawn)

    def _computed_in(self) -> dict[int, frozenset[ReadPhase]]:
        """Per value, the phases of the kernels that read it, or compute it on the fly."""
        found: dict[int, frozenset[ReadPhase]] = {}
        for i in reversed(range(len(self.program.ops))):
            op = self.program.ops[i]
            for v in op.results:
                phases: set[ReadPhase] = set()
                for u in self.uses.get(v, ()):
                    reader = self.program.ops[u]
                    is_light = self.is_light[self.folded.class_of[u]] and bool(reader.results)
                    is_fused = is_light and not self._is_stored(u, reader.results[0])
                    phases |= found.get(reader.results[0], frozenset()) if is_fused else {read_phase(reader)}
                found[v] = frozenset(phases)
        return found

    def _is_stored(self, i: int, v: int) -> bool:
        """Whether what a light op makes is an array; remembered, as every reader asks."""
        if v not in self.stored:
            self.stored[v] = self._stores(i, v)
        return self.stored[v]

    def _stores(self, i: int, v: int) -> bool:
        op = self.program.ops[i]
        is_reduction = self.is_reduction[self.folded.class_of[i]]
        if v in self.drawn and not is_reduction:
            read_in = {read_phase(self.program.ops[u]) for u in self.uses.get(v, ())}
            return len(read_in) > 1 or self._is_read_whole(v)
        if is_reduction or op.name.startswith(("random", "threefry", "rng")):
            return True
        if op.name.startswith("scatter"):
            return not self._is_scattered_into(v)
        return self._is_read_whole(v) or any(self._is_scattered_into(o) for o in op.operands)

    def _is_scattered_into(self, v: int) -> bool:
        """Whether a value is scattered to zeros and then added to another: XLA scatters into the other."""
        readers = [self.program.ops[u].name for u in self.uses.get(v, ())]
        return self.program.ops[self.maker[v][0]].name == "scatter-add" and readers in (["add_any"], ["add"])

    def _is_read_whole(self, v: int) -> bool:
        """Whether an op that is not fused reads a value, or a view of it."""
        for u in self.uses.get(v, ()):
            op = self.program.ops[u]
            if is_view(op):
                if any(self._is_read_whole(r) for r in op.results):
                    return True
            elif op.name not in LOOKUPS and not self.is_light[self.folded.class_of[u]]:
                return True
        return False

    def _use(self, v: int, u: int) -> int:
        """Where a use of a value at op `u` ends: at the end of the outermost loop that the value comes from
        outside of."""
        born = self.maker[v][0]
        for start, end in self.loops_at[u]:
            if not start <= born < end:
                return end - 1
        return u

    def _hold(self, v: int) -> None:
        """A value that is not stored keeps its fusion sources until its own last use."""
        if v in self.fusion_sources[v]:
            return
        ends = [self._use(v, u) for u in self.uses.get(v, ()) if self.program.ops[u].name != "input"]
        end = max([*ends, self.held_until.get(v, -1)], default=-1)
        for a in self.fusion_sources[v]:
            self.held_until[a] = max(self.held_until.get(a, -1), end)

    def _of_value(self, v: int) -> list[LiveRange]:
        i, r = self.maker[v]
        op, op_class, value = self.program.ops[i], self.folded.class_of[i], self.program.values[v]
        port = self.graph.ports[op_class, r, True]
        if op.name == "input":
            role = self.program.step.arguments[op.site[0]].role
            stays = [
                LiveRange(port, value.num_bytes, 0, len(self.program.ops) - 1, None, _RESIDENT_OF[role], i)
            ]
            return stays + self._copies(v, op_class, r, len(self.program.ops) - 1)
        if any(self.program.ops[u].name == "input" for u in self.uses.get(v, ())):
            return []  # it is written where the old state was
        by_phase: dict[ReadPhase, list[int]] = {}
        for u in self.uses.get(v, ()):
            reader = self.program.ops[u]
            if reader.name != "input":
                by_phase.setdefault(read_phase(reader), []).append(self._use(v, u))
        if not by_phase and v not in self.held_until:
            return []
        start = self._born(i)
        copied = {g for g in by_phase if (op_class, r, g) in self.graph.copy_of}
        ends = [min(us) if g in copied else max(us) for g, us in by_phase.items()]
        end = max([start, *ends, self.held_until.get(v, -1)])
        resident = self._resident(op, end)
        rest = self.graph.copy_of.get((op_class, r, ReadPhase.REST))
        found = [LiveRange(port, value.num_bytes, start, start if rest else end, None, resident, i)]
        if rest:
            resting = Port(rest.node, ())
            found += [
                LiveRange(resting, value.num_bytes, start, end, way, resident, i)
                for way in (CopySource.SAME, CopySource.FRESH)
            ]
        return found + self._copies(v, op_class, r, end)

    def _born(self, i: int) -> int:
        op = self.program.ops[i]
        if op.name != "stack":
            return i
        return max((start for start, end in self.program.loops if start <= i < end), default=i)

    def _resident(self, op, end: int) -> Resident:
        last = read_phase(self.program.ops[end])
        born = read_phase(op)
        if born is ReadPhase.BACKWARD and last is ReadPhase.UPDATE:
            return Resident.GRADIENTS
        if born is ReadPhase.FORWARD and last is not ReadPhase.FORWARD:
            return Resident.RESIDUALS
        return Resident.TEMPORARIES

    def _copies_of_light(self, v: int) -> list[LiveRange]:
        """A light value has no array of its own, but once resharded it is one."""
        i, r = self.maker[v]
        copies = self._copies(v, self.folded.class_of[i], r, len(self.program.ops))
        return [item for item in copies if item.way is not CopySource.SAME]

    def _copies(self, v: int, op_class: int, r: int, source_end: int) -> list[LiveRange]:
        value, i = self.program.values[v], self.maker[v][0]
        found = []
        last_forward = i
        for phase in (ReadPhase.FORWARD, ReadPhase.BACKWARD, ReadPhase.UPDATE):
            uses = [self._use(v, u) for u in self.uses.get(v, ()) if self._reads_in(u, phase)]
            if not uses:
                continue
            copy = self.graph.copy_of.get((op_class, r, phase))
            first, last = min(uses), max(uses)
            if copy is not None:
                stretches = [
                    (CopySource.FRESH, first),
                    (CopySource.SAME, source_end + 1),
                    (CopySource.KEPT, last_forward + 1),
                ]
                for way, start in stretches:
                    resident = Resident.RESIDUALS if way is CopySource.KEPT else Resident.TEMPORARIES
                    if start <= last:
                        found.append(
                            LiveRange(Port(copy.node, ()), value.num_bytes, start, last, way, resident, i)
                        )
            last_forward = last if phase is ReadPhase.FORWARD else last_forward
        return found

    def _reads_in(self, u: int, phase: ReadPhase) -> bool:
        op = self.program.ops[u]
        return op.name != "input" and read_phase(op) is phase
