"""Never a crash: whatever JAX can trace can be traced, searched and run, with one device's results.

Every step here holds something that no Transformer has. Some of it has no factor rule and is computed alike on all devices.
"""

import functools
from collections.abc import Callable
from itertools import cycle, product
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from autoshard.executors.jit import build
from autoshard.search.ir.trace import trace
from tests.executors import plans
from tests.extended_dtypes import float_of, fp8_meta

pytestmark = pytest.mark.devices

STEPS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def case(*args: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a step with its arguments."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        STEPS[step.__name__] = step, args
        return step

    return register


def trained(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The training step of a loss: `(w, ...) -> (w, loss)`."""

    @functools.wraps(loss)
    def step(w, *batch):
        value, grad = jax.value_and_grad(loss)(w, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grad), value

    return step


@case(normal(4, 16, 32), normal(24, 16), np.array([3, 9, 0, 12], np.int32))
@trained
def ragged_product(w, x, sizes):
    return jnp.mean(jax.lax.ragged_dot(x, w, sizes) ** 2)


@case(normal(16, 32), normal(24, 16))
@trained
def pallas_kernel(w, x):
    @jax.custom_vjp
    def doubled(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = 2 * x_ref[...]

        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))
    return jnp.mean(doubled(x @ w) ** 2)


@case(normal(16, 32), normal(24, 16))
@trained
def host_callback(w, x):
    y = jax.lax.stop_gradient(x @ w)
    shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return jnp.mean((x @ w) * jax.pure_callback(lambda y: np.tanh(y), shape, y))


@case(normal(16, 32), normal(24, 16))
@trained
def debug_print(w, x):
    y = x @ w
    jax.debug.print("mean {}", y.mean())
    return jnp.mean(y**2)


@case(normal(16, 32), normal(24, 16))
@trained
def fourier_mixing(w, x):
    return jnp.mean((jnp.fft.fft2(x).real @ w) ** 2) + jnp.mean(jnp.abs(jnp.fft.rfft(x @ w)) ** 2)


@case(normal(16, 32), normal(24, 16))
@trained
def sorts_and_sums(w, x):
    y = jnp.sort(x @ w, axis=0)
    order = jnp.argsort(x[:, 0])
    best, at = jax.lax.top_k(y, 3)
    return jnp.mean(jnp.cumsum(y[order], axis=0) ** 2) + jnp.mean(best * at) + jnp.mean(jax.lax.cummax(y))


@case(normal(16, 32), normal(24, 16))
@trained
def looks_up(w, x):
    """As experts are dealt their tokens, and curves are read between points."""
    y = x @ w
    at = jax.vmap(lambda row: jnp.searchsorted(jnp.sort(row), jnp.linspace(-1, 1, 8)))(y)
    chosen = jnp.take_along_axis(y, jnp.clip(at, 0, 31), axis=1)
    (found,) = jnp.nonzero(chosen[0] > 0, size=4)
    return (
        jnp.mean(chosen**2)
        + jnp.interp(y[1], jnp.linspace(-1, 1, 8), jnp.sort(y[2, :8])).mean()
        + y[found, 0].sum()
    )


@case(normal(16, 32), normal(24, 16))
@trained
def implicit_roots(w, x):
    a = 1 + jnp.abs(x @ w)
    root = jax.lax.custom_root(
        lambda y: y * y - a,
        a,
        lambda f, y: jax.lax.fori_loop(0, 6, lambda _, y: y - f(y) / (2 * y), y),
        lambda g, y: y / g(jnp.ones_like(y)),
    )
    return jnp.mean(root)


@case(normal(16, 32), normal(24, 16))
@trained
def named_axes_of_vmap(w, x):
    """As batch statistics are taken by name."""

    def normalized(v):
        centred = v - jax.lax.pmean(v, "b")
        scale = jax.lax.pmax(jax.lax.stop_gradient(jnp.abs(centred)), "b")
        return centred / scale + jax.lax.axis_index("b")

    return jnp.mean(jax.vmap(normalized, axis_name="b")(x @ w) ** 2)


@jax.custom_vjp
def with_largest_gradients(largest, x):
    """As FP8 statistics are found: `x`, of which the gradient's largest elements are that of `largest`."""
    return x


with_largest_gradients.defvjp(
    lambda largest, x: (x, None), lambda _, g: (fp8_meta(jnp.max(jnp.abs(g), axis=0)), g)
)


@case((normal(16, 16), jax.jit(fp8_meta)(normal(4, 16))), normal(24, 16))
def gradients_whose_sum_is_their_maximum(state, x):
    w, largest = state[0], float_of(state[1])

    def loss(w, largest):
        def layer(x, largest):
            return jnp.tanh(with_largest_gradients(last, with_largest_gradients(largest, x)) @ w), None

        last = fp8_meta(largest[-1])
        return jnp.mean(jax.lax.scan(layer, x, fp8_meta(largest))[0] ** 2)

    value, (grad, largest) = jax.value_and_grad(loss, (0, 1))(w, largest)
    return (w - 0.1 * grad, fp8_meta(largest)), value


@case(normal(16, 16), normal(24, 16))
@trained
def linear_algebra(w, x):
    gram = w @ w.T + 16 * jnp.eye(16)
    root = jnp.linalg.cholesky(gram)
    solved = jax.scipy.linalg.solve_triangular(root, x.T, lower=True)
    return jnp.mean(solved**2) + jnp.mean(jnp.linalg.solve(gram, x.T)) + jnp.linalg.eigvalsh(gram).sum()


@case(normal(16, 16), normal(24, 16))
@trained
def custom_gradients(w, x):
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))

    @jax.custom_jvp
    def safe_sqrt(x):
        return jnp.sqrt(x)

    safe_sqrt.defjvp(lambda p, t: (jnp.sqrt(p[0]), t[0] / (2 * jnp.sqrt(p[0]) + 1e-3)))
    return jnp.mean(safe_sqrt(jnp.abs(clipped(x @ w))))


