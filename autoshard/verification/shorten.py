"""A shorter stack that stands for the whole: compiled in seconds where the whole takes minutes.

A model of 32 equal layers moves the bytes of a model of 4, plus 28 times the bytes of one more layer. So a step is
compiled short, and once more for each of its stacks with one block less. Every additive quantity follows exactly:
X = X_short + sum over stacks of missing * (X_short - X_less).

A stack keeps its first block, its last, those unlike the rest, and two of those alike. `search.problem.cut` says how
values pass the missing blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.search.ir.graph import Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.problem.blocks import find_blocks
from autoshard.search.problem.cut import BlockCut
from autoshard.search.problem.likeness import Likeness, UnlikeError

REPEATED = 2
"""Equal blocks of a stack that are kept, of which one is left out to see what it adds. The first block of a stack, its last
and those unlike the rest are kept anyway."""


@dataclass(frozen=True, eq=False)
class ShortPrograms:
    """Programs to compile instead of the whole one.

    Attributes:
      short: the shortened step and its sharding.
      less: for each stack, the shortened step with one block less of that stack, and its sharding.
      missing: for each stack, how many blocks `short` lacks.
      num_blocks: total number of blocks in these stacks of the whole step.
      left_out: the outermost ops of the whole step that `short` lacks, then those that each of `less` lacks.
    """

    short: tuple[Step, StepSharding]
    less: tuple[tuple[Step, StepSharding], ...]
    missing: tuple[int, ...]
    num_blocks: int
    left_out: tuple[frozenset[int], ...]

    def extrapolate(self, short: float, less: Sequence[float]) -> float:
        """An additive quantity of the whole step, such as a collective's bytes.

        Args:
          short: its amount in `short`.
          less: its amount in each of `less`.
        """
        return short + sum(n * (short - x) for n, x in zip(self.missing, less, strict=True))


@dataclass(frozen=True, slots=True)
class NotShortened:
    """The step cannot be shortened.

    Attributes:
      reason: why, in one sentence.
    """

    reason: str


def shorten(step: Step, sharding: StepSharding) -> ShortPrograms | NotShortened:
    """Shortens the stacks of repeated blocks in a step."""
    blocks = find_blocks(step)
    likeness = Likeness(step, sharding, blocks)
    inner = [
        [b for b in group if b not in (stack[0], stack[-1])]
        for stack, group in zip(blocks.stacks, likeness.groups, strict=True)
    ]
    long = [alike for alike in inner if len(alike) > REPEATED]
    if not long:
        return NotShortened(
            f"the step {step.name!r} has no stack of {REPEATED + 3} layers or more, written one after the other and planned "
            "alike"
        )
    # The first and the last equal block stay: in either direction of values, one precedes all blocks left out.
    omitted = [alike[REPEATED - 1 : -1] for alike in long]
    gone = {b for s in omitted for b in s}
    without = (gone, *(gone | {alike[-1]} for alike in long))
    try:
        cut = BlockCut(step, sharding, likeness)
        short, *less = map(cut.without, without)
    except UnlikeError as e:
        return NotShortened(f"no layer of the step {step.name!r} can be left out: {e}")
    num_blocks = sum(len(stack) for stack, alike in zip(blocks.stacks, inner, strict=True) if alike in long)
    left_out = tuple(
        frozenset(i for i, b in enumerate(blocks.of_op) if b in blocks_gone) for blocks_gone in without
    )
    return ShortPrograms(short, tuple(less), tuple(map(len, omitted)), num_blocks, left_out)
