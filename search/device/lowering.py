"""The program of one device under a full assignment: kernels, collectives, and the buffers between them.

The solver sees nodes and strategies. A device sees kernels: an op that is not fused, with the light ops that it
computes on the fly; a collective for every step of a resharding chain; and buffers, each with its local bytes. This
module lowers the flat program to that form. `search.device.kernel_order` puts the kernels in an order, from which the
memory and the time of a step follow.

Kernels of a loop's body stand between those before and after it; `loops` says in which loops a kernel is.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from autoshard.cost_model.memo import memo
from autoshard.search.device.handed_over import TurnedCopy, turned
from autoshard.search.device.kernel_times import KernelTime, Times, of_collective
from autoshard.search.device.sums_of_products import sums_of_products
from autoshard.search.device.workspace import Workspaces
from autoshard.search.ir.sharding import ReshardStep, SharedPaths
from autoshard.search.ir.spec import shard_shape
from autoshard.search.problem.convolution_copies import CONVOLUTION, ConvolutionCopy
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp, ReadPhase, read_phase
from autoshard.search.problem.fusion import is_part
from autoshard.search.problem.halos import HALO, Exchange
from autoshard.search.problem.kernels import runs_alone
from autoshard.search.problem.layouts import PRODUCT, Order
from autoshard.search.problem.live_ranges import LiveRanges, Resident
from autoshard.search.problem.memory_rows import Origin
from autoshard.search.problem.reshard import SLICE
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.strategy_graph import Port

TO_HOST, FROM_HOST = TRANSFERS = ("to host", "from host")
"""Kinds of communication with the host."""

SMALL_BYTES = 16 * 2**20
"""Largest array across which maxima are taken that is written rather than computed twice. Source: XLA on an H100,
softmaxes of grouped heads in float32: 8 and 16 MiB are written, 32 MiB are not."""

REWRITING = frozenset({CONVOLUTION, PRODUCT})
"""Ops whose kernels need operands in a layout of their own."""

Loops = tuple[tuple[int, int], ...]
"""Ranges of op positions, inner loops first."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """An array on one device.

    Attributes:
      num_bytes: its bytes; zero if it takes the memory of another array (a new state over the old one).
      resident: its kind.
      is_argument: whether it is held from the step's start to its end.
      loops: the loops in which it is made.
      origin: its value; None if its bytes depend on no single value.
      repeats: the number of arrays for which it stands, one of each of the corresponding blocks.
      alike: a key that it shares with its counterparts in other blocks; None where it has none.
    """

    num_bytes: float
    resident: Resident
    is_argument: bool
    loops: Loops
    origin: Origin | None = None
    repeats: int = 1
    alike: Hashable = None


@dataclass(frozen=True, slots=True)
class Communication:
    """A kernel's communication: a collective's kind, its mesh axes, bytes per device each time, and the dtype. A
    transfer between a device and its host is one over no axes."""

    kind: str
    axes: tuple[int, ...]
    num_bytes: float
    dtype: str

    @property
    def stream(self) -> str:
        """The stream that it occupies: the links between devices, or one direction of the link to the host."""
        return self.kind if self.kind in TRANSFERS else "collectives"


@dataclass(frozen=True, slots=True)
class Sums:
    """The dimensions over which a kernel sums, or takes another reduction."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copies:
    """The order of dimensions in which a kernel writes an array that it reads in another.

    Attributes:
      order: the order in which it writes.
      is_tiled: whether it writes tile by tile; a kernel that is a plain loop writes several orders at once.
    """

    order: Order
    is_tiled: bool = True


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on one device.

    Attributes:
      position: the position of its op in the flat program.
      reads: buffers that it reads.
      makes: buffers that it makes.
      after: kernels that must have run, besides the makers of the buffers that it reads.
      collective: its communication; None when it computes.
      workspace_bytes: workspace memory while it runs.
      time: time of all its runs in one step together.
      loops: the loops of the step that it is in.
      nest: the iteration space of a fused kernel; None for others.
      root: the dimensions over which a fused kernel reduces, or the order in which one that copies writes.
      parts: buffers of which it reads a slice alone, each with the slice.
      sliced: the stacks of which a matrix product reads a loop's part in place.
      turned: the copies of operands in another order that it needs if they are arguments of its program.
    """

    position: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    after: tuple[int, ...]
    collective: Communication | None
    workspace_bytes: float
    time: KernelTime
    loops: Loops
    nest: Hashable = None
    root: Sums | Copies | None = None
    parts: tuple[tuple[int, Hashable], ...] = ()
    sliced: tuple[int, ...] = ()
    turned: tuple[TurnedCopy, ...] = ()


@dataclass(frozen=True, eq=False)
class Lowered:
    """A device's kernels, in program order, and their buffers."""

    kernels: tuple[Kernel, ...]
    buffers: tuple[Buffer, ...]

    @cached_property
    def copied(self) -> frozenset[int]:
        """The buffers that are copied to the host."""
        kernels = (k for k in self.kernels if k.collective is not None and k.collective.kind == TO_HOST)
        return frozenset(b for k in kernels for b in k.reads)

    def reordered(self, order: Sequence[int]) -> "Lowered":
        """The program with its kernels in another order, listed by number."""
        place = {k: at for at, k in enumerate(order)}
        kernels = [self.kernels[k] for k in order]
        return replace(self, kernels=tuple(renumbered(kernels, place)))


