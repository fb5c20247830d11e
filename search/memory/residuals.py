"""Residuals: the forward values that the backward phase needs, with the cost to keep and to recompute each.

Each graph that holds both phases gives one problem. So does each body of a forward loop whose residuals a backward loop
reads; there, a kept value is stacked, once for each iteration. Times and bytes are those of one device, under a solution's
strategies.

* Arguments, constants and slices of stacked arguments are available in the backward phase anyway.
* A value that is not stored (`search.problem.fusion`) is computed on the fly at no cost, if its sources are available. So
  are the maxima and row sums of a softmax.
* A loop's stack is filled with zeros, written and read for the residual alone (`search.problem.kernels`). Recomputation may
  be faster, even with memory to spare.
* A needed value is kept if it crosses from one segment to the next (`search.memory.segments`), or is a loop's carry.
* A residual that the backward phase reads soon after its last forward read counts for at most the bytes made in between.
* Light ops on parameters, keys and constants alone (a cast, a mask) may always be recomputed. Offloaded parameters may be
  fetched once more.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.cost_model.compute import kernel_s
from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import EFFECTFUL, Equivalence, Graph, Op, Phase, Role, Site, Step, walk
from autoshard.search.ir.sharding import Place
from autoshard.search.memory.loop_pairs import loop_pairs
from autoshard.search.memory.loop_segments import LoopSegments, cut_loop, obstacle, segments_site
from autoshard.search.memory.min_cut import Recomputation, cheapest
from autoshard.search.memory.passes import Passes
from autoshard.search.memory.peak_left import first_reads, last_reads
from autoshard.search.memory.segment_lengths import LoopCut
from autoshard.search.memory.segments import segments
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import BARRIER
from autoshard.search.problem.fusion import Fusion
from autoshard.search.problem.kernels import MAXIMA, FusedKernel, is_by_rows


@dataclass(frozen=True, eq=False)
class Residuals:
    """The ops of one graph that may be recomputed.

    Attributes:
      problem: its ops and values.
      sites: the site of each op, a loop's for its carries; None for an op that holds both phases.
      is_stored: of each op: whether it makes an array, or is computed on the fly.
      blocks: of each op: its block, and the number of blocks that this one represents.
      is_loop: whether this is a loop's body, whose iterations are all alike.
      cut: of a loop that may be cut into segments.
      length: the number of iterations of a loop.
    """

    problem: Recomputation
    sites: tuple[Site | None, ...]
    is_stored: tuple[bool, ...]
    blocks: tuple[tuple[int, int], ...]
    is_loop: bool
    cut: LoopCut | None = None
    length: int = 1

    def prices(self, low: float, high: float, share: float) -> np.ndarray:
        """[values]: the high price for all values of a loop, and for those that a share of the ops makes; the low price for
        the rest."""
        return np.where(self._is_in(share)[self.problem.maker] | self.is_loop, high, low)

    def _is_in(self, share: float) -> np.ndarray:
        """[ops]: whether an op is in a share of all ops, each counted once per repetition of its block. Blocks are taken in
        program order while they fit: the residuals made first are held longest, and recomputed when nearly all others are
        gone."""
        sizes = Counter[int]()
        for block, repeats in self.blocks:
            sizes[block] += repeats
        left, chosen = share * sizes.total(), set[int]()
        for block, size in sizes.items():
            if size <= left:
                chosen.add(block)
                left -= size
        return np.array([block in chosen for block, _ in self.blocks], bool)

    def chosen(self, low: float, high: float, share: float, may_be_cut: bool) -> frozenset[Site]:
        """The sites to recompute at a high price for a share of the ops, and at a low one for the rest. Of a loop that is
        cut into segments at the high price alone, a share of the iterations is."""
        found = self.recomputed(self.prices(low, high, share), may_be_cut)
        segments = self._segments(found)
        if self.cut is None or segments is None or share >= 1.0:
            return found
        less = self.recomputed(low, may_be_cut)
        if share == 0.0 or self._segments(less):
            return less if share == 0.0 else found
        whole, some = (
            segments_site(self.cut.loop, one) for one in (segments, self.cut.up_to(share, segments))
        )
        return found - {whole} | {some}

    def recomputed(self, price_s_per_byte: float | np.ndarray, may_be_cut: bool = False) -> frozenset[Site]:
        """The sites to recompute at a price per kept byte; among them that of a cut into segments, if the loop may be cut
        and is cheapest so."""
        found = self._recomputed(price_s_per_byte)
        price = float(np.max(price_s_per_byte, initial=0.0))
        for sites in self._in_segments(price) if may_be_cut else ():
            if self._cost_s(sites, price) >= self._cost_s(found, price):
                break
            found = sites
        return found

    def _cost_s(self, sites: frozenset[Site], price_s_per_byte: float) -> float:
        return self.seconds(sites) + price_s_per_byte * self.kept_bytes(sites)

    def _in_segments(self, price_s_per_byte: float) -> Iterator[frozenset[Site]]:
        """The sites to recompute with the loop cut, by one level, by two, and so on. Segments hold the residuals of few
        iterations at a time, so that less is recomputed inside of an iteration."""
        cut, before = self.cut, -1
        if cut is None:
            return
        every_bytes = self.all_bytes / cut.length
        while len(lengths := cut.shortest(before + 2, every_bytes)) > before + 1:
            before += 1
            share = (lengths[-1] + cut.length % lengths[0]) / cut.length
            sites = self._recomputed(price_s_per_byte * share)
            lengths = cut.shortest(before + 1, self._kept_bytes(sites) / cut.length)
            yield sites | {segments_site(cut.loop, LoopSegments(lengths))} if lengths else sites

    def _recomputed(self, price_s_per_byte: float | np.ndarray) -> frozenset[Site]:
        """The ops to recompute at a price per kept byte.

        An op that is computed on the fly is listed in two cases only: it reads a listed op, or a listed op reads it. In the
        second case its result would otherwise become an array on the way.
        """
        runs, is_stored = cheapest(self.problem, price_s_per_byte), np.array(self.is_stored, bool)
        is_listed = is_stored & runs
        for op in np.flatnonzero(runs).tolist():
            is_listed[op] |= any(is_listed[made] for made in self._made_of[op])
        for op in np.flatnonzero(runs)[::-1].tolist():
            if is_listed[op]:
                is_listed[[made for made in self._made_of[op] if not is_stored[made]]] = True
        return frozenset(
            site for site, one in zip(self.sites, is_listed, strict=True) if one and site is not None
        )

    @cached_property
    def _made_of(self) -> list[list[int]]:
        """By op, the ops that make its operands."""
        return [[self._maker[v] for v in values] for values in self.problem.reads]

    def kept_bytes(self, sites: frozenset[Site]) -> float:
        """Bytes kept for the backward phase if these sites are recomputed."""
        kept_bytes = self._kept_bytes(sites)
        if self.cut and (segments := self._segments(sites)):
            return self.cut.held_bytes(segments, kept_bytes / self.cut.length)
        return kept_bytes

    def _kept_bytes(self, sites: frozenset[Site]) -> float:
        """Bytes of all residuals that are not recomputed one by one."""
        return float(sum(self.problem.num_bytes[v] for v in self._kept(sites)))

    def _segments(self, sites: frozenset[Site]) -> LoopSegments | None:
        """The segments into which the loop is cut; None if it is not."""
        cuts = map(cut_loop, sites) if self.cut else ()
        return next((segments for loop, segments in cuts if self.cut and loop == self.cut.loop), None)

    @memo
    def _kept(self, sites: frozenset[Site]) -> set[int]:
        """The values that are kept if these sites are recomputed."""
        runs = [not stored or site in sites for site, stored in zip(self.sites, self.is_stored, strict=True)]
        wanted, maker = set(self.problem.needed), self._maker
        left = list(wanted)
        while left:
            op = maker[left.pop()]
            fresh = [v for v in self.problem.reads[op] if v not in wanted] if runs[op] else []
            wanted.update(fresh)
            left += fresh
        return {v for v in wanted if not runs[maker[v]]}

    @cached_property
    def _maker(self) -> list[int]:
        """By value, the op that makes it."""
        return self.problem.maker.tolist()

    def kept(self, sites: frozenset[Site]) -> list[tuple[Site, float]]:
        """The ops whose results are kept if these sites are recomputed, with their bytes, in program order."""
        found: dict[Site, float] = {}
        for v in sorted(self._kept(sites)):
            site = self.sites[self.problem.maker[v]]
            if site is not None and np.isfinite(self.problem.num_bytes[v]):
                found[site] = found.get(site, 0.0) + float(self.problem.num_bytes[v])
        return list(found.items())

    def may_offload(self, sites: frozenset[Site]) -> bool:
        """True if what is kept may wait on the host: outside of loops, or as stacks of a loop that is not cut into
        segments."""
        return self._segments(sites) is None

    def is_read_as_it_is(self, site: Site) -> bool:
        """True if no value is computed on the fly from an op's results."""
        return site not in self._read_on_the_fly

    @cached_property
    def _read_on_the_fly(self) -> frozenset[Site | None]:
        reads = zip(self.problem.reads, self.is_stored, strict=True)
        read = {v for values, is_stored in reads if not is_stored for v in values}
        return frozenset(self.sites[self.problem.maker[v]] for v in read)

    def recomputed_with(self, sites: frozenset[Site], offloaded: frozenset[Site]) -> frozenset[Site]:
        """The sites to recompute if some results (`offloaded`) are kept on the host. Ops that are computed on the fly
        from recomputed or offloaded results are included: the backward phase computes them from its own copies."""
        moved = [site in sites or site in offloaded for site in self.sites]
        for op, values in enumerate(self.problem.reads):
            if not self.is_stored[op]:
                moved[op] |= any(moved[self.problem.maker[v]] for v in values)
        again = (
            s
            for s, one in zip(self.sites, moved, strict=True)
            if one and s is not None and s not in offloaded
        )
        return frozenset(again)

    @cached_property
    def all_bytes(self) -> float:
        """Bytes kept if no op is recomputed."""
        return self.kept_bytes(frozenset())

    def seconds(self, sites: frozenset[Site]) -> float:
        """Seconds to recompute these sites, and to keep the remaining residuals."""
        recompute_s = sum(s for s, site in zip(self.problem.op_s, self.sites, strict=True) if site in sites)
        keep_s = np.broadcast_to(self.problem.keep_s, len(self.problem.maker))
        if self.cut and (segments := self._segments(sites)):
            recompute_s += self.cut.seconds(segments)
        return float(recompute_s + sum(keep_s[v] for v in self._kept(sites)))


