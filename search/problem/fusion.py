"""The values that become arrays: XLA fuses ops into kernels, and stores only some values between them.

XLA fuses elementwise ops, reductions over windows, and ops that only move elements (slices, pads, splits, concatenations)
into their readers. So a light value (of an op that is no product, no look-up, no loop) is an array only if

* an op that reads whole arrays needs it: a product, a loop, a result of the step; cuBLAS that adds a product to it;
* its order of dimensions differs from that of the op that reads it (`search.problem.layouts`);
* it is a reduction, or random bits, or made of more than `MAX_FUSION_SOURCES` large arrays, of `MAX_FUSION_OPERANDS` of
  any size, or of one at more than `MAX_PLACES` places;
* it is expensive to compute (a tanh), read in several phases, and small enough an element that moving it is cheap;
* it is computed from a reduction over windows, and several kernels read it.

A scatter computes its updates on the fly, and writes over the array that they are added to. An operand that a product
or a convolution reads in another order or with zeros around it is computed by the kernel that writes that copy
(`copied_as`).

A value that is not stored is computed on the fly, in each kernel that reads it, from its *fusion sources*: the stored
arrays behind it. Views (reshapes, transposes) are their operand's array.

This one model gives the bytes that the solver's kernels move (`search.problem.kernels`), the live ranges of arrays
(`search.problem.live_ranges`), and the kernels that a device launches (`search.device.lowering`).
"""

from collections import Counter
from functools import cached_property
from math import prod

from autoshard.cost_model.cluster import Device
from autoshard.cost_model.memo import memo
from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import Phase
from autoshard.search.problem.constants import shared_constants
from autoshard.search.problem.convolution_copies import CONVOLUTION, ConvolutionCopy, convolution_copy
from autoshard.search.problem.flat_program import ADDITIONS, FlatOp, ReadPhase, read_phase
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.layouts import PRODUCT, Order, layouts

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
"""Ops whose result is their operand's array."""

LIBRARIES = frozenset({PRODUCT, CONVOLUTION})
"""Ops that call a library."""

LOOKUPS = frozenset({"gather", "dynamic_slice"})
"""Ops that read a few elements of an operand, which may be computed on the fly."""

MOVES = frozenset({"slice", "pad", "split", "concatenate"})
"""Ops that only move elements: fused into their readers, as elementwise ops are, along any dimension."""

PARTS = frozenset({"slice", "split"})
"""Ops that only move a part of their operand."""

POOLINGS = frozenset({"reduce_window_sum", "reduce_window_max", "reduce_window_min"})
"""Reductions over windows, fused into their reader as elementwise ops are, but computed once if several kernels read them.
Source: programs that XLA compiled for an H100. The gradient of an average pooling is one of them: it sums windows over a
gradient with zeros between. Behind a norm XLA mostly stores it."""

EXPENSIVE = frozenset(
    {"tanh", "erf", "erfc", "erf_inv", "logistic", "log", "log1p", "expm1", "pow", "sin", "cos", "tan"}
)
"""Elementwise ops that the compiler does not compute twice, where moving the result is cheap."""

_ACTIVATION = frozenset({"mul", "add", "sub", "div", "integer_pow", "square", "convert_element_type"})
"""Ops that activation functions are made of, besides the expensive ones."""

CHEAPER = frozenset({"logistic"})
"""Expensive ops whose results are taken as stored in 16 bits at most, on every device. Source: a choice of ours. XLA
recomputes a logistic even then; ours stands in for copies in another layout around 16-bit softmaxes, which we do not
know."""

CHEAPER_ITEMSIZE = 2
"""Largest element, in bytes, of a stored result of the `CHEAPER` ops. Derived: 16 bits."""

EXPENSIVE_FLOPS = 60.0
"""Floating-point operations per element that an expensive op is taken to cost. Source: XLA's fusion stores a tanh in
bfloat16 on an H100 and in float32 on A100s of 40 and 80 GB, but recomputes it in float32 on an H100: 50 to 80."""


