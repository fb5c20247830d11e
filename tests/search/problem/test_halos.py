"""Halos: which parts of images are offered, and which rows travel, against what XLA:GPU's partitioner sends."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.problem.costs import price
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.fusion import Fusion
from autoshard.search.problem.kernels import kernels
from autoshard.search.problem.op_groups import op_groups
from autoshard.search.problem.reshard import Resharder
from autoshard.search.problem.strategies import NONE
from autoshard.search.problem.strategy_graph import strategy_graph

SIZE, CHANNELS, ITEMSIZE = 64, 8, 4


def images(batch=1, size=SIZE):
    return jax.ShapeDtypeStruct((batch, size, size, CHANNELS), jnp.float32)


def costed(function, *args, mesh=(8,)):
    """A function's strategies and their costs."""
    folded = fold(flatten(trace(function, *args)))
    groups, model = op_groups(folded), MeshModel(parse_cluster("8xH100-80GB"), mesh)
    return price(strategy_graph(folded, groups), kernels(Fusion(folded, 4.0), groups), Resharder(model))


def named(problem, name="conv_general_dilated"):
    """The class of the only op of that name."""
    folded = problem.graph.folded
    (found,) = (k for k in range(len(folded.members)) if folded.op(k).name == name)
    return found


def splits(problem, op_class, dim):
    """By strategy that splits a dimension of the first operand: the axes that do."""
    port = problem.graph.ports[op_class, 0, False]
    (factor, *_), rows = port.dims[dim], problem.strategies[port.node].assignment.tolist()
    found = {n: tuple(a for a, f in enumerate(row) if f == factor) for n, row in enumerate(rows)}
    return {n: axes for n, axes in found.items() if axes}


