"""What computation costs: bytes counted by hand on small steps, products against their sizes."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.compute import pass_s_per_byte
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.plan.estimates import estimate
from autoshard.search.problem.costs import price
from autoshard.search.problem.kernels import moved_alone
from autoshard.search.problem.reshard import Resharder
from autoshard.search.step_problem import StepProblem
from tests.zoo import make_small


def zeros(shape, dtype=np.float32):
    """As `jnp.zeros`, but no program makes them."""
    return np.zeros(shape, dtype)


ROWS, COLUMNS = 512, 256
LARGE = zeros((ROWS, COLUMNS))
ROW = zeros(COLUMNS)


def costed(step, *args, cluster="1xH100-80GB", mesh=(1,)):
    problem = StepProblem.of(trace(step, *args), (), parse_cluster(cluster).device)
    return price(problem.graph, problem.kernels, Resharder(MeshModel(parse_cluster(cluster), mesh)))


def num_bytes(folded, place):
    kind, index, is_result = place
    op = folded.op(kind)
    return folded.program.values[(op.results if is_result else op.operands)[index]].num_bytes


def fused_traffic(step, *args):
    """(Kernels of light ops, what they move) in arrays like `LARGE`; what is smaller than a twentieth is left out."""
    found = costed(step, *args)
    kernels, folded = found.kernels.fused, found.graph.folded
    moved = [k.count * times * num_bytes(folded, p) for k in kernels for p, times in k.moved]
    return sum(k.count for k in kernels), round(sum(moved) / LARGE.nbytes, 1)


def traffic_alone(step, name, *args):
    """Bytes that the op of this name moves, which is a kernel of its own."""
    folded = costed(step, *args).graph.folded
    (kind,) = [k for k in range(len(folded.members)) if folded.op(k).name == name]
    return sum(times * num_bytes(folded, place) for place, times in moved_alone(folded, kind))


def test_a_chain_moves_its_input_and_its_output():
    assert fused_traffic(lambda x: jnp.exp(jnp.sin(x) * 2.0) + 1.0, LARGE) == (1, 2.0)


def test_an_input_read_twice_is_moved_once():
    assert fused_traffic(lambda x: jnp.sin(x) * jnp.cos(x) + x, LARGE) == (1, 2.0)


def test_two_inputs_are_two():
    assert fused_traffic(lambda x, y: jnp.sin(x) * jnp.cos(y), LARGE, LARGE) == (1, 3.0)


def test_a_broadcast_row_is_read_as_a_row():
    assert fused_traffic(lambda x, b: x + b, LARGE, ROW) == (1, 2.0)


def test_a_transposed_input_is_read_as_it_is():
    assert fused_traffic(lambda x: jnp.sin(x.T) + 1.0, LARGE) == (1, 2.0)


HUGE = jax.ShapeDtypeStruct((4096, 8192), jnp.float32)
HALF = jax.ShapeDtypeStruct((2048, 8192), jnp.float32)


def gated(x):
    gates, values = jnp.split(x, 2, axis=-1)
    return jnp.tanh(gates) * values


def test_a_slice_reads_what_it_writes():
    assert traffic_alone(lambda x, w: x[:, :64] @ w, "slice", LARGE, zeros((64, 64))) == LARGE.nbytes / 2


def interleaved(x, y):
    return lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))) + lax.pad(y, 0.0, ((1, 0, 1), (0, 0, 0)))


@pytest.mark.parametrize(
    ("step", "args", "arrays"),
    [
        (gated, [HUGE], 1.5),
        (lambda x: jax.grad(lambda x: gated(x).sum())(x), [HUGE], 2.0),
        (lambda x: [part * 2.0 for part in jnp.split(x, 2, axis=-1)], [HUGE], 2.0),
        (lambda x, y: jnp.concatenate([x * 2.0, jnp.exp(y)], axis=-1) * 3.0, [HUGE, HUGE], 4.0),
        (lambda x: jnp.pad(x, ((0, 2048), (0, 0))) * 2.0, [HALF], 1.5),
        (lambda x: x + jnp.roll(x, 1, axis=0), [HUGE], 2.0),
        (lambda x: x * jnp.concatenate([-x[:, 4096:], x[:, :4096]], axis=1), [HUGE], 2.0),
        (lambda x, y: (x * y)[:2048] * 2.0, [HUGE, HUGE], 1.5),
        (lambda x, y: interleaved(x * 2.0, y) * 2.0, [HALF, HALF], 2.0),
        (lambda x: jnp.concatenate([x[:2048] + x[2048:], x[:2048]]) * 2.0, [HUGE], 2.0),
    ],
)
def test_elements_move_for_nothing_in_the_kernels_that_read_them(step, args, arrays):
    """XLA compiles each of these steps to one kernel, which reads and writes each array once."""
    found = costed(step, *args)
    seconds = found.compute_s([0] * found.graph.num_nodes)
    moved_bytes = arrays * 4 * prod(HUGE.shape)
    assert seconds == pytest.approx(pass_s_per_byte(found.device) * moved_bytes, rel=1e-3)


def test_a_reduction_at_the_end_writes_little():
    assert fused_traffic(lambda x: jnp.sum(jnp.exp(x), axis=1), LARGE) == (1, 1.0)


def test_a_normalisation_reads_and_writes_once():
    def step(x):
        y = jnp.exp(x)
        return y / jnp.sum(y, axis=1, keepdims=True)

    assert fused_traffic(step, LARGE) == (1, 2.0)


def test_what_two_kernels_need_of_one_input_is_computed_twice():
    """Before and after a product: x is read by both kernels, its sine is stored for the product only."""

    def step(x, w):
        y = jnp.sin(x)
        return (y @ w) * jnp.cos(x)

    weight = zeros((COLUMNS, COLUMNS))
    assert fused_traffic(step, LARGE, weight) == (2, 2.0 + 3.0)  # x, sin x; x, the product, the result


def test_a_sum_that_is_needed_later_is_stored():
    """z = x + y enters a product and is added to its result: written once, read once."""

    def step(x, y, w):
        z = x + y
        return z @ w + z

    weight = zeros((COLUMNS, COLUMNS))
    assert fused_traffic(step, LARGE, LARGE, weight) == (2, 3.0 + 3.0)  # x, y, z; z, the product, the result


def test_a_look_up_costs_what_it_picks():
    """Of a table of a million rows, four thousand rows are read and written, and their numbers read."""
    table = jax.ShapeDtypeStruct((1 << 20, 16), jnp.float32)
    rows = jax.ShapeDtypeStruct((4096,), jnp.int32)
    moved = traffic_alone(lambda t, i: t.at[i].get(mode="clip"), "gather", table, rows)
    assert moved == 4096 * (2 * 16 * 4 + 4)


def test_the_gradient_of_a_look_up_touches_its_rows():
    table = jax.ShapeDtypeStruct((1 << 20, 16), jnp.float32)
    rows = jax.ShapeDtypeStruct((4096,), jnp.int32)
    new = jax.ShapeDtypeStruct((4096, 16), jnp.float32)
    moved = traffic_alone(lambda t, i, u: t.at[i].add(u, mode="clip"), "scatter-add", table, rows, new)
    assert moved == 4096 * (3 * 16 * 4 + 4)


def test_slices_cost_their_size():
    stack = jax.ShapeDtypeStruct((100, ROWS, COLUMNS), jnp.float32)
    start = jax.ShapeDtypeStruct((), jnp.int32)
    sliced = traffic_alone(lambda s, i: lax.dynamic_index_in_dim(s, i), "dynamic_slice", stack, start)
    assert sliced == 2 * LARGE.nbytes
    update = jax.ShapeDtypeStruct((1, ROWS, COLUMNS), jnp.float32)
    updated = traffic_alone(
        lambda s, u, i: lax.dynamic_update_index_in_dim(s, u, i, 0),
        "dynamic_update_slice",
        stack,
        update,
        start,
    )
    assert updated == 2 * LARGE.nbytes


def product_of(step, *args, mesh=(1,)):
    """Batch, rows, columns and depth of the step's one product, for every label."""
    found = costed(step, *args, cluster=f"{prod(mesh)}xH100-80GB", mesh=mesh)
    folded = found.graph.folded
    (kind,) = [k for k in range(len(folded.members)) if folded.is_heavy[k]]
    product = found._product(kind)
    sizes = [
        np.broadcast_to(s, len(found.strategies[found.graph.node_of[kind]]))
        for s in (product.batch, product.m)
    ]
    sizes += [np.broadcast_to(s, sizes[0].shape) for s in (product.n, product.k)]
    return {tuple(row) for row in np.stack(sizes, axis=1).tolist()}


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_the_sizes_of_products():
    assert product_of(lambda x, w: x @ w, array(8, 32, 64), array(64, 128)) == {(1, 256, 128, 64)}
    assert product_of(
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), array(2, 16, 4, 8), array(2, 32, 4, 8)
    ) in (
        {(8, 16, 32, 8)},
        {(8, 32, 16, 8)},
    )


