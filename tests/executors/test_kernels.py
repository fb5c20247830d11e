"""Kernels that somebody wrote: split as they say, with one device's numbers.

The compiled program is searched for the evidence: which shapes a device computes, and which collectives there are.
"""

import re
from itertools import pairwise
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core as jex_core
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import AutoshardWarning
from autoshard.executors.jit import Program, build
from autoshard.search.driver import find
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import AXIS_NAMES, PARTIAL, WHOLE
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from tests.executors import plans

W = jnp.asarray(np.random.default_rng(0).standard_normal((16, 32), np.float32))
X = jnp.asarray(np.random.default_rng(1).standard_normal((24, 16), np.float32))


def pinned(step, mesh, pins, *args) -> Program:
    """The fastest plan with these pins."""
    traced = trace(step, *args)
    options = Options(plans.PLENTY_BYTES, mesh, pins, time_limit_s=plans.SEARCH_S)
    return build(traced, find(traced, plans.cluster(mesh), options).sharding, jax.devices())


def run(program: Program, *args):
    return program.fn(*jax.device_put(jax.tree.map(jnp.copy, args), program.shardings))


def collectives(program: Program) -> set[str]:
    text = program.fn.lower(*program.args).compile().as_text()
    return set(re.findall(r"= \S+ (all-\w+|reduce-scatter|collective-permute)\(", text))


def assert_close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), a, b)


# --- custom_partitioning


def product(shapes: list, rule: str | None = "i k, k j -> i j", **options):
    """A matrix product that says how it splits, and notes the shapes of which a device computes it."""

    @custom_partitioning
    def wrapped(x, w):
        return x @ w

    def partition(mesh, args, result):
        x, w = (arg.sharding for arg in args)
        summed = x.spec[1]

        def on_device(x, w):
            shapes.append((x.shape, w.shape))
            return x @ w if summed is None else jax.lax.psum(x @ w, summed)

        return mesh, on_device, result.sharding, (x, w)

    wrapped.def_partition(partition, sharding_rule=rule, **options)
    return wrapped


def kernel_step(kernel):
    def step(w, x):
        return jnp.tanh(kernel(x, w))

    return step


@pytest.mark.parametrize(
    ("pins", "shapes", "kinds"),
    [
        ({"x": P("data"), "w": P(None, "model")}, ((12, 16), (16, 8)), set()),
        ({"x": P("data", "model"), "w": P("model")}, ((12, 4), (4, 32)), {"all-reduce"}),
        ({"x": P(), "w": P(None, ("data", "model"))}, ((24, 16), (16, 4)), set()),
    ],
)
def test_a_custom_partitioning_is_split_as_its_rule_says(pins, shapes, kinds):
    seen = []
    step = kernel_step(product(seen, reduction_factors=("k",)))
    program = pinned(step, (2, 4), pins, W, X)
    assert_close(run(program, W, X), jnp.tanh(X @ W))
    assert set(seen) == {shapes}
    assert collectives(program) == kinds


def test_a_factor_that_needs_replication_is_gathered_first():
    seen = []
    step = kernel_step(product(seen, need_replication_factors=("k", "j")))
    program = pinned(step, (2, 4), {"x": P("data", "model"), "w": P(None, "model")}, W, X)
    assert_close(run(program, W, X), jnp.tanh(X @ W))
    assert {w for _, w in seen} == {(16, 32)}


SEEDS = (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)))
"""Of plans that are drawn; those above and below are pinned."""


@pytest.mark.parametrize("seed", SEEDS)
def test_any_plan_of_a_trained_kernel_gives_one_devices_numbers(seed):
    @jax.custom_vjp
    def kernel(x, w):
        return product([], reduction_factors=("k",))(x, w)

    def backward(saved, g):
        x, w = saved
        by_input = product([], "i j, k j -> i k", reduction_factors=("j",))
        return by_input(g, w.T), x.T @ g

    kernel.defvjp(lambda x, w: (kernel(x, w), (x, w)), backward)

    def step(ws, x):
        def loss(ws):
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(kernel(x, w)), None), x, ws)[0] ** 2)

        value, grad = jax.value_and_grad(loss)(ws)
        return ws - 0.1 * grad, value

    ws = jnp.stack([W[:, :16], W[:, 16:]])
    traced = trace(step, ws, X)
    program = build(traced, plans.drawn(traced, (2, 4), seed).sharding, jax.devices())
    assert_close(run(program, ws, X), jax.jit(step)(ws, X))