def conv(taps=3, stride=1, dilation=1, padding="SAME", base=1):
    def function(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        steps = {"lhs_dilation": (base, base), "rhs_dilation": (dilation, dilation)}
        return lax.conv_general_dilated(x, kernel, (stride, stride), padding, **steps, dimension_numbers=dims)

    return function, (images(), jax.ShapeDtypeStruct((taps, taps, CHANNELS, CHANNELS), jnp.float32))


def of_input(function):
    """The gradient of a convolution's images, as an only convolution."""
    return lambda x, kernel: jax.linear_transpose(lambda x: function(x, kernel), x)(
        jnp.ones(jax.eval_shape(function, x, kernel).shape)
    )


def of_kernel(function):
    """The gradient of a convolution's kernel, as an only convolution."""
    return lambda x, kernel: jax.linear_transpose(lambda kernel: function(x, kernel), kernel)(
        jnp.ones(jax.eval_shape(function, x, kernel).shape)
    )


SENT = {  # rows of the image, of its gradient's cotangent, of the kernel's image
    "3x3": (conv(), [1, 1], [1, 1], [1, 1]),
    "1x1": (conv(1), [], [], []),
    "5x5": (conv(5), [2, 2], [2, 2], [2, 2]),
    "even": (conv(2), [1], [1], [1]),
    "strided": (conv(3, 2), [1], [1], [1]),
    "strided, padded alike": (conv(3, 2, padding=[(1, 1)] * 2), [1], [1], [1]),
    "stem": (conv(7, 2), [2, 3], [2, 1], [2, 3]),
    "patches": (conv(4, 4, padding="VALID"), [], [], []),
    "dilated": (conv(3, dilation=2), [2, 2], [2, 2], [2, 2]),
    "transposed": (conv(2, base=2, padding=[(1, 1)] * 2), [], [], []),
    "transposed, 4x4": (conv(4, base=2, padding=[(2, 2)] * 2), [1, 1], [1, 1], [1, 1]),
}
"""Source: XLA:GPU's partitioner, eight H100s, 512 x 512; for the kernel of a transposed convolution, the rows that its
windows reach."""


@pytest.mark.parametrize("case", SENT)
@pytest.mark.parametrize("direction", ["forward", "input", "kernel"])
def test_rows_that_travel(case, direction):
    (function, args), *expected = SENT[case]
    derived = {"forward": function, "input": of_input(function), "kernel": of_kernel(function)}[direction]
    problem = costed(derived, *args)
    k, rows = named(problem), expected[("forward", "input", "kernel").index(direction)]
    first = problem.graph.folded.op(k).operands[0]
    height, width = problem.graph.folded.program.values[first].shape[1:3]
    for dim, row in ((1, width), (2, height)):
        split = splits(problem, k, dim)
        assert split
        for strategy in split:
            sent = [n for one in problem.exchanges(k).get(strategy, ()) for n in one.sent]
            assert sent == [n * row * CHANNELS * ITEMSIZE for n in rows]


def test_the_second_dimension_sends_what_the_first_received_too():
    function, args = conv()
    problem = costed(function, *args, mesh=(2, 4))
    k = named(problem)
    height, width = splits(problem, k, 1), splits(problem, k, 2)
    (both,) = (n for n in height if height[n] == (0,) and width.get(n) == (1,))
    first, second = problem.exchanges(k)[both]
    pixel = CHANNELS * ITEMSIZE
    assert (first.axes, first.sent) == ((0,), (SIZE // 4 * pixel,) * 2)
    assert (second.axes, second.sent) == ((1,), pytest.approx((((SIZE // 2 + 2) * pixel),) * 2))


def test_halos_cost_their_messages_and_a_copy():
    function, args = conv()
    problem = costed(function, *args)
    k = named(problem)
    node, mesh = problem.graph.node_of[k], problem.resharder.mesh
    row = SIZE * CHANNELS * ITEMSIZE
    compute, inside = problem.node_seconds[node]
    for strategy in splits(problem, k, 1):
        assert inside[strategy] == pytest.approx(2 * float(mesh.time_s("collective-permute", (0,), row)))
        assert compute[strategy] > float(problem.op_seconds(k)[strategy])
    (whole,) = (n for n, row in enumerate(problem.strategies[node].assignment.tolist()) if row == [NONE])
    assert inside[whole] == 0


# --- what is offered


def test_rows_are_not_split_where_examples_divide_over_all_devices():
    function, (_, kernel) = conv()
    offered = {}
    for batch in (1, 4, 8, 12, 16):
        problem = costed(function, images(batch), kernel, mesh=(2, 4))
        offered[batch] = bool(splits(problem, named(problem), 1))
    assert offered == {1: True, 4: True, 8: False, 12: True, 16: False}


@pytest.mark.parametrize(("size", "taps", "is_offered"), [(64, 17, True), (64, 19, False), (60, 3, False)])
def test_parts_are_even_and_no_shorter_than_their_halos(size, taps, is_offered):
    function, (_, kernel) = conv(taps)
    problem = costed(function, images(size=size), kernel)
    assert bool(splits(problem, named(problem), 1)) is is_offered


def pooled(taps, stride):
    window, strides = (1, taps, taps, 1), (1, stride, stride, 1)
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, strides, "SAME")


def test_a_pooling_sends_a_row_and_its_gradient_sends_one_back():
    problem = costed(jax.grad(lambda x: (pooled(3, 2)(x) ** 2).sum()), images())
    row = SIZE * CHANNELS * ITEMSIZE
    for name, sent in (("reduce_window_max", (row,)), ("select_and_scatter_add", (row, row))):
        k = named(problem, name)
        found = problem.exchanges(k)
        split = splits(problem, k, 1)
        assert split
        assert all([one.sent for one in found[strategy]] == [sent] for strategy in split)


def test_the_gradient_of_an_average_sends_rows_of_the_results_gradient():
    def averages(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    problem = costed(jax.grad(lambda x: (averages(x) ** 2).sum()), images())
    folded = problem.graph.folded
    forward, backward = (k for k in range(len(folded.members)) if folded.op(k).name == "reduce_window_sum")
    for k, row in ((forward, SIZE), (backward, SIZE // 2)):
        split = splits(problem, k, 1)
        assert split
        sent = [[one.sent for one in problem.exchanges(k)[strategy]] for strategy in split]
        assert sent == [[(row * CHANNELS * ITEMSIZE,)]] * len(sent)


def test_a_pooling_without_overlap_sends_nothing():
    problem = costed(jax.grad(lambda x: (pooled(2, 2)(x) ** 2).sum()), images())
    for name in ("reduce_window_max", "select_and_scatter_add"):
        assert splits(problem, named(problem, name), 1)
        assert not problem.exchanges(named(problem, name))