@case(normal(3, 2, 16, 16), normal(24, 16))
@trained
def nested_scans(w, x):
    def inner(x, w):
        return jnp.tanh(x @ w), x.mean()

    def outer(x, ws):
        x, means = jax.lax.scan(inner, x, ws)
        return x, means

    x, means = jax.lax.scan(outer, x, w)
    return jnp.mean(x**2) + means.sum()


@case(normal(3, 16, 16), normal(24, 16))
def while_in_scan(w, x):
    def layer(x, w):
        doubled = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 1.1 + w[0]), (0, x))[1]
        return jnp.tanh(x @ w + jax.lax.stop_gradient(doubled)), None

    def loss(w):
        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


@case(normal(3, 16, 16), normal(24, 16))
@trained
def cond_in_scan(w, x):
    def layer(x, w):
        y = jax.lax.cond(w[0, 0] > 0, lambda x, w: jnp.tanh(x @ w), lambda x, w: x, x, w)
        return jax.lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, lambda y: y], y), None

    return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)


@case(normal(16, 16), normal(24, 16))
@trained
def loop_with_trip_count(w, x):
    return jnp.mean(jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w) * i, x) ** 2)


@case(normal(4, 16, 16), normal(24, 16))
@trained
def nnx_scanned_layers(w, x):
    layers = nnx.vmap(lambda rngs: nnx.Linear(16, 16, rngs=rngs), axis_size=4)(nnx.Rngs(0).split(4))
    layers.kernel.set_value(w)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(layer, x):
        return jnp.tanh(layer(x))

    return jnp.mean(forward(layers, x) ** 2)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(16)(x)), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.remat_scan(Tanh, lengths=(2, 2))
        return layers(name="layers")(x)


class Tanh(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(16)(x))


def drawn(shapes: Any) -> Any:
    return jax.tree.map(lambda x: normal(*x.shape), shapes)


@case(drawn(jax.eval_shape(Stack().init, jax.random.key(0), normal(1, 16))), normal(24, 16))
@trained
def linen_remat_scan(w, x):
    return jnp.mean(Stack().apply(w, x) ** 2)


@case(normal(16, 16), normal(24, 16))
@trained
def checkpoint_policies(w, x):
    policies = jax.checkpoint_policies

    @functools.partial(jax.checkpoint, policy=policies.dots_saveable)
    def first(x):
        return jnp.sin(x @ w)

    @functools.partial(jax.checkpoint, policy=policies.save_only_these_names("kept"), prevent_cse=False)
    def second(x):
        return jnp.cos(checkpoint_name(x @ w, "kept"))

    return jnp.mean(jax.checkpoint(lambda x: jnp.tanh(second(first(x)) @ w))(x) ** 2)


@case(normal(16, 16), normal(24, 16), jax.random.key(0))
def typed_key(w, x, key):
    key, used = jax.random.split(key)
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2 * jax.random.bernoulli(used, 0.5, (24, 16))))(w)
    return w - grad, key


