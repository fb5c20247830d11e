"""The frontier benchmark: what it counts, compares and finds wrong, and the models that it compares."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.search.ir.trace import trace
from benchmarks.frontier import (
    CLUSTER,
    FRONTIER_HEADER,
    by_hand_header,
    by_hand_row,
    frontier_row,
    violations,
)
from benchmarks.scanned_stacks import BY_HAND, make_scanned_gpt, make_scanned_llama, nearest_divisor
from benchmarks.under_caps import (
    Planner,
    Point,
    faster_below,
    frontier,
    product_flops,
    saved_share,
    smallest_cap,
    under,
)
from tests.zoo import make_llama, make_megatron

F32 = jnp.float32
SIZES = {"num_layers": 2, "hidden": 16, "heads": 4, "vocab": 32, "seq": 8, "batch": 8}
GPT = {**SIZES, "compute_dtype": F32}
LLAMA = {**SIZES, "kv_heads": 2, "ffn": 24, "compute_dtype": F32}
GIB = 1 << 30


def planned(cap_gib: float, step_s: float, peak_gib: float, **rest) -> Point:
    return Point(round(cap_gib * GIB), step_s, round(peak_gib * GIB), product_flops=100, **rest)


# --- products


def test_products_are_counted_with_the_lengths_of_loops():
    def step(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]

    traced = trace(step, jax.ShapeDtypeStruct((4, 4), F32), jax.ShapeDtypeStruct((3, 4), F32))
    assert product_flops(traced) == 5 * 2 * 3 * 4 * 4


def test_a_convolution_counts_its_taps():
    def step(kernel, images):
        return jax.lax.conv(images, kernel, (1, 1), "SAME")

    traced = trace(step, jax.ShapeDtypeStruct((6, 3, 5, 5), F32), jax.ShapeDtypeStruct((2, 3, 8, 8), F32))
    assert product_flops(traced) == 2 * (2 * 6 * 8 * 8) * (3 * 5 * 5)


def test_a_checkpoint_around_each_layer_computes_its_products_once_more():
    """The forward phase of a layer again, but for the last product, which the backward phase does not read."""
    flops = {
        way: product_flops(Planner.of(make_scanned_gpt(BY_HAND[way], **GPT), CLUSTER).step) for way in BY_HAND
    }
    tokens, hidden = SIZES["batch"] * SIZES["seq"], SIZES["hidden"]
    last = 2 * tokens * hidden * 4 * hidden
    layer = 2 * tokens * (8 * hidden * hidden + 2 * SIZES["seq"] * hidden)
    plain = flops["everything_saveable"]
    assert flops["nothing_saveable"] - plain == SIZES["num_layers"] * layer
    assert flops["dots_saveable"] == plain
    assert plain == 3 * (SIZES["num_layers"] * (layer + last) + 2 * tokens * hidden * SIZES["vocab"])


# --- the models


@pytest.mark.devices
@pytest.mark.parametrize(
    ("make", "sizes", "make_unrolled"),
    [
        pytest.param(make_scanned_gpt, GPT, make_megatron, marks=pytest.mark.slow),  # as the next one
        (make_scanned_llama, LLAMA, make_llama),
    ],
    ids=["gpt", "llama"],
)
def test_a_scanned_model_has_the_loss_of_the_unrolled_one(make, sizes, make_unrolled):
    found, wanted = (
        jax.jit(lambda *args, case=case: case.step(*args)[1]["loss"])(
            case.init(), case.batch(0), *case.extra()
        )
        for case in (make(**sizes), make_unrolled(**sizes))
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.devices
@pytest.mark.parametrize("way", BY_HAND)
def test_what_is_kept_changes_no_gradient(way):
    layers = jnp.linspace(-1.0, 1.0, 4 * 3 * 3).reshape(4, 3, 3)

    def loss(layers, stack):
        return stack(lambda x, w: jnp.tanh(x @ w), jnp.ones((2, 3)), layers).sum()

    found, wanted = (jax.grad(loss)(layers, BY_HAND[w]) for w in (way, "everything_saveable"))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    ("n", "wanted", "nearest"), [(24, 24**0.5, 4), (32, 32**0.5, 4), (36, 6, 6), (7, 2.6, 1)]
)
def test_groups_divide_the_layers(n, wanted, nearest):
    assert nearest_divisor(n, wanted) == nearest


# --- caps


def test_a_search_in_vain_names_a_cap_that_has_a_plan():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w, x = jax.ShapeDtypeStruct((256, 256), F32), jax.ShapeDtypeStruct((64, 256), F32)
    planner = Planner(trace(step, w, x), CLUSTER)
    free, tight, smallest = frontier(planner, (100,))
    assert tight.cap_bytes == free.peak_bytes
    assert smallest.is_planned
    assert smallest.cap_bytes < free.peak_bytes


def test_a_message_without_a_cap_has_none():
    assert smallest_cap("no plan keeps all pins") is None


class Recorded:
    """A planner of plans that hold 10, 7 and 4, and nothing less."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def point(self, cap_bytes: int) -> Point:
        self.asked.append(cap_bytes)
        peaks = [peak for peak in (10, 7, 4) if peak <= cap_bytes]
        return Point(cap_bytes, 1.0, peaks[0]) if peaks else Point(cap_bytes, failure="nothing fits")