def expensive_itemsize(device: Device) -> float:
    """Bytes of an element up to which moving it costs less than recomputing it with an expensive op."""
    return EXPENSIVE_FLOPS * device.memory_bytes_per_s / device.vector_flops_per_s


RANDOM = frozenset({"random_bits", "threefry2x32"})
"""Ops whose random bits the compiler draws inside the kernel that reads them: a mask is stored, never its bits."""

MAX_FUSION_SOURCES = 2
"""A value computed from more stored arrays is stored itself: fusions do not grow without end. (An optimizer's update
does, to one kernel that reads a gradient and all state beside it; XLA:GPU, measured on AdamW. Sums of gradients do too:
one kernel at the end adds up the gradients of a value that all layers read.)"""

MAX_FUSION_OPERANDS = 96
"""A value computed from as many stored arrays, of any size and in any phase, is stored itself. Source: XLA,
`MaxOperandsAndOutputsPerFusion` (`xla/service/gpu/gpu_fusible.h`)."""


MAX_PLACES = 3
"""Number of places of one array that a kernel reads to compute one element. A value that takes more, as slices of
slices do, is stored itself. Source: XLA on an associative scan, whose levels it fuses by twos: two places it reads, but
not four."""


def is_part(op: FlatOp) -> bool:
    """Whether an op is a loop's part of a stacked array."""
    return op.name == "slice" and op.is_boundary


def is_view(op: FlatOp) -> bool:
    """Whether an op makes no array of its own; a loop's part of a stacked array is read in place."""
    return len(op.operands) == 1 and (op.name in VIEWS or is_part(op))


_ALONE = {phase: frozenset({phase}) for phase in ReadPhase}

Place = tuple[int, tuple[int, ...]]
"""A stored array, with the slices through which it is read."""

Places = frozenset[Place]
"""The places from which a value's elements are read."""


