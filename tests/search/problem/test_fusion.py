"""Which values become arrays, in steps small enough to reckon by hand.

Where it says "as XLA does", this is what the compiled program holds for an H100, read from its kernels.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import ReadPhase, flatten, read_phase
from autoshard.search.problem.folding import fold
from autoshard.search.problem.fusion import MOVES, Fusion, expensive_itemsize, is_view
from tests.zoo import traced


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = array(2048, 1024), array(1024, 1024)
KEY = jax.eval_shape(lambda: jax.random.key(0))
LABELS = array(2048, dtype=jnp.int32)


def fusion(step, *args, gpu="H100-80GB") -> Fusion:
    return fusion_of(trace(step, *args), gpu)


def fusion_of(step: Step, gpu="H100-80GB") -> Fusion:
    device = parse_cluster(f"1x{gpu}").device
    return Fusion(fold(flatten(step)), expensive_itemsize(device))


def arrays(step, *args, gpu="H100-80GB") -> list[str]:
    """The ops whose results are arrays, without arguments, results and numbers of a single element."""
    found = fusion(step, *args, gpu=gpu)
    return [
        op.name
        for op in found.program.ops
        for v in op.results
        if op.name not in ("input", "output") and found.program.values[v].shape and found.is_stored(v)
    ]


def sources(found: Fusion, name: str) -> list[str]:
    """The ops whose arrays the one result of this name is computed from."""
    ((v,),) = [op.results for op in found.program.ops if op.name == name]
    return [found.program.ops[found.maker[a][0]].name for a in sorted(found.sources[v])]


def pooled(x, size):
    """Sums over windows of the last dimension."""
    return lax.reduce_window(x, 0.0, lax.add, (1, size), (1, size), "VALID")


def trained(loss, params, *args):
    """What is stored of a step of plain gradient descent, up to the update."""

    def step(params, *args):
        gradients = jax.grad(lambda params: jnp.sum(loss(params, *args) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    return step, params, *args


# --- one after the other, as XLA does


@pytest.mark.parametrize(
    ("step", "args", "wanted"),
    [
        (lambda x: jnp.sin(x) * 2 + 1, (X,), ["add"]),
        (lambda x, w: jnp.sin(x) @ w, (X, W), ["sin", "dot_general"]),
        (lambda x, w: jnp.sin(x @ w) + 1, (X, W), ["dot_general", "add"]),
        (lambda x, w: jnp.sin(x).T @ x, (X, W), ["sin", "dot_general"]),
        (lambda x, w: (x @ w).T @ x, (X, W), ["dot_general", "dot_general"]),
        (lambda x: jnp.sum(jnp.exp(x), 1), (X,), ["reduce_sum"]),
        (lambda x: jnp.sum(jnp.exp(x), 1) * 2, (X,), ["reduce_sum", "mul"]),
        (lambda x: jnp.max(x, 1, keepdims=True) - x, (X,), ["reduce_max", "sub"]),
        (lambda x, w: jnp.sin(x)[:512] @ w, (X, W), ["slice", "dot_general"]),
        (lambda x: jnp.sin(jnp.pad(x, 1)[::2]) * 2.0, (X,), ["mul"]),
        (lambda x: jnp.sin(jnp.concatenate([jnp.cos(x), x * 2.0])) + 1.0, (X,), ["add"]),
        (lambda x: sum(jnp.split(jnp.sin(x), 2)), (X,), ["add"]),
        (lambda x: pooled(jnp.sin(x), 4) * 2.0, (X,), ["mul"]),
        (jax.grad(lambda x: jnp.sum(jnp.sin(pooled(jnp.exp(x), 4)))), (X,), ["mul"]),
        (
            lambda x, w: pooled(x @ w, 4).T @ x,
            (X, W),
            ["dot_general", "reduce_window_sum", "dot_general"],
        ),
        (lambda x, i: (x * 2.0).at[i].get(mode="clip"), (X, LABELS), ["gather"]),
        (lambda x, k: x + jax.random.uniform(k, X.shape), (X, KEY), ["add"]),
    ],
    ids=[
        "chain",
        "into",
        "out of",
        "turned light",
        "turned",
        "sum",
        "after a sum",
        "maximum",
        "part",
        "padded",
        "joined",
        "split",
        "pooled",
        "gradient of a pooling",
        "pooled for a product",
        "look-up",
        "noise",
    ],
)
def test_what_is_stored(step, args, wanted):
    assert arrays(step, *args) == wanted


@pytest.mark.parametrize("is_pooled", [False, True])
def test_windows_are_summed_once_for_all_kernels(is_pooled):
    """As XLA does with the gradient of a pooling behind a group norm; other light values it computes in each kernel anew."""

    def centred(x):
        y = jnp.cos(pooled(x, 4) if is_pooled else x * 2.0)
        return y - jnp.sum(y, 1, keepdims=True)

    assert arrays(centred, X) == [*["cos"] * is_pooled, "reduce_sum", "sub"]


def test_what_is_not_stored_is_computed_from_the_arrays_behind_it():
    found = fusion(lambda x, w: jnp.cos(jnp.sin(x @ w).T + jnp.sum(x)) * 2.0, X, W)
    assert sources(found, "sin") == sources(found, "transpose") == ["dot_general"]
    assert sources(found, "cos") == ["dot_general", "reduce_sum"]
    assert sources(found, "mul") == ["mul"]


def test_a_sum_over_one_element_is_none():
    assert arrays(lambda x: jnp.sin(jnp.sum(x, 1)) + 1.0, array(2048, 1)) == ["add"]


@pytest.mark.parametrize(("rows", "wanted"), [(4, ["add", "mul"]), (5, ["mul"])])
def test_what_is_computed_from_three_large_arrays_is_stored(rows, wanted):
    """Large is what has a fourth of the result's bytes."""
    large, third = array(rows, 256, 1024), array(256, 1024)
    assert arrays(lambda x, y, z: jnp.sin(x * y + z) * 2.0, large, large, third) == wanted
    assert arrays(lambda x, y: jnp.sin(x * y + x) * 2.0, large, large) == ["mul"]


