"""The pairs of blocks that a device computes, counted one by one; and their price, against what no GPU does in less."""

import numpy as np
import pytest

from autoshard.cost_model.compute import pass_s_per_byte
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.attention.layout import KEY, QUERY
from autoshard.search.ir.attention.op import BACKWARD, FORWARD
from autoshard.search.ir.attention.ring import ALONE, Ring, seen_share
from autoshard.search.ir.trace import trace
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.problem.rings import block_loops
from tests.attentions import MASKS, by_softmax, gradients, named, shapes

CLUSTER = parse_cluster("8xA100-80GB")
PEAK = CLUSTER.device.peak_flops_per_s("bfloat16")


def scores_of(mask, length=64):
    step = trace(gradients(by_softmax(MASKS[mask])), *shapes(1, length, 4, 2, 16))
    (op,) = named(blockwise(step).graph, FORWARD)
    return op.params["scores"]


def hidden_scores(mask, length):
    """Where a mask of positions hides, written out."""
    i, j = np.arange(length)[:, None], np.arange(length)
    return {"nothing": i < 0, "causal": i < j, "windowed": (i < j) | (i - j >= 5), "biased": i < j}[mask] & (
        j >= 0
    )


def places_of(ring, length):
    """The positions of each device."""
    pieces = np.arange(length).reshape(ring.size * (2 if ring.is_zigzag else 1), -1)
    if not ring.is_zigzag:
        return list(pieces)
    return [np.concatenate([pieces[n], pieces[-1 - n]]) for n in range(ring.size)]


@pytest.mark.parametrize("mask", ["nothing", "causal", "windowed", "biased"])
@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize(
    "ring", [ALONE, Ring(("data",), 4), Ring(("data",), 4, True)], ids=["alone", "ring", "zigzag"]
)
def test_pairs_that_are_not_hidden_whole_are_computed(mask, block, ring):
    length, scores = 64, scores_of(mask)
    hidden = np.broadcast_to(hidden_scores(mask, length), (length, length))
    num = length // block
    counts = []
    for rows in places_of(ring, length):
        own = hidden[rows].reshape(-1, block, num, block)
        counts.append((~own.all((1, 3))).sum())
    assert seen_share(scores, ring, length, block) * num**2 == pytest.approx(max(counts))


def test_a_mask_that_depends_on_arrays_hides_no_block_for_sure():
    assert seen_share(scores_of("packed"), Ring(("data",), 4), 64, 8) == 1 / 4


def loops(name, mask="causal", length=4096, heads=(8, 4)):
    sizes = {"b0": 1, "b1": heads[0], "g0": heads[1], QUERY: length, KEY: length, "d": 128, "e": 128}
    return block_loops(name, scores_of(mask), sizes, heads, ALONE, 2)


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_blocks_take_the_time_of_their_arithmetic_and_of_their_scores_at_least(name):
    """Each score that is computed is written in float32, read, and is an operand of a product in bfloat16 after that."""
    one = loops(name)
    num_scores = one.num_seen * one.num_scores
    products = {FORWARD: 2, BACKWARD: 5}[name]
    flops_s = products * 2 * 128 * num_scores / (PEAK * CLUSTER.device.matmul_efficiency)
    passes_s = pass_s_per_byte(CLUSTER.device) * (4 + 4 + 2 + 2) * num_scores
    assert one.seconds(CLUSTER, PEAK) > max(flops_s, passes_s)


@pytest.mark.parametrize("name", [FORWARD, BACKWARD])
def test_the_host_waits_for_each_predicate(name):
    masked, plain = loops(name), loops(name, "nothing")
    predicates_s = masked.num_pairs * float(CLUSTER.host_link.copy_s(1))
    seen_s = (plain.seconds(CLUSTER, PEAK) / plain.num_pairs) * masked.num_seen
    assert masked.seconds(CLUSTER, PEAK) > 0.9 * seen_s + predicates_s


def test_without_a_mask_blocks_are_slower_than_whole_products():
    """They move the same scores more often, and save nothing but memory."""
    both = [loops(name, "nothing") for name in (FORWARD, BACKWARD)]
    blocks_s = sum(one.seconds(CLUSTER, PEAK) for one in both)
    assert blocks_s > sum(one.written_s(CLUSTER.device, PEAK, 2) for one in both)
