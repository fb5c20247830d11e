"""What XLA keeps that the step does not name: copies that libraries want, activations beside products, parts of stacks.

Each was seen in XLA:GPU's buffers; here it is read off the kernels and buffers that a device is taken to have.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.device.lowering import Copies, Kernel, Lowered, lower
from autoshard.search.ir.trace import trace
from autoshard.search.problem.live_ranges import Resident
from autoshard.search.problem.strategies import CopySource
from autoshard.search.step_problem import StepProblem


def zeros(shape, dtype=np.float32):
    """As `jnp.zeros`, but no program makes them."""
    return np.zeros(shape, dtype)


PLENTY_BYTES = 1 << 45


def lowered(
    step, *args, mesh=(1,), pins=None, gpu="H100-80GB", gathers_again=False, is_one_program=True
) -> Lowered:
    traced, pins, cluster = trace(step, *args), pins or {}, parse_cluster(f"{mesh[0]}x{gpu}")
    marks = [str(pins.get(a.name)) for a in traced.arguments]
    on_mesh = StepProblem.of(traced, marks, cluster.device).on(cluster, mesh)
    kept = list(on_mesh.pinned(pins))
    for copy in on_mesh.memory.costed.graph.copies if gathers_again else ():
        sources = on_mesh.memory.costed.strategies[copy.node].copy_sources
        if copy.kept_from:
            kept[copy.node] = np.flatnonzero([source is CopySource.FRESH for source in sources])
    solution, _ = on_mesh.fitting(kept, PLENTY_BYTES, 5.0)
    return lower(on_mesh.memory.costed, on_mesh.live_ranges, solution.labels, is_one_program)


def gathers(found: Lowered) -> list[Kernel]:
    return [k for k in found.kernels if k.collective is not None and k.collective.kind == "all-gather"]


def readers(found: Lowered, num_bytes: int) -> list[int]:
    """By how many kernels each array of this size is read, arguments left out."""
    arrays = [b for b, buffer in enumerate(found.buffers) if buffer.num_bytes == num_bytes]
    return [
        sum(b in kernel.reads for kernel in found.kernels) for b in arrays if not found.buffers[b].is_argument
    ]


@pytest.mark.parametrize("is_biased", [False, True])
def test_a_product_is_written_with_the_array_that_it_is_added_to(is_biased):
    """A residual block: the product and the sum are one array, and the array before stays for its other readers."""
    x, w, bias = zeros((2048, 1024)), zeros((1024, 1024)), zeros((1024,))

    def step(x, w, bias):
        before = jnp.sin(x)
        after = before + (before @ w + bias if is_biased else before @ w)
        return after @ w, before.sum()

    found = lowered(step, x, w, bias)
    made = [k for k in found.kernels if any(found.buffers[b].num_bytes == x.nbytes for b in k.makes)]
    ((before,), (after,), *_) = (k.makes for k in made)
    assert [before in k.reads for k in made] == [False, True, False, False]
    assert [after in k.reads for k in made] == [False, False, True, False]


def test_a_kernel_that_reads_a_slice_alone_says_which():
    x, w = zeros((2048, 1024)), zeros((512, 512))

    def step(x, w):
        one, other = jnp.split(jnp.sin(x), 2, axis=1)
        return jnp.cos(one) @ w, jnp.tanh(other) @ w, jnp.sin(x) @ x.T

    found = lowered(step, x, w)
    slices = [k.parts for k in found.kernels if k.nest is not None and k.parts]
    assert len(slices) == len({*slices}) == 2


def test_an_array_that_is_not_as_large_as_the_sum_is_added_by_a_kernel():
    x, w = zeros((2048, 1024)), zeros((1024, 1024))

    def step(x, w):
        row = jnp.sin(x).sum(0)
        return jnp.tanh(x @ w + row) @ w, row

    assert readers(lowered(step, x, w), x.nbytes) == [1, 1, 1, 0]


def convolved(padding):
    def step(kernel, images):
        def loss(kernel):
            out = lax.conv_general_dilated(
                images, kernel, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.sum(out**2)

        return kernel - 0.1 * jax.grad(loss)(kernel)

    return step


KERNEL, IMAGES = zeros((3, 3, 32, 32)), zeros((4, 64, 64, 32))


def test_uneven_padding_is_written_out_once_for_both_phases():
    padded_bytes = 4 * 4 * 65 * 65 * 32
    assert readers(lowered(convolved("SAME"), KERNEL, IMAGES), padded_bytes) == [2]
    assert readers(lowered(convolved(((1, 1), (1, 1))), KERNEL, IMAGES), padded_bytes) == []


def test_images_are_read_as_they_are_where_the_padding_is_even():
    """By the convolution and by its kernel's gradient; padded, by one copy."""

    def num_readers(padding):
        found = lowered(convolved(padding), KERNEL, IMAGES)
        (images,) = [b for b, x in enumerate(found.buffers) if x.is_argument and x.num_bytes == IMAGES.nbytes]
        return sum(images in kernel.reads for kernel in found.kernels)

    assert num_readers(((1, 1), (1, 1))) == 2
    assert num_readers("SAME") == 1