@pytest.mark.parametrize(
    ("then", "is_stored"),
    [
        (lambda h, x, w, b: (h + x @ w, h * 3.0), True),
        (lambda h, x, w, b: (h + (x @ w + b), h * 3.0), True),
        (lambda h, x, w, b: (h + jnp.sin(x @ w), h * 3.0), False),
        (lambda h, x, w, b: ((lambda p: (h + p, p * 2.0))(x @ w), h * 3.0), False),
        (lambda h, x, w, b: (h[0] + x @ w, h * 3.0), False),
    ],
    ids=["product", "with a bias", "made of a product", "that others read", "a row"],
)
def test_what_cublas_adds_a_product_to_is_an_array(then, is_stored):
    """As XLA does: it reads it where it lies, or a copy; where another kernel adds them, it computes it on the fly."""
    found = fusion(lambda x, y, w, b: then(x * y, x, w, b), X, X, W, array(1024))
    (h,) = (op.results[0] for op in found.program.ops if op.name == "mul" and op.operands == (0, 1))
    assert found.is_stored(h) == is_stored


def test_gradients_of_what_all_layers_read_are_added_up_by_one_kernel():
    """It reads them all: the products wait for it."""

    def loss(x, ws):
        return sum(jnp.sum(x @ w) for w in ws)

    found = fusion(lambda x, ws: jax.grad(loss)(x, ws) * 2.0, X, [W] * 8)
    sums = [op.results[0] for op in found.program.ops if op.name == "add_any"]
    assert [len(found.sources[v]) for v in sums] == [2, 3, 4, 5, 6, 7, 1]
    assert found.is_stored(sums[-1])


def test_no_kernel_reads_more_arrays_than_xla_lets_one_read():
    def clipped(params):
        gradients = jax.grad(lambda params: sum(jnp.sum(jnp.sin(p)) for p in params))(params)
        norm = functools.reduce(jnp.add, [jnp.sum(g * g) for g in gradients])
        return [p - g / norm for p, g in zip(params, gradients, strict=True)]

    found = fusion(clipped, [array(1024)] * 300)
    assert max(map(len, found.sources.values())) == 95


def test_what_takes_an_array_at_more_than_three_places_is_stored():
    """Every second level of an associative scan is, as XLA does; elements at one place may be read as often as one likes."""

    def halved(x):
        return x[::2] * x[1::2]

    assert arrays(halved, X) == ["mul"]
    assert arrays(lambda x: halved(halved(x)) + 1.0, X) == ["mul", "add"]
    assert arrays(lambda x: halved(halved(halved(x))) + 1.0, X) == ["mul", "add"]
    assert arrays(lambda x: x * x + jnp.sin(x) * jnp.cos(x) + jnp.exp(x), X) == ["add"]


# --- what the backward phase reads again


def scaled(activation):
    """A layer whose activation a trained row scales, and one on top: the row's gradient reads the activation."""
    return lambda params, x: (activation(x @ params[0]) * params[2]) @ params[1]


def log(x):
    return jnp.log(x * x + 1.0)


