"""A step of few blocks that stands for one of many: a search does not grow with a model's depth.

Of a stack of equal blocks (`search.problem.blocks`, `search.problem.likeness`) few are kept. Each stands for a run of
consecutive blocks: its ops and arguments say how many, and costs count them as often. A decision for a kept block holds
for its whole run. The first two blocks and the last two, and those with another structure, stand for themselves,
because decisions near the ends of a stack may differ from those within. There is more than one representative, so that
a residual may be recomputed in some layers and kept in others, and so that the memory can peak between the first layer
and the last.
"""

from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby, pairwise

from autoshard.search.ir.graph import Equivalence, Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.problem.blocks import find_blocks
from autoshard.search.problem.cut import BlockCut
from autoshard.search.problem.likeness import Likeness, UnlikeError

NUM_REPRESENTATIVES = 4
"""Largest number of blocks that are kept among a stack's blocks of one structure. Source: a choice of ours."""

MIN_RUN = 2
"""Smallest number of blocks for which one stands. Source: a choice of ours."""

_NO_SHARDING = StepSharding((), (), {}, {})


@dataclass(frozen=True, eq=False)
class Shortened:
    """A step of few blocks.

    Attributes:
      step: the short step, which stands for the whole one.
      label: makes the whole step, whose ops and arguments name their representatives.
      paired: makes a step in which some representatives are followed by one more block of their runs. The values that
        blocks of a run pass to one another in the whole step appear in it.
    """

    step: Step
    label: Callable[[], Step]
    paired: Callable[[Container[int]], Step]

    @cached_property
    def whole(self) -> Step:
        """The whole step, whose ops and arguments name their representatives."""
        return self.label()


def shortened(step: Step, marks: Sequence[Hashable]) -> Shortened | None:
    """A step that stands for a deeper one; None where no block can be left out.

    Args:
      step: the traced step.
      marks: per argument, a mark; arguments with different marks do not correspond.
    """
    blocks = find_blocks(step)
    if not blocks.stacks:
        return None
    likeness = Likeness(step, _NO_SHARDING, blocks, marks)
    runs = [
        run
        for stack, group in zip(blocks.stacks, likeness.groups, strict=True)
        for run in _runs([b for b in group if b not in (stack[0], stack[-1])])
    ]
    if not runs:
        return None
    labels = _Labelling(step, likeness, runs)
    try:
        return Shortened(labels.of_few(), labels.of_whole, labels.of_pairs)
    except UnlikeError:
        return None


def _runs(alike: Sequence[int]) -> list[Sequence[int]]:
    """Consecutive blocks in one run for each representative, and in more where others lie between them; none if there were
    but one."""
    within = alike[1:-1]
    num = min(NUM_REPRESENTATIVES, len(within) // MIN_RUN)
    ends = [len(within) * n // num for n in range(num + 1)] if num > 1 else []
    parts = (within[start:end] for start, end in pairwise(ends))
    return [run for part in parts for run in _consecutive(part) if len(run) > 1]


def _consecutive(blocks: Sequence[int]) -> Iterator[Sequence[int]]:
    """The blocks, split where others lie between them."""
    for _, run in groupby(enumerate(blocks), key=lambda one: one[1] - one[0]):
        yield [block for _, block in run]


class _Labelling:
    """Records on ops and arguments which ops and arguments they correspond to."""

    def __init__(self, step: Step, likeness: Likeness, runs: Sequence[Sequence[int]]) -> None:
        self.step, self.likeness, self.runs = step, likeness, runs

    def of_whole(self) -> Step:
        """The step, each of its ops and arguments for itself."""
        return self._labelled({}, {}, ())

    def of_few(self) -> Step:
        """The step with the first block of each run only.

        Raises:
          UnlikeError: a value that the other blocks pass on, or one of their arguments, has no counterpart.
        """
        return self._cut(self.runs)

    def of_pairs(self, blocks: Container[int]) -> Step:
        """The step with one block of each run, or two of the runs that begin with `blocks`; the second stands for the
        rest."""
        parts = [(run[:1], run[1:]) if run[0] in blocks else (run,) for run in self.runs]
        return self._cut([part for some in parts for part in some if part])

    def _cut(self, runs: Sequence[Sequence[int]]) -> Step:
        """The step with only the first block of each run; its ops and arguments say for how many they stand."""
        gone = {block for _, *others in runs for block in others}
        repeats = {run[0]: len(run) for run in runs}
        alike = dict(chain.from_iterable(self._alike_arguments(run).items() for run in runs))
        labelled = self._labelled(repeats, alike, gone)
        return BlockCut(labelled, _NO_SHARDING, self.likeness).without(gone)[0]

    def _labelled(
        self, repeats: Mapping[int, int], alike: Mapping[int, tuple[str, ...]], gone: Container[int]
    ) -> Step:
        blocks, members = self.likeness.blocks, self.likeness.members
        ops, arguments = list(self.step.graph.ops), list(self.step.arguments)
        representative = {block: run[0] for run in self.runs for block in run}
        kept = [(i, block) for i, block in enumerate(blocks.of_op) if block is None or block not in gone]
        equivalence = {i: Equivalence(-1 if block is None else block, None, i) for i, block in kept}
        for n, group in enumerate(self.likeness.groups):
            for block in (b for b in group if b not in gone):
                stands, count = members[representative.get(block, block)], repeats.get(block, 1)
                for place, i in enumerate(members[block]):
                    equivalence[i] = Equivalence(block, (n, place), stands[place], count)
                for slot, a in self.likeness.arguments_of(block).items():
                    arguments[a] = replace(arguments[a], alike=alike.get(a, ()), place=(n, slot))
        for i, like in equivalence.items():
            ops[i] = replace(ops[i], equivalence=like)
        graph = replace(self.step.graph, ops=tuple(ops))
        return replace(self.step, graph=graph, arguments=tuple(arguments))

    def _alike_arguments(self, run: Sequence[int]) -> Mapping[int, tuple[str, ...]]:
        """For each argument of a run's first block, the names of the corresponding arguments of the others."""
        first, *others = [self.likeness.arguments_of(block) for block in run]
        if any(other.keys() != first.keys() for other in others):
            raise UnlikeError("an argument of one has no like in another")
        names = [argument.name for argument in self.step.arguments]
        return {a: tuple(names[other[slot]] for other in others) for slot, a in first.items()}