def test_a_kernel_is_transposed_for_cudnn_and_updated_as_it_lies_there():
    found = lowered(convolved("SAME"), KERNEL, IMAGES)
    (argument,) = [b for b, x in enumerate(found.buffers) if x.is_argument and x.num_bytes == KERNEL.nbytes]
    first = next(k for k in found.kernels if argument in k.reads)
    (copy,) = first.makes
    assert found.buffers[copy].num_bytes == KERNEL.nbytes
    assert first.workspace_bytes == 0
    rate = parse_cluster("1xH100-80GB").device.memory_bytes_per_s
    assert first.time.scheduled_s == pytest.approx(2 * KERNEL.nbytes / rate)  # read and written
    last = max(k.position for k in found.kernels if copy in k.reads)
    assert last == max(k.position for k in found.kernels)


def test_a_product_reads_its_part_of_what_every_device_has_from_a_copy():
    x, w = zeros((1 << 16, 1024)), zeros((1024, 1024))
    found = lowered(lambda x, w: (x @ w, w @ w), x, w, mesh=(8,), pins={"x": P(), "w": P()})
    (argument,) = [b for b, one in enumerate(found.buffers) if one.is_argument and one.num_bytes == x.nbytes]
    (copied,) = [k for k in found.kernels if argument in k.reads]
    (copy,) = copied.makes
    assert (copied.workspace_bytes, found.buffers[copy].num_bytes) == (0.0, x.nbytes / 8)
    assert [k.workspace_bytes > 0 for k in found.kernels if copy in k.reads] == [True]


def branches(weights, x):
    """A layer that several others read: their products say together what its gradient is."""

    def loss(weights):
        first, *others = weights
        y = jax.nn.relu(x @ first)
        return sum(jnp.sum((y @ w) ** 2) for w in others)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))


@pytest.mark.parametrize("num_branches", [1, 2, 3])
def test_a_product_is_added_to_the_array_that_is_there(num_branches):
    weights, x = [zeros((512, 512)) for _ in range(1 + num_branches)], zeros((2048, 512))
    found = lowered(branches, weights, x)
    products = [k for k in found.kernels if k.workspace_bytes]
    added = [k for k in products if not found.buffers[k.makes[0]].num_bytes]
    terms = [k for k in added if len(k.reads) > 2]  # others are new state, which lies where the old one was
    assert (len(products), len(terms)) == (2 + 3 * num_branches, num_branches - 1)


@pytest.mark.parametrize("is_one_program", [True, False])
def test_a_program_for_each_task_adds_nothing_to_what_it_is_handed(is_one_program):
    """Gradients of microbatches are added up where they lie by a loop, not by programs that get the sum and hand it back."""

    def step(w, xs):
        total, _ = lax.scan(lambda total, x: (total + x.T @ jnp.tanh(x @ w), None), jnp.zeros_like(w), xs)
        return w - total

    found = lowered(step, zeros((512, 512)), zeros((4, 2048, 512)), is_one_program=is_one_program)
    sizes = [found.buffers[k.makes[0]].num_bytes for k in found.kernels if k.workspace_bytes]
    assert sizes == [4 * 2048 * 512, 0 if is_one_program else 4 * 512 * 512]


