"""What runs as one kernel and what it moves, reckoned by hand. Where it says so, XLA compiles the step to these kernels."""

from math import prod

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.problem.kernels import FusedKernel, moved_alone, runs_alone
from autoshard.search.step_problem import StepProblem
from tests.zoo import traced

DEVICE = parse_cluster("1xH100-80GB").device


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, ROWS = array(512, 256), array(256, 256), array(64, dtype=jnp.int32)
LARGE, SQUARE, COLUMN, ROW = 4 * 512 * 256, 4 * 256 * 256, 4 * 512, 4 * 256
"""Bytes of X, of W, and of what is left of X when one dimension is summed over."""


def problem(step, *args) -> StepProblem:
    return StepProblem.of(trace(step, *args), (), DEVICE)


def fused(step, *args) -> list[tuple[str, list[int], list[int]]]:
    """Of each fused kernel: the ops whose results it stores, the bytes that it reads and those that it writes."""
    found = problem(step, *args)
    return [described(found, kernel) for kernel in found.kernels.fused]


def described(found: StepProblem, kernel: FusedKernel) -> tuple[str, list[int], list[int]]:
    """What it writes enters where its own ops make it; what it reads, anywhere else."""
    names = ", ".join(found.graph.folded.op(k).name for k in kernel.op_classes)
    written = {
        (k, i, is_result) for (k, i, is_result), _ in kernel.moved if is_result and k in kernel.op_classes
    }
    sizes = {e: times * num_bytes(found, e) for e, times in kernel.moved}
    return (
        names,
        sorted((n for e, n in sizes.items() if e not in written), reverse=True),
        sorted((n for e, n in sizes.items() if e in written), reverse=True),
    )


def num_bytes(found: StepProblem, endpoint) -> int:
    op_class, index, is_result = endpoint
    op = found.graph.folded.op(op_class)
    return found.graph.folded.program.values[(op.results if is_result else op.operands)[index]].num_bytes


# --- sums over rows, and over anything else


def normalised(axis):
    """By the mean and the variance over some dimensions, of what is computed on the fly."""

    def step(x):
        x = x * 2.0
        mean = jnp.mean(x, axis, keepdims=True)
        variance = jnp.mean(x * x, axis, keepdims=True) - mean * mean
        return (x - mean) * lax.rsqrt(variance + 1e-5)

    return step


def standardised(axis):
    """The same, with the variance of what is left when the mean is taken away."""

    def step(x):
        x = x * 2.0
        x = x - jnp.mean(x, axis, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, axis, keepdims=True) + 1e-5)

    return step


@pytest.mark.parametrize(
    "step", [lambda x: jax.nn.softmax(x * 0.5, 1), standardised(1)], ids=["softmax", "norm"]
)
def test_what_is_normalised_by_rows_is_one_kernel(step):
    """As XLA compiles them."""
    ((_, read, written),) = fused(step, X)
    assert (read, written) == ([LARGE], [LARGE])


def test_a_mean_that_is_read_twice_ends_its_kernel():
    """As XLA compiles it: the sums of all rows, and then what needs them, which computes its input again."""
    assert fused(normalised(1), X) == [
        ("reduce_sum, reduce_sum", [LARGE], [COLUMN, COLUMN]),
        ("mul", [LARGE, COLUMN, COLUMN], [LARGE]),
    ]


