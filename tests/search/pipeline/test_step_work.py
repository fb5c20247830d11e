"""The work of a step in parts, against the cost model and against steps that were made ready."""

from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.compute import Product, product_s
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.step_work import FORWARD, StepWork, product_part_s
from autoshard.search.step_problem import StepProblem
from tests.zoo import make_llama
from tests.zoo.case import Case
from tests.zoo.megatron import make_megatron

CLUSTER = parse_cluster("8xA100-80GB")
FLOPS_PER_S = CLUSTER.device.peak_flops_per_s("bfloat16")


@pytest.mark.parametrize(
    "sizes", [(1, 4096, 4096, 4096), (1, 128, 1024, 1024), (16, 256, 256, 64), (1, 512, 64, 8192)]
)
def test_no_way_to_cut_a_product_takes_less(sizes):
    """Each of its loops cut into 1, 2, 4 ... parts."""
    b, m, n, k = sizes
    num_bytes = 2 * b * (m * k + k * n + m * n)
    for cut in product((1, 2, 8, 64), repeat=4):
        parts = cut[0] * cut[1] * cut[2] * cut[3]
        if all(size % by == 0 for size, by in zip(sizes, cut, strict=True)):
            local = Product(*(size // by for size, by in zip(sizes, cut, strict=True)))
            took_s = product_s(CLUSTER.device, local, num_bytes / parts, FLOPS_PER_S)
            least_s = product_part_s(CLUSTER.device, b * m * n, k, FLOPS_PER_S, num_bytes, parts)
            assert least_s <= took_s * (1 + 1e-9)


def scanned() -> Case:
    return make_llama(
        num_layers=2, hidden=256, heads=4, kv_heads=2, ffn=512, vocab=512, seq=128, batch=8, scanned=True
    )


def unrolled() -> Case:
    return make_megatron(2, 256, 4, 512, 128, 8)


@cache
def step_of(make) -> Step:
    case = make()
    return trace(case.step, *case.abstract_args())


@cache
def work_of(make, num_microbatches: int = 1) -> StepWork:
    """Of the step as one program."""
    step = step_of(make)
    if num_microbatches > 1:
        return StepWork.of(parts_of(make, num_microbatches).solution((1,)).on_mesh)
    problem = StepProblem.of(step, [""] * len(step.arguments), CLUSTER.device)
    return StepWork.of(problem.on(CLUSTER, (8,)))


@cache
def parts_of(make, count: int) -> Parts:
    step = step_of(make)
    return Parts.of(step, CLUSTER, count)


CASES = [(scanned, 1, 2), (unrolled, 4, 1)]
"""Each way to write the step, number of microbatches and size of a submesh."""
OTHERS = [case for case in product((scanned, unrolled), (1, 4), (1, 2)) if case not in CASES]


@pytest.mark.parametrize(
    ("make", "count", "size"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_step_that_was_made_ready_takes_no_less(make, count, size):
    costs = parts_of(make, count).costs((size,), 1)
    passes = work_of(make).passes(count, size)
    each = costs.forward_s, costs.backward_s, costs.weight_gradient_s
    took_s = [count * size * float(seconds.sum()) for seconds in each]
    assert 0 < passes.forward_s <= took_s[0]
    assert passes.forward_s + passes.backward_s <= took_s[0] + took_s[1]
    assert 0.7 * sum(took_s) < passes.total_s <= sum(took_s), "a bound from far away bounds nothing"


@pytest.mark.parametrize("make", [scanned, unrolled])
def test_a_step_in_microbatches_says_no_more_of_other_numbers_than_they_take(make):
    for count in (1, 4):
        costs = parts_of(make, count).costs((1,), 1)
        took_s = count * float((costs.forward_s + costs.backward_s + costs.weight_gradient_s).sum())
        assert 0 < work_of(make, 4).passes(count).total_s <= took_s * (1 + 1e-9)


@pytest.mark.parametrize("make", [scanned, unrolled])
def test_more_parts_never_take_less(make):
    work = work_of(make)
    totals = [work.passes(parts).total_s for parts in (1, 2, 4, 8, 64)]
    assert totals == sorted(totals)
    assert 0 < work.longest_s(8) <= work.longest_s(1)


# --- products over examples

EXAMPLES, TOKENS, WIDTH, WIDER = 16, 96, 512, 1280


def as_they_are(x, w):
    return x @ w


def flat(x, w):
    return x.reshape(EXAMPLES * TOKENS, WIDTH) @ w


def tokens_first(x, w):
    return x.transpose(1, 0, 2).reshape(TOKENS * EXAMPLES, WIDTH) @ w


@cache
def work_of_product(multiply) -> StepWork:
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(multiply(x, w) ** 2))(w)

    w = jax.ShapeDtypeStruct((WIDTH, WIDER), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((EXAMPLES, TOKENS, WIDTH), jnp.bfloat16)
    traced = trace(step, w, x)
    return StepWork.of(StepProblem.of(traced, ["", ""], CLUSTER.device).on(CLUSTER, (8,)))


@pytest.mark.parametrize(
    ("multiply", "loops"), [(as_they_are, {1, 3}), (flat, {1, 3}), (tokens_first, {None})]
)
def test_a_product_says_which_of_its_loops_runs_over_all_examples(multiply, loops):
    """Rows, or the sum of a weight gradient; nothing is said where tokens come first."""
    sizes = (kernel.product for kernel in work_of_product(multiply).runs)
    found = {one.over_examples for one in sizes if one is not None}
    assert found == loops


@pytest.mark.parametrize("multiply", [as_they_are, flat])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (4, 1), (16, 1), (4, 2), (2, 4)])
def test_a_product_over_examples_takes_what_its_part_takes(multiply, count, size):
    """The best of all ways in which the devices of a mesh axis may share it."""
    work = work_of_product(multiply)
    ((n, kernel),) = [(n, k) for n, k in enumerate(work.runs) if k.product and k.part == FORWARD]
    rows, shares = EXAMPLES * TOKENS // count, [(1, 1, 1), (size, 1, 1), (1, size, 1), (1, 1, size)]
    took_s = [
        product_s(
            CLUSTER.device,
            Product(1, rows // m, WIDER // n, WIDTH // k),
            kernel.num_bytes / (count * size),
            FLOPS_PER_S,
        )
        for m, n, k in shares
    ]
    assert work.seconds(count, size)[n] <= min(took_s) * (1 + 1e-9)
    assert size > 2 or work.seconds(count, size)[n] == pytest.approx(min(took_s))