def test_a_custom_partitioning_without_a_rule_is_replicated_and_says_so():
    seen = []
    step = kernel_step(product(seen, rule=None))
    with pytest.warns(AutoshardWarning, match="custom_partitioning has no factor rule .*sharding_rule"):
        plan = autoshard.search(step, W, X, cluster="8xCPU")
    with pytest.warns(AutoshardWarning, match="custom_partitioning has no factor rule"):
        program = autoshard.emit(step, W, X, plan=plan)
    assert_close(run(program, W, X), jnp.tanh(X @ W))
    assert set(seen) == {(X.shape, W.shape)}


def vendors_primitive(wrapped):
    """A primitive that is lowered to what is wrapped in `custom_partitioning`, as vendors make them."""
    primitive = jex_core.Primitive("vendors_product")
    primitive.def_abstract_eval(lambda x, w: jax.core.ShapedArray((x.shape[0], w.shape[1]), x.dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(wrapped, multiple_results=False))
    return primitive.bind


def test_a_primitive_that_is_lowered_to_a_custom_partitioning_is_split_likewise():
    seen = []
    step = kernel_step(vendors_primitive(product(seen)))
    program = pinned(step, (2, 4), {"x": P("data"), "w": P(None, "model")}, W, X)
    assert_close(run(program, W, X), jnp.tanh(X @ W))
    assert set(seen) == {((12, 16), (16, 8))}


def test_a_rule_that_does_not_suit_its_function():
    step = kernel_step(product([], "i k, k -> i"))
    with pytest.raises(
        autoshard.InputError,
        match=r"sharding_rule of wrapped at .*test_kernels\.py:\d+, .*1th operand has rank",
    ):
        autoshard.search(step, W, X, cluster="8xCPU")


# --- pallas_call


def scaled(x, s):
    """Multiplies a matrix by a vector, row by row."""

    def kernel(x_ref, s_ref, o_ref):
        o_ref[...] = x_ref[...] * s_ref[...] + pl.program_id(0)

    rows = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 2,),
        in_specs=[rows, pl.BlockSpec(s.shape, lambda i: (0,))],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x, s)


BATCHES = jnp.asarray(np.random.default_rng(2).standard_normal((8, 6, 4, 16), np.float32))
S = jnp.arange(16.0)


def runs(program: Program) -> int:
    """How often a device runs the kernel: the size of its grid."""
    (grid,) = re.findall(r"grid=\(([\d, ]*)\)", str(jax.make_jaxpr(program.fn)(*program.args)))
    return prod(map(int, filter(None, grid.split(","))))


VMAPS = {
    "one": lambda x, s: jax.vmap(lambda x: jax.vmap(scaled, (0, None))(x, s))(x),
    "both": lambda x, s: jax.vmap(jax.vmap(scaled, (0, 0)), (0, None))(x, jnp.broadcast_to(s, (6, 16))),
    "inner-first": lambda x, s: jax.vmap(jax.vmap(scaled, (0, None)), (1, None), 1)(x, s),
}


@pytest.mark.parametrize("vmaps", VMAPS)
def test_a_pallas_kernel_under_vmap_runs_for_the_batches_of_its_device(vmaps):
    def step(s, x):
        return s + 1, VMAPS[vmaps](x, s)

    program = pinned(step, (2, 4), {"x": P("model", "data"), "s": P()}, S, BATCHES)
    assert_close(run(program, S, BATCHES), step(S, BATCHES))
    assert runs(program) == 8 // 4 * 6 // 2 * 2
    assert collectives(program) == set()


@pytest.mark.parametrize("seed", SEEDS)
def test_any_plan_of_a_pallas_kernel_gives_one_devices_numbers(seed):
    def step(w, x):
        y = jax.vmap(jax.vmap(scaled, (0, None)), (0, None))(x @ w, S)
        return w + y.mean(), y

    w = jax.random.normal(jax.random.key(3), (16, 16))
    traced = trace(step, w, BATCHES)
    program = build(traced, plans.drawn(traced, (2, 4), seed).sharding, jax.devices())
    assert_close(run(program, w, BATCHES), jax.jit(step)(w, BATCHES))


def test_a_kernels_own_grid_is_not_split():
    def step(s, x):
        return s + 1, scaled(x, s)

    x = BATCHES[0, :, 0]
    with pytest.warns(AutoshardWarning, match="pallas_call has no factor rule"):
        plan = autoshard.search(step, S, x, cluster="8xCPU")
    with pytest.warns(AutoshardWarning, match="pallas_call has no factor rule"):
        program = autoshard.emit(step, S, x, plan=plan)
    assert_close(run(program, S, x), step(S, x))
    assert runs(program) == 3


def test_splits_are_even():
    """Seven batches are not padded to eight."""

    def step(s, x):
        return s + 1, jax.vmap(scaled, (0, None))(x, s)

    x = BATCHES[:, 0, :4][:7]
    program = pinned(step, (8,), {}, S, x)
    assert_close(run(program, S, x), step(S, x))
    assert runs(program) == 7 * 2