def test_convolutions_are_products():
    """Images 2 x 10 x 12 with 3 channels, 16 kernels of 5 x 5: rows are places, the sum runs over taps and channels."""
    image, kernels = array(2, 10, 12, 3), array(5, 5, 3, 16)
    numbers = ("NHWC", "HWIO", "NHWC")
    sizes = product_of(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers), image, kernels
    )
    assert sizes == {(1, 2 * 10 * 12, 16, 3 * 5 * 5)}


def test_strategies_compute_parts_of_a_product():
    sizes = product_of(lambda x, w: x @ w, array(256, 64), array(64, 128), mesh=(8,))
    assert sizes == {(1, 256, 128, 64), (1, 32, 128, 64), (1, 256, 16, 64), (1, 256, 128, 8)}


def test_what_a_product_has_written_out_in_another_order_is_paid_for_once():
    """Grouped heads: their probabilities are copied as `(head, group and query, key)`, and two products read the copy."""
    scores, values = zeros((2, 4, 3, 256, 512)), zeros((2, 512, 4, 64))

    def step(q, k, v):
        probabilities = jnp.einsum("bqkgd,bskd->bkgqs", q, k)
        return jnp.einsum("bkgqs,bskd->bqkgd", probabilities, v), jnp.einsum(
            "bkgqs,bskd->bqkgd", probabilities, 2 * v
        )

    found = costed(step, zeros((2, 256, 4, 3, 64)), values, values)
    (copied,) = found.kernels.copied.values()
    assert [(c.times, c.count) for c in copied] == [(2.0, 1)]
    with_copies = sum(float(compute.sum()) for compute, _ in found.node_seconds)
    without = replace(found, kernels=replace(found.kernels, copied={}))
    saved_s = with_copies - sum(float(compute.sum()) for compute, _ in without.node_seconds)
    assert saved_s == pytest.approx(2 * scores.nbytes * pass_s_per_byte(found.device))


