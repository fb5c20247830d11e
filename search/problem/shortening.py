"""A step of few blocks that stands for one of many: a search does not grow with a model's depth.

Of a stack of blocks alike (`search.problem.blocks`, `search.problem.likeness`) few are kept, each for a run of its likes
that follow one another: its ops and arguments say how many they stand for, and costs count them as often. What is decided of
them is decided of all. The first two blocks and the last two, and those unlike the rest, stand for themselves, as what is
near the ends of a stack may be decided otherwise than what is within. There is more than one representative, so that
something may be recomputed in some layers and kept in others, and so that memory has places to peak between the first layer
and the last.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from search.ir.graph import Likes, Op, Step
from search.ir.sharding import StepSharding
from search.problem.blocks import find_blocks
from search.problem.cut import Cut
from search.problem.likeness import Likeness, UnlikeError

NUM_REPRESENTATIVES = 4
"""Of the blocks of a stack that are alike, how many are kept. Source: a choice of ours."""

MIN_SAVED = 4
"""Blocks left out of a stack, at the least, for it to be shortened. Source: a choice of ours."""

MIN_BLOCKS = NUM_REPRESENTATIVES + MIN_SAVED + 4
"""Of a stack, at the least, for that: those at its ends stand for themselves."""

_NOTHING_SAID = StepSharding((), (), {}, {})


@dataclass(frozen=True, slots=True, eq=False)
class Shortened:
    """A step of few blocks, and the whole one that it stands for, whose ops say which stands for them."""

    step: Step
    whole: Step


def shortened(step: Step, marks: Sequence[Hashable]) -> Shortened | None:
    """A step that stands for a deeper one; None where nothing can be left out.

    Args:
      step: the traced step.
      marks: per argument, what keeps it apart from others.
    """
    blocks = find_blocks(step)
    if all(len(stack) < MIN_BLOCKS for stack in blocks.stacks):
        return None
    likeness = Likeness(step, _NOTHING_SAID, blocks, marks)
    groups = [likeness.alike(stack) for stack in blocks.stacks]
    runs = [
        run
        for stack, group in zip(blocks.stacks, groups, strict=True)
        for run in _runs([b for b in group if b not in (stack[0], stack[-1])])
    ]
    gone = {b for _, *others in runs for b in others}
    if not gone:
        return None
    try:
        whole = _labelled(step, likeness, groups, runs)
        cut = Cut(_repeating(whole, likeness, runs), _NOTHING_SAID, likeness, groups)
        return Shortened(cut.without(gone)[0], whole)
    except UnlikeError:
        return None


def _runs(alike: Sequence[int]) -> list[Sequence[int]]:
    """Blocks in as many runs as there shall be representatives, none where that saves little."""
    within = alike[1:-1]
    if len(within) < NUM_REPRESENTATIVES + MIN_SAVED:
        return []
    ends = [len(within) * n // NUM_REPRESENTATIVES for n in range(NUM_REPRESENTATIVES + 1)]
    return [within[start:end] for start, end in pairwise(ends)]


def _labelled(
    step: Step, likeness: Likeness, groups: Sequence[Sequence[int]], runs: Sequence[Sequence[int]]
) -> Step:
    """The step with its ops and arguments saying who their likes are."""
    likes = [Likes(-1 if b is None else b, None, i) for i, b in enumerate(likeness.blocks.of_op)]
    stand_in = {block: run[0] for run in runs for block in run}
    places: dict[int, Hashable] = {}
    for n, group in enumerate(groups):
        for block in group:
            members = likeness.members[block], likeness.members[stand_in.get(block, block)]
            for place, (i, stands) in enumerate(zip(*members, strict=True)):
                likes[i] = Likes(block, (n, place), stands)
            places |= {a: (n, slot) for slot, a in likeness.arguments_of(block).items()}
    ops = tuple(replace(op, likes=like) for op, like in zip(step.graph.ops, likes, strict=True))
    arguments = tuple(replace(a, place=places.get(n)) for n, a in enumerate(step.arguments))
    return replace(step, graph=replace(step.graph, ops=ops), arguments=arguments)


def _repeating(step: Step, likeness: Likeness, runs: Sequence[Sequence[int]]) -> Step:
    """The step with the ops and arguments of each run's first block saying for how many they stand."""
    repeats = {i: len(run) for run in runs for i in likeness.members[run[0]]}
    ops = tuple(_repeated(op, repeats.get(i, 1)) for i, op in enumerate(step.graph.ops))
    alike = dict(chain.from_iterable(_alike_arguments(step, likeness, run).items() for run in runs))
    arguments = tuple(replace(a, alike=alike.get(n, ())) for n, a in enumerate(step.arguments))
    return replace(step, graph=replace(step.graph, ops=ops), arguments=arguments)


def _repeated(op: Op, repeats: int) -> Op:
    assert op.likes is not None
    return replace(op, likes=replace(op.likes, repeats=repeats)) if repeats > 1 else op


def _alike_arguments(step: Step, likeness: Likeness, run: Sequence[int]) -> Mapping[int, tuple[str, ...]]:
    """For each argument of a run's first block, the names of those of the others.

    Raises:
      UnlikeError: an argument has no like.
    """
    first, *others = [likeness.arguments_of(block) for block in run]
    if any(other.keys() != first.keys() for other in others):
        raise UnlikeError("an argument of one has no like in another")
    return {a: tuple(step.arguments[other[slot]].name for other in others) for slot, a in first.items()}
