"""From the exponentials on: what each value means, until the output and the gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np

from autoshard.search.ir.graph import Atom, Op
from autoshard.search.memory.attention.chain import Chain
from autoshard.search.memory.attention.dataflow import Dataflow, root
from autoshard.search.memory.attention.names import (
    IDENTITIES,
    MOVES,
    PRODUCT,
    Moved,
    ProductLabels,
    Shape,
    UnrecognisedError,
    check,
    is_view,
)
from autoshard.search.memory.attention.polynomials import (
    ARITHMETIC,
    DP,
    EXPONENTIAL,
    ONE,
    PROBABILITY,
    SCORE_GRADIENT,
    Fact,
    Polynomial,
    R,
    fact_of,
    means,
)
from autoshard.search.memory.attention.region import Region


class Meaning:
    """Follows the exponentials of a region to all that is computed from them."""

    def __init__(self, reader: Dataflow, region: Region, chain: Chain, shape: Shape) -> None:
        self.reader, self.region, self.names, self.chain = reader, region, region.names, chain
        self.ops, self.graph = reader.ops, reader.graph
        (made,) = self.ops[region.exponential].outputs
        self.facts: dict[int, Fact] = {made: fact_of(shape, EXPONENTIAL)}
        self.left: list[int] = []
        self.waiting = set[int]()
        region.inside.add(region.exponential)
        self._follow(made)

    def _follow(self, v: int) -> None:
        for at in self.reader.uses[v]:
            if at not in self.waiting:
                self.waiting.add(at)
                heappush(self.left, at)

    def follow(self) -> None:
        """Interprets, in program order, every op that reads a value with a meaning."""
        heapify(self.left)
        while self.left:
            at = heappop(self.left)
            op = self.ops[at]
            self.waiting.discard(at)
            if op.name == PRODUCT:
                self._product(at, op)
                continue
            for v, fact in self._results(op):
                if v not in self.facts:
                    self.facts[v] = fact
                    self.region.inside.add(at)
                    self._follow(v)
        region = self.region
        is_whole = bool(region.gradients) and region.seen is not None
        check(region.value is not None and (is_whole or (region.output and not region.gradients)))

    def _results(self, op: Op) -> Iterator[tuple[int, Fact]]:
        read = [self.facts.get(a) if isinstance(a, int) else None for a in op.inputs]
        if op.name in IDENTITIES:
            yield from ((v, fact) for v, fact in zip(op.outputs, read, strict=True) if fact)
            return
        if len(op.outputs) != 1:
            return
        found = None
        if op.name in MOVES and read[0]:
            value = self.graph.value(op.inputs[0])
            shape = Moved(self.names, op, value).forwards(read[0].shape)
            found = replace(read[0], shape=shape)
        elif op.name == "reduce_sum" and read[0]:
            found = self._row_sum(op, read[0])
        elif op.name == "select_n":
            found = self._selected(op, read)
        elif op.name in ARITHMETIC:
            found = self._computed(op, read)
        if found:
            yield op.outputs[0], found

    def _row_sum(self, op: Op, fact: Fact) -> Fact | None:
        axes = {int(d) for d in op.params["axes"]}
        summed = [self.names.find(a) for d in axes for a in fact.shape[d]]
        shape = tuple(dim for d, dim in enumerate(fact.shape) if d not in axes)
        if not summed:
            return replace(fact, shape=shape)
        if summed != [self.region.column] or fact.is_masked:
            return None
        sums = {(1, ONE): (1, ONE), (1, DP): (0, R)}
        made: Polynomial = {}
        for (e, power, atom), c in fact.terms:
            if (e, atom) not in sums:
                return None
            more, summed_atom = sums[e, atom]
            m = (0, power + more, summed_atom)
            made[m] = made.get(m, 0.0) + c
        return fact_of(shape, made)

    def _computed(self, op: Op, read: Sequence[Fact | None]) -> Fact | None:
        """An arithmetic op over values with a meaning and numbers."""
        terms: list[Polynomial] = []
        for a, fact in zip(op.inputs, read, strict=True):
            number = self._number(a)
            if fact is None and number is None:
                return None
            terms.append(fact.polynomial if fact else {(0, 0, ONE): number or 0.0})
        made = ARITHMETIC[op.name](op, terms)
        if made is None:
            return None
        return fact_of(self._met(read), made, any(fact.is_masked for fact in read if fact))

    def _met(self, read: Sequence[Fact | None]) -> Shape:
        """The dimensions of an elementwise result."""
        first, *others = [fact.shape for fact in read if fact]
        made = list(first)
        check(all(len(other) == len(first) for other in others))
        for other in others:
            for d, dim in enumerate(other):
                if made[d] and dim:
                    self.names.unify(made[d], dim)
                made[d] = made[d] or dim
        return tuple(made)

    def _selected(self, op: Op, read: Sequence[Fact | None]) -> Fact | None:
        """The gradient of the mask: it hides, where the mask does."""
        mask = self.region.scores.mask if self.region.scores else None
        if mask is None or len(read) != 3:
            return None
        fact, other = read[2 - mask.case], op.inputs[1 + mask.case]
        if fact is None or self._number(other) != 0.0:
            return None
        is_same = self.chain.is_written(op.inputs[0], fact.shape, mask.predicate)
        return replace(fact, is_masked=True) if is_same else None

    def _number(self, atom: Atom) -> float | None:
        """A number, or an array of one number."""
        while isinstance(atom, int):
            at = self.reader.maker.get(atom)
            if at is None or self.ops[at].name not in MOVES | IDENTITIES or len(self.ops[at].inputs) != 1:
                return None
            (atom,) = self.ops[at].inputs
        return float(atom.val) if np.ndim(atom.val) == 0 else None

    # --- products

    def _product(self, at: int, op: Op) -> None:
        """The output, a gradient, or the product of the output's gradient with the values."""
        left, right = (self.facts.get(a) if isinstance(a, int) else None for a in op.inputs)
        if len(op.operands) != 2 or (left is None) == (right is None):
            return
        own, side = (left, 0) if left else (right, 1)
        assert own is not None, "one of both"
        other = op.operands[1 - side]
        labelled = ProductLabels(self.names, self.graph, op)
        shapes = [own.shape, None] if side == 0 else [None, own.shape]
        made = labelled.labelled(*shapes)
        there = labelled.operands[1 - side]
        summed = labelled.summed(own.shape if side == 0 else labelled.operands[0])
        column = {self.region.column}
        if means(own, PROBABILITY) and summed == column and self.region.output is None:
            self._output(at, op, other, there, made)
        elif means(own, PROBABILITY) and self.region.row in summed:
            if self.region.value is None:
                self._seen_first(other, there)
            self._take("value", at, other, there, made)
        elif own.is_masked == self._has_mask and means(own, SCORE_GRADIENT, self.region.scale):
            kind = "query" if summed == column else "key" if self.region.row in summed else ""
            wanted = {"query": self.region.key, "key": self.region.query}.get(kind)
            if wanted is not None and root(self.reader, other) == root(self.reader, wanted):
                wanted_shape = self.region.key_shape if kind == "query" else self.region.query_shape
                self._same(other, there, wanted, wanted_shape)
                self.region.gradients[kind] = (at, made)

    @property
    def _has_mask(self) -> bool:
        return self.region.scores is not None and self.region.scores.mask is not None

    def _output(self, at: int, op: Op, value: int, there: Shape, made: Shape) -> None:
        self.region.value, self.region.value_shape, self.region.output = value, there, (at, made)
        self.region.inside.add(at)
        for v in self._views(value):
            for use in self.reader.uses[v]:
                if use > at and self.ops[use].name == PRODUCT:
                    self._seen(use, v)

    def _views(self, v: int) -> list[int]:
        """All values that are the same array in other orders of dimensions."""
        start = root(self.reader, v)
        found, left = [start], [start]
        while left:
            one = left.pop()
            for use in self.reader.uses[one]:
                op = self.ops[use]
                if op.name in MOVES | IDENTITIES and len(op.inputs) == len(op.outputs):
                    for a, made in zip(op.inputs, op.outputs, strict=True):
                        if a == one and made not in found and is_view(self.graph, one, made):
                            found.append(made)
                            left.append(made)
        return found

    def _seen(self, at: int, value: int) -> None:
        """A product of the values with the gradient of the output, if this is one: its result has the dimensions of the
        scores."""
        op, region = self.ops[at], self.region
        if len(op.operands) != 2 or op.operands.count(value) != 1:
            return
        side = 1 - op.operands.index(value)
        names = self.names
        labelled = ProductLabels(names, self.graph, op)
        shapes: list[Shape | None] = [None, None]
        assert region.value is not None, "the output is known"
        try:
            shapes[1 - side] = self._as_value(value)
            made = labelled.labelled(*shapes)
        except UnrecognisedError:
            return
        there = labelled.operands[side]
        channel = set(names.flat(region.value_shape)) - {region.column} - set(names.flat(region.key_shape))
        summed = labelled.summed(shapes[0] or labelled.operands[0])
        size = prod(self.ops[region.exponential].result_values[0].shape)
        if summed != channel or prod(op.result_values[0].shape) != size or region.seen is not None:
            return
        region.seen, region.seen_shape = op.operands[side], there
        self.facts[op.outputs[0]] = fact_of(made, {(0, 0, DP): 1.0})
        self._follow(op.outputs[0])

    def _seen_first(self, gradient: int, there: Shape) -> None:
        """Finds the values by the gradient of an output that is not computed here, from its products with both."""
        region, names = self.region, self.names
        channel = set(names.flat(there)) - set(names.flat(region.scores_shape))
        size = prod(self.ops[region.exponential].result_values[0].shape)
        for v in self._views(gradient):
            for use in self.reader.uses[v]:
                op = self.ops[use]
                is_product = op.name == PRODUCT and len(op.operands) == 2 and op.operands.count(v) == 1
                if not is_product or prod(op.result_values[0].shape) != size:
                    continue
                side = op.operands.index(v)
                labelled = ProductLabels(names, self.graph, op)
                own = self._as_view(v, gradient, there)
                made = labelled.labelled(*((own, None) if side == 0 else (None, own)))
                if labelled.summed(own if side == 0 else labelled.operands[0]) == {
                    names.find(a) for a in channel
                }:
                    region.seen, region.seen_shape = gradient, there
                    region.value, region.value_shape = op.operands[1 - side], labelled.operands[1 - side]
                    self.facts[op.outputs[0]] = fact_of(made, {(0, 0, DP): 1.0})
                    self._follow(op.outputs[0])
                    return

    def _as_value(self, v: int) -> Shape:
        """The dimensions of another view of the values."""
        assert self.region.value is not None, "the output is known"
        return self._as_view(v, self.region.value, self.region.value_shape)

    def _as_view(self, v: int, of: int, shape: Shape) -> Shape:
        """The dimensions of a view of an array of which another view is known."""
        known, path = {of: shape}, of
        if v == of:
            return shape
        while path in self.reader.maker and path != root(self.reader, path):
            op = self.ops[self.reader.maker[path]]
            own = op.inputs[op.outputs.index(path)]
            assert isinstance(own, int), "a view"
            moved = Moved(self.names, op, self.graph.values[own])
            known[own] = moved.backwards(known[path]) if op.name in MOVES else known[path]
            path = own
        return self._from(v, known)

    def _from(self, v: int, known: Mapping[int, Shape]) -> Shape:
        if v in known:
            return known[v]
        check(v in self.reader.maker)
        op = self.ops[self.reader.maker[v]]
        check(op.name in MOVES | IDENTITIES)
        own = op.inputs[op.outputs.index(v)]
        check(isinstance(own, int))
        assert isinstance(own, int), "as checked"
        shape = self._from(own, known)
        return Moved(self.names, op, self.graph.values[own]).forwards(shape) if op.name in MOVES else shape

    def _take(self, kind: str, at: int, other: int, there: Shape, made: Shape) -> None:
        """The gradient of the values, from the same gradient of the output."""
        region = self.region
        if region.seen is not None and root(self.reader, other) == root(self.reader, region.seen):
            self._same(other, there, region.seen, region.seen_shape)
            region.gradients[kind] = (at, made)

    def _same(self, v: int, shape: Shape, known: int, known_shape: Shape) -> None:
        """Makes the labels of two views of one array the same."""
        if v == known:
            for a, b in zip(shape, known_shape, strict=True):
                self.names.unify(a, b)
            return
        self._unified(self._at_root(v, shape), self._at_root(known, known_shape))

    def _at_root(self, v: int, shape: Shape) -> Shape:
        while v != root(self.reader, v):
            op = self.ops[self.reader.maker[v]]
            own = op.inputs[op.outputs.index(v)]
            assert isinstance(own, int), "a view"
            if op.name in MOVES:
                shape = Moved(self.names, op, self.graph.values[own]).backwards(shape)
            v = own
        return shape

    def _unified(self, left: Shape, right: Shape) -> None:
        self.names.unify([a for dim in left for a in dim], [a for dim in right for a in dim])