@pytest.mark.parametrize(
    ("precision", "tflops"), [(None, 494.5), (lax.Precision.DEFAULT, 494.5), (lax.Precision.HIGHEST, 67.0)]
)
def test_all_digits_of_float32_need_ordinary_cores(precision, tflops):
    found = costed(
        lambda x, w: jnp.dot(x, w, precision=precision),
        array(256, 64, dtype=jnp.float32),
        array(64, 128, dtype=jnp.float32),
    )
    folded = found.graph.folded
    (kind,) = [k for k in range(len(folded.members)) if folded.is_heavy[k]]
    assert found.product_flops_per_s(folded.op(kind)) == tflops * 1e12


def deep_mlp(num_layers, width=256):
    """A loss, its gradients and an update, over layers with biases."""

    def step(params, x):
        def loss(params):
            y = x
            for w, b in params:
                y = jnp.tanh(y @ w + b)
            return jnp.mean(y * y)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = [
        (array(width, width, dtype=jnp.float32), array(width, dtype=jnp.float32)) for _ in range(num_layers)
    ]
    return step, params, array(1 << 16, width, dtype=jnp.float32)


def test_estimates_add_up_to_what_was_minimised_and_combined_gradients_share_their_latency():
    cluster = parse_cluster("8xH100-80GB")
    on_mesh = StepProblem.of(trace(*deep_mlp(20)), (), cluster.device).on(cluster, (8,))
    kept = on_mesh.pinned({})
    solution = on_mesh.solve(kept, 1 << 40, 10.0)
    device = on_mesh.predicted(solution.labels, 1 << 40)
    hidden_s = on_mesh.hiding.hidden_s(solution.labels)
    estimates = estimate(on_mesh.memory.costed, solution.labels, device, hidden_s)
    assert estimates.step_s == pytest.approx(solution.cost_s, rel=1e-3)
    (reduced,) = [c for c in estimates.collectives if c.kind == "all-reduce"]
    alone_s = on_mesh.memory.costed.resharder.mesh.time_s("all-reduce", (0,), 0.0)
    assert reduced.count >= 40
    assert reduced.seconds < 0.2 * reduced.count * alone_s


def joined_bytes(num_layers, width):
    """How large the all-reduces are that gradients take part in."""
    found = costed(*deep_mlp(num_layers, width), cluster="8xH100-80GB", mesh=(8,))
    graph = found.graph
    makers = [(k, r) for k, r in graph.combined if graph.folded.op(k).phase is Phase.BACKWARD]
    (size,) = {found.joined_bytes((k, r)) for k, r in makers}
    return size


def test_gradients_are_joined_until_their_collective_is_as_large_as_the_compiler_makes_them():
    """XLA joins all-reduces up to 31457280 bytes. Ten layers' gradients have more; those of two are joined, all of them."""
    limit_bytes = 31_457_280
    assert joined_bytes(10, 1024) == limit_bytes
    assert 2 * 4 * (1024 + 1) * 1024 <= joined_bytes(2, 1024) < limit_bytes