@case(normal(16, 16), normal(24, 16), jax.random.PRNGKey(3))
def raw_key(w, x, key):
    key, used = jax.random.split(key)
    noise = jax.random.normal(used, (24, 16)) + jax.random.gumbel(jax.random.fold_in(used, 1), (16,))
    return w - jax.grad(lambda w: jnp.mean((x @ w + noise) ** 2))(w), key


@case(normal(16, 16), normal(24, 16), np.arange(24) % 2 == 0, np.arange(24, dtype=np.int32), 3)
@trained
def integers_and_booleans(w, x, mask, ids, scale):
    rows = jnp.where(mask[:, None], x @ w, 0.0)[ids]
    return jnp.mean(rows**2) * scale + jnp.sum(ids // 3 & 1) + mask.any()


@case({"w": normal(16, 16), "none": None, "empty": {}, "list": []}, (normal(24, 16), None))
def empty_pytrees(state, batch):
    x, _ = batch
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {**state, "w": state["w"] - grad}, {}


@case({"w": normal(16, 16), "scale": np.float32(2), "rest": np.zeros((0, 16), np.float32)}, normal(24, 16))
@trained
def scalars_and_nothing(state, x):
    return jnp.mean((x @ state["w"] * state["scale"]) ** 2) + jnp.concatenate([state["rest"], x]).sum()


@case(1.0, normal(24, 16))
@trained
def weak_types(scale, x):
    return jnp.mean((x * scale) ** 2) + scale


@case(normal(16, 16) + 1j * normal(16, 16), normal(24, 16))
def complex_numbers(w, x):
    value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.abs(x @ w) ** 2))(w)
    return w - 0.1 * grad.conj(), value


@case(normal(16, 16), normal(24, 16))
def results_that_are_arguments_and_constants(w, x):
    grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - grad, x, 3.0, np.arange(8), grad, grad


@case(normal(16, 16), normal(24, 16))
def no_gradient(w, x):
    return {"mean": jnp.mean(x @ w), "var": jnp.var(x)}


@case(normal(24, 16))
def nothing_computed(x):
    return x


@case({"w": normal(4, 16, 16), "count": np.int32(3)}, normal(24, 16))
def results_that_are_constants(state, x):
    """State that is set back, and what a loop stacks up."""

    def loss(w):
        y, (zeros, _) = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), (np.float32(0), y)), x, w)
        return jnp.mean(y**2), zeros

    (value, zeros), grad = jax.value_and_grad(loss, has_aux=True)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "count": np.int32(0)}, (value, zeros)


@case(normal(4, 16), normal(24, 8, 16), normal(3, 3, 16, 8))
@trained
def odd_sizes(w, x, kernel):
    y = x[:, :7] @ w.T
    images = jnp.tile(x[:, :5, None], (1, 1, 5, 1))
    features = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(y**2) + jnp.mean(features) + jnp.mean(jnp.pad(y, ((1, 2), (0, 0), (0, 0))))


MESHES = (8,), (2, 4)
PLANS = plans.fastest, functools.partial(plans.drawn, seed=2)
PLANS_ON_MESHES = dict(zip(STEPS, cycle(product(MESHES, PLANS)), strict=False))
"""By step, a mesh and a plan on it; each mesh and each plan meets every fourth step."""


IN_PARTS = {"linen_remat_scan", "nested_scans", "pallas_kernel", "raw_key"}
"""Others have `scan`, loops in it and `checkpoint` apart, tests/executors/test_kernels.py has kernels, and a typed key is a
raw one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_PARTS else []) for name in STEPS]
)
def test_runs_and_equals_one_device(name):
    assert_equals_one_device(name, *PLANS_ON_MESHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_runs_and_equals_one_device_under_each_plan(name):
    for mesh, plan in product(MESHES, PLANS):
        assert_equals_one_device(name, mesh, plan)


def assert_equals_one_device(name, mesh, plan):
    step, args = STEPS[name]
    traced = trace(step, *args)
    wanted = jax.jit(step)(*args)
    program = build(traced, plan(traced, mesh).sharding, jax.devices())
    copies = jax.tree.map(jnp.array, args)
    got = program.fn(*jax.device_put(copies, program.shardings))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(_numbers(g), _numbers(w), rtol=1e-4, atol=1e-5)


def _numbers(x: jax.Array) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        x = jax.random.key_data(x) if is_key else jax.jit(float_of)(x)
    return np.asarray(x, np.float32 if x.dtype == jnp.bfloat16 else None)
