"""A ring's messages and work, against closed forms."""

from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.attention.op import BACKWARD, FORWARD
from autoshard.search.ir.attention.ring import num_samples, ring_over, work_shares
from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.trace import trace
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.problem.rings import attention
from tests.attentions import MASKS, by_softmax, gradients, named, shapes

LENGTH, HEADS, KEY_HEADS, CHANNELS = 4096, 8, 2, 64


def ops_of(mask):
    """The ops of an attention in bfloat16, with the graph that holds them."""
    step = trace(
        gradients(by_softmax(MASKS[mask])), *shapes(1, LENGTH, HEADS, KEY_HEADS, CHANNELS, "bfloat16")
    )
    return blockwise(step).graph


def on_ring(graph, name, num_devices):
    """The only op of that name, with its sequence split over all devices of one node."""
    (op,) = named(graph, name)
    values = [graph.value(a) for a in op.inputs]
    rule = rule_for(name, values, op.result_values, op.params)
    flat = SimpleNamespace(op=op, name=name, rule=rule, operands=op.inputs, results=op.outputs)
    mesh = MeshModel(parse_cluster(f"{num_devices}xH100-80GB"), (num_devices,))
    (sequence,) = {f for dim in rule.operands[1] for f in dim if rule.factors[f].size == LENGTH}
    return attention(flat, graph.values, {sequence: 0}, np.array([0]), mesh)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_keys_and_values_go_round_once_and_their_gradients_come_home(num_devices):
    graph = ops_of("nothing")
    part = 2 * (LENGTH // num_devices) * KEY_HEADS * CHANNELS
    forward = on_ring(graph, FORWARD, num_devices).messages(1.0)
    assert sorted(forward.sent) == [(num_devices - 1, part)] * 2
    backward = on_ring(graph, BACKWARD, num_devices).messages(1.0)
    times = num_devices - 1
    assert sorted(backward.sent) == sorted([(times, part)] * 2 + [(times, 2 * part)] * 2 + [(1, part)] * 2)


@pytest.mark.parametrize(("num_devices", "times"), [(2, 1), (4, 2), (8, 2)])
def test_a_zigzag_also_exchanges_halves(num_devices, times):
    """Each of two devices keeps one piece: 0 and 1 on the one, 2 and 3 on the other become 0 and 3, 2 and 1."""
    rows, heads = LENGTH // num_devices, {"q": HEADS, "k": KEY_HEADS}
    sent = on_ring(ops_of("causal"), FORWARD, num_devices).messages(1.0).sent
    halves = [(times, rows // 2 * n * CHANNELS * 2) for n in (heads["q"], heads["k"], heads["k"], heads["q"])]
    statistic = (times, rows // 2 * HEADS * 4)
    ring = [(num_devices - 1, rows * KEY_HEADS * CHANNELS * 2)] * 2
    assert sorted(sent) == sorted([*halves, statistic, *ring])


def test_messages_hide_behind_blocks_that_take_as_long():
    one = on_ring(ops_of("nothing"), FORWARD, 4)
    longest, shortest = one.messages(1.0), one.messages(0.0)
    assert longest.exposed_s == 0.0
    assert shortest.exposed_s == pytest.approx(shortest.total_s)
    assert longest.total_s == shortest.total_s


def test_one_device_sends_nothing():
    assert on_ring(ops_of("causal"), BACKWARD, 1).messages(1.0).sent == ()


def test_a_ring_holds_a_part_of_what_one_device_holds():
    graph = ops_of("causal")
    alone, eight = (on_ring(graph, FORWARD, n) for n in (1, 8))
    assert eight.workspace_bytes < alone.workspace_bytes


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_zigzag_halves_a_causal_ring_s_work(num_devices):
    """In order, the last device sees all keys but those of its own last pieces; in zigzag, all see half. A piece's own
    blocks are seen to a half, and half a sample more."""
    (op,) = named(ops_of("causal"), FORWARD)
    pieces = 2 * num_devices
    own = (num_samples(pieces) + 1) / 2 / num_samples(pieces)
    in_order, in_zigzag = work_shares(op.params["scores"], num_devices, LENGTH)
    assert in_order == pytest.approx((2 * pieces - 3 + 2 * own) / pieces**2)
    assert in_zigzag == pytest.approx((pieces - 1 + 2 * own) / pieces**2)


def test_work_without_a_mask_is_equal():
    (op,) = named(ops_of("nothing"), FORWARD)
    assert work_shares(op.params["scores"], 4, LENGTH) == pytest.approx((1 / 4, 1 / 4))
    assert not ring_over(op.params["scores"], ("data",), 4, LENGTH).is_zigzag