def test_shards_are_placed_as_planned():
    program = pinned(kernel_step(product([])), (2, 4), {"x": P("data"), "w": P(None, "model")}, W, X)
    assert run(program, W, X).sharding == NamedSharding(program.mesh, P("data", "model"))


# --- products whose terms are summed up by name


@pytest.mark.parametrize(
    "made",
    [
        ((0, PARTIAL, PARTIAL), (0, PARTIAL, 0), (0, 1, 0)),
        ((WHOLE, PARTIAL, PARTIAL), (WHOLE, PARTIAL, 1), (WHOLE, WHOLE, 1), (0, WHOLE, 1)),
        ((PARTIAL, PARTIAL, PARTIAL), (PARTIAL, PARTIAL, 1), (0, PARTIAL, 1), (0, 0, 1)),
        ((1, PARTIAL, PARTIAL), (1, 1, 1)),
    ],
)
def test_terms_are_summed_up_one_axis_after_another(made):
    """Then come the other specs, by constraints."""
    x, y = (jax.random.normal(jax.random.key(seed), (24, 16)) for seed in (0, 1))
    step = trace(lambda x, y: jax.lax.dot_general(x, y, (((0,), (0,)), ((), ()))), x, y)
    # the terms are those of the first dimension; the second is the result's first, or its second
    read = [tuple({PARTIAL: 0, dim: 1}.get(d, WHOLE) for d in made[0]) for dim in (0, 1)]
    specs = {("operand", (0,), n): (spec,) for n, spec in enumerate(read)}
    sharding = StepSharding((2, 2, 2), AXIS_NAMES[3], {**specs, ("result", (0,), 0): made}, {})
    program = build(step, sharding, jax.devices())
    stated = str(jax.make_jaxpr(program.fn)(x, y))
    before = [(b, a) for b, a in pairwise(made) if PARTIAL in b]
    summed = [[(d, e) for d, e in zip(b, a, strict=True) if d == PARTIAL != e] for b, a in before]
    assert stated.count("reduce_scatter[") == sum(step[0][1] != WHOLE for step in summed)
    assert stated.count("psum[") == sum(step[0][1] == WHOLE for step in summed)
    result = run(program, x, y)
    assert_close(result, np.asarray(x).T @ np.asarray(y))


def test_terms_of_a_convolution_are_summed_up_one_axis_after_another():
    """By constraints alone XLA would reduce the kernel's gradient whole over the axes that come second and third."""

    def step(w, x):
        def loss(w):
            y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")
            return jnp.sum(jnp.sin(y + jnp.arange(y.size).reshape(y.shape)))

        return w - 0.1 * jax.grad(loss)(w)

    w = jax.random.normal(jax.random.key(3), (16, 8, 4, 3))
    pins = {"x": P(("replica", "data", "model")), "w": P("replica", "data", "model")}
    program = pinned(step, (2, 2, 2), pins, w, IMAGES)
    assert str(jax.make_jaxpr(program.fn)(w, IMAGES)).count("reduce_scatter[") > 1
    assert_close(run(program, w, IMAGES), jax.jit(step)(w, IMAGES))


# --- convolutions in batch groups

IMAGES = jnp.asarray(np.random.default_rng(2).standard_normal((8, 8, 6, 6), np.float32))


def grouped_step(num_groups):
    def step(w, x):
        def loss(w):
            y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=num_groups)
            return jnp.sum(jnp.sin(y + jnp.arange(y.size).reshape(y.shape)))

        return w - 0.1 * jax.grad(loss)(w)

    return step


@pytest.mark.parametrize(
    "pins",
    [
        {"x": P("data")},
        {"x": P("model")},
        {"x": P(("data", "model"))},
        {"x": P("data", "model")},
        {"x": P("model", "data"), "w": P("data")},
        {"x": P(None, "model"), "w": P("model")},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_groups", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_grouped_convolutions_gradient_is_one_devices(num_groups, pins):
    """XLA's partitioner adds its terms up over replicas, too."""
    step, w = grouped_step(num_groups), jax.random.normal(jax.random.key(3), (16, 8 // num_groups, 3, 3))
    assert_close(run(pinned(step, (2, 4), pins, w, IMAGES), w, IMAGES), jax.jit(step)(w, IMAGES))


def test_the_examples_of_a_grouped_convolution_are_not_gathered():
    step, w = grouped_step(4), jax.random.normal(jax.random.key(3), (16, 2, 3, 3))
    assert collectives(pinned(step, (8,), {"x": P("data"), "w": P()}, w, IMAGES)) == {"all-reduce"}