def test_only_what_a_plan_does_not_keep_to_is_asked_again():
    planner = Recorded()
    found = list(under(planner, [12, 9, 8, 7, 6, 3, 2]))
    assert planner.asked[1:] == [9, 6, 3]
    assert [p.cap_bytes for p in found] == [12, 9, 8, 7, 6, 3, 2]
    assert [p.peak_bytes for p in found] == [10, 7, 7, 7, 4, 0, 0]


# --- what is said


def test_a_plan_compiled_to_more_than_its_cap_is_a_violation():
    fits, over = planned(8, 1.0, 7, compiled_bytes=8 * GIB), planned(4, 1.0, 4, compiled_bytes=5 * GIB)
    (said,) = violations("model", [fits, over])
    assert "under 4 GiB compiled 25.0% above it, and no other was found" in said


def test_a_plan_that_takes_the_place_of_one_over_the_cap_is_told():
    (said,) = violations("model", [planned(4, 1.0, 4, compiled_bytes=3 * GIB, first_bytes=5 * GIB)])
    assert "under 4 GiB compiled 25.0% above it at first, then 3 GiB" in said


def test_a_step_that_is_faster_under_a_lower_cap_is_a_violation():
    points = [planned(8, 1.0, 7), planned(6, 1.5, 6), planned(5, 1.2, 5), planned(4, 1.2, 4)]
    assert faster_below(points) == [(points[1], points[2])]
    (said,) = violations("model", points)
    assert "1.5 s under 6 GiB, but 1.2 s under 5 GiB" in said


def test_a_cap_without_a_plan_violates_nothing():
    assert not list(violations("model", [planned(8, 1.0, 7), Point(GIB, failure="nothing fits")]))


def test_rows_have_the_cells_of_their_headers():
    free, point, none = planned(9, 1.0, 8), planned(4, 1.25, 4, compiled_bytes=GIB), Point(GIB, failure="x")
    for one in (free, point, none):
        assert len(frontier_row("model", free, one)) == len(FRONTIER_HEADER)
        by_hand = dict.fromkeys(BY_HAND, one)
        assert len(by_hand_row("model", free, point, by_hand)) == len(by_hand_header())


def test_the_best_by_hand_is_the_fastest_that_has_a_plan():
    free, ours = planned(9, 1.0, 8), planned(4, 1.2, 4)
    by_hand = {**dict.fromkeys(BY_HAND, Point(4 * GIB, failure="x")), "dots_saveable": planned(4, 1.5, 4)}
    assert by_hand_row("model", free, ours, by_hand)[-3:] == ("dots_saveable", "0.800", "60%")


def test_where_nothing_is_lost_nothing_can_be_saved():
    assert saved_share(1.0, 1.5, 2.0) == 0.5
    assert saved_share(1.0, 1.2, 0.9) is None
    assert saved_share(1.0, 1.2, 1.001) is None
