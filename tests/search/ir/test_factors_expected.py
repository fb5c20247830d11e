"""What each primitive's factors are, written down by hand from what the primitive computes.

The other `test_factors_*` modules show that no factor promises too much; this one, that none is missing. An array is written
as its dimensions: `i (j k) 1` has a compound second dimension, of which `j` is the major part, and a third of size one; `()`
is a scalar. Marks: `k+` is summed over, `k^` reduced otherwise, `k!` kept whole.
"""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from autoshard.search.ir import factors
from autoshard.search.ir.attention.layout import plain_layout
from autoshard.search.ir.attention.op import BACKWARD, FORWARD
from autoshard.search.ir.factors import Kind, Rule, rule_for
from tests.search.ir.test_factors_cases import BINARY, BITWISE, CASES, UNARY, capture, equation, floats

pytestmark = pytest.mark.devices

MARKS = {Kind.PARALLEL: "", Kind.SUM: "+", Kind.REDUCE: "^", Kind.UNSPLITTABLE: "!"}


def written(rule: Rule) -> str:
    """A rule in the notation above."""

    def array(dims: tuple[tuple[int, ...], ...]) -> str:
        names = [[f"f{f}{MARKS[rule.factors[f].kind]}" for f in dim] for dim in dims]
        return " ".join(f"({' '.join(n)})" if len(n) > 1 else (n or "1")[0] for n in names) or "()"

    return f"{', '.join(map(array, rule.operands))} -> {', '.join(map(array, rule.results))}"


def same(text: str) -> str:
    """The notation with factors numbered by first appearance; a mark counts wherever its factor stands."""
    marks = dict(re.findall(r"([a-z]\w*)([+^!])", text))
    number: dict[str, int] = {}

    def renamed(match: re.Match[str]) -> str:
        name = match[1]
        return f"f{number.setdefault(name, len(number))}{marks.get(name, '')}"

    return re.sub(r"([a-z]\w*)[+^!]?", renamed, text)


POOLED = "n (h s!) (w t!) c -> n h w c"
SUMMED_UPDATES, COMBINED_UPDATES = "r d, p+ 1, p+ d -> r d", "r d, p^ 1, p^ d -> r d"