def test_reductions_inside_a_group_run_as_often_as_the_loops_around_them():
    """A softmax over columns in a loop of five in a loop of three, its columns split over one axis, the other, or both."""

    def normalised(y, _):
        e = jnp.exp(y)
        return e / jnp.sum(e, 1, keepdims=True), None

    def step(x):
        return lax.scan(lambda y, _: (lax.scan(normalised, y, None, length=5)[0], None), x, None, length=3)[0]

    found = costed(step, LARGE, cluster="8xH100-80GB", mesh=(2, 4))
    folded = found.graph.folded
    (op_class,) = [k for k in range(len(folded.members)) if folded.op(k).name == "reduce_sum"]
    node = found.graph.node_of[op_class]
    rows, columns = (found.graph.groups[node].factor_of[op_class, f] for f in range(2))
    for assigned, inside_s in zip(
        found.strategies[node].assignment.tolist(), found.node_seconds[node][1], strict=True
    ):
        axes = tuple(axis for axis, factor in enumerate(assigned) if factor == columns)
        parts = prod(n for n, factor in zip((2, 4), assigned, strict=True) if factor == rows)
        once_s = found.resharder.mesh.time_s("all-reduce", axes, 4 * ROWS / parts) if axes else 0.0
        assert inside_s == pytest.approx(3 * 5 * once_s)
    assert {columns, rows} <= set(found.strategies[node].assignment.ravel().tolist())


@pytest.mark.parametrize("name", ["llama", pytest.param("moe", marks=pytest.mark.slow)])
def test_what_is_priced_once_for_edges_that_are_alike_is_the_price_of_each(name):
    """Also where two steps share what is known of a mesh, here one with an argument on the host."""
    case, cluster = make_small(name), parse_cluster("8xH100-80GB")
    step, mesh = microbatched(trace(case.step, *case.abstract_args()), 2), MeshModel(cluster, (2, 4))
    shared, met = Resharder(mesh), list[np.ndarray]()
    for hosted in (frozenset[int](), frozenset({0})):
        ready = StepProblem.of(step, [""] * len(step.arguments), cluster.device, hosted=hosted)
        found = ready.on(cluster, (2, 4), shared).memory.costed
        for edge in found.graph.edges:
            met.append(found.edge_seconds(edge))
            alone = replace(found, resharder=Resharder(mesh))
            np.testing.assert_array_equal(met[-1], alone.edge_seconds(edge))
    assert len(set(map(id, met))) < len(met) / 2


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_a_product_of_no_elements_takes_no_longer_than_a_small_one(sizes):
    m, k, n = sizes
    (empty_s,), (small_s,) = (
        [
            float(compute[0])
            for compute, _ in costed(jnp.matmul, zeros((a, b)), zeros((b, c))).node_seconds
            if compute[0]
        ]
        for a, b, c in ((m, k, n), (8, 8, 8))
    )
    assert 0 < empty_s <= small_s


@pytest.mark.parametrize("decompose", [jnp.linalg.eigh, jnp.linalg.svd, jnp.linalg.qr, jnp.linalg.cholesky])
def test_devices_that_share_a_batch_of_decompositions_take_less_than_one_that_has_all(decompose):
    batch = jax.ShapeDtypeStruct((8, 512, 512), "float32")
    one, many = (
        costed(lambda x: decompose(x)[0], batch, cluster=f"{n}xH100-80GB", mesh=(n,)) for n in (1, 8)
    )
    fastest_s = [sum(compute.min() for compute, _ in each.node_seconds) for each in (one, many)]
    assert fastest_s[1] < fastest_s[0]


def test_a_decomposition_takes_far_longer_than_moving_its_matrix():
    matrix = jax.ShapeDtypeStruct((4096, 4096), "float32")
    taken_s = {}
    for name, step in (("eigh", lambda x: jnp.linalg.eigh(x)[1]), ("copy", lambda x: x + x.T)):
        found = costed(step, matrix)
        taken_s[name] = sum(compute.min() for compute, _ in found.node_seconds)
    assert taken_s["eigh"] > 100 * taken_s["copy"]


def test_a_fourier_transform_of_long_rows_takes_no_less_than_its_arithmetic():
    rows = jax.ShapeDtypeStruct((1024, 4096), "complex64")
    found, device = costed(jnp.fft.fft, rows, cluster="1xCPU"), parse_cluster("1xCPU").device
    taken_s = sum(compute.min() for compute, _ in found.node_seconds)
    assert taken_s >= 5 * 12 * 1024 * 4096 / device.vector_flops_per_s