@pytest.mark.parametrize(
    ("gpu", "dtype", "activation", "kept"),
    [
        ("H100-80GB", jnp.bfloat16, jnp.tanh, ["tanh"]),
        ("A100-80GB", jnp.float32, jnp.tanh, ["tanh"]),
        ("A100-80GB", jnp.float32, log, ["log"]),
        ("H100-80GB", jnp.float32, log, []),
        ("A100-80GB", jnp.float32, jax.nn.sigmoid, []),
        ("H100-80GB", jnp.bfloat16, jnp.exp, []),
    ],
)
def test_an_expensive_op_s_result_is_kept_where_moving_it_is_cheap(gpu, dtype, activation, kept):
    """As XLA does on either GPU."""
    x, w, row = (array(*shape, dtype=dtype) for shape in ((8192, 1024), (1024, 1024), (1024,)))
    forward = ["dot_general", *kept, "mul", "dot_general"]
    assert arrays(*trained(scaled(activation), (w, w, row), x), gpu=gpu)[: len(forward)] == forward


def test_moving_is_cheap_up_to_the_device_s_bytes_in_the_time_of_sixty_operations():
    h100, a100 = (parse_cluster(f"1x{gpu}-80GB").device for gpu in ("H100", "A100"))
    assert expensive_itemsize(h100) == pytest.approx(60 * 3.35 / 67, rel=0.01)
    assert expensive_itemsize(a100) == pytest.approx(60 * 2.04 / 19.5, rel=0.01)


def test_what_one_phase_reads_is_computed_twice_rather_than_stored():
    x = array(2048, 1024, dtype=jnp.bfloat16)
    assert arrays(lambda x: (y := jnp.tanh(x)) + jnp.sum(y, 1, keepdims=True), x) == ["reduce_sum", "add"]


def gated(activation):
    return lambda params, x: (activation(x @ params[0]) * (x @ params[1])) @ params[2]


@pytest.mark.parametrize(
    ("activation", "kept"), [(jnp.tanh, ["tanh"]), (jax.nn.gelu, ["mul"]), (jax.nn.silu, []), (jnp.exp, [])]
)
def test_a_gate_is_kept_beside_the_product_that_it_multiplies(activation, kept):
    """As XLA does, also where it is cheap to compute again; not where the gradient doesn't need it."""
    forward = ["dot_general", *kept, "dot_general", "mul", "dot_general"]
    assert arrays(*trained(gated(activation), (W, W, W), X))[: len(forward)] == forward
    assert arrays(gated(activation), (W, W, W), X) == ["dot_general", "dot_general", "mul", "dot_general"]


def test_a_gate_of_an_argument_is_computed_again():
    """As XLA does."""

    def loss(params, x):
        return (jax.nn.gelu(x @ params[0]) * x) @ params[1]

    assert arrays(*trained(loss, (W, W), X))[:3] == ["dot_general", "mul", "dot_general"]


def test_of_dropout_the_mask_is_kept_and_never_its_bits():
    """As XLA does."""

    def dropped(params, x, key):
        y = x @ params[0]
        return jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0.0) @ params[1]

    forward = ["dot_general", "lt", "select_n", "dot_general"]
    assert arrays(*trained(dropped, (W, W), X, KEY))[:4] == forward


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (lambda k, w: jax.random.uniform(k, X.shape) @ w, ["max", "dot_general"]),
        (lambda k, w: jnp.sum(jax.random.uniform(k, X.shape), 1), ["reduce_sum"]),
        (lambda k, w: jax.random.uniform(k, W.shape) * 2.0 + w, ["add"]),
    ],
    ids=["product", "sum", "added"],
)
def test_noise_is_an_array_where_it_is_read_whole(step, wanted):
    """As XLA does."""
    assert arrays(step, KEY, W) == wanted


# --- scatters


@pytest.mark.parametrize("is_added", [True, False])
def test_what_is_scattered_to_zeros_is_scattered_into_what_it_is_added_to(is_added):
    """The gradient of a cross-entropy, and of its picked part alone, as XLA does."""

    def step(w, x, labels):
        def loss(w):
            y = x @ w
            picked = jnp.take_along_axis(y, labels[:, None], -1, mode="clip")
            return jnp.sum(picked) + (jnp.sum(y**2) if is_added else 0.0)

        return jax.grad(loss)(w)

    last = ["add_any" if is_added else "scatter-add", "dot_general"]
    found = arrays(step, W, X, LABELS)
    assert found == (["dot_general", *last] if is_added else last)


def test_what_is_scattered_to_is_not_computed_twice():
    """As XLA does."""

    def step(x, labels):
        return jnp.sin(jnp.zeros(X.shape).at[labels, labels].add(1.0, mode="clip") * x)

    assert arrays(step, X, LABELS)[-2:] == ["scatter-add", "sin"]


def test_what_is_added_to_an_array_is_computed_by_the_scatter():
    """As XLA does, the gradient's part of a joined array included."""

    def step(table, x, labels):
        return table.at[labels].add(jnp.split(jnp.sin(x), 2, axis=1)[0], mode="clip")

    assert arrays(step, array(4096, 512), X, LABELS) == ["scatter-add"]