EXPECTED = {
    **dict.fromkeys(UNARY, "a b -> a b"),
    **dict.fromkeys((*BINARY, *BITWISE), "a b, a b -> a b"),
    **dict.fromkeys(("not", "population_count", "clz", "integer_pow", "reduce_precision"), "a b -> a b"),
    **dict.fromkeys(("float-to-float", "float-to-int", "real", "imag", "conj", "copy", "name"), "a b -> a b"),
    **dict.fromkeys(("add_any", "complex"), "a b, a b -> a b"),
    "clamp": "(), a b, () -> a b",
    "clamp-full": "a b, a b, a b -> a b",
    "select_n": "a b, a b, a b -> a b",
    "select_n-scalar": "(), a b, a b -> a b",
    "barrier": "a b, c -> a b, c",
    # products
    "dot": "i k+, k j -> i j",
    "dot-vector": "i k+, k -> i",
    "dot-batch": "b q h d+, b k h d -> b h q k",
    "dot-size-1": "1 m k+, 1 k 1 -> 1 m 1",
    "dot-two-contracted": "b+ s+ d, b s h -> d h",
    "conv": "n h w c+, p! q! c o -> n h w o",
    "conv-strided": "n (h s!) (w t!) c+, p! q! c o -> n h w o",
    "conv-dilated": "n h w c+, p! q! c o -> n h w o",
    "conv-volume": "n d (h s!) w c+, p! q! 1 c o -> n d h w o",
    "conv-transposed": "n h w c+, p! q! c o -> n (h s!) (w t!) o",
    "conv-nchw": "n c+ h! w!, o c p! q! -> n o y! x!",
    "conv-input-gradient": "n h w o+, p! q! c o -> n (h s!) (w t!) c",
    "conv-kernel-gradient": "n+ (h+ s!) (w+ t!) c, n h w o -> p! q! c o",
    "conv-transposed-kernel-gradient": "n+ h+ w+ c, n (h s!) (w t!) o -> p! q! c o",
    "conv-grouped": "n (g c+) h w, (g o) c p! q! -> n (g o) h w",
    "conv-grouped-input-gradient": "n (g o+) h w, o (g c) p! q! -> n (g c) h w",
    "conv-grouped-kernel-gradient": "n+ (g c) h+ w+, n (g o) h w -> (g o) c p! q!",
    "conv-depthwise": "n h w g, p! q! 1 g -> n h w g",
    "conv-depthwise-kernel-gradient": "n+ h+ w+ g, n h w g -> p! q! 1 g",
    "conv-batch-groups": "(g n) c+ h w, (g o) c p! q! -> n (g o) h w",
    # shapes
    "reshape-split": "a (b c) -> a b c",
    "reshape-merge": "a b c -> (a b) c",
    "reshape-both": "a b (c d) -> a (b c) d",
    "reshape-gcd": "(a b!) c! -> (a d!) e!",
    "reshape-size-1": "a b 1 -> 1 a 1 b",
    "reshape-permuted": "a b -> (b a)",
    "transpose": "a b c -> c a b",
    "squeeze": "a 1 b -> a b",
    "broadcast": "a 1 b -> c a d b",
    "broadcast-scalar": "() -> a b",
    "tile": "a b -> (r a) b",
    "rev": "a b! -> a b",
    "slice": "a b! -> a c!",
    "slice-strided": "a b! -> a c!",
    "pad": "a b!, () -> a c!",
    "pad-shifted": "a b!, () -> a b",
    "concatenate": "a b!, a c! -> a d!",
    "concatenate-equal": "a b!, a b -> a c!",
    "split": "a b! -> a c!, a d!",
    "iota": " -> a b",
    "bitcast": "a b -> a b",
    "bitcast-narrow": "a b -> a b c!",
    # reductions
    "reduce_sum": "a+ b c+ -> b",
    "reduce_min": "a^ b -> b",
    "argmin": "a^ b -> b",
    **dict.fromkeys(("reduce_max", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor"), "a b^ -> a"),
    "argmax": "a b^ -> a",
    "reduce": "a b!, a b, (), () -> a, a",
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cumlogsumexp"), "a b! -> a b"),
    "cummin": "a! b -> a b",
    "max-pool": POOLED,
    "sum-pool": POOLED,
    "overlapping-pool": "n h w c -> n h w c",
    "sum-pool-gradient": "n h w c -> n (h s!) (w t!) c",
    "strided-pool": "(h s!) b -> h b",
    "max-pool-gradient": "n h w c, n (h s!) (w t!) c -> n (h s!) (w t!) c",
    "overlapping-pool-gradient": "n h w c, n (h s!) (w t!) c -> n (h s!) (w t!) c",
    # look-ups
    "embedding": "v+ d, p q 1 -> p q d",
    "embedding-gradient": "v d, p+ q+ 1, p q d -> v d",
    "take-along": "b k+, b p 1 -> b p",
    "take-along-gradient": "b k, b p+ 1, b p -> b k",
    "gather-points": "a+ b+, p q v! -> p q",
    "gather-windows": "a b!, p 1 -> p a c!",
    "gather-kept-1": "a b+, p 1 -> a p 1",
    "gather-truths": "a! b, p 1 -> p b",
    "scatter": "r d, p! 1, p d -> r d",
    "scatter-add": SUMMED_UPDATES,
    **dict.fromkeys(("scatter-mul", "scatter-max", "scatter-min"), COMBINED_UPDATES),
    "scatter-points": "a b, p+ v!, p -> a b",
    "scatter-windows": "a b!, 1, a c! -> a b",
    "dynamic_slice": "a b!, (), () -> a c!",
    "dynamic_update_slice": "a b!, a c!, (), () -> a b",
    "sort": "a b!, a b -> a b, a b",
    "top_k": "a b! -> a c!, a c!",
    # stacks of matrices
    "fft": "a b! -> a b",
    "cholesky": "s a! b! -> s c! d!",
    "qr": "s a! b! -> s c! d!, s e! f!",
    "eigh": "s a! b! -> s c! d!, s e!",
    "svd": "s a! b! -> s c!, s d! e!, s f! g!",
    "lu": "s a! b! -> s c! d!, s e!, s f!",
    "triangular_solve": "s e! u!, s u c -> s u c",
    "triangular_solve-right": "s e! u!, s r u -> s r u",
}


@pytest.mark.parametrize("case", CASES)
def test_every_factor_is_found(case: str):
    assert same(written(equation(case).rule)) == same(EXPECTED[case])


# --- what has no case: (shapes of operands, of results, parameters, factors)

KEYS = jax.ShapeDtypeStruct((4,), jax.random.key(0).dtype)


def windowed(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"window_dimensions": shape, "padding": ((0, 0),) * len(shape)}


UPDATES = SimpleNamespace(
    update_window_dims=(1,),
    inserted_window_dims=(0,),
    scatter_dims_to_operand_dims=(0,),
    operand_batching_dims=(),
    scatter_indices_batching_dims=(),
)
FIRST_COLUMN = SimpleNamespace(
    offset_dims=(1,),
    collapsed_slice_dims=(0,),
    start_index_map=(0,),
    operand_batching_dims=(),
    start_indices_batching_dims=(),
)
"""Rows are looked up; of each, the first element is taken."""

MATRICES = [(2, 4, 3)]

DIRECT: dict[str, tuple[list[Any], list[Any], dict[str, Any], str]] = {
    **{
        name: ([(4, 6)] * arity, [(4, 6)], {}, f"{', '.join(['a b'] * arity)} -> a b")
        for arity, names in {
            1: ("one_minus_square", "random_clone", "random_seed", "polynomial", "zeros_like", "device_put"),
            2: ("eq_to", "le_to", "lt_to", "mulhi", "igamma_grad_a", "random_gamma_grad", "random_fold_in"),
            3: ("regularized_incomplete_beta",),
        }.items()
        for name in names
    },
    "host_update": ([(4, 6), (4, 6), ()], [(4, 6), (4, 6)], {}, "a b, a b, () -> a b, a b"),
    **{
        name: ([(4, 6)], [(4, 6)], {}, "a b -> a b")
        for name in ("sharding_constraint", "layout_constraint", "reshard", "stage", "stop_gradient")
    },
    **{
        name: ([(4, 6)] * 4, [(4, 6)] * 2, {}, "a b, a b, a b, a b -> a b, a b")
        for name in ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
    },
    **{name: ([], [(4, 6)], {}, " -> a b") for name in ("empty", "empty2")},
    "iota_2x32_shape": ([], [(4, 6), (4, 6)], {}, " -> a b, a b"),
    "expand_dims": ([(4, 6)], [(4, 1, 6)], {"dimensions": (1,)}, "a b -> a 1 b"),
    "stack": ([(4, 6), (4, 6)], [(4, 2, 6)], {"axis": 1}, "a b, a b -> a s! b"),
    "unstack": ([(4, 2, 6)], [(4, 6), (4, 6)], {"axis": 1}, "a s! b -> a b, a b"),
    "random_bits": ([KEYS], [(4, 6)], {}, "k -> k a"),
    "random_split": ([KEYS], [(4, 2)], {}, "k -> k a"),
    "random_gamma": ([KEYS, (4,)], [(4,)], {}, "k, k -> k"),
    **{
        name: ([(4, 2)], [(4,)], {}, "k w! -> k")
        for name in ("random_wrap", "random_unwrap", "from_edtype", "to_edtype")
    },
    **{name: ([(4,)], [(4,), (8,)], {}, "k! -> a!, b!") for name in ("rng_bit_generator", "rng_uniform")},
    "reduce_window": ([(4, 6), ()], [(4, 5)], windowed((1, 2)), "a b!, () -> a c!"),
    "reduce_window_max": (  # every other element, the last one of the padding
        [(4, 2)],
        [(4, 2)],
        {"window_dimensions": (1, 1), "window_strides": (1, 2), "padding": ((0, 0), (0, 1))},
        "a b! -> a c!",
    ),
    "reduce_window_min": ([(4, 6)], [(4, 5)], windowed((1, 2)), "a b! -> a c!"),
    "select_and_scatter": ([(4, 6), (4, 3), ()], [(4, 6)], windowed((1, 2)), "a b!, a c!, () -> a d!"),
    "select_and_gather_add": ([(4, 6), (4, 6)], [(4, 3)], windowed((1, 2)), "a b!, a c! -> a d!"),
    "gather": (
        [(4, 6), (3, 1)],
        [(3, 1)],
        {"dimension_numbers": FIRST_COLUMN, "slice_sizes": (1, 1)},
        "a+ b!, p 1 -> p 1",
    ),
    "scatter-sub": ([(4, 6), (8, 1), (8, 6)], [(4, 6)], {"dimension_numbers": UPDATES}, SUMMED_UPDATES),
    "approx_top_k": ([(4, 6)], [(4, 2), (4, 2)], {"reduction_dimension": 1}, "a b! -> a c!, a c!"),
    **{
        name: (MATRICES, [(2, 3)], {}, "s a! b! -> s c!")
        for name in ("eig", "schur", "hessenberg", "tridiagonal")
    },
    **{name: (MATRICES, [(2, 4, 3), (2, 3)], {}, "s a! b! -> s c! d!, s e!") for name in ("geqrf", "geqp3")},
    "householder_product": ([(2, 4, 3), (2, 3)], [(2, 4, 3)], {}, "s a! b!, s c! -> s d! e!"),
    "ormqr": ([(2, 4, 3), (2, 3), (2, 4, 5)], [(2, 4, 5)], {}, "s a! b!, s c!, s d! e! -> s f! g!"),
    "symmetric_product": ([(2, 4, 3), (2, 4, 4)], [(2, 4, 4)], {}, "s a! b!, s c! d! -> s e! f!"),
    "cholesky_update": ([(2, 4, 4), (2, 4)], [(2, 4, 4)], {}, "s a! b!, s c! -> s d! e!"),
    "lu_pivots_to_permutation": ([(2, 4)], [(2, 5)], {}, "s a! -> s b!"),
    "tridiagonal_solve": (
        [(2, 4)] * 3 + [(2, 4, 5)],
        [(2, 4, 5)],
        {},
        "s a!, s b!, s c!, s d! e! -> s f! g!",
    ),
    "no such primitive": ([(4, 6), ()], [(4,)], {}, "a! b!, () -> c!"),
}


def avals(shapes: list[Any]) -> Iterator[Any]:
    for shape in shapes:
        yield shape if hasattr(shape, "dtype") else jax.ShapeDtypeStruct(shape, np.float32)


@pytest.mark.parametrize("name", DIRECT)
def test_every_factor_is_found_where_there_is_no_case(name: str):
    ins, outs, params, expected = DIRECT[name]
    assert same(written(rule_for(name, [*avals(ins)], [*avals(outs)], params))) == same(expected)


FLOPS = {  # Golub and Van Loan's leading terms, of two matrices of 4 x 3
    **dict.fromkeys(("geqrf", "geqp3", "householder_product", "tridiagonal"), 2 * 4 / 3 * 4 * 3 * 3),
    "hessenberg": 2 * 10 / 3 * 4 * 3 * 3,
    **dict.fromkeys(("eig", "schur"), 2 * 25 * 4 * 3 * 3),
    "ormqr": 2 * 4 * 4 * 3 * 3,
    "symmetric_product": 2 * 4 * 3 * 3,
    "scatter-sub": 8 * 6,
    "reduce_window": 4 * 5 * 2,
    **dict.fromkeys(("zeros_like", "random_wrap", "expand_dims", "stack", "unstack", "stop_gradient"), 0),
    "random_bits": 4 * 6 * 100,  # of Threefry
}


@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_those_that_one_counts_by_hand(name: str):
    ins, outs, params, _ = DIRECT[name]
    assert flops(rule_for(name, [*avals(ins)], [*avals(outs)], params)) == pytest.approx(FLOPS[name])


def flops(rule: Rule) -> float:
    return rule.flops_per_point * rule.num_points


@pytest.mark.parametrize(("points", "per_transform"), [(1, 0), (2, 5 * 2 * 1), (8, 5 * 8 * 3)])
def test_flops_of_a_transform(points: int, per_transform: int):
    rows = [*avals([(4, points)])]
    assert flops(rule_for("fft", rows, rows, {"fft_lengths": (points,)})) == 4 * per_transform


def test_windows_cut_no_rows_that_are_no_neighbours():
    """A microbatch holds every count-th example."""
    expected = {
        "conv-strided": "n h! w! c+, p! q! c o -> n y! x! o",
        "conv-kernel-gradient": "n+ h! w! c, n y! x! o -> p! q! c o",
        "overlapping-pool": "n h! w! c -> n y! x! c",
    }
    for case, rule in expected.items():
        written_whole = re.sub(r"\((\S+!) \S+!\)", r"\1", written(equation(case).rule.in_rows))
        assert same(written_whole) == same(rule)
    plain = equation("dot").rule
    assert plain.in_rows == plain


def test_few_ops_are_kernels_of_their_own():
    assert not any(equation(case).rule.is_kernel for case in CASES)


def test_grouped_convolutions_run_on_shards():
    found = {case for case in CASES if equation(case).rule.is_on_shards}
    assert found == {case for case in CASES if "grouped" in case or "depthwise" in case or "groups" in case}


# --- kernels


def partitioned(rule: str, num_results: int, **options: Any) -> Callable[..., Any]:
    """A function that says how it splits, of operands whose first ones have its results' shapes."""
    wrapped = custom_partitioning(lambda *xs: xs[:num_results])
    wrapped.def_partition(lambda *_: None, sharding_rule=rule, **options)
    return wrapped


PARTITIONED = {
    "a b -> a b": ("a b -> a b", {}, [(4, 6)]),
    "a b!, a c! -> a b!": ("a b, a c -> a b", {"need_replication_factors": ("b",)}, [(4, 6), (4, 3)]),
    "a b! -> a b": ("a b -> a b", {"permutation_factors": ("b",)}, [(4, 6)]),
    "a b, a k^ -> a b": ("a b, a k -> a b", {"reduction_factors": ("k",)}, [(4, 6), (4, 3)]),
    "(a c) b, a c -> (a c) b": ("(a c) b, a c -> (a c) b", {}, [(8, 6), (2, 4)]),
    "s t b -> s t b": ("... b -> ... b", {}, [(2, 4, 6)]),
    "a b!, a c! -> a d!": ("a b, a b -> a b", {}, [(4, 6), (4, 3)]),  # the second has a scale for two
}


@pytest.mark.parametrize("expected", PARTITIONED)
def test_a_sharding_rule_is_read_as_it_says(expected: str):
    rule, options, shapes = PARTITIONED[expected]
    eqn = capture("custom_partitioning", partitioned(rule, 1, **options), *(floats(*s) for s in shapes))
    assert same(written(eqn.rule)) == same(expected)
    assert eqn.rule.is_kernel
    assert not eqn.rule.is_unknown


def doubled(x: jax.Array, s: jax.Array) -> jax.Array:
    def kernel(x_ref, s_ref, o_ref):
        o_ref[...] = x_ref[...] * s_ref[0]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, s)


VMAPPED = {
    "a! b!, c! -> d! e!": (doubled, (4, 6), (3,)),
    "n a! b!, c! -> n d! e!": (jax.vmap(doubled, (0, None)), (2, 4, 6), (3,)),
    "a! n b!, n c! -> n d! e!": (jax.vmap(doubled, (1, 0)), (4, 2, 6), (2, 3)),
    "m n a! b!, n c! -> m n d! e!": (jax.vmap(jax.vmap(doubled), (0, None)), (5, 2, 4, 6), (2, 3)),
}


@pytest.mark.parametrize("expected", VMAPPED)
def test_batches_of_a_pallas_kernel_are_parallel(expected: str):
    function, x, s = VMAPPED[expected]
    rule = capture("pallas_call", function, floats(*x), floats(*s)).rule
    assert same(written(rule)) == same(expected)
    assert rule.is_kernel != rule.is_unknown


EMPTY = [(0,)] * 4
ATTENTION = "b t! (n g) h!, b s! n i!, b u! n j!"
ATTENDED = {
    "forward": (
        "dot_product_attention_fwd_wrapper",
        [(2, 8, 6, 4), (2, 8, 3, 4), (2, 8, 3, 4), (0,), (0,), (0,), *EMPTY],
        [(2, 8, 6, 4), (2, 6, 8)],
        f"{ATTENTION}, c!, d!, e!, p!, q!, r!, v! -> b w! (n g) x!, b (n g) y!",
    ),
    "bias shared by heads, lengths": (
        "dot_product_attention_fwd_wrapper",
        [(2, 8, 6, 4), (2, 8, 3, 4), (2, 8, 3, 4), (2, 1, 8, 8), (2,), (2,), *EMPTY],
        [(2, 8, 6, 4)],
        f"{ATTENTION}, b 1 c! d!, b, b, p!, q!, r!, v! -> b w! (n g) x!",
    ),
    "gradient of a bias shared by the batch": (
        "dot_product_attention_bwd_wrapper",
        [*[(2, 8, 6, 4)] * 3, (1, 6, 8, 8), (0,), (0,), *EMPTY, (2, 6, 8), (2, 8, 6, 4), (2, 8, 6, 4)],
        [*[(2, 8, 6, 4)] * 3, (1, 6, 8, 8)],
        "b! a! n c!, b d! n e!, b f! n g!, 1 n h! i!, j!, k!, l!, m!, o!, p!, b n q!, b r! n s!, b t! n u! -> "
        "b va! n vb!, b vc! n vd!, b ve! n vf!, 1 n vg! vh!",
    ),
}
PLAIN = {"layout": 0, "dropout_rate": 0.0, "mask_type": SimpleNamespace(name="CAUSAL")}


@pytest.mark.parametrize("case", ATTENDED)
def test_attention_is_parallel_in_batches_and_heads(case: str):
    name, ins, outs, expected = ATTENDED[case]
    rule = rule_for(name, [*avals(ins)], [*avals(outs)], PLAIN)
    assert same(written(rule)) == same(expected)
    assert rule.is_kernel


@pytest.mark.parametrize(
    ("case", "num_products"), [("forward", 2), ("gradient of a bias shared by the batch", 5)]
)
def test_attention_s_products_are_counted(case: str, num_products: int):
    """Of 2 x 6 pairs of matrices, 8 x 4 and 4 x 8; the gradient recomputes the scores."""
    name, ins, outs, _ = ATTENDED[case]
    rule = rule_for(name, [*avals(ins)], [*avals(outs)], PLAIN)
    assert flops(rule) == pytest.approx(num_products * 2 * 2 * 6 * 8 * 8 * 4)


@pytest.mark.parametrize("change", [{"dropout_rate": 0.1}, {"mask_type": SimpleNamespace(name="ALIBI")}])
def test_attention_that_counts_places_stays_whole(change: dict[str, Any]):
    name, ins, outs, _ = ATTENDED["forward"]
    rule = rule_for(name, [*avals(ins)], [*avals(outs)], PLAIN | change)
    assert {factor.kind for factor in rule.factors} == {Kind.UNSPLITTABLE}


LAYOUT = plain_layout(heads_first=False, is_grouped=True)
BLOCKWISE = {
    FORWARD: (
        [(2, 8, 6, 4), (2, 8, 3, 4), (2, 8, 3, 5)],
        [(2, 8, 6, 5), (2, 6, 8)],
        "b s (n g) d!, b s n d!, b s n e! -> b s (n g) e!, b (n g) s",
    ),
    BACKWARD: (
        [(2, 8, 6, 4), (2, 8, 3, 4), (2, 8, 3, 5), (2, 8, 6, 5), (2, 6, 8), (2, 8, 6, 5)],
        [(2, 8, 6, 4), (2, 8, 3, 4), (2, 8, 3, 5)],
        "b s (n g^) d!, b s n d!, b s n e!, b s (n g^) e!, b (n g^) s, b s (n g^) e! -> "
        "b s (n g^) d!, b s n d!, b s n e!",
    ),
}


@pytest.mark.parametrize(("name", "products"), [(FORWARD, 4 + 5), (BACKWARD, 2.5 * (4 + 5))])
def test_blockwise_attention_is_parallel_in_the_sequence_too(name: str, products: float):
    """The gradients of keys and values sum over the query heads that share them."""
    ins, outs, expected = BLOCKWISE[name]
    rule = rule_for(name, [*avals(ins)], [*avals(outs)], {"layout": LAYOUT})
    assert same(written(rule)) == same(expected)
    assert rule.is_kernel
    assert flops(rule) == pytest.approx(2 * products * 2 * 6 * 8 * 8)


def test_sequences_of_two_lengths_stay_whole():
    rule = rule_for(
        FORWARD,
        [*avals([(2, 8, 6, 4), (2, 9, 3, 4), (2, 9, 3, 5)])],
        [*avals([(2, 8, 6, 5), (2, 6, 8)])],
        {"layout": LAYOUT},
    )
    assert same(written(rule)) == same("b s! (n g) d!, b t! n d!, b t! n e! -> b s! (n g) e!, b (n g) s!")


def test_the_table_is_complete():
    """Each primitive with a rule stands in one of the tables."""
    written_down = (
        {CASES[case][0] for case in EXPECTED}
        | set(DIRECT)
        | {name for name, *_ in ATTENDED.values()}
        | {*BLOCKWISE}
    )
    assert set(factors._RULES) <= written_down | {"custom_partitioning", "pallas_call"}
