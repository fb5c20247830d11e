"""Stages of equal work at whose borders few bytes cross: what trying all cuts finds."""

from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cost_model.errors import InputError
from search.ir.trace import trace
from search.pipeline.stage_cut import TOLERANCES, StageCut, balanced_cut, crossing_bytes, num_flops


def ops_of(function, *args):
    graph = trace(function, *args).graph
    return graph.ops, graph.values


def chain(widths, skip=False):
    """Products and sums of drawn widths, one of which may be read again at the end."""

    def function(x, *weights):
        first = y = jnp.tanh(x @ weights[0])
        for w in weights[1:]:
            y = jnp.tanh(y @ w)
        return jnp.sum(y) + jnp.sum(first) * skip

    weights = [jax.ShapeDtypeStruct(pair, "float32") for pair in pairwise(widths)]
    return ops_of(function, jax.ShapeDtypeStruct((4, widths[0]), "float32"), *weights)


def tried(flops, crossing, num_stages):
    """The fewest bytes that cross, and the most even work, of all cuts within the smallest tolerance that allows any."""
    share = flops.sum() / num_stages
    cuts = list(combinations(range(1, len(flops)), num_stages - 1))
    work = {cut: [flops[a:b].sum() for a, b in pairwise((0, *cut, len(flops)))] for cut in cuts}
    for tolerance in TOLERANCES:
        allowed = [
            c for c in cuts if min(work[c]) > 0 and max(work[c]) <= (1 + tolerance) * share * (1 + 1e-9)
        ]
        if allowed:
            return min(
                (sum(crossing[p] for p in c), sum((w / share - 1) ** 2 for w in work[c])) for c in allowed
            )
    return None


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_no_cut_is_better(seed, num_stages):
    rng = np.random.default_rng(seed)
    ops, values = chain([int(n) for n in rng.integers(1, 12, size=6)], skip=seed % 2)
    ones = [1] * len(ops)
    cut = balanced_cut(ops, values, ones, num_stages)
    flops, crossing = (
        np.array([num_flops(op, values) for op in ops]),
        crossing_bytes(ops, values, ones),
    )
    work = [flops[a:b].sum() for a, b in pairwise((0, *cut.starts, len(ops)))]
    share = flops.sum() / num_stages
    got = sum(crossing[p] for p in cut.starts), sum((w / share - 1) ** 2 for w in work)
    assert got == pytest.approx(tried(flops, crossing, num_stages))


def test_what_is_read_later_crosses_all_cuts_in_between():
    def function(x):
        first = jnp.tanh(x)
        return jnp.sin(jnp.cos(jnp.exp(first))) + first

    ops, values = ops_of(function, jax.ShapeDtypeStruct((4,), "float32"))
    assert crossing_bytes(ops, values, [1] * 5).tolist() == [0, 16, 32, 32, 32, 0]


def test_inside_a_loop_its_carry_crosses_beside_what_is_read_behind_it():
    def function(x, ws):
        first = jnp.tanh(x)
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), first, ws)[0] + first

    shapes = jax.ShapeDtypeStruct((2, 2), "float32"), jax.ShapeDtypeStruct((3, 2, 2), "float32")
    ops, values = ops_of(function, *shapes)
    assert [op.name for op in ops] == ["tanh", "scan", "add"]
    assert crossing_bytes(ops, values, [1, 3, 1]).tolist() == [0, 16, 32, 32, 32, 0]
    assert balanced_cut(ops, values, [1, 3, 1], 3).starts in [(2, 3), (2, 4)]


def test_equal_blocks_are_cut_evenly():
    ops, values = chain([8] * 9)
    assert balanced_cut(ops, values, [1] * len(ops), 4) == StageCut((4, 8, 12))


def test_a_loops_work_is_its_bodys_as_often_as_it_runs():
    def looped(x, ws):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    (loop,), values = ops_of(
        looped, jax.ShapeDtypeStruct((4, 4), "float32"), jax.ShapeDtypeStruct((5, 4, 4), "float32")
    )
    assert num_flops(loop, values) == 5 * 2 * 4**3


def test_more_stages_than_ops_that_compute_are_refused():
    ops, values = chain([4, 4])
    with pytest.raises(InputError, match=r"wanted 9 stages, but .* has \d+ ops.* Ask for fewer"):
        balanced_cut(ops, values, [1] * len(ops), 9)
