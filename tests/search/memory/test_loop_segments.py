"""A loop in segments makes the same numbers, keeps a carry for each segment, and runs its body once more for each level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.graph import Phase, walk
from autoshard.search.ir.trace import trace
from autoshard.search.memory.loop_pairs import loop_pairs
from autoshard.search.memory.loop_segments import LoopSegments, check_segments, obstacle, segments_site
from autoshard.search.memory.recompute import recomputed
from autoshard.search.problem.flat_program import flatten
from tests.search.memory.evaluation import evaluated
from tests.search.recurrence import recurrence, traced

LENGTH = 13


def in_segments(step, loop, *lengths, sites=(), end=None):
    return recomputed(step, frozenset({segments_site((loop,), LoopSegments(lengths, end)), *sites}))


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def drawn(step):
    rng = np.random.default_rng(0)
    values = [step.graph.values[v] for v in step.graph.inputs]
    return [jnp.asarray(rng.normal(size=v.shape).astype(v.dtype)) for v in values]


@pytest.mark.devices
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "lengths",
    [(6, 3), *(pytest.param(lengths, marks=pytest.mark.slow) for lengths in ((4,), (12,), (7, 3, 2)))],
    ids=str,
)
@pytest.mark.parametrize("reverse", [False, True])
def test_the_numbers_stay(reverse, lengths):
    step, loop = traced(LENGTH, reverse=reverse, dtype=jnp.float64)
    inputs = drawn(step)
    wanted = evaluated(step.graph, *inputs)
    for one, other in zip(evaluated(in_segments(step, loop, *lengths).graph, *inputs), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.devices
@pytest.mark.usefixtures("float64")
def test_the_numbers_stay_where_ops_of_the_body_are_recomputed_too():
    step, loop = traced(LENGTH, dtype=jnp.float64)
    inputs, body = drawn(step), step.graph.ops[loop].bodies["jaxpr"][0]
    every = {(loop, "jaxpr", 0, i) for i in range(len(body.ops))}
    again = in_segments(step, loop, 4, sites=every)
    for one, other in zip(evaluated(again.graph, *inputs), evaluated(step.graph, *inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.devices
@pytest.mark.usefixtures("float64")
def test_the_numbers_stay_where_one_recurrence_reads_another():
    def layer(w, xs):
        return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, xs[0], xs)[1]

    def stacked(w, xs):
        grads = jax.grad(lambda w: jnp.mean(layer(w[1], layer(w[0], xs)) ** 2))(w)
        return w - 0.1 * grads

    shapes = (2, 4, 4), (LENGTH, 3, 4)
    step = trace(stacked, *(jax.ShapeDtypeStruct(shape, jnp.float64) for shape in shapes))
    first, last = loop_pairs(step.graph)
    both = {segments_site((first,), LoopSegments((4,))), segments_site((last,), LoopSegments((6, 2)))}
    again, inputs = recomputed(step, frozenset(both)), drawn(step)
    for one, other in zip(evaluated(again.graph, *inputs), evaluated(step.graph, *inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.devices
@pytest.mark.usefixtures("float64")
def test_the_numbers_stay_inside_a_loop_over_microbatches():
    step, params, xs = recurrence(LENGTH, dtype=jnp.float64)

    def accumulated(params, xs):
        return jax.lax.scan(lambda params, xs: step(params, xs)[:2], params, xs)

    outer = trace(accumulated, params, jax.ShapeDtypeStruct((2, *xs.shape), xs.dtype))
    ((path, graph),) = ((path, graph) for path, graph in walk(outer.graph) if loop_pairs(graph))
    (loop,) = loop_pairs(graph)
    again = recomputed(outer, frozenset({segments_site((*path, loop), LoopSegments((4,)))}))
    inputs = drawn(outer)
    for one, other in zip(evaluated(again.graph, *inputs), evaluated(outer.graph, *inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.pure
@pytest.mark.parametrize("lengths", [(), (8,), (16, 4), (32, 8, 2)], ids=str)
def test_each_level_runs_the_body_once_more(lengths):
    step, loop = traced(64)
    step = in_segments(step, loop, *lengths) if lengths else step
    runs = sum(op.count for op in flatten(step).ops if op.name == "tanh")
    assert runs == 64 * (1 + len(lengths))


@pytest.mark.devices
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("reverse", [False, True])
def test_the_numbers_stay_where_later_iterations_keep_their_residuals(reverse):
    step, loop = traced(LENGTH, reverse=reverse, dtype=jnp.float64)
    inputs = drawn(step)
    again = in_segments(step, loop, 3, end=7)
    for one, other in zip(evaluated(again.graph, *inputs), evaluated(step.graph, *inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)


@pytest.mark.pure
def test_only_the_iterations_before_the_end_run_once_more():
    step, loop = traced(64)
    program = flatten(in_segments(step, loop, 8, end=24))
    assert sum(op.count for op in program.ops if op.name == "tanh") == 64 + 24


@pytest.mark.pure
@pytest.mark.parametrize("end", [0, 7, 65])
def test_segments_end_inside_of_the_loop(end):
    step, loop = traced(64)
    with pytest.raises(PlanError, match=f"segments before an iteration from 8 to 64, got {end}"):
        check_segments(step.graph, loop, LoopSegments((8,), end), "plan")


@pytest.mark.pure
def test_a_loop_in_segments_stacks_the_carries_that_segments_begin_with():
    step, loop = traced(64)
    after = in_segments(step, loop, 16)
    forward = next(op for op in after.graph.ops if op.name == "scan" and op.phase is Phase.FORWARD)
    stacked = [value.shape for value in forward.result_values[forward.loop_counts[1] :]]
    results = [(4, 16), (4, 16)]
    assert sorted(stacked) == sorted([*results, (4, 4, 8), (4,)])


def with_effects(w, x):
    def loss(w):
        def body(h, _):
            jax.debug.print("{}", h[0, 0])
            return jnp.tanh(h @ w), None

        return jnp.sum(jax.lax.scan(body, x, None, length=8)[0])

    return jax.grad(loss)(w)


@pytest.mark.pure
def test_a_loop_with_effects_is_not_cut():
    w = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    graph = trace(with_effects, w, w).graph
    (loop,) = loop_pairs(graph)
    assert "has effects (debug_p" in obstacle(graph, loop)
    with pytest.raises(PlanError, match=r"plan cannot be cut into segments: its body has effects"):
        check_segments(graph, loop, LoopSegments((2,)), "plan")


@pytest.mark.pure
@pytest.mark.parametrize("lengths", [(64,), (8, 8), (8, 0), (4, 8)], ids=str)
def test_lengths_fall_from_below_the_number_of_iterations(lengths):
    step, loop = traced(64)
    with pytest.raises(PlanError, match="that fall from below its 64 iterations"):
        check_segments(step.graph, loop, LoopSegments(lengths), "plan")


@pytest.mark.pure
@pytest.mark.parametrize(("lengths", "num_loops"), [((), 1), ((8,), 2), ((10,), 3), ((16, 4), 3)], ids=str)
def test_gradients_of_weights_stay_sums_in_all_loops(lengths, num_loops):
    """Of two weights: terms of a sum over devices need not be added up in each segment."""
    step, loop = traced(64)
    program = flatten(in_segments(step, loop, *lengths) if lengths else step)
    assert sum(op.is_accumulator for op in program.ops) == 2 * num_loops
