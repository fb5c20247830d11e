"""Lengths of a loop's segments: the fewest bytes for each number of levels.

A loop of n iterations in segments of m iterations (`search.memory.loop_segments`) holds a carry for each segment. While a
segment runs backwards, it holds the segment's residuals besides, or if that is cut in turn, what that holds:

    bytes(n, no levels) = n * residual
    bytes(n, levels)    = min over m < n of  (n // m) * carry + (n % m) * residual + bytes(m, levels - 1)

One level has its optimum at about the square root of n, k levels at the root of degree k + 1 (Chen et al. 2016, section 4).
Each level runs all iterations once more. REVOLVE (Griewank and Walther 2000) needs fewer runs for as many states, as its
segments differ in length. Those of a loop of loops are alike, so that its program does not grow with the iterations.
"""

from dataclasses import dataclass

from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Site
from autoshard.search.memory.loop_segments import LoopSegments

Lengths = tuple[int, ...]
"""Of segments, the longest first."""


@dataclass(frozen=True, slots=True)
class LoopCut:
    """A loop that may be cut into segments.

    Attributes:
      loop: its site.
      length: its iterations.
      carry_bytes: of all carries at one iteration, on one device.
      entering_bytes: of values that the loop reads and that are kept for its segments alone.
      recompute_s: seconds to run all iterations once more.
    """

    loop: Site
    length: int
    carry_bytes: float
    entering_bytes: float
    recompute_s: float

    def held_bytes(self, segments: LoopSegments, residual_bytes: float) -> float:
        """Bytes held at the most with these segments, for residuals of so many bytes an iteration."""
        length = segments.whole(self.length)
        held_bytes = self.entering_bytes + (self.length - length) * residual_bytes
        for shorter in segments.lengths:
            count, left = divmod(length, shorter)
            held_bytes += count * self.carry_bytes + left * residual_bytes
            length = shorter
        return held_bytes + length * residual_bytes

    def seconds(self, segments: LoopSegments) -> float:
        """Seconds to run the iterations of segments once more for each level."""
        return len(segments.lengths) * self.recompute_s * segments.whole(self.length) / self.length

    def up_to(self, share: float, segments: LoopSegments) -> LoopSegments:
        """The segments reduced to a share of the iterations, in whole segments, at least one."""
        longest = segments.lengths[0]
        return LoopSegments(segments.lengths, longest * max(1, round(share * self.length / longest)))

    def shortest(self, num_levels: int, residual_bytes: float) -> Lengths:
        """The lengths with which so many levels hold least; fewer lengths if more levels do not hold less."""
        search = _LengthSearch(self.carry_bytes, residual_bytes)
        return search.best(self.length, num_levels)[1]


@dataclass(eq=False)
class _LengthSearch:
    """The recursion above, for one loop."""

    carry_bytes: float
    residual_bytes: float

    @memo
    def best(self, length: int, num_levels: int) -> tuple[float, Lengths]:
        """The fewest bytes of so many iterations, and the lengths of their segments."""
        cut = (self._cut(length, m, num_levels) for m in (_lengths(length) if num_levels else ()))
        return min((*cut, (length * self.residual_bytes, ())))

    def _cut(self, length: int, shorter: int, num_levels: int) -> tuple[float, Lengths]:
        segments, left = divmod(length, shorter)
        held_bytes, lengths = self.best(shorter, num_levels - 1)
        crossing_bytes = segments * self.carry_bytes + left * self.residual_bytes
        return crossing_bytes + held_bytes, (shorter, *lengths)


def _lengths(length: int) -> list[int]:
    """Lengths of segments to try: divisors, which leave nothing over, and powers of two."""
    divisors = {m for n in range(2, int(length**0.5) + 1) if length % n == 0 for m in (n, length // n)}
    return sorted(divisors | {1 << n for n in range(1, (length - 1).bit_length())})