def gated(activation):
    def step(weights, x):
        def loss(weights):
            gate, up, down = weights
            return jnp.sum(((activation(x @ gate) * (x @ up)) @ down) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    return step


@pytest.mark.parametrize(
    ("gpu", "activation", "dtype", "kept"),
    [  # both products and their product in any case
        ("H100-80GB", jax.nn.gelu, jnp.float32, 4),  # and the activation
        ("H100-80GB", jax.nn.gelu, jnp.bfloat16, 4),  # and the tanh
        ("A100-80GB", jax.nn.gelu, jnp.float32, 4),  # and the tanh, which is slower to compute there
        ("H100-80GB", jax.nn.silu, jnp.float32, 3),
        ("H100-80GB", jax.nn.relu, jnp.float32, 3),
    ],
    ids=["gelu in float32", "gelu in bfloat16", "gelu on an A100", "silu", "relu"],
)
def test_what_a_gated_layer_keeps_for_the_backward_phase(gpu, activation, dtype, kept):
    weights = [zeros((256, 1024), dtype), zeros((256, 1024), dtype), zeros((1024, 256), dtype)]
    x = zeros((2048, 256), dtype)
    found = lowered(gated(activation), weights, x, gpu=gpu)
    size = 2048 * 1024 * dtype.dtype.itemsize
    residuals = [b for b in found.buffers if b.resident is Resident.RESIDUALS and b.num_bytes == size]
    assert len(residuals) == kept


def layers(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(y @ w)
        return jnp.sum(y**2)

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


WEIGHTS = [zeros((256, 256))] * 3
SHARDED = {f"weights[{i}]": P("data") for i in range(3)} | {"x": P("data")}


def test_weights_are_gathered_for_their_reader_without_workspace():
    found = lowered(layers, WEIGHTS, zeros((8192, 256)), mesh=(8,), pins=SHARDED)
    assert len(gathers(found)) == 3
    for gather in gathers(found):
        arrived = found.buffers[gather.makes[0]]
        assert arrived.origin is not None
        assert (arrived.num_bytes, arrived.origin.source) == (WEIGHTS[0].nbytes, (0,))
        assert gather.workspace_bytes == 0
        assert gather.after == ()


def test_what_is_gathered_again_for_the_backward_phase_waits_for_what_ran_there_before():
    x = zeros((8192, 256))
    found = lowered(layers, WEIGHTS, x, mesh=(8,), pins=SHARDED, gathers_again=True)
    again = gathers(found)[3:]
    assert len(again) == 2  # the first layer's input has no gradient
    for gather in again:
        earlier = found.kernels[: found.kernels.index(gather)]
        assert gather.after == (max(k for k, kernel in enumerate(earlier) if kernel.collective is None),)


def test_a_new_state_that_travels_home_takes_no_array_but_the_old_one():
    def step(weights, momentum, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(weights)
        momentum = 0.9 * momentum + grads.astype(jnp.float32)
        return weights - momentum.astype(jnp.bfloat16), momentum

    weights, x = zeros((256, 256), jnp.bfloat16), zeros((8192, 256), jnp.bfloat16)
    pins = {"weights": P(), "momentum": P("data"), "x": P("data")}
    found = lowered(step, weights, zeros((256, 256)), x, mesh=(8,), pins=pins)
    (home,) = gathers(found)
    assert home == found.kernels[-1]
    (new,) = home.makes
    assert found.buffers[new].num_bytes == 0
    (part,) = home.reads
    assert found.buffers[part].num_bytes == weights.nbytes / 8


def test_what_a_loop_carries_or_stacks_lives_outside_of_it():
    """Read as written: a carry's first value is copied; the body reads it, makes the next one and a row of the stack, and
    holds the next one to its end; after it, both are handed out."""

    def step(w, x):
        def body(y, _):
            y = jnp.tanh(y @ w)
            return y, jnp.sum(y, 0)

        return lax.scan(body, x, None, length=4)

    w, x = zeros((256, 256)), zeros((512, 256))
    found = lowered(step, w, x)
    first, product, tanh, _, stack, end, *results = found.kernels
    (loop,) = product.loops
    body = (product, tanh, stack, end)
    assert [kernel.loops for kernel in body] == [(loop,)] * 4
    assert [kernel.loops for kernel in (first, *results)] == [()] * 3
    (carry,), (rows,), (again,) = first.makes, stack.makes, tanh.makes
    assert [found.buffers[b].loops for b in (carry, rows, again)] == [(), (), (loop,)]
    assert [found.buffers[b].num_bytes for b in (carry, rows)] == [x.nbytes, 4 * x.nbytes / 512]
    assert carry in product.reads
    assert (end.reads, end.makes, end.position) == ((again,), (), loop[1] - 1)
    assert {b for kernel in results for b in kernel.reads} == {carry, rows}


def accumulated(dtype):
    """A step whose loop adds up gradients of four microbatches, which are computed in some type."""

    def step(w, xs):
        def body(total, x):
            y = jnp.tanh(x @ w.astype(dtype)) * 1e-3
            return total + (x.T @ y).astype(w.dtype), None

        return w - lax.scan(body, jnp.zeros_like(w), xs)[0]

    w, xs = jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((4, 8192, 512), dtype)
    return lowered(step, w, xs, mesh=(8,), pins={"w": P(), "xs": P(None, "data")})


def test_what_a_loop_adds_up_is_reduced_once_behind_it_and_written_over():
    found = accumulated(jnp.float32)
    sums = [k for k in found.kernels if k.collective is not None]
    assert [(k.collective.kind, k.loops) for k in sums] == [("reduce-scatter", ())]
    (total,) = (b for b in sums[0].reads if found.buffers[b].num_bytes)
    assert found.buffers[total].num_bytes == 4 * 512**2
    again = [b for k in found.kernels if k.loops and total in k.reads for b in k.makes]
    assert [found.buffers[b].num_bytes for b in again] == [0.0]


def test_converted_terms_are_reduced_in_their_type():
    (reduced,) = [k for k in accumulated(jnp.bfloat16).kernels if k.collective is not None]
    what = reduced.collective
    assert (what.kind, what.dtype, what.num_bytes) == ("all-reduce", "bfloat16", 2 * 512**2)
    assert reduced.loops == ()


def test_what_an_inner_loop_stacks_lives_in_the_outer_one():
    def step(w, x):
        def inner(y, _):
            y = jnp.tanh(y @ w)
            return y, jnp.sum(y, 0)

        def outer(y, _):
            y, rows = lax.scan(inner, y, None, length=4)
            return y, jnp.sum(rows)

        return lax.scan(outer, x, None, length=3)

    found = lowered(step, zeros((256, 256)), zeros((512, 256)))
    inside, around = max((kernel.loops for kernel in found.kernels), key=len)
    (rows,) = [b for b in found.buffers if b.num_bytes == 4 * 4 * 256]
    assert rows.loops == (around,)
    assert [b.loops for b in found.buffers if b.num_bytes == 4 * 3] == [
        (),
        (),
    ]  # of the outer, and handed out
    for loop in (inside, around):  # each holds its carry to its own end
        *_, last = [kernel for kernel in found.kernels if loop in kernel.loops]
        assert (last.makes, last.position) == ((), loop[1] - 1)
        assert [found.buffers[b].num_bytes for b in last.reads] == [4 * 512 * 256]


def test_a_carry_s_first_value_is_not_held_by_the_loop_that_stacked_it():
    """The first loop carries what it multiplies, and only that is held to its end."""

    def step(w, x):
        last, rows = lax.scan(lambda y, _: (jnp.tanh(y @ w), jnp.sum(y, 0)), x, None, length=4)
        return last, lax.scan(lambda y, _: (jnp.tanh(y @ w), None), rows, None, length=3)[0]

    found = lowered(step, zeros((256, 256)), zeros((512, 256)))
    first = found.kernels[1].loops
    *_, end = [kernel for kernel in found.kernels if kernel.loops == first]
    assert [found.buffers[b].num_bytes for b in end.reads] == [4 * 512 * 256]


def test_a_stack_is_gathered_once_and_its_parts_are_copied():
    def step(weights, x):
        def loss(weights):
            return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    weights, x = zeros((4, 256, 256)), zeros((8192, 256))
    pins = {"weights": P(None, "data"), "x": P("data")}
    found = lowered(step, weights, x, mesh=(8,), pins=pins)
    (gather,) = gathers(found)
    assert gather.collective is not None
    assert (gather.collective.num_bytes, gather.loops) == (weights.nbytes, ())
    once_s = MeshModel(parse_cluster("8xH100-80GB"), (8,)).time_s("all-gather", (0,), weights.nbytes)
    assert gather.time.seconds == pytest.approx(once_s)
    (whole,) = gather.makes
    parts = [k for k in found.kernels if whole in k.reads]
    assert len(parts) == 2
    assert all(k.loops and found.buffers[k.makes[0]].num_bytes == weights.nbytes / 4 for k in parts)


def fenced(w, x):
    """A product that must be there before a hyperbolic tangent is computed, which does not read it."""
    product = x @ w
    held = lax.optimization_barrier((x, product))[0]
    return jnp.sum(jnp.tanh(held) @ w), jnp.sum(product)


def test_what_is_computed_behind_a_barrier_waits_for_all_that_goes_in():
    found = lowered(fenced, zeros((512, 512)), zeros((512, 512)))
    products = [k for k, kernel in enumerate(found.kernels) if kernel.workspace_bytes]
    behind = [kernel for kernel in found.kernels if products[0] in kernel.after]
    assert len(products) == 2
    assert behind
    assert not set(found.kernels[products[0]].makes) & {b for kernel in behind for b in kernel.reads}


def test_a_gradient_is_waited_for_as_its_update_reads_it():
    """Split over rows where the update rests, it is reduced and scattered before the barrier: once."""

    def step(w, x):
        product = lax.dot_general(x, x, (((0,), (0,)), ((), ())))
        held = lax.optimization_barrier((x, product))[0]
        return w - 0.1 * product, jnp.sum(jnp.tanh(held))

    shapes = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    found = lowered(step, *shapes, mesh=(8,), pins={"w": P("data"), "x": P("data")})
    (scatter,) = [
        k
        for k, kernel in enumerate(found.kernels)
        if kernel.collective is not None and kernel.collective.num_bytes > 1024
    ]
    assert found.kernels[scatter].collective.kind == "reduce-scatter"
    assert any(scatter in kernel.after for kernel in found.kernels)


# --- arrays in another order


def grouped(batch, rows, heads=4, dtype=jnp.bfloat16):
    """Grouped heads and their gradients: 2 groups."""
    q, k = (jax.ShapeDtypeStruct((batch, rows, *two, 64), dtype) for two in ((2, heads), (2,)))

    def attended(q, k, v):
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32)
        return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, -1).astype(q.dtype), v)

    def step(q, k, v):
        return jax.grad(lambda *args: jnp.sum(attended(*args).astype(jnp.float32) ** 2), (0, 1, 2))(q, k, v)

    return lowered(step, q, k, k)