def test_a_sum_that_the_backward_phase_reads_too_ends_its_kernel():
    """As XLA compiles the forward phase: a softmax's sums in one kernel, then what it makes, from the scores again."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum((jax.nn.softmax((x @ w) * 0.5, 1) @ w) ** 2))(w)

    sums, made, *_ = fused(step, W, X)
    assert sums == ("reduce_max, reduce_sum", [LARGE], [COLUMN, COLUMN])
    assert made == ("div", [LARGE, COLUMN, COLUMN], [LARGE])


def test_a_row_that_is_too_long_is_read_for_each_sum():
    """As XLA compiles it: what threads cannot keep at hand is read again."""

    def reads(length):
        return [len(read) for _, read, _ in fused(lambda x: jax.nn.softmax(x * 0.5, 1), array(64, length))]

    assert reads(1 << 14) == [1]
    assert reads(1 << 15) == [1, 2, 3]


def test_a_batch_norm_is_two_kernels():
    """As XLA compiles it: the sums of all columns, and then what needs them, which computes its input again."""
    assert fused(normalised(0), X) == [
        ("reduce_sum, reduce_sum", [LARGE], [ROW, ROW]),
        ("mul", [LARGE, ROW, ROW], [LARGE]),
    ]


def test_a_softmax_over_columns_is_a_kernel_for_each_sum_and_one_for_the_rest():
    assert fused(lambda x: jax.nn.softmax(x * 0.5, 0), X) == [
        ("reduce_max", [LARGE], [ROW]),
        ("reduce_sum", [LARGE, ROW], [ROW]),
        ("div", [LARGE, ROW, ROW], [LARGE]),
    ]


@pytest.mark.parametrize(
    ("axis", "num_kernels"), [(0, 3), (1, 3), (2, 1), ((1, 2), 1), ((0, 2), 3), ((0, 1, 2), 3)]
)
def test_rows_are_of_the_last_dimensions_and_there_are_several(axis, num_kernels):
    assert len(fused(standardised(axis), array(8, 64, 256))) == num_kernels


def test_dimensions_of_one_element_are_not_summed_over():
    assert len(fused(standardised((0, 2)), array(1, 512, 256))) == 1
    assert len(fused(standardised((0, 2)), array(2, 512, 256))) == 3
    assert len(fused(standardised(1), array(512, 256, 1))) == 1


def test_what_is_clipped_by_the_norm_of_all_is_read_twice():
    """As XLA compiles it: gradients in 16 bits, cast for both kernels; the update waits for the norm."""

    def step(w, g):
        g = g.astype(jnp.float32)
        return w - g / jnp.sqrt(jnp.sum(g * g))

    assert fused(step, W, array(256, 256, dtype=jnp.bfloat16)) == [
        ("reduce_sum", [SQUARE // 2], [4]),
        ("sub", [SQUARE, SQUARE // 2, 4], [SQUARE]),
    ]


# --- between products


def test_what_passes_between_products_is_stored_once_and_computed_late():
    """Of what a product reads the sine is stored; the kernel after it reads x again, as XLA compiles it."""
    assert fused(lambda x, w: (jnp.sin(x) @ w) * jnp.cos(x), X, W) == [
        ("sin", [LARGE], [LARGE]),
        ("mul", [LARGE, LARGE], [LARGE]),
    ]


def test_what_only_the_backward_phase_reads_is_computed_there():
    """The gradient of a tanh, between the forward products and the backward ones."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum((jnp.tanh(x @ w) @ w) ** 2))(w)

    assert fused(step, W, X) == [
        ("tanh", [LARGE], [LARGE]),
        ("mul", [LARGE], [LARGE]),  # twice the output
        ("mul", [LARGE, LARGE], [LARGE]),  # by the tanh, with what comes back
        ("sub", [SQUARE, SQUARE], [SQUARE]),  # both gradients' sum is handed over by another group
    ]


def test_what_only_a_later_kernel_reads_is_computed_in_it():
    """Not ahead of the product whose result it scales."""
    assert fused(lambda x, w: jax.nn.softmax(x * 2.0) * (x @ w), X, W) == [
        ("reduce_max, reduce_sum, mul", [LARGE, LARGE], [LARGE])
    ]


def test_one_kernel_writes_all_that_it_makes():
    """As XLA compiles Adam: parameters, gradients and both moments are read, parameters and moments written."""

    def adam(p, m, v, g):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return p - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v

    ((names, read, written),) = fused(adam, W, W, W, W)
    assert (names, written) == ("add, add, sub", [SQUARE] * 3)
    assert sum(read) == 4 * SQUARE


@pytest.mark.devices
@pytest.mark.parametrize("as_read", [lambda y: y.reshape(64, 8, 256).reshape(512, 256), lambda y: y.T])
def test_what_only_a_product_reads_is_written_however_it_is_read(as_read):
    """A view makes no array: the one that it is of is written."""
    (kernel,) = fused(
        lambda x, w: as_read(jnp.tanh(x)) @ w, X if as_read(jnp.zeros(X.shape)).shape == X.shape else W, W
    )
    name, read, written = kernel
    assert name == "tanh"
    assert read == written
    assert written in ([LARGE], [SQUARE])


