"""Where attention in blocks is worth a search of its own.

Blocks save the memory of scores, and they let devices split a sequence without gathering keys and values. Both matter for
long sequences alone. If the best plan of the step as it is holds all its scores, and splits every attention by examples and
heads over all devices without moving it to do so, blocks offer nothing.
"""

from collections.abc import Iterable
from math import gcd, prod

from autoshard.search.ir.attention.layout import QUERY
from autoshard.search.ir.graph import Graph, Op, Step, walk
from autoshard.search.memory.attention.cudnn import FUSED
from autoshard.search.memory.microbatches import batch_divisors
from autoshard.search.plan.values import Collective
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.rings import ATTENTIONS
from autoshard.search.solver.pbqp import Labels

BLOCKWISE = "blockwise"
"""The word of a plan for attention in blocks."""


def holds_too_much(step: Step, in_blocks: Step, num_devices: int, limit_bytes: int) -> bool:
    """True if no plan of the step as it is fits: one example's scores, split over all devices, are more than the cap.

    Args:
      step: the step.
      in_blocks: the step with its attention in blocks.
      num_devices: of the cluster.
      limit_bytes: the cap.
    """
    examples = max(batch_divisors(step), default=1)
    return _score_bytes(in_blocks) / examples / num_devices > limit_bytes


def _score_bytes(in_blocks: Step) -> int:
    """Bytes of the scores of the largest attention."""
    sizes = [0]
    for _, graph in walk(in_blocks.graph):
        sizes += [_scores_of(graph, i) for i, op in enumerate(graph.ops) if op.name in ATTENTIONS]
    return max(sizes)


def _scores_of(graph: Graph, at: int) -> int:
    sizes = _sizes(graph, graph.ops[at])
    return prod(n for a, n in sizes.items() if a not in "de") * graph.value(graph.ops[at].inputs[0]).itemsize


def _sizes(graph: Graph, op: Op) -> dict[str, int]:
    return op.params["layout"].sizes(*(graph.value(a).shape for a in op.inputs[:3]))


def may_want_blocks(
    costed: CostedGraph, chosen: Labels, collectives: Iterable[Collective], in_blocks: Step
) -> bool:
    """True if a plan of the step as it is splits some attention by its sequence, or not at all over some axis, or if it
    moves heads because there are fewer examples than devices (Ulysses).

    Args:
      costed: the step as it is on the plan's mesh.
      chosen: the plan's strategies.
      collectives: those of the plan.
      in_blocks: the step with its attention in blocks.
    """
    lengths, shape = _lengths(in_blocks), costed.resharder.mesh.shape
    for node, group in enumerate(costed.graph.groups):
        split = costed.strategies[node].assignment[chosen[node]]
        sizes = {group.sizes[f] if f >= 0 else 0 for f, n in zip(split, shape, strict=True) if n > 1}
        is_of_sequence = not sizes.isdisjoint({0, *lengths})
        if is_of_sequence and any(_is_attention(costed, k, lengths) for k in group.op_classes):
            return True
    is_moved = any(one.kind == "all-to-all" for one in collectives)
    return is_moved and max(batch_divisors(in_blocks), default=1) < prod(shape)


def without_ring(in_blocks: Step, num_devices: int) -> str:
    """Why no attention can run in a ring, as a sentence; empty if some can."""
    lengths = sorted(_lengths(in_blocks))
    if any(gcd(n, num_devices) > 1 for n in lengths):
        return ""
    said = " or ".join(f"{n:,}" for n in lengths)
    return f"no ring: a sequence of {said} positions does not split evenly over any axis of {num_devices} devices"


def _lengths(in_blocks: Step) -> frozenset[int]:
    """Lengths of the sequences of all attentions."""
    ops = ((graph, op) for _, graph in walk(in_blocks.graph) for op in graph.ops if op.name in ATTENTIONS)
    return frozenset(_sizes(graph, op)[QUERY] for graph, op in ops)


def _is_attention(costed: CostedGraph, op_class: int, lengths: frozenset[int]) -> bool:
    """Whether a class of ops makes scores, or is cuDNN's attention."""
    op, values = costed.graph.folded.op(op_class), costed.graph.folded.program.values
    makes_scores = op.name == "dot_general" and any(values[op.results[0]].shape.count(n) > 1 for n in lengths)
    return makes_scores or op.name in FUSED