def made(found: Lowered, num_bytes: int) -> int:
    return sum(b.num_bytes == num_bytes and not b.is_argument for b in found.buffers)


def test_grouped_heads_hold_their_probabilities_and_gradients_in_the_orders_that_products_want():
    """As XLA does of large ones: scores, probabilities for either product, their gradient, and that of the scores twice, in
    bfloat16; and the gradient of the probabilities as the scores lie, in float32."""
    scores = 8 * 1024 * 1024 * 2
    found = grouped(1, 1024)
    assert (made(found, scores * 2), made(found, scores)) == (1, 6)


def test_the_scores_of_small_grouped_heads_are_kept_in_float32():
    """As XLA does: beside the gradient of the probabilities."""
    scores = 8 * 512 * 512 * 2
    assert made(grouped(1, 512), scores * 2) == 2
    assert made(grouped(4, 512), 4 * scores * 2) == 1


@pytest.mark.parametrize(
    ("heads", "rows", "dtype", "num_orders"),
    [
        (4, 1024, jnp.float32, 2),
        (8, 256, jnp.float32, 2),
        (8, 1024, jnp.float32, 1),
        (16, 256, jnp.float32, 1),
        (4, 1024, jnp.bfloat16, 1),
    ],
)
def test_a_plain_loop_writes_an_array_in_all_orders_that_products_want(heads, rows, dtype, num_orders):
    """As XLA does: probabilities for the forward and the backward phase. Others are transposed in tiles."""
    found = grouped(1, rows, heads, dtype)
    num_bytes = 2 * heads * rows * rows * jnp.dtype(dtype).itemsize
    written = [[b for b in k.makes if found.buffers[b].num_bytes == num_bytes] for k in found.kernels]
    copies = [bs for k, bs in zip(found.kernels, written, strict=True) if isinstance(k.root, Copies)]
    assert max(map(len, copies)) == num_orders


# --- zeros


@pytest.mark.parametrize(("number", "more"), [(0.0, 1), (1.0, 0)])
def test_zeros_like_those_that_a_scatter_writes_over_are_there_while_a_kernel_reads_them(number, more):
    """As XLA does with AdaGrad on a table: made anew for the update, and never kept."""
    table, rows = zeros((4096, 64)), zeros((128, 64))

    def step(table, squares, at, rows):
        gradient = jnp.zeros_like(table).at[at].add(rows, mode="clip")
        squares = squares + gradient**2
        safe = jnp.where(squares > 0, gradient * lax.rsqrt(squares), jnp.full_like(table, number))
        return table - safe, squares

    found = lowered(step, table, table, zeros(128, int), rows)
    read = {b for kernel in found.kernels for b in kernel.reads}
    unread = [b for k in found.kernels for b in k.makes if b not in read]
    assert [found.buffers[b].num_bytes for b in unread] == [table.nbytes] * (2 + more)  # besides both results