def test_what_stays_in_a_kernel_is_not_written():
    assert fused(lambda x: jnp.sum(x * 2.0, 1) * 3.0, X) == [("reduce_sum, mul", [LARGE], [COLUMN])]
    assert fused(lambda x: jnp.sum(x * 2.0), X) == [("reduce_sum", [LARGE], [4])]


# --- how often


def test_kernels_of_the_same_classes_are_one_with_a_count():
    found = problem(lambda ws, x: [jnp.tanh(x @ w) for w in ws], [W] * 6, X)
    (kernel,) = found.kernels.fused
    assert (kernel.count, described(found, kernel)) == (6, ("tanh", [LARGE], [LARGE]))
    assert [share for k, share in found.kernels.of_op.values() if k is kernel] == [1.0] * 6


def test_kernels_in_a_loop_run_as_often_as_it_turns():
    found = problem(
        lambda ws, x: lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, ws)[0], array(4, 256, 256), X
    )
    (kernel,) = found.kernels.fused
    assert (kernel.count, described(found, kernel)) == (4, ("tanh", [LARGE], [LARGE]))


def copied(step, *args):
    """What is moved besides, by the op that it is counted for: bytes per run, and runs."""
    found = problem(step, *args)
    folded, values = found.graph.folded, found.graph.folded.program.values

    def moved(copies):
        op_class, i, is_result = copies.endpoint
        op = folded.op(op_class)
        value = values[(op.results if is_result else op.operands)[i]]
        return copies.times * value.num_bytes, copies.count

    return {folded.op(k).name: sorted(map(moved, some)) for k, some in found.kernels.copied.items()}


STACK = array(4, 256, 256)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        # XLA on an H100: loops fill what they stack with zeros, and copy what cuBLAS reads and writes of stacks
        (lambda y, w: (jnp.tanh(y @ w), None), {"slice": [(2 * SQUARE, 4)]}),
        (lambda y, w: (jnp.tanh(y @ (2 * w)), None), {}),
        (lambda y, w: (jnp.tanh(y @ (2 * w).T), jnp.sin(y)), {"stack": [(4 * LARGE, 1)]}),
        (lambda y, w: (jnp.tanh(y @ (2 * w)), y @ (2 * w)), {"stack": [(2 * LARGE, 4), (4 * LARGE, 1)]}),
        (
            lambda y, w: (jnp.tanh(y @ (z := jnp.sin(w))), z.reshape(-1)),
            {"stack": [(2 * SQUARE, 4), (4 * SQUARE, 1)]},
        ),
        (
            lambda y, w: (jnp.tanh(y @ w[None][0]), y @ w),
            {"slice": [(2 * SQUARE, 4)], "stack": [(2 * LARGE, 4), (4 * LARGE, 1)]},
        ),
    ],
    ids=["part", "part-on-the-fly", "stacked", "product-stacked", "read-and-stacked", "view"],
)
def test_what_stacks_take_besides(body, wanted):
    assert copied(lambda ws, x: lax.scan(body, x, ws), STACK, X) == wanted


def test_what_no_loop_stacks_takes_nothing_besides():
    assert copied(lambda ws, x: jnp.stack([x @ w for w in ws]), [W] * 4, X) == {}


MODELS = pytest.mark.parametrize("name", ["mlp", "gpt_scan", "resnet"])


@MODELS
def test_an_op_s_shares_add_up_to_its_kernels_runs(name):
    found = StepProblem.of(traced(name), (), DEVICE)
    program, fusion = found.graph.folded.program, found.live_ranges.fusion
    runs = dict.fromkeys(map(id, found.kernels.fused), 0.0)
    for position, (kernel, share) in found.kernels.of_op.items():
        assert found.graph.folded.class_of[position] in kernel.op_classes
        runs[id(kernel)] += share * program.ops[position].count
    for kernel in found.kernels.fused:
        assert runs[id(kernel)] == pytest.approx(kernel.count)
        assert len({found.graph.node_of[k] for k in kernel.op_classes}) == 1
    for position, op in enumerate(program.ops):
        is_fused = not op.is_boundary and not runs_alone(
            found.graph.folded, found.graph.folded.class_of[position]
        )
        stores = any(map(fusion.is_stored, op.results))
        assert (position in found.kernels.of_op) == (is_fused and stores)


