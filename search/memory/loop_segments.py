"""A loop and its backward loops cut into segments, which recompute their residuals one by one (Chen et al. 2016).

A differentiated loop keeps the residuals of all its iterations:

    for t in steps:            c, r[t] = f(c, x[t])
    for t in reversed(steps):  g = b(g, r[t])

In segments it becomes a loop of loops. The forward loop keeps the carry with which each segment begins. The backward loop
runs a segment's iterations forwards once more; their residuals live as long as the segment:

    for s in segments:            start[s] = c;  for t in s: c = f(c, x[t])
    for s in reversed(segments):  c = start[s];  for t in s: c, r[t] = f(c, x[t]);  for t in reversed(s): g = b(g, r[t])

Both inner loops of the backward phase are such a pair again, and may be cut into segments in turn: each level runs all
iterations once more, and keeps a root of a higher degree of their number. (REVOLVE, Griewank and Walther 2000, has no such
levels and needs the fewest steps; `search.memory.segment_lengths` compares.) Iterations that are left over behind whole
segments make a loop of their own, which keeps its residuals. Where there is room for some residuals, more are left over.

The site of a cut is that of its loop, `SEGMENTS`, and a value of `LoopSegments`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.graph import EFFECTFUL, Atom, Graph, Op, Site, Step, Value, walk, without_dead_ops
from autoshard.search.memory.fission import without_unread_results
from autoshard.search.memory.loop_pairs import LoopPair, loop_pairs
from autoshard.search.memory.written import Written
from autoshard.search.problem.flat_program import only_adding, readers_in

SEGMENTS = "segments"
"""In a site: behind it come the lengths of segments."""

SCOPE = "segments"
"""The name scope of reshapes of stacked arrays."""


@dataclass(frozen=True, slots=True)
class LoopSegments:
    """The segments of a loop.

    Attributes:
      lengths: of segments, the longest first; each level cuts those of the level before.
      end: the iteration before which there are segments; those from it on keep their residuals. None for the loop's end.
    """

    lengths: tuple[int, ...]
    end: int | None = None

    def whole(self, length: int) -> int:
        """The iterations, of so many, that are in whole segments of the first level."""
        end = length if self.end is None else self.end
        return end - end % self.lengths[0]


def segments_site(loop: Site, segments: LoopSegments) -> Site:
    """The site of a loop's cut into segments."""
    return (*loop, SEGMENTS, segments)


def cut_loop(site: Site) -> tuple[Site, LoopSegments | None]:
    """The loop of a cut's site, and its segments; another op's site, and None."""
    return (site[:-2], site[-1]) if len(site) > 2 and site[-2] == SEGMENTS else (site, None)


def segments_at(sites: Iterable[Site], path: Site) -> dict[int, LoopSegments]:
    """The cuts of loops of one graph, by op index."""
    cuts = map(cut_loop, sites)
    return {loop[-1]: segments for loop, segments in cuts if segments and loop[:-1] == path}


def obstacle(graph: Graph, f: int) -> str:
    """The reason why a loop of a graph cannot be cut into segments; nothing if it can."""
    pairs, op = loop_pairs(graph), graph.ops[f]
    if f not in pairs:
        return "no backward loop reads what it stacks up"
    effects = [o for path, body in walk(op.bodies["jaxpr"][0]) for o in body.ops if o.name in EFFECTFUL]
    if effects:
        return f"its body has effects ({effects[0].name} {effects[0].where}), which must not happen twice"
    if any(not set(pairs[f]).isdisjoint(backward) for other, backward in pairs.items() if other != f):
        return "its backward loop reads what another loop stacks up"
    return ""


def uncut_loops(step: Step) -> Iterator[str]:
    """A sentence for each loop whose residuals are stacked up, but which cannot be cut into segments."""
    for _, graph in walk(step.graph):
        for f in loop_pairs(graph):
            if reason := obstacle(graph, f):
                yield f"The loop {graph.ops[f].where} is not cut into segments: {reason}."


def check_segments(graph: Graph, f: int, segments: LoopSegments, place: str) -> None:
    """Checks that a loop can be cut into such segments.

    Raises:
      PlanError: it cannot be; says why.
    """
    if reason := obstacle(graph, f):
        raise PlanError(f"{place} cannot be cut into segments: {reason}. Leave out 'in segments of'")
    length, lengths = int(graph.ops[f].params["length"]), segments.lengths
    if not all(0 < shorter < longer for longer, shorter in pairwise((length, *lengths))):
        raise PlanError(
            f"{place}: wanted lengths of segments that fall from below its {length} iterations, got {lengths}"
        )
    if segments.end is not None and not lengths[0] <= segments.end <= length:
        raise PlanError(
            f"{place}: wanted segments before an iteration from {lengths[0]} to {length}, got {segments.end}"
        )


