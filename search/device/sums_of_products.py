"""Products that cuBLAS adds to an array.

cuBLAS computes `alpha * A @ B + beta * C`, with a bias if there is one. XLA adds a product this way to an array that exists
before, if nothing else reads the product (`GemmRewriter`). Then the product has no array of its own, and the addition no
kernel. If nothing reads the array afterwards, the sum is written over it: gradients of microbatches are added up so, and so
are several products of one gradient. Otherwise the sum is a new array, as after a residual block.

Sums over microbatches that programs of a pipeline's stages pass from one to the next are left out: no product is added to
them in this way.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.search.problem.flat_program import ADDITIONS
from autoshard.search.problem.fusion import is_part, is_view
from autoshard.search.problem.layouts import PRODUCT
from autoshard.search.problem.live_ranges import LiveRanges
from autoshard.search.problem.reshard_paths import ReshardPaths


@dataclass(frozen=True, slots=True)
class Sum:
    """A product that is added to an array.

    Attributes:
      addition: the position of the addition.
      product: its operand that comes from the product.
      addend: the value that the product is added to.
      is_in_place: whether the sum is written over it.
    """

    addition: int
    product: int
    addend: int
    is_in_place: bool


def sums_of_products(live_ranges: LiveRanges, paths: ReshardPaths, is_one_program: bool) -> dict[int, Sum]:
    """By product, its sum with an array.

    Args:
      is_one_program: whether the loop over microbatches is part of the program.
    """
    return dict(_Sums(live_ranges, paths, is_one_program).found())


class _Sums:
    def __init__(self, live_ranges: LiveRanges, paths: ReshardPaths, is_one_program: bool) -> None:
        self.live_ranges, self.paths, self.program = live_ranges, paths, live_ranges.program
        self.is_one_program = is_one_program
        self.maker, self.uses = self.program.maker, self.program.uses
        self.sums: set[int] = set()

    def found(self) -> Iterator[tuple[int, Sum]]:
        """Products, each with its sum; of two, the later one is added."""
        for u, op in enumerate(self.program.ops):
            if op.name not in ADDITIONS or len(op.operands) != 2 or not self._stays(u):
                continue
            products = [(i, n) for n, v in enumerate(op.operands) if (i := self._product(v)) is not None]
            i, n = max(products, default=(None, 0))
            if i is None:
                continue
            product, addend = op.operands[n], op.operands[1 - n]
            if not self._exists(addend, i, u) or self._is_handed_on(addend):
                continue
            is_in_place = self._is_overwritten(addend, u)
            if is_in_place or self._is_as_large(addend, u):
                self.sums.update(op.results if is_in_place else ())
                yield i, Sum(u, product, addend, is_in_place)

    def _stays(self, u: int) -> bool:
        """Whether an addition's operands and its result have one spec."""
        op = self.program.ops[u]
        read = (self.paths.to_reader(u, n).path for n in range(len(op.operands)))
        return not any(read) and not self.paths.to_rest(op.results[0])

    def _product(self, v: int) -> int | None:
        """The product that makes a value, through views and a bias; None unless the addition is its only reader."""
        i = self.maker[v][0]
        op = self.program.ops[i]
        if len(self.uses[v]) > 1 or self.paths.to_rest(v):
            return None
        if op.name == PRODUCT:
            return i
        if op.op is None or any(self.paths.to_reader(i, n).path for n in range(len(op.operands))):
            return None
        if is_view(op):
            return self._product(op.operands[0])
        values = self.program.values
        whole = [o for o in op.operands if values[o].num_bytes == values[v].num_bytes]
        is_biased = op.name in ADDITIONS and len(op.operands) == 2 and len(whole) == 1
        return self._product(whole[0]) if is_biased else None

    def _exists(self, v: int, i: int, u: int) -> bool:
        """Whether a value is an array before a product, in the same run of the same loop as the addition."""
        at, loops = self.maker[v][0], self.live_ranges.loops_at
        is_array = v in self.sums or self.live_ranges.fusion.is_stored(v)
        return is_array and not is_part(self.program.ops[at]) and loops[i] == loops[u] and at < i

    def _is_as_large(self, v: int, u: int) -> bool:
        """Whether a value is as large as its sum with a product."""
        values = self.program.values
        return values[v].num_bytes == values[self.program.ops[u].results[0]].num_bytes

    def _is_overwritten(self, v: int, u: int) -> bool:
        """Whether only an addition reads an array until their loop ends."""
        maker, loops = self.program.ops[self.maker[v][0]], self.live_ranges.loops_at
        start, end = loops[u][0] if loops[u] else (0, len(self.program.ops))
        is_free = all(reader == u or not start <= reader < end for reader in self.uses[v])
        return is_free and maker.name != "input" and not self.paths.to_rest(v)

    def _is_handed_on(self, v: int) -> bool:
        """Whether programs of a stage pass an array from one to the next, as sums over microbatches."""
        return self.program.ops[self.maker[v][0]].is_accumulator and not self.is_one_program