class Fusion:
    """The stored values of a folded program, and the fusion sources of all others.

    Attributes:
      folded: the folded program.
      is_reduction: by class, whether it reduces over some dimension.
      layouts: the layouts of products' results in memory.
      shared_constants: arrays of one number, made for each kernel that reads them.
      expensive_itemsize: largest element, in bytes, of an expensive op's stored result.
      joined: operands, each an op's position and a number, that are written out together with their halos.
      sources: by value, the stored arrays that it is computed from: itself, if it is stored.
      computed_in: by value, the phases of the kernels that read it, or compute it on the fly.
    """

    def __init__(
        self,
        folded: FoldedProgram,
        expensive_itemsize: float,
        joined: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        self.joined = joined
        self.folded, self.program, self.expensive_itemsize = folded, folded.program, expensive_itemsize
        self.maker, self.uses = self.program.maker, self.program.uses
        self.is_reduction = [self._reduces(k) for k in range(len(folded.members))]
        self.layouts, self.shared_constants = layouts(self.program), shared_constants(self.program)
        self._num_bytes = [value.num_bytes for value in self.program.values]
        self.computed_in = self._computed_in()
        self.sources: dict[int, frozenset[int]] = {}
        self._places: dict[int, Places] = {}  # of those that are read through slices
        self._pooled = set[int]()
        for i, op in enumerate(self.program.ops):
            for v in op.results:
                if places := self._places_read(i, v):
                    self._places[v] = places
                if op.name in POOLINGS or not self._pooled.isdisjoint(op.operands):
                    self._pooled.add(v)
                self.sources[v] = self._sources(i, v)
                if v in self.sources[v]:
                    self._pooled.discard(v)
                    self._places.pop(v, None)

    def is_stored(self, v: int) -> bool:
        """Whether a value is an array of its own."""
        return v in self.sources[v]

    def _is_fusible(self, i: int) -> bool:
        """Whether an op may be computed in its readers' kernels."""
        op = self.program.ops[i]
        is_light = self.folded.is_light[self.folded.class_of[i]]
        return is_light or op.name in POOLINGS or (op.name in MOVES and not op.is_boundary)

    def _reduces(self, op_class: int) -> bool:
        return any(
            f.kind in (Kind.SUM, Kind.REDUCE) and f.size > 1 for f in self.folded.op(op_class).rule.factors
        )

    def _sources(self, i: int, v: int) -> frozenset[int]:
        """The stored arrays that a value is computed from: itself, if it is stored."""
        op, own = self.program.ops[i], frozenset((v,))
        if op.is_boundary and not is_view(op):
            return own
        below = frozenset().union(*(self.sources.get(o, frozenset((o,))) for o in op.operands))
        if is_view(op):
            return below
        if not self._is_fusible(i) or self._is_wanted(i, v):
            return own
        sizes, size = self._num_bytes, self._num_bytes[v]
        large = [a for a in below - self.shared_constants if 4 * sizes[a] >= size]
        most = (
            min(self.expensive_itemsize, CHEAPER_ITEMSIZE) if op.name in CHEAPER else self.expensive_itemsize
        )
        is_cheap_to_move = self.program.values[v].itemsize <= most
        is_expensive = op.name in EXPENSIVE if is_cheap_to_move else self._is_gate(v, below)
        is_many = len(large) > MAX_FUSION_SOURCES and not (op.phase is Phase.UPDATE or self._is_added_on(v))
        is_many |= len(below) >= MAX_FUSION_OPERANDS
        is_shared = is_expensive and len(self.computed_in[v]) > 1
        is_shared |= v in self._pooled and self._is_computed_in_several(v)
        return own if is_many or is_shared or self._is_spread(v) else below

    def _is_computed_in_several(self, v: int) -> bool:
        """Whether several ops read a value, and end in several kernels."""
        return len({*self.uses.get(v, ())}) > 1 and len(self._ends(v)) > 1

    def _ends(self, v: int) -> frozenset[int]:
        """The ops that store what is computed from a value."""
        found, seen, left = set[int](), {v}, [v]
        while left:
            for u in self.uses.get(left.pop(), ()):
                results = self.program.ops[u].results
                if not self._is_fusible(u) or any(self._is_wanted(u, r) for r in results):
                    found.add(u)
                else:
                    left += [r for r in results if r not in seen]
                    seen.update(results)
        return frozenset(found)

    def _is_added_on(self, v: int) -> bool:
        """Whether a value is a sum of gradients that is only an operand of the next sum."""
        around = (self.maker[v][0], *self.uses.get(v, ()))
        return [self.program.ops[i].name for i in around] == ["add_any", "add_any"]

    def _places_read(self, i: int, v: int) -> "Places":
        """The places from which a value's elements are read, if some are read through slices."""
        op = self.program.ops[i]
        is_taken = op.name in PARTS and not op.is_boundary
        if not is_taken and not any(o in self._places for o in op.operands):
            return frozenset()
        below: Places = frozenset().union(*map(self.places_of, op.operands))
        return frozenset((a, (*path, v)) for a, path in below) if is_taken else below

    def places_of(self, v: int) -> "Places":
        """The places from which a value's elements are read; a value that a later iteration makes has none yet."""
        return self._places.get(v) or frozenset((a, ()) for a in self.sources.get(v, ()))

    def _is_spread(self, v: int) -> bool:
        """Whether a value reads too many places of one array."""
        places = self._places.get(v, ())
        return len(places) > MAX_PLACES and max(Counter(a for a, _ in places).values()) > MAX_PLACES

    def _is_gate(self, v: int, below: frozenset[int]) -> bool:
        """Whether an expensive activation is multiplied with another array in the forward phase and in the backward
        phase. The kernel that makes the forward product then writes the activation too (XLA, measured on GELU in
        float32)."""
        times = [u for u in self.uses.get(v, ()) if self.program.ops[u].name == "mul"]
        if len({read_phase(self.program.ops[u]) for u in times}) < 2 or not self._is_expensive_to_make(v):
            return False
        forward = [self.program.ops[u] for u in times if read_phase(self.program.ops[u]) is ReadPhase.FORWARD]
        others = [self.seen_through(o) for op in forward for o in op.operands if o != v]
        return any(o not in below and self._is_made_by_heavy(o) for o in others)

    def _is_expensive_to_make(self, v: int) -> bool:
        """Whether a value is computed on the fly by an expensive op, among others."""
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

    def seen_through(self, v: int) -> int:
        """The value under a chain of views."""
        op = self.program.ops[self.maker[v][0]]
        return self.seen_through(op.operands[0]) if is_view(op) else v

    def _is_made_by_heavy(self, v: int) -> bool:
        op_class = self.folded.class_of[self.maker[v][0]]
        return self.folded.is_heavy[op_class] and not self.folded.op(op_class).is_boundary

    @cached_property
    def random_bits(self) -> frozenset[int]:
        """Values computed from random bits and single numbers alone: masks and noise."""
        random: set[int] = set()
        plain: set[int] = set()
        for i, op in enumerate(self.program.ops):
            if op.name in RANDOM:
                random.update(op.results)
            elif all(self.program.values[v].num_bytes == self.program.values[v].itemsize for v in op.results):
                plain.update(op.results)
            elif self._is_fusible(i) and all(v in random or v in plain for v in op.operands):
                (plain if plain.issuperset(op.operands) else random).update(op.results)
        return frozenset(random)

    def _computed_in(self) -> dict[int, frozenset[ReadPhase]]:
        """Per value, the phases of the kernels that read it, or compute it on the fly."""
        found: dict[int, frozenset[ReadPhase]] = {}
        own = [_ALONE[read_phase(op)] for op in self.program.ops]
        for i in reversed(range(len(self.program.ops))):
            op = self.program.ops[i]
            for v in op.results:
                phases = {own[u] for u in self.uses.get(v, ())}
                found[v] = phases.pop() if len(phases) == 1 else frozenset().union(*phases)
            is_passed_on = is_view(op) or not any(self._is_wanted(i, v) for v in op.results)
            if op.results and self._is_fusible(i) and is_passed_on:
                own[i] = frozenset().union(*(found[v] for v in op.results))
        return found

    @memo
    def _is_wanted(self, i: int, v: int) -> bool:
        """Whether a light op's result is an array; remembered, as every reader asks."""
        op = self.program.ops[i]
        is_reduction = self.is_reduction[self.folded.class_of[i]]
        if v in self.random_bits and not is_reduction:
            read_in = {read_phase(self.program.ops[u]) for u in self.uses.get(v, ())}
            return len(read_in) > 1 or self._is_read_whole(v)
        if is_reduction or op.name.startswith(("random", "threefry", "rng")):
            return True
        if op.name.startswith("scatter"):
            return not self._is_scattered_into(v)
        if v in self.layouts.transposed or v in self.shared_constants:
            return True
        is_overwritten = any(self._is_scattered_into(o) for o in op.operands)
        return is_overwritten or self._is_read_whole(v) or self._is_added_to_product(v)

    def _is_added_to_product(self, v: int) -> bool:
        """Whether cuBLAS adds a product to a value, which it reads as an array (XLA, `GemmRewriter`)."""
        adding = [self.program.ops[u] for u in self.uses.get(v, ()) if self.program.ops[u].name in ADDITIONS]
        return not self._is_added_on(v) and any(
            self._num_bytes[v] == self._num_bytes[op.results[0]]
            and any(o != v and self._is_bare_product(o) for o in op.operands)
            for op in adding
        )

    def _is_bare_product(self, v: int) -> bool:
        """Whether a value is a product that nothing else reads, with or without a bias."""
        op = self.program.ops[self.maker[v][0]]
        if len(self.uses[v]) > 1 or op.op is None:
            return False
        if op.name in ADDITIONS:
            whole = [o for o in op.operands if self._num_bytes[o] == self._num_bytes[v]]
            return len(whole) == 1 and self._is_bare_product(whole[0])
        return op.name == PRODUCT or (is_view(op) and self._is_bare_product(op.operands[0]))

    def copied_as(self, i: int, operand: int) -> ConvolutionCopy | Order | None:
        """The copy of an operand that a library needs, in another order or with zeros; None if the op reads the operand
        itself."""
        op = self.program.ops[i]
        if op.name == CONVOLUTION:
            return convolution_copy(self.program, op, operand)
        return self.layouts.written_out(op, operand) if op.name == PRODUCT else None

    def _reads_itself(self, i: int, operand: int) -> bool:
        """Whether a library reads an operand, not a copy of it."""
        return (i, operand) not in self.joined and self.copied_as(i, operand) is None

    def is_at_library(self, v: int) -> bool:
        """Whether a product or a convolution makes or reads an array, or a view of it, without a copy."""
        seen = self.seen_through(v)
        return self.program.ops[self.maker[seen][0]].name in LIBRARIES or self.is_read_by_library(seen)

    def is_read_by_library(self, v: int) -> bool:
        """Whether a product or a convolution reads an array, or a view of it, without a copy."""
        for u in self.uses.get(v, ()):
            op = self.program.ops[u]
            if op.name in LIBRARIES:
                if any(o == v and self._reads_itself(u, i) for i, o in enumerate(op.operands)):
                    return True
            elif is_view(op) and not is_part(op) and any(map(self.is_read_by_library, op.results)):
                return True
        return False

    def _is_scattered_into(self, v: int) -> bool:
        """Whether a value is scattered to zeros and then added to another: XLA scatters into the other."""
        if self.program.ops[self.maker[v][0]].name != "scatter-add":
            return False
        return [self.program.ops[u].name for u in self.uses.get(v, ())] in (["add_any"], ["add"])

    def _is_read_whole(self, v: int) -> bool:
        """Whether an op that is not fused reads a value, or a view of it."""
        for u in self.uses.get(v, ()):
            op = self.program.ops[u]
            if is_part(op) or op.name == "enter":
                return True
            if is_view(op):
                if any(self._is_read_whole(r) for r in op.results):
                    return True
            elif op.name.startswith("scatter"):
                if v == op.operands[0] and len(self.uses[v]) > 1:
                    return True
            elif op.name in LIBRARIES:
                if any(o == v and self._reads_itself(u, n) for n, o in enumerate(op.operands)):
                    return True
            elif op.name not in LOOKUPS and not self._is_fusible(u):
                return True
        return False


def elements_read(fusion: Fusion) -> dict[int, dict[Place, float]]:
    """By value, the number of elements that a kernel reads at each place to compute it on the fly. For a part of a value, it
    reads as large a share of them. Elements are counted in the whole arrays, before any mesh."""
    found: dict[int, dict[Place, float]] = {}
    sizes = [float(prod(value.shape)) for value in fusion.program.values]
    for op in fusion.program.ops:
        read: dict[Place, float] = {}
        if not all(map(fusion.is_stored, op.results)):
            for o in op.operands:
                for place, size in found.get(o, {(o, ()): sizes[o]}).items():
                    read[place] = max(size, read.get(place, 0.0))
        for v in op.results:
            if fusion.is_stored(v):
                found[v] = {(v, ()): sizes[v]}
            elif op.name in PARTS:
                share = sizes[v] / max(1.0, sizes[op.operands[0]])
                found[v] = {(a, (*path, v)): share * size for (a, path), size in read.items()}
            else:
                found[v] = read
    return found