def renumbered(kernels: Sequence[Kernel], number: Mapping[int, int]) -> list[Kernel]:
    """The kernels with new numbers for those that they must follow (`after`)."""
    return [
        replace(k, after=tuple(dict.fromkeys(number[a] for a in k.after))) if k.after else k for k in kernels
    ]


def lower(
    costed: CostedGraph, live_ranges: LiveRanges, chosen: Sequence[int], is_one_program: bool = True
) -> Lowered:
    """The kernels of one step under a full assignment of strategies, run by one program or by one for each of its
    tasks."""
    lowering = _Lowering(costed, live_ranges, chosen, is_one_program)
    for i in range(len(lowering.program.ops)):
        lowering.op(i)
        lowering.loop_ends(i + 1)
    lowering.finish()
    return Lowered(tuple(lowering.kernels), tuple(lowering.buffers))


def _halos(costed: CostedGraph, chosen: Sequence[int]) -> Iterator[tuple[int, tuple[Exchange, ...]]]:
    """By position, the exchanges of an op's halos."""
    folded, node_of = costed.graph.folded, costed.graph.node_of
    for k, members in enumerate(folded.members):
        if found := costed.exchanges(k).get(chosen[node_of[k]]):
            yield from ((i, found) for i in members)


class _Lowering:
    def __init__(
        self, costed: CostedGraph, live_ranges: LiveRanges, chosen: Sequence[int], is_one_program: bool
    ) -> None:
        self.halos = dict(_halos(costed, chosen))
        joined = ((i, one.operand) for i, halos in self.halos.items() for one in halos)
        live_ranges = live_ranges.with_copies(frozenset(joined))
        self.costed, self.live_ranges, self.chosen = costed, live_ranges, chosen
        self.folded, self.program = costed.graph.folded, live_ranges.program
        self.paths = ReshardPaths(costed, chosen)
        self.workspaces, self.times = Workspaces(self.paths, live_ranges.fusion), Times(costed, chosen)
        self.kernels: list[Kernel] = []
        self.buffers: list[Buffer] = []
        self.sources: dict[int, tuple[int, ...]] = {}
        self.shared = SharedPaths[tuple[int, ...]]()
        self.rewritten: dict[tuple[tuple[int, ...], Hashable, float], tuple[int, ...]] = {}
        self.looped: dict[Hashable, int] = {}
        self.last_backward: tuple[int, ...] = ()
        self.constants: set[int] = set()
        self.made_by: dict[int, int] = {}
        self.waits: dict[int, tuple[int, ...]] = {}
        self.mesh = costed.resharder.mesh
        self.at, self.num_made = 0, 0
        self.is_one_program = is_one_program
        self.sums = sums_of_products(live_ranges, self.paths, is_one_program)
        self.products = {one.addition: one.product for one in self.sums.values() if not one.is_in_place}
        self.additions = {one.addition for one in self.sums.values()}
        self.places = live_ranges.places
        self.resharded = self._resharded()
        self.carried = self._carried()

    def _resharded(self) -> frozenset[int]:
        """Values that a collective reads; they are arrays even if their makers are light."""
        found = set[int]()
        for (i, operand), values in self.folded.values_read:
            if any(s.kind != SLICE for s in self.paths.to_reader(i, operand).path):
                found |= values
        return frozenset(found)

    # --- kernels

    def op(self, i: int) -> None:
        """Lowers one op: to an argument's buffer, to nothing if it is fused with its readers, or to kernels."""
        self.at, self.num_made = i, 0
        op = self.program.ops[i]
        if op.name == "input":
            self._argument(op)
            return
        read = self._reads(i)
        if i in self.additions:  # by the product that is added
            summed = self.sources[self.products[i]] if i in self.products else read
            self.sources |= dict.fromkeys(op.results, summed)
            return
        if op.results and self.live_ranges.fusion.shared_constants.issuperset(op.results):
            (v,) = op.results
            local_bytes = self.paths.local_bytes(v, self.paths.made(v))
            self.sources[v] = (self._buffer(local_bytes, Resident.TEMPORARIES, (), False, self._made_at(v)),)
            self.constants.update(self.sources[v])
            return
        if self._is_converted_on_arrival(i, op):
            self.sources |= dict.fromkeys(op.results, read)
            return
        is_array = any(
            v in self.resharded or self.live_ranges.fusion.is_stored(v) or self._is_kept_as_small(v)
            for v in op.results
        )
        if is_array or self._is_copied_part(i, op):
            self._kernels(i, op, read)
        else:
            self.sources |= dict.fromkeys(op.results, read)
            if waits := self._waits(op):
                self.waits |= dict.fromkeys(op.results, waits)

    def _is_converted_on_arrival(self, i: int, op: FlatOp) -> bool:
        """Whether an op's result is only read after it moved in the narrower type from which the op converts it: then
        those devices convert it that it reaches."""
        if (self.folded.class_of[i], 0) not in self.costed.graph.widened:
            return False
        (v,) = op.results
        ways = [self.paths.to_reader(*read).path for read in self._readers(v)]
        return not self.paths.to_rest(v) and bool(ways) and all(way and way[0].is_narrowed for way in ways)

    def _readers(self, v: int) -> Iterator[tuple[int, int]]:
        """The ops that read a value, each with the operand that it is."""
        for i in dict.fromkeys(self.program.uses.get(v, ())):
            yield from ((i, n) for n, o in enumerate(self.program.ops[i].operands) if o == v)

    def _is_kept_as_small(self, v: int) -> bool:
        """Whether the kernel that takes maxima across an array also writes it, for later ones to read."""
        is_across = v in self.live_ranges.fusion.layouts.across
        return is_across and self.paths.local_bytes(v, self.paths.made(v)) <= SMALL_BYTES

    def _waits(self, op: FlatOp) -> tuple[int, ...]:
        """The kernels before a barrier that an op, or a light op that it computes on the fly, must follow; those of an
        earlier loop, where another one goes on with its carries."""
        found = [
            k
            for v in self._carried_before(op)
            for b in self.sources[v]
            if (k := self.made_by.get(b)) is not None
        ]
        if not (self.waits or op.after):
            return tuple(dict.fromkeys(found))
        found += [k for v in op.operands for k in self.waits.get(v, ())]
        found += [self.made_by[b] for v, _ in op.after for b in self._as_first_read(v) if b in self.made_by]
        return tuple(dict.fromkeys(found))

    def _carried_before(self, op: FlatOp) -> list[int]:
        """The last values of the earlier loops whose carries a loop's carry begins with."""
        makers = (self.program.ops[self.live_ranges.maker[v][0]] for v in op.operands if op.name == "carry")
        last = (maker.operands[-1] for maker in makers if maker.name == "carry" and maker.operands)
        return [v for v in last if v in self.sources]

    def _as_first_read(self, v: int) -> tuple[int, ...]:
        """A value's buffers in the spec of the first op that reads it."""
        read = self.paths.first_read(v)
        return self.sources[v] if read is None else self._sent(read[0], *read)

    def _is_copied_part(self, i: int, op: FlatOp) -> bool:
        """Whether a loop copies its part of a stack: a gathered stack has another layout than its readers need."""
        return is_part(op) and any(s.kind != SLICE for s in self.paths.to_reader(i, 0).path)

    def _argument(self, op: FlatOp) -> None:
        (v,) = op.results
        role = self.live_ranges.resident_of_argument(op)
        held_bytes = (
            0.0 if self.program.values[v].is_on_host else self.paths.local_bytes(v, self.paths.made(v))
        )
        self.sources[v] = (self._buffer(held_bytes, role, (), True, self._made_at(v)),)

    def _kernels(self, i: int, op: FlatOp, read: tuple[int, ...]) -> None:
        """Makes an op's own kernel, and the collectives that bring its results to rest."""
        loops, one = self._loops(i, op), self.sums.get(i)
        read += self.sources[one.addend] if one else ()
        is_in_place = one is not None and one.is_in_place
        makes = tuple(
            self._buffer(
                0.0 if is_in_place else self._bytes_made(v),
                self.live_ranges.resident(v),
                loops,
                False,
                self._made_at(v),
            )
            for v in op.results
        )
        self.sources |= {v: (b,) for v, b in zip(op.results, makes, strict=True)}
        if read_phase(op) is ReadPhase.UPDATE:  # a convolution's kernel is updated in the layout of its copy
            copies = (self.rewritten.get(((b,), 1, self.buffers[b].num_bytes), ()) for b in read)
            read += tuple(copy for found in copies for copy in found)
        lower = self._transfer if op.is_transfer else self._kernel
        kernel = lower(i, read, makes, self._waits(op))
        if op.op is not None and read_phase(op) is ReadPhase.BACKWARD:
            self.last_backward = (kernel,)
        for v in op.results:
            for axes, num_bytes in self.reductions(self.folded.class_of[i]):
                summed = Communication("all-reduce", axes, num_bytes, str(self.program.values[v].dtype))
                made = self._launched(i, v, self.sources[v], summed, (), num_bytes)
                self.buffers[made] = replace(self.buffers[made], origin=self._made_at(v))
                self.sources[v] = (made,)
            for step in self.paths.to_rest(v):
                self.sources[v] = self._taken(i, v, "", self._resting_at(v), self.sources[v], step)

    def _reads(self, i: int) -> tuple[int, ...]:
        """The buffers that an op reads, also through its fused operands."""
        op = self.program.ops[i]
        read: dict[int, None] = {}
        for operand, v in enumerate(op.operands):
            if v not in self.sources:
                continue  # a body's result that a carry reads, which is made later
            source = self.sources[v]
            if self.paths.to_reader(i, operand).path:
                source = self._sent(i, i, operand, self._arriving_at(i, operand))
            read |= dict.fromkeys(self._rewritten(i, operand, source))
        return tuple(read)

    def _rewritten(self, i: int, operand: int, source: tuple[int, ...]) -> tuple[int, ...]:
        """The buffers that an op reads instead of its operand. cuDNN reads a transposed copy of a kernel that is an
        argument. cuDNN and cuBLAS read a copy of an operand in another layout than they need, and of a device's part of
        a whole array. A copy serves all ops with the same need, the backward phase's too."""
        op = self.program.ops[i]
        if halos := [one for one in self.halos.get(i, ()) if one.operand == operand]:
            return self._with_halos(i, operand, source, halos)
        if op.name not in REWRITING:
            return source
        copy = self.workspaces.copied_as(i, operand)
        is_kernel = op.name == CONVOLUTION and operand == 1
        if copy is not None:
            v = op.operands[operand]
            read: Hashable = (self.live_ranges.fusion.seen_through(v), copy)
            num_bytes = self.workspaces.copied_bytes(i, operand)
            if isinstance(copy, ConvolutionCopy):
                return self._copied(i, operand, source, read, num_bytes, (copy.spatial, num_bytes))
            seen = self.live_ranges.fusion.seen_through(v)
            shape, spec = self.program.values[seen].shape, self.paths.made(seen)
            part = shard_shape(spec, shape, self.mesh.shape)
            itemsize = self.program.values[v].itemsize
            root = Copies(copy, self.live_ranges.fusion.layouts.is_tiled(seen, copy, part, itemsize))
            return self._copied(i, operand, source, read, num_bytes, (shape, spec), root)
        if is_kernel and all(self.buffers[b].is_argument for b in source):
            return self._copied(
                i, operand, source, operand, sum(self.buffers[b].num_bytes for b in source), None
            )
        reshard = self.paths.to_reader(i, operand)
        steps = reshard.path
        if steps and steps[-1].kind == SLICE:  # neither reads a part of an array that every device has
            num_bytes = self.paths.local_bytes(op.operands[operand], steps[-1].after)
            return self._copied(
                i, operand, source, steps[-1].after, num_bytes, None, after=self._tie(reshard.phase)
            )
        return source

    def _with_halos(
        self, i: int, operand: int, source: tuple[int, ...], halos: Sequence[Exchange]
    ) -> tuple[int, ...]:
        """The buffers in which an op reads an operand and its halos. A convolution reads them as one array, with its zeros;
        other kernels join them on the fly."""
        op, v = self.program.ops[i], self.program.ops[i].operands[operand]
        dtype = str(self.program.values[v].dtype)
        sends = (Communication(HALO, one.axes, sent, dtype) for one in halos for sent in one.sent)
        rows = tuple(self._launched(i, v, source, send, (), send.num_bytes) for send in sends)
        if op.name not in REWRITING:
            return source + rows
        port = self._read_at(i, operand).port
        copied_bytes = self.workspaces.copied_bytes(i, operand)
        part_bytes = copied_bytes or self.paths.local_bytes(v, self.paths.spec(port))
        return self._copied(
            i, operand, source + rows, HALO, prod(one.growth for one in halos) * part_bytes, None
        )

    def _copied(
        self,
        i: int,
        operand: int,
        source: tuple[int, ...],
        read: Hashable,
        num_bytes: float,
        nest: Hashable,
        root: Copies | None = None,
        after: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """A copy of an array, made once. Copies of one array in several orders share a kernel, if their kernels are
        plain loops."""
        key = (source, read, num_bytes)
        if key not in self.rewritten:
            loops, runs = self.live_ranges.loops_at[i], self.program.ops[i].count
            origin = self._read_at(i, operand)
            made = (self._buffer(num_bytes, Resident.TEMPORARIES, loops, False, origin),)
            time = self.times.of_moving(2 * num_bytes) * runs
            kernel = Kernel(i, source, made, after, None, 0.0, time, loops, nest, root)
            looped = (source, nest, loops) if root and not root.is_tiled else None
            if looped in self.looped:
                self._add(kernel, self.looped[looped])
            else:
                k = self._append(kernel)
                self.looped |= {looped: k} if looped else {}
            self.rewritten[key] = made
        return self.rewritten[key]

    def _add(self, kernel: Kernel, k: int) -> None:
        """Adds the results of a kernel to those of another one."""
        one = self.kernels[k]
        self.kernels[k] = replace(one, makes=(*one.makes, *kernel.makes), time=one.time + kernel.time)
        self.made_by |= dict.fromkeys(kernel.makes, k)

    def _made_at(self, v: int) -> Origin:
        """The origin of an array in the spec in which a value is made."""
        i, r = self.live_ranges.maker[v]
        return Origin(self.costed.graph.ports[self.folded.class_of[i], r, True])

    def _resting_at(self, v: int) -> Origin:
        """The origin of an array in the spec in which a value rests."""
        i, r = self.live_ranges.maker[v]
        rest = self.costed.graph.copy_of.get((self.folded.class_of[i], r, ReadPhase.REST))
        return Origin(Port(rest.node, ())) if rest else self._made_at(v)

    def _read_at(self, i: int, operand: int) -> Origin:
        """The origin of an array in the spec in which an op reads an operand."""
        return Origin(self.costed.graph.ports[self.folded.class_of[i], operand, False])

    def _arriving_at(self, i: int, operand: int) -> Origin:
        """The origin of an operand that is resharded for an op."""
        return replace(
            self._read_at(i, operand), source=self.paths.resting(self.program.ops[i].operands[operand])
        )

    def _sent(self, at: int, i: int, operand: int, origin: Origin | None = None) -> tuple[int, ...]:
        """The buffers in which an op gets an operand, its collectives launched at `at`."""
        v, reshard = self.program.ops[i].operands[operand], self.paths.to_reader(i, operand)
        take = partial(self._taken, at, v, reshard.phase, origin)
        read = v, self.program.ops[i].operand_counts[operand]
        return self.shared.arrive(read, reshard, lambda: self.sources[v], take)

    def _taken(
        self,
        i: int,
        v: int,
        phase: str,
        origin: Origin | None,
        source: tuple[int, ...],
        step: ReshardStep,
    ) -> tuple[int, ...]:
        """The buffers after a step of a reshard."""
        if step.kind == SLICE:
            return source
        moved = self.paths.moved(v, step)
        share = moved.itemsize / self.program.values[v].itemsize
        what = Communication(step.kind, step.axes, step.num_bytes, str(moved.dtype))
        num_bytes = share * self.paths.local_bytes(v, step.after)
        made = self._launched(i, v, source, what, self._tie(phase), num_bytes)
        if step.is_narrowed and self._is_widened(v):
            made = self._converted(i, v, made, step)
        self.buffers[made] = replace(self.buffers[made], origin=origin)
        return (made,)

    def _is_widened(self, v: int) -> bool:
        """Whether a value is an array that was converted from a narrower type."""
        i, r = self.live_ranges.maker[v]
        is_widened = (self.folded.class_of[i], r) in self.costed.graph.widened
        return is_widened and self.live_ranges.fusion.is_stored(v)

    def _converted(self, i: int, v: int, narrow: int, step: ReshardStep) -> int:
        """The buffer of a value that has moved in a narrower type, and is converted where it arrives."""
        moving, num_bytes = self.kernels[-1], self.paths.local_bytes(v, step.after)
        made = self._buffer(num_bytes, self.live_ranges.resident(v), moving.loops, False)
        time = self.times.of_moving(self.buffers[narrow].num_bytes + num_bytes) * self.program.ops[i].count
        self._append(replace(moving, reads=(narrow,), makes=(made,), after=(), collective=None, time=time))
        return made

    def _tie(self, phase: str) -> tuple[int, ...]:
        """The kernels that a reshard of a phase must follow: in the backward phase, its last kernel so far."""
        return self.last_backward if phase == ReadPhase.BACKWARD.value else ()

    def _launched(
        self,
        i: int,
        v: int,
        source: tuple[int, ...],
        what: Communication,
        after: tuple[int, ...],
        made_bytes: float,
    ) -> int:
        """The buffer that a collective fills."""
        loops, runs = self.live_ranges.loops_at[i], self.program.ops[i].count
        if is_part(self.program.ops[i]):  # the whole stack travels, before the loop
            loops, runs = loops[1:], self.program.ops[self.live_ranges.maker[v][0]].count
        made = self._buffer(made_bytes, self.live_ranges.resident(v), loops, False)
        time = of_collective(self.mesh, what.kind, what.axes, what.num_bytes) * runs
        self._append(Kernel(i, source, (made,), (*after, *self.waits.get(v, ())), what, 0.0, time, loops))
        return made

    @memo
    def reductions(self, op_class: int) -> list[tuple[tuple[int, ...], float]]:
        """The all-reduces that an op's own group resolves where the op runs: mesh axes and bytes per device. Numbers that
        are reduced behind their loop are left out."""
        graph = self.costed.graph
        is_late = graph.num_reductions[op_class] < self.folded.counts[op_class]
        strategy = self.chosen[graph.node_of[op_class]]
        return [
            (axes, float(local[at.tolist().index(strategy)]))
            for axes, at, local, _ in self.costed.reductions(op_class)
            if strategy in at and not is_late
        ]

    def _kernel(self, i: int, reads: tuple[int, ...], makes: tuple[int, ...], after: tuple[int, ...]) -> int:
        moved = sum(self.buffers[b].num_bytes for b in (*reads, *makes))
        time = self.times.of_op(i, moved) * self.program.ops[i].count
        if self.program.ops[i].name == "stack":
            time = replace(time, seconds=self._stacking_s(i))
        loops, workspaces = self.live_ranges.loops_at[i], self.workspaces.num_bytes(i)
        nest, root = self._nest(i) if makes else (None, None)
        sliced, parts = self._sliced(i) if workspaces else (), () if nest is None else self._parts(i)
        copies = () if self.is_one_program else tuple(self._turned(i, reads))
        return self._append(
            Kernel(i, reads, makes, after, None, workspaces, time, loops, nest, root, parts, sliced, copies)
        )

    def _parts(self, i: int) -> tuple[tuple[int, Hashable], ...]:
        """The buffers of which a fused kernel reads a slice alone."""
        places = {
            place for v in self.program.ops[i].operands for place in self.live_ranges.fusion.places_of(v)
        }
        slices = defaultdict[int, set[Hashable]](set)
        for v, path in places:
            for b in self.sources.get(v, ()):
                slices[b].add(path)
        return tuple(
            (b, next(iter(paths)))
            for b, paths in sorted(slices.items())
            if len(paths) == 1 and () not in paths
        )

    def _stacking_s(self, i: int) -> float:
        """Seconds to write the slices of a stack, one in each iteration."""
        op = self.program.ops[i]
        sliced = sum(self.paths.local_bytes(v, self.paths.made(v)) for v in op.operands)
        return self.times.of_moving(2 * sliced).seconds * op.count

    def _turned(self, i: int, reads: tuple[int, ...]) -> Iterator[TurnedCopy]:
        for operand, v in enumerate(self.program.ops[i].operands):
            source = self.sources.get(v, ())
            if len(source) == 1 and source[0] in reads:
                copy = turned(self.paths, self.live_ranges.fusion, i, operand, source[0])
                yield from () if copy is None else (copy,)

    def _sliced(self, i: int) -> tuple[int, ...]:
        operands = self.program.ops[i].operands
        parts = (v for n, v in enumerate(operands) if self.workspaces.is_part_of_stack(i, n))
        return tuple(b for v in parts for b in self.sources[v])

    def _transfer(
        self, i: int, reads: tuple[int, ...], makes: tuple[int, ...], after: tuple[int, ...]
    ) -> int:
        """A copy between the device and its host."""
        op = self.program.ops[i]
        (v,) = op.results
        num_bytes = self.paths.local_bytes(v, self.paths.made(v))
        kind = TO_HOST if self.program.values[v].is_on_host else FROM_HOST
        what = Communication(kind, (), num_bytes, str(self.program.values[v].dtype))
        time = self.times.of_op(i, num_bytes) * op.count
        return self._append(Kernel(i, reads, makes, after, what, 0.0, time, self.live_ranges.loops_at[i]))

    def _nest(self, i: int) -> tuple[Hashable, Sums | None]:
        """A fused kernel's iteration space, as a shape and its spec, and the dimensions of its reduction, if it has
        one. None for a kernel that writes in another order than it reads."""
        op, op_class = self.program.ops[i], self.folded.class_of[i]
        is_turned = not self.live_ranges.fusion.layouts.transposed.isdisjoint(op.results)
        if op.is_boundary or is_turned or runs_alone(self.folded, op_class):
            return None, None
        if self.live_ranges.fusion.is_reduction[op_class]:
            assert op.op is not None
            spec = self.paths.spec(self.costed.graph.ports[op_class, 0, False])
            axes = tuple(op.op.params.get("axes", ()))
            return ((self.program.values[op.operands[0]].shape, spec), Sums(axes)) if axes else (None, None)
        largest = max((*op.operands, *op.results), key=lambda v: len(self.program.values[v].shape))
        return (self.program.values[largest].shape, self.paths.made(largest)), None

    def _append(self, kernel: Kernel) -> int:
        constants = self.constants.intersection(kernel.reads)
        if constants:
            kernel = replace(
                kernel,
                reads=tuple(b for b in kernel.reads if b not in constants),
                makes=(*kernel.makes, *(self._constant(b, kernel.loops) for b in sorted(constants))),
            )
        self.kernels.append(kernel)
        self.made_by |= dict.fromkeys(kernel.makes, len(self.kernels) - 1)
        return len(self.kernels) - 1

    def _constant(self, pattern: int, loops: Loops) -> int:
        """An array of one number: XLA makes a new one for each kernel that reads it, right before it."""
        return self._buffer(self.buffers[pattern].num_bytes, Resident.TEMPORARIES, loops, False)

    def _buffer(
        self,
        num_bytes: float,
        resident: Resident,
        loops: Loops,
        is_argument: bool,
        origin: Origin | None = None,
    ) -> int:
        repeats = self.program.ops[self.at].repeats
        self.num_made += 1
        place = self.places[self.at] if self.places else None
        alike = None if place is None else (place, self.num_made, num_bytes)
        self.buffers.append(Buffer(num_bytes, resident, is_argument, loops, origin, repeats, alike))
        return len(self.buffers) - 1

    def _loops(self, i: int, op) -> Loops:
        """The loops in which a result lives; a loop's stack lives outside of the loop."""
        inside = self.live_ranges.loops_at[i]
        return inside[1:] if op.name == "stack" else inside

    def _bytes_made(self, v: int) -> float:
        if self.program.values[v].is_on_host or (v in self.program.in_place and v not in self.resharded):
            return 0.0
        return self.paths.local_bytes(v, self.paths.made(v))

    def _carried(self) -> dict[tuple[int, int], list[tuple[int, int]]]:
        """By loop: (position of the carry, its operand) of the values that the body passes to its next run."""
        found: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, op in enumerate(self.program.ops):
            if op.name == "carry":
                for operand, v in enumerate(op.operands):
                    for loop in self.live_ranges.loops_at[self.live_ranges.maker[v][0]]:
                        if loop not in self.live_ranges.loops_at[i] and loop[0] > i:
                            found.setdefault(loop, []).append((i, operand))
                            break
        return found

    def loop_ends(self, position: int) -> None:
        """Keeps the values that a body passes to its next run until the body's end."""
        for loop in [k for k in self.carried if k[1] == position]:
            read: dict[int, None] = {}
            for i, operand in self.carried[loop]:
                read |= dict.fromkeys(self._sent(position - 1, i, operand))
            self._kernel(position - 1, tuple(read), (), ())

    def finish(self) -> None:
        """Reshards the new state to where the old one rests, and into its memory unless it has another type."""
        for i, op in enumerate(self.program.ops):
            if op.name == "input":
                for operand, v in enumerate(op.operands):
                    if any(s.kind != SLICE for s in self.paths.to_reader(i, operand).path):
                        at = self.live_ranges.maker[v][0]
                        made = self._sent(at, i, operand)
                        for b in () if self.program.ops[at].name == "output" else made:
                            self.buffers[b] = replace(self.buffers[b], num_bytes=0.0)
