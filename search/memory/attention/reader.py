"""Finds the attentions of a graph."""

from collections.abc import Iterator
from math import prod

from autoshard.search.memory.attention.chain import FUNCTIONS, LONGEST_CHAIN, Chain
from autoshard.search.memory.attention.dataflow import Dataflow
from autoshard.search.memory.attention.meaning import Meaning
from autoshard.search.memory.attention.names import (
    IDENTITIES,
    MOVES,
    PRODUCT,
    Name,
    Names,
    ProductLabels,
    Shape,
    UnrecognisedError,
    check,
)
from autoshard.search.memory.attention.region import Region


class Reader(Dataflow):
    """Finds the attentions of one graph."""

    def regions(self) -> Iterator[Region]:
        """The attentions, in program order."""
        for i, op in enumerate(self.ops):
            if op.name == "exp" and len(op.result_values[0].shape) > 1:
                for product in self._products(i):
                    try:
                        yield self._region(i, product)
                        break
                    except UnrecognisedError:
                        continue

    def _products(self, exponential: int) -> list[int]:
        """The products whose results reach an exponential by elementwise ops."""
        found, seen, left = list[int](), {exponential}, [exponential]
        size = prod(self.ops[exponential].result_values[0].shape)
        while left and len(seen) < LONGEST_CHAIN:
            for v in self.ops[left.pop(0)].operands:
                at = self.maker.get(v)
                if at is None or at in seen or prod(self.graph.values[v].shape) != size:
                    continue
                seen.add(at)
                if self.ops[at].name == PRODUCT:
                    found.append(at)
                elif self.ops[at].name in FUNCTIONS | MOVES and self.ops[at].name != "exp":
                    left.append(at)
        return found

    def _region(self, exponential: int, product: int) -> Region:
        names = Names()
        labelled = ProductLabels(names, self.graph, self.ops[product])
        made = labelled.labelled()
        argument, shift = self.ops[exponential].inputs[0], None
        at = self.maker.get(argument, -1) if isinstance(argument, int) else -1
        if at >= 0 and self.ops[at].name == "sub":
            argument, shift = self.ops[at].inputs
        check(isinstance(argument, int) and (shift is None or isinstance(shift, int)))
        chain = Chain(self, names, product, made)
        shape = chain.shape_of(argument)
        column = self._summed_name(names, exponential, shape)
        if shift is not None:
            check(
                prod(self.graph.values[shift].shape) * names.size[column]
                <= prod(self.graph.values[argument].shape)
            )
        left, right = labelled.operands
        is_key_first = column in names.flat(left)
        query, key = (right, left) if is_key_first else (left, right)
        first, second = self.ops[product].operands
        queries, keys = (second, first) if is_key_first else (first, second)
        region = Region(names, product, queries, keys)
        region.query_shape, region.key_shape, region.column = query, key, column
        rows = [a for a in names.flat(query) if a not in names.flat(key)]
        free = [a for a in names.flat(key) if a not in names.flat(query)]
        check(free == [column])
        alike = [a for a in names.flat(shape) if a in rows and names.size[a] == names.size[column]]
        check(alike)
        region.row, region.exponential = alike[-1], exponential
        chain.write(region, argument)
        region.inside |= {product, at, *(self.maker[v] for v in chain.shapes)} - {-1}
        region.inside |= self._between(shift, region.inside) if isinstance(shift, int) else set()
        region.scores_shape = shape
        Meaning(self, region, chain, shape).follow()
        return region

    def _between(self, shift: int, inside: set[int]) -> set[int]:
        """The ops that compute the rows' shift from the scores."""
        found, left = set[int](), [shift]
        while left:
            at = self.maker.get(left.pop(), -1)
            if at >= 0 and at not in inside | found and len(found) < LONGEST_CHAIN:
                found.add(at)
                left += self.ops[at].operands
        return {at for at in found if self._reads_score(at, inside | found, inside)}

    def _reads_score(self, at: int, known: set[int], inside: set[int]) -> bool:
        makers = {self.maker.get(v, -1) for v in self.ops[at].operands}
        return not makers.isdisjoint(inside) or any(
            self._reads_score(m, known, inside) for m in makers & known - {at}
        )

    def _summed_name(self, names: Names, exponential: int, shape: Shape) -> Name:
        """The dimension along which the exponentials are summed."""
        left, seen = [*self.ops[exponential].outputs], set[int]()
        while left:
            v = left.pop(0)
            for at in self.uses[v]:
                op = self.ops[at]
                if op.name == "reduce_sum" and len(op.params["axes"]) == 1:
                    (dim,) = (shape[int(d)] for d in op.params["axes"])
                    check(len(dim) == 1)
                    return names.find(dim[0])
                if op.name in IDENTITIES and at not in seen:
                    seen.add(at)
                    left += op.outputs
        raise UnrecognisedError