def test_the_zeros_that_a_scatter_writes_over_are_no_array_of_their_own():
    """As XLA does: the table's gradient takes their place."""

    def step(x, labels):
        return jnp.zeros(X.shape).at[labels].add(x, mode="clip")

    assert arrays(step, X, LABELS) == ["scatter-add"]


# --- loops


def test_what_a_loop_reads_from_outside_is_an_array():
    """As XLA does: what is made of the batch before the loop over layers, and what is computed of all layers' weights."""

    def step(weights, x):
        bias = jnp.cos(x)
        return jax.lax.scan(lambda y, w: (jnp.sin(y @ w + bias), None), x, weights)[0]

    assert "cos" in arrays(step, array(4, 1024, 1024), X)
    assert (
        arrays(
            lambda w, x: jax.lax.scan(lambda y, w: (y + w, None), x, jnp.sin(w))[0], array(4, *X.shape), X
        )[0]
        == "sin"
    )


# --- copies in another order


def test_what_only_copies_are_made_of_is_no_array_besides():
    """As XLA does: the probabilities of grouped heads."""

    def attended(p, v):
        return jnp.einsum("bkgts,bskd->btkgd", jnp.exp(p @ p), v)

    large, values = array(2, 4, 8, 64, 64), array(2, 64, 4, 16)
    assert "exp" not in arrays(attended, large, values)
    assert "exp" in arrays(lambda p, v: jnp.exp(p @ p) @ v, large, array(2, 4, 8, 64, 16))


# --- loops


def test_loops_have_arrays_of_their_own_and_their_parts_are_views():
    def step(weights, x):
        return jax.lax.scan(lambda y, w: (jnp.sin(y @ w), jnp.cos(y)), x, weights)

    found = fusion(step, array(4, 1024, 1024), X)
    assert arrays(step, array(4, 1024, 1024), X) == ["carry", "dot_general", "sin", "cos", "stack"]
    assert sources(found, "slice") == ["input"]


# --- laws


@functools.cache
def of_model(name: str) -> Fusion:
    return fusion_of(traced(name))


MODELS = pytest.mark.parametrize("name", ["mlp", "gpt_scan", "moe", "resnet"])


@MODELS
def test_sources_are_arrays_and_those_of_the_operands(name):
    found = of_model(name)
    for op in found.program.ops:
        behind = {s for o in op.operands for s in found.sources[o]} if not op.is_boundary else set()
        for v in op.results:
            assert all(found.sources[s] == {s} for s in found.sources[v])
            if not op.is_boundary:
                assert found.is_stored(v) or found.sources[v] == behind


@MODELS
def test_what_is_not_fused_makes_arrays_and_reads_arrays(name):
    found = of_model(name)
    for i, op in enumerate(found.program.ops):
        is_fused = found.folded.is_light[found.folded.class_of[i]] or (
            op.name in MOVES and not op.is_boundary
        )
        if is_view(op) or is_fused:
            continue
        assert all(map(found.is_stored, op.results))
        reads_whole = op.name not in ("gather", "dynamic_slice") and not op.name.startswith("scatter")
        for n, v in enumerate(op.operands) if reads_whole else ():
            assert len(found.sources[v]) == 1 or found.copied_as(i, n) is not None, (op.name, v)


@MODELS
def test_values_are_computed_in_the_phases_of_the_kernels_that_they_end_up_in(name):
    found = of_model(name)
    for v, phases in found.computed_in.items():
        least, most = set(), set()
        for u in found.uses.get(v, ()):
            op = found.program.ops[u]
            is_light = found.folded.is_light[found.folded.class_of[u]]
            if not is_light:
                least.add(read_phase(op))
            elif not found.is_stored(op.results[0]):
                least |= found.computed_in[op.results[0]]
            else:  # an expensive op's array may be computed in the kernel of its reader, or be it
                most |= {read_phase(op)} | found.computed_in[op.results[0]]
        assert least <= phases <= least | most


def test_arguments_and_products_are_computed_in_the_phases_that_read_them():
    found = fusion(*trained(lambda params, x: (jnp.tanh(x @ params[0]) + x) @ params[1], (W, W), X))
    forward, backward, update = ReadPhase.FORWARD, ReadPhase.BACKWARD, ReadPhase.UPDATE
    made = [op for op in found.program.ops if op.name in ("input", "dot_general")]
    assert [found.computed_in[op.results[0]] for op in made] == [
        {forward, update},  # the first weight: no gradient of x is asked for
        {forward, backward, update},
        {forward, backward},  # x
        {forward, backward},  # what tanh reads, then and again
        {backward},  # the output, doubled by the backward phase's kernel
        {update},  # the second weight's gradient
        {backward},
        {update},
    ]