# --- kernels of their own


def moved(step, name, *args) -> list[float]:
    """The bytes that the op of this name reads, and that it writes, if it is a kernel of its own."""
    found = problem(step, *args)
    (op_class,) = [k for k in range(len(found.graph.folded.members)) if found.graph.folded.op(k).name == name]
    assert runs_alone(found.graph.folded, op_class)
    return [times * num_bytes(found, e) for e, times in moved_alone(found.graph.folded, op_class)]


def test_a_product_reads_each_operand_once_and_writes_its_result():
    assert moved(lambda x, w: x @ w, "dot_general", X, W) == [SQUARE, LARGE, LARGE]
    assert moved(lambda w: w @ w, "dot_general", W) == [SQUARE, SQUARE]


def test_light_ops_and_borders_are_no_kernels_of_their_own():
    folded = problem(lambda x: jnp.sum(jnp.sin(x)) * 2.0, X).graph.folded
    assert not any(runs_alone(folded, k) for k in range(len(folded.members)))
    loop = problem(lambda xs: lax.scan(lambda c, x: (c + x, None), xs[0], xs)[0], array(4, 256)).graph.folded
    borders = [k for k in range(len(loop.members)) if loop.op(k).is_boundary]
    assert {loop.op(k).name for k in borders} >= {"input", "carry", "slice", "output"}
    assert not any(runs_alone(loop, k) for k in borders)


UPDATES = array(64, 256)
PICKED, INDICES = 4 * 64 * 256, 4 * 64


@pytest.mark.parametrize(
    ("name", "step", "args", "wanted"),
    [
        ("gather", lambda x, i: x.at[i].get(mode="clip"), (X, ROWS), [INDICES, 2 * PICKED]),
        ("scatter", lambda x, i, u: x.at[i].set(u, mode="clip"), (X, ROWS, UPDATES), [INDICES, 2 * PICKED]),
        ("scatter", lambda x, i: x.at[i[0], i[1]].set(0.0, mode="clip"), (X, ROWS), [2 * 4]),  # a number
        *[
            (
                f"scatter-{primitive}",
                lambda x, i, u, method=method: getattr(x.at[i], method)(u, mode="clip"),
                (X, ROWS, UPDATES),
                [INDICES, 3 * PICKED],
            )
            for primitive, method in (
                ("add", "add"),
                ("sub", "subtract"),
                ("mul", "mul"),
                ("min", "min"),
                ("max", "max"),
            )
        ],
        (
            "dynamic_slice",
            lambda x, i: lax.dynamic_slice_in_dim(x, i, 64),
            (X, array(dtype=jnp.int32)),
            [2 * PICKED],
        ),
        (
            "dynamic_update_slice",
            lambda x, i, u: lax.dynamic_update_slice_in_dim(x, u, i, 0),
            (X, array(dtype=jnp.int32), UPDATES),
            [2 * PICKED],
        ),
    ],
)
def test_look_ups_and_updates_touch_only_what_they_pick(name, step, args, wanted):
    """An update reads what is new and writes where it goes, after reading that if it adds to it."""
    assert moved(step, name, *args) == wanted
    assert prod(args[0].shape) * 4 == LARGE > 3 * PICKED


def test_moved_elements_are_a_kernel_only_if_an_op_reads_whole_arrays():
    for step, args, wanted in (
        (lambda x, y: jnp.concatenate([x, y]) * 2.0, (X, X), []),
        (lambda x, y, w: jnp.concatenate([x, y]) @ w, (X, X, W), ["concatenate", "dot_general"]),
    ):
        found = problem(step, *args)
        assert [found.graph.folded.program.ops[i].name for i in sorted(found.kernels.alone)] == wanted
