"""One long sequence over many devices: a ring, heads (Ulysses), both (USP), or neither, whichever costs least.

XLA's blocks write scores in float32, and the host decides which of them are skipped. So on GPUs with fast memory a ring is
there for sequences whose scores do not fit. Ulysses moves each of queries, keys, values and output once, but needs as many
heads as devices (Jacobs et al. 2023). A ring needs none, and hides its messages behind blocks if these are long enough
(Liu et al. 2023). Between nodes, where links are slow, heads move while the ring stays inside a node (Fang and Zhao, "USP",
2024).
"""

from functools import cache

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.applying import apply
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.options import Options
from tests.attentions import by_softmax, layer_shapes, layer_step

CAP, SMALL = 70 * 2**30, 2 * 2**30
"""In the smaller cap, the scores of 32,768 positions and a head for two devices do not fit."""


def plan_for(
    heads,
    length,
    cluster="8xH100-80GB",
    channels=128,
    key_heads=None,
    form=None,
    said=None,
    cap=CAP,
    mesh=None,
):
    key_heads = key_heads or heads
    step = layer_step(form or by_softmax(), heads, key_heads)
    traced = trace(step, *layer_shapes(1, length, heads, key_heads, channels))
    return find(
        traced,
        parse_cluster(cluster),
        Options(cap, mesh),
        said.append if said is not None else lambda _: None,
    ).plan


def moved(plan):
    """The kinds of large collectives."""
    return {one.kind for one in plan.estimates.collectives if one.bytes > 4 * 2**20}


def gradient_specs(plan):
    """How the backward attention reads its queries."""
    (said,) = [text for name, text in plan.decisions.ops.items() if name.endswith("attention_gradient")]
    return said.split(", P(")[0]


@cache
def ring():
    return plan_for(heads=4, length=32768, cap=SMALL)


def test_few_heads_go_round_a_ring():
    plan = ring()
    assert plan.attention == "blockwise"
    assert moved(plan) == {"collective-permute"}
    assert "ring attention over 8" in str(plan).splitlines()[0]
    assert gradient_specs(plan) == "P(None, 'data')"


def test_many_heads_are_moved_as_by_ulysses():
    plan = plan_for(heads=16, length=16384, channels=64)
    assert moved(plan) == {"all-to-all"}


@pytest.mark.parametrize("mesh", [(2, 8), pytest.param(None, marks=pytest.mark.slow)])
def test_two_nodes_move_heads_and_keep_rings_inside(mesh):
    """Unasked as well, whatever axes the search splits a node into."""
    plan = plan_for(heads=8, length=32768, cluster="16xH100-80GB", cap=SMALL, mesh=mesh)
    between, *inside = plan.decisions.mesh
    assert plan.decisions.mesh[between] == 2
    ring = inside[0] if len(inside) == 1 else tuple(inside)
    assert gradient_specs(plan) == f"P(None, {ring!r}, {between!r})"
    assert [one.axes for one in plan.estimates.collectives if one.kind == "collective-permute"] == [
        tuple(inside)
    ]


def test_a_short_sequence_stays_as_it_is():
    assert plan_for(heads=1, length=16384).attention == ""


def test_a_sequence_that_no_axis_divides_has_no_ring():
    said = []
    plan = plan_for(heads=4, length=32767, said=said)
    assert not [one for one in plan.estimates.collectives if one.kind == "collective-permute"]
    assert "no ring: a sequence of 32,767 positions does not split evenly over any axis of 8 devices" in said


def test_a_million_tokens_fit_only_in_blocks():
    """In bfloat16, the scores of one head alone would take 256 GiB of each device."""
    plan = plan_for(heads=32, key_heads=8, length=2**20)
    assert plan.attention == "blockwise"
    assert plan.estimates.peak_bytes < CAP


def test_a_plan_in_blocks_is_read_back():
    step = trace(layer_step(by_softmax(), 4, 4), *layer_shapes(1, 32768, 4, 4, 128))
    cluster = parse_cluster("8xH100-80GB")
    found = ring()
    assert found.attention == "blockwise"
    again = apply(step, type(found).from_json(found.to_json()), cluster).plan
    assert again.decisions == found.decisions
    assert again.estimates.step_s == pytest.approx(found.estimates.step_s)
    assert blockwise(step) is not None