@dataclass(frozen=True, slots=True)
class SegmentedLoop:
    """A loop to cut into segments.

    Attributes:
      forward: the op index of the forward loop.
      backward: those of the loops that read its stacks, and those of no other loop.
      segments: its segments.
    """

    forward: int
    backward: tuple[int, ...]
    segments: LoopSegments


def in_segments(graph: Graph, cuts: Sequence[SegmentedLoop]) -> Graph:
    """The graph with loops cut into segments whose residuals are recomputed."""
    loops = [[graph.ops[i] for i in (cut.forward, *cut.backward)] for cut in cuts]
    for cut, ops in zip(cuts, loops, strict=True):
        place = {op: i for i, op in enumerate(graph.ops)}  # that of an earlier cut may have moved it
        forward, *backward = (place[op] for op in ops)
        graph = _Cutting(graph, replace(cut, forward=forward, backward=tuple(backward))).run()
    return without_unread_results(without_dead_ops(graph)) if cuts else graph


class _Cutting:
    """One forward loop and its backward loops.

    Attributes:
      parts: by stacked array, its whole segments and the iterations left over.
      places: by loop, where its segments stand in the new graph.
    """

    def __init__(self, graph: Graph, cut: SegmentedLoop) -> None:
        self.graph, self.cut = graph, cut
        self.written = Written(graph.values, SCOPE)
        self.length, *self.inner_lengths = cut.segments.lengths
        self.parts: dict[Atom, tuple[int, ...]] = {}
        self.places: dict[int, int] = {}

    def run(self) -> Graph:
        for i, op in enumerate(self.graph.ops):
            if i in (self.cut.forward, *self.cut.backward):
                self.places[i] = self._cut(op)
            else:
                self.written.ops.append(op)
        for b in self.cut.backward:
            self._recompute(self.places[self.cut.forward], self.places[b])
        return replace(self.graph, values=tuple(self.written.values), ops=tuple(self.written.ops))

    def _recompute(self, f: int, b: int) -> None:
        """Lets the segments of a backward loop recompute those of the forward loop."""
        ops = self.written.ops
        pair = LoopPair(ops[f], ops[b], lambda i: True, self.written.new, lambda atom: atom)
        ops[f], ops[b] = pair.run()
        if self.inner_lengths:
            ops[b] = _cut_again(ops[b], tuple(self.inner_lengths))

    def _cut(self, op: Op) -> int:
        """Appends a loop over whole segments and one over the iterations left over; returns the place of the first one."""
        num_consts, num_carry = op.loop_counts
        lengths = self._lengths(op)
        carried, stacks = op.inputs[num_consts:][:num_carry], op.inputs[num_consts + num_carry :]
        xs = [self._parts_of(a, op) for a in stacks]
        ys = [self._new_parts(value, lengths) for value in op.result_values[num_carry:]]
        order = sorted(range(len(lengths)), reverse=bool(op.params["reverse"]))
        place = 0
        for n in order:
            sums = _sums(op) if n != order[0] else frozenset[int]()
            results = (
                op.outputs[:num_carry] if n == order[-1] else tuple(map(self._like, op.outputs[:num_carry]))
            )
            outputs = tuple(self._like(v) if c in sums else v for c, v in enumerate(results))
            inits = _begun(self.written, carried, sums, op)
            part = self._part(op, lengths[n], inits, [x[n] for x in xs], (*outputs, *(y[n] for y in ys)))
            place = place if n else len(self.written.ops)
            self.written.ops.append(part if n else _of_segments(part, self.length))
            for c in sums:
                self.written.write(jnp.add, _values((carried[c], outputs[c])), op, results[c])
            carried = results
        for out, parts in zip(op.outputs[num_carry:], ys, strict=True):
            self.parts[out] = parts
            self.written.write(_joined, parts, op, out)
        return place

    def _lengths(self, op: Op) -> tuple[int, ...]:
        """The iterations in whole segments, and those left over if there are any."""
        length = int(op.params["length"])
        whole = self.cut.segments.whole(length)
        return (whole, length - whole) if whole < length else (whole,)

    def _part(
        self, op: Op, length: int, carried: Sequence[Atom], xs: Sequence[int], outputs: tuple[int, ...]
    ) -> Op:
        """A loop over some of the iterations."""
        consts = op.inputs[: op.loop_counts[0]]
        params = {**op.params, "length": length, "unroll": min(int(op.params["unroll"]), length)}
        results = tuple(self.written.values[v] for v in outputs)
        return replace(
            op, params=params, inputs=(*consts, *carried, *xs), outputs=outputs, result_values=results
        )

    def _like(self, v: int) -> int:
        return self.written.new(self.graph.values[v])

    def _new_parts(self, value: Value, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """New values for the parts of a stack that a loop makes."""
        shapes = [(lengths[0] // self.length, self.length), *((n,) for n in lengths[1:])]
        return tuple(self.written.new(replace(value, shape=(*s, *value.shape[1:]))) for s in shapes)

    def _parts_of(self, stack: Atom, like: Op) -> tuple[int, ...]:
        """The parts of a stacked operand."""
        if stack not in self.parts:
            assert isinstance(stack, int), "a literal is no stack"
            parted = partial(_parted, self.length, self._lengths(like))
            parts = self.written.write_all(parted, (stack,), like)
            self.parts[stack] = tuple(v for v in parts if isinstance(v, int))
        return self.parts[stack]


def _of_segments(op: Op, length: int) -> Op:
    """A loop over segments, each a loop over iterations, from a loop over all; its stacks have the dims of both already."""
    (body,), (num_consts, num_carry) = op.bodies["jaxpr"], op.loop_counts
    within = num_consts + num_carry
    read = [body.values[v] for v in body.inputs]
    made = [body.value(a) for a in body.outputs]
    read[within:] = [_stacked(length, value) for value in read[within:]]
    made[num_carry:] = [_stacked(length, value) for value in made[num_carry:]]
    written, sums = Written((*read, *made), SCOPE), sorted(_sums(op))
    inputs, results = range(len(read)), list(range(len(read), len(read) + len(made)))
    carried = inputs[num_consts:within]
    segment = replace(
        op,
        params={**op.params, "length": length, "unroll": min(int(op.params["unroll"]), length)},
        inputs=(*inputs[:num_consts], *_begun(written, carried, sums, op), *inputs[within:]),
        outputs=tuple(results),
        result_values=tuple(made),
    )
    written.ops.append(segment)
    outputs: list[Atom] = [*results]
    for c in sums:
        outputs[c] = written.write(jnp.add, (carried[c], results[c]), op)
    outer = Graph(tuple(written.values), tuple(inputs), (), tuple(written.ops), tuple(outputs))
    params = {**op.params, "length": int(op.params["length"]) // length, "unroll": 1}
    return replace(op, params=params, bodies={"jaxpr": (outer,)})


def _sums(op: Op) -> frozenset[int]:
    """The carries of a loop that each iteration only adds to, such as gradients of weights. In parts of the loop they begin
    with zeros, and the parts' sums are added up: terms of a sum over devices then stay apart until the loop's end."""
    (body,), (num_consts, num_carry) = op.bodies["jaxpr"], op.loop_counts
    readers = readers_in(body)
    adding = (c for c in range(num_carry) if only_adding(body, readers, num_consts + c, c))
    return frozenset(adding)


def _begun(written: Written, carried: Sequence[Atom], sums: Collection[int], like: Op) -> list[Atom]:
    """The first carries of a part of a loop: the loop's own, but zeros for sums."""
    values = like.result_values
    return [
        written.write(partial(_zeros, values[c]), (), like) if c in sums else a for c, a in enumerate(carried)
    ]


def _values(atoms: Iterable[Atom]) -> list[int]:
    return [a for a in atoms if isinstance(a, int)]


def _zeros(value: Value) -> Any:
    return jnp.zeros(value.shape, value.dtype)


def _stacked(length: int, value: Value) -> Value:
    return replace(value, shape=(length, *value.shape))


def _cut_again(backward: Op, lengths: tuple[int, ...]) -> Op:
    """A backward loop over segments whose segments are cut in turn."""
    (body,) = backward.bodies["jaxpr"]
    again, last = (i for i, op in enumerate(body.ops) if op.name == "scan")
    return replace(
        backward,
        bodies={"jaxpr": (in_segments(body, [SegmentedLoop(again, (last,), LoopSegments(lengths))]),)},
    )


def _parted(length: int, lengths: tuple[int, ...], stack: Any) -> tuple[Any, ...]:
    """A stack's whole segments, and what is left over."""
    whole, *left = jnp.split(stack, [lengths[0]]) if len(lengths) > 1 else (stack,)
    return jnp.reshape(whole, (-1, length, *stack.shape[1:])), *left


def _joined(segments: Any, *left: Any) -> Any:
    """A stack from its parts."""
    return jnp.concatenate((jnp.reshape(segments, (-1, *segments.shape[2:])), *left))