def residuals(costed: CostedGraph, fusion: Fusion, strategies: Sequence[int]) -> tuple[Residuals, ...]:
    """The residuals of a step, graph by graph.

    Returns:
      One problem for each graph that holds both phases, followed by those of its loops.
    """
    reader = _Reader(costed, fusion, strategies)
    found: list[Residuals] = []
    for path, graph in walk(costed.graph.folded.program.step.graph):
        phases = {op.phase for op in graph.ops}
        if {Phase.FORWARD, Phase.BACKWARD} <= phases:
            found.append(reader.of_graph(path, graph))
            found += [reader.of_loop(path, graph, f, readers) for f, readers in loop_pairs(graph).items()]
    return tuple(found)


def has_loops(step: Step) -> bool:
    """True if loops stack residuals."""
    return any(loop_pairs(graph) for _, graph in walk(step.graph))


class _Ledger:
    """Collects a graph's ops and values."""

    def __init__(self) -> None:
        self.number: dict[int, int] = {}
        self.sites: list[Site | None] = []
        self.is_stored: list[bool] = []
        self.blocks: list[tuple[int, int]] = []
        self.op_s: list[float] = []
        self.reads: list[list[int]] = []
        self.maker: list[int] = []
        self.num_bytes: list[float] = []
        self.keep_s: list[float] = []

    def add(
        self,
        site: Site | None,
        seconds: float,
        operands: Sequence[int],
        results: Sequence[int],
        num_bytes: Sequence[float],
        keep_s: Sequence[float] = (),
        equivalence: Equivalence | None = None,
    ) -> None:
        """Adds an op or a carry; a value that is not stored has infinitely many bytes.

        An op with both stored results and results computed on the fly counts as two ops with the same operands.
        """
        each = [*zip(results, num_bytes, keep_s or (0.0,) * len(results), strict=True)]
        for is_stored in sorted({bool(np.isfinite(n)) for n in num_bytes} or {False}):
            own = [(v, n, s) for v, n, s in each if np.isfinite(n) == is_stored]
            self._add(site, seconds, operands, own, is_stored, equivalence)

    def _add(
        self,
        site: Site | None,
        seconds: float,
        operands: Sequence[int],
        results: Sequence[tuple[int, float, float]],
        is_stored: bool,
        equivalence: Equivalence | None,
    ) -> None:
        op = len(self.sites)
        self.sites.append(site)
        self.is_stored.append(is_stored)
        self.blocks.append(
            (equivalence.block, equivalence.repeats)
            if equivalence and equivalence.block >= 0
            else (-1 - op, 1)
        )
        self.op_s.append(seconds if is_stored else 0.0)
        self.reads.append([self.number[v] for v in operands if v in self.number])
        self.number.update({v: len(self.number) + n for n, (v, _, _) in enumerate(results)})
        self.maker += [op] * len(results)
        self.num_bytes += [num_bytes for _, num_bytes, _ in results]
        self.keep_s += [keep_s if is_stored else 0.0 for _, _, keep_s in results]

    def residuals(
        self, needed: set[int], is_loop: bool, cut: LoopCut | None = None, length: int = 1
    ) -> Residuals:
        """The problem for a backward phase that reads these values."""
        problem = Recomputation(
            np.array(self.op_s),
            self.reads,
            np.array(self.maker, np.int64),
            np.array(self.num_bytes),
            sorted(self.number[v] for v in needed if v in self.number),
            np.array(self.keep_s),
        )
        places = tuple(self.sites), tuple(self.is_stored), tuple(self.blocks)
        return Residuals(problem, *places, is_loop, cut, length)


