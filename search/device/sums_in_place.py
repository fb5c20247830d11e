"""Products that are added to an array in its own memory.

cuBLAS computes `alpha * A @ B + beta * C` over `C`. XLA adds a product this way to an array that exists before, if
nothing else reads the product, and nothing reads the array afterwards (`GemmRewriter`). Then the product has no array
of its own, and the addition no kernel. Gradients of microbatches are added up so, and so are several products of one
gradient.

(Where other ops read the array too, XLA copies it first, which takes as much memory as the product. And where programs
of a pipeline's stages pass the array from one to the next, as sums over microbatches, nothing is added in place.)
"""

from collections.abc import Iterator

from autoshard.search.problem.flat_program import ADDITIONS
from autoshard.search.problem.fusion import is_part, is_view
from autoshard.search.problem.layouts import PRODUCT
from autoshard.search.problem.live_ranges import LiveRanges
from autoshard.search.problem.reshard_paths import ReshardPaths


def sums_in_place(
    live_ranges: LiveRanges, paths: ReshardPaths, is_one_program: bool
) -> dict[int, tuple[int, int]]:
    """By product: the addition, and the value that the product is added to.

    Args:
      is_one_program: whether the loop over microbatches is part of the program.
    """
    return {i: (u, v) for i, u, v in _Sums(live_ranges, paths, is_one_program).found()}


class _Sums:
    def __init__(self, live_ranges: LiveRanges, paths: ReshardPaths, is_one_program: bool) -> None:
        self.live_ranges, self.paths, self.program = live_ranges, paths, live_ranges.program
        self.is_one_program = is_one_program
        self.maker, self.uses = self.program.maker, self.program.uses
        self.sums: set[int] = set()

    def found(self) -> Iterator[tuple[int, int, int]]:
        """Products, each with its addition and the value that it is added to; of two, the later one is added."""
        for u, op in enumerate(self.program.ops):
            if op.name not in ADDITIONS or len(op.operands) != 2 or not self._stays(u):
                continue
            products = [(i, n) for n, v in enumerate(op.operands) if (i := self._product(v)) is not None]
            i, n = max(products, default=(None, 0))
            if i is not None and self._lies_there(op.operands[1 - n], i, u):
                self.sums.update(op.results)
                yield i, u, op.operands[1 - n]

    def _stays(self, u: int) -> bool:
        """Whether an addition's operands and its result have one spec."""
        op = self.program.ops[u]
        read = (self.paths.to_reader(u, n).path for n in range(len(op.operands)))
        return not any(read) and not self.paths.to_rest(op.results[0])

    def _product(self, v: int) -> int | None:
        """The product that makes a value, through views; None unless the addition is its only reader."""
        i = self.maker[v][0]
        op = self.program.ops[i]
        if len(self.uses[v]) > 1 or self.paths.to_rest(v):
            return None
        if op.name == PRODUCT:
            return i
        if op.op is None or not is_view(op) or self.paths.to_reader(i, 0).path:
            return None
        return self._product(op.operands[0])

    def _lies_there(self, v: int, i: int, u: int) -> bool:
        """Whether an array exists before a product, and only the addition reads it until their loop ends."""
        at, loops = self.maker[v][0], self.live_ranges.loops_at
        start, end = loops[u][0] if loops[u] else (0, len(self.program.ops))
        maker, is_made = self.program.ops[at], v in self.sums or self.live_ranges.fusion.is_stored(v)
        is_handed_over = maker.name == "input" or (maker.is_accumulator and not self.is_one_program)
        is_array = is_made and not is_handed_over and not is_part(maker)
        is_free = all(reader == u or not start <= reader < end for reader in self.uses[v])
        return is_array and is_free and loops[i] == loops[u] and at < i and not self.paths.to_rest(v)