class _Reader:
    """Reads times of ops and bytes of values from a solution."""

    def __init__(self, costed: CostedGraph, fusion: Fusion, strategies: Sequence[int]) -> None:
        self.costed, self.fusion, self.strategies = costed, fusion, strategies
        self.folded = costed.graph.folded
        self.program = self.folded.program

    def of_graph(self, path: Site, graph: Graph) -> Residuals:
        """The residuals of a graph that holds both phases."""
        loops, ledger = loop_pairs(graph), _Ledger()
        forward = [i for i, op in enumerate(graph.ops) if op.phase is Phase.FORWARD]
        of_arguments = self._of_arguments(path, graph, forward)
        kept = self._handed_on(path, graph, [i for i in forward if i not in of_arguments]) | _passed_on(
            graph, forward
        )
        for i in forward:
            op, site = graph.ops[i], (*path, i)
            if i not in loops:
                seconds = np.inf if i in kept or _must_stay(op) else self._recompute_s(site)
                own = None if _holds_both_phases(op) else site
                arrays = [self._stored_at(("result", site, r)) for r in range(len(op.outputs))]
                num_bytes = [np.inf if v is None else self._relief(v) for v in arrays]
                is_light = site in self._light_at
                keep_s = [self._passes.keep_s(v) if is_light and v is not None else 0.0 for v in arrays]
                ledger.add(own, seconds, op.operands, op.outputs, num_bytes, keep_s, op.equivalence)
        needed = {v for op in graph.ops if op.phase is Phase.BACKWARD for v in op.operands}
        return ledger.residuals(needed, is_loop=False)

    def of_loop(self, path: Site, graph: Graph, f: int, readers: Sequence[int]) -> Residuals:
        """The residuals of the body of a forward loop."""
        loop, ledger = graph.ops[f], _Ledger()
        body, (num_consts, num_carry) = loop.bodies["jaxpr"][0], loop.loop_counts
        inner, length = (*path, f, "jaxpr", 0), int(loop.params["length"])
        stacks = zip(body.outputs[num_carry:], loop.outputs[num_carry:], strict=True)
        stack_of = {v: stack for v, stack in stacks if isinstance(v, int)}
        read = {v for b in readers for v in graph.ops[b].operands}
        others = {v for b, op in enumerate(graph.ops) if b not in readers for v in op.operands}
        others |= {*graph.made}

        def num_bytes(v: int, what: str, where: Site, n: int) -> float:
            array = self._stored_at((what, where, n))
            stacked_bytes = np.inf if array is None else length * self._held_bytes(array)
            return 0.0 if stack_of.get(v) in others else stacked_bytes

        for n, v in enumerate(body.inputs[num_consts : num_consts + num_carry], num_consts):
            ledger.add((*path, f), np.inf, (), (v,), [num_bytes(v, "input", inner, n)])
        for i, op in enumerate(body.ops):
            site = (*inner, i)
            seconds = np.inf if _must_stay(op) else self._seconds.get(site, 0.0)
            sizes = [num_bytes(v, "result", site, r) for r, v in enumerate(op.outputs)]
            arrays = [self.program.value_at.get(("result", site, r)) for r in range(len(op.outputs))]
            keep_s = [
                size * self._passes.stacking_s_per_byte(v)
                if v is not None and np.isfinite(size) and not op.bodies
                else 0.0
                for v, size in zip(arrays, sizes, strict=True)
            ]
            ledger.add(site, seconds, op.operands, op.outputs, sizes, keep_s)
        needed = {y for y, out in stack_of.items() if out in read}
        return ledger.residuals(needed, is_loop=True, cut=self._cut(path, graph, f), length=length)

    def _cut(self, path: Site, graph: Graph, f: int) -> LoopCut | None:
        """A loop that may be cut into segments; None if it may not be."""
        if obstacle(graph, f):
            return None
        loop, inner = graph.ops[f], (*path, f, "jaxpr", 0)
        num_consts, num_carry = loop.loop_counts
        arrays = (self._stored_at(("input", inner, n)) for n in range(num_consts, num_consts + num_carry))
        carry_bytes = sum(self._held_bytes(v) for v in arrays if v is not None)
        seconds = (self._seconds.get((*inner, i), 0.0) for i in range(len(loop.bodies["jaxpr"][0].ops)))
        entering_bytes = self._entering_bytes(path, graph, f)
        return LoopCut((*path, f), int(loop.params["length"]), carry_bytes, entering_bytes, sum(seconds))

    def _entering_bytes(self, path: Site, graph: Graph, f: int) -> float:
        """Bytes of values of the forward phase that a loop reads and the backward phase does not."""
        num_consts, num_carry = graph.ops[f].loop_counts
        entering = [*graph.ops[f].inputs[:num_consts], *graph.ops[f].inputs[num_consts + num_carry :]]
        read = {v for op in graph.ops if op.phase is Phase.BACKWARD for v in op.operands}
        place = {
            v: ("result", (*path, i), r) for i, op in enumerate(graph.ops) for r, v in enumerate(op.outputs)
        }
        alone = {v for v in entering if isinstance(v, int) and v in place and v not in read}
        arrays = (self._stored_at(place[v]) for v in sorted(alone))
        return sum(self._held_bytes(v) for v in arrays if v is not None)

    @cached_property
    def _passes(self) -> Passes:
        return Passes(self.costed, self.fusion, lambda v: self._held_bytes(v) / self._repeats(v))

    @cached_property
    def _light_at(self) -> dict[Site, int]:
        """By site, the positions of light ops that make arrays."""
        return {self.program.ops[i].site: i for i in self.costed.kernels.first}

    def _recompute_s(self, site: Site) -> float:
        """Seconds per step to recompute an op."""
        if site not in self._light_at:
            return self._seconds.get(site, 0.0)
        position = self._light_at[site]
        op = self.program.ops[position]
        return op.count * self._inside_s(self.folded.class_of[position]) + self._passes.recompute_s(position)

    @cached_property
    def _seconds(self) -> dict[Site, float]:
        """By site, the seconds of an op per step, including the ops in its bodies."""
        found: dict[Site, float] = {}
        for position, op in enumerate(self.program.ops):
            if op.op is not None:
                for end in range(1, len(op.site) + 1, 3):
                    site = op.site[:end]
                    found[site] = found.get(site, 0.0) + op.count * self._run_s(position)
        return found

    def _run_s(self, position: int) -> float:
        """Seconds of one run of an op."""
        op_class = self.folded.class_of[position]
        inside_s = self._inside_s(op_class)
        if position in self.costed.kernels.alone:
            return inside_s + self._alone_s(op_class)
        if position not in self.costed.kernels.of_op:
            return inside_s
        kernel, share = self.costed.kernels.of_op[position]
        return inside_s + share * self._kernel_s(kernel)

    @memo
    def _inside_s(self, op_class: int) -> float:
        """Seconds of the reductions inside an op."""
        return self._chosen_s(op_class, self.costed.reduction_seconds(op_class))

    @memo
    def _alone_s(self, op_class: int) -> float:
        return self._chosen_s(op_class, self.costed.op_seconds(op_class))

    @memo
    def _kernel_s(self, kernel: FusedKernel) -> float:
        seconds = np.asarray(kernel_s(self.costed.device, self.costed.kernel_bytes(kernel)))
        return self._chosen_s(kernel.op_classes[0], seconds)

    def _chosen_s(self, op_class: int, of_strategies: np.ndarray) -> float:
        """The seconds of the chosen strategy of an op's group."""
        return float(of_strategies[self.strategies[self.costed.graph.node_of[op_class]]])

    def _stored_at(self, place: Place) -> int | None:
        """The array at a place, if it is stored and may be kept."""
        v = self.program.value_at.get(place)
        if v is None or not self.fusion.is_stored(v):
            return None
        return None if v in self._taken_again else v

    @cached_property
    def _taken_again(self) -> frozenset[int]:
        """Maxima of rows, and row sums of values computed on the fly from these. Keeping them would add kernels to the
        forward phase, which computes a softmax in one kernel, as the backward phase does (`SoftmaxRewriterTriton`)."""
        found = set[int]()
        for op in self.program.ops:
            if len(op.operands) != 1 or not is_by_rows(op) or op.operands[0] in self.fusion.layouts.across:
                continue
            if op.name in MAXIMA or not found.isdisjoint(self.fusion.sources[op.operands[0]]):
                found.update(op.results)
        return frozenset(found)

    def _held_bytes(self, v: int) -> float:
        """Bytes on one device of an array and of the arrays that it represents."""
        i, r = self.program.maker[v]
        port = self.costed.graph.ports[self.folded.class_of[i], r, True]
        share = float(self.costed.shares(port)[self.strategies[port.node]])
        return self._repeats(v) * self.program.values[v].num_bytes * share

    def _repeats(self, v: int) -> int:
        """The number of arrays that an array represents."""
        return self.program.ops[self.program.maker[v][0]].repeats

    def _of_arguments(self, path: Site, graph: Graph, forward: Sequence[int]) -> set[int]:
        """Light ops on constants and on arguments other than the batch (parameters, state, keys)."""
        known = {v for v, _ in graph.constants}
        if not path:
            known |= {v for v, a in self.program.step.inputs if a.role is not Role.BATCH}
        of_arguments: set[int] = set()
        for i in forward:
            op = graph.ops[i]
            is_light = op.is_transfer or (*path, i) not in self._heavy
            if known.issuperset(op.operands) and not op.bodies and is_light:
                known.update(op.outputs)
                of_arguments.add(i)
            elif op.name == BARRIER:
                known.update(v for a, v in zip(op.inputs, op.outputs, strict=True) if a in known)
        return of_arguments

    @cached_property
    def _heavy(self) -> frozenset[Site]:
        """The sites of ops that are not light."""
        light, class_of = self.folded.is_light, self.folded.class_of
        return frozenset(
            op.site for i, op in enumerate(self.program.ops) if op.op is not None and not light[class_of[i]]
        )

    def _handed_on(self, path: Site, graph: Graph, ops: Sequence[int]) -> set[int]:
        """Ops whose results cross from one segment to another."""
        made_at, last_at, sizes, repeats = [], [], [], []
        for at, i in enumerate(ops):
            for r in range(len(graph.ops[i].outputs)):
                if (v := self._stored_at(("result", (*path, i), r))) is not None:
                    last = self._last_forward.get(v, self.program.maker[v][0])
                    made_at.append(at)
                    last_at.append(bisect_right(ops, self._place_in(path, graph, last)) - 1)
                    repeats.append(self._repeats(v))
                    sizes.append(self._held_bytes(v) / repeats[-1])
        cut = segments(sizes, last_at, made_at, len(ops), repeats)
        return {ops[a] for a, b in zip(made_at, last_at, strict=True) if cut.of(b) > cut.of(a)}

    def _place_in(self, path: Site, graph: Graph, at: int) -> int:
        """The index in a graph of an op of the program; an op outside of the graph counts as behind its end."""
        site = self.program.ops[at].site
        return site[len(path)] if site[: len(path)] == path and len(site) > len(path) else len(graph.ops)

    @cached_property
    def _last_forward(self) -> dict[int, int]:
        return last_reads(self.program, self.fusion, Phase.FORWARD)

    @cached_property
    def _first_backward(self) -> dict[int, int]:
        return first_reads(self.program, self.fusion, Phase.BACKWARD)

    @cached_property
    def _made_before(self) -> np.ndarray:
        """By position: bytes of all arrays stored before it."""
        made = [
            sum(map(self._held_bytes, filter(self.fusion.is_stored, op.results))) for op in self.program.ops
        ]
        return np.concatenate([[0.0], np.cumsum(made)])

    def _relief(self, v: int) -> float:
        """Bytes by which the peak may fall if a value is not kept: its own bytes, but at most the bytes made between its
        last read in the forward phase and its first read in the backward phase."""
        if v not in self._first_backward:
            return self._held_bytes(v)
        left = self._last_forward.get(v, self.program.maker[v][0]) + 1
        made_meanwhile = self._made_before[self._first_backward[v]] - self._made_before[left]
        return min(self._held_bytes(v), max(0.0, float(made_meanwhile)))


def _passed_on(graph: Graph, forward: Sequence[int]) -> set[int]:
    """Ops of repeated blocks whose results another block reads. If these were recomputed, each block would have to recompute
    the results of all blocks before it."""
    made = {v: i for i in forward if graph.ops[i].repeats > 1 for v in graph.ops[i].outputs}
    read = ((i, made[v]) for i in forward for v in graph.ops[i].operands if v in made)
    return {maker for i, maker in read if _block(graph.ops[i]) != _block(graph.ops[maker])}


def _block(op: Op) -> int | None:
    return None if op.equivalence is None else op.equivalence.block


def _must_stay(op: Op) -> bool:
    """True if an op may not run twice, or holds both phases."""
    return _holds_both_phases(op) or any(o.name in EFFECTFUL for o in _with_bodies(op))


def _holds_both_phases(op: Op) -> bool:
    """True if the bodies of an op hold several phases, as a loop over microbatches does; its results are no residuals."""
    return len({o.phase for o in _with_bodies(op)}) > 1


def _with_bodies(op: Op) -> list[Op]:
    """The op, and all ops in its bodies."""
    bodies = [body for inner in op.bodies.values() for body in inner]
    return [op, *(o for body in bodies for _, graph in walk(body) for o in graph.ops)]
