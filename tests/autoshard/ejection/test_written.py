"""A printed program computes what the traced one does."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.ejection.source import broken
from autoshard.ejection.written import identifier, written
from autoshard.search.ir._jax import jitted_call

pytestmark = pytest.mark.devices

X = np.linspace(-2.0, 3.0, 24, dtype=np.float32).reshape(4, 6)
N = np.arange(6, dtype=np.int32)
IMAGE = np.linspace(-1.0, 1.0, 2 * 5 * 5 * 3, dtype=np.float32).reshape(2, 5, 5, 3)
KERNEL = np.linspace(-1.0, 1.0, 3 * 3 * 3 * 4, dtype=np.float32).reshape(3, 3, 3, 4)


def devices():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def printed(function, *args):
    return written(
        jitted_call(jax.jit(function), args), [f"x{i}" for i in range(len(args))], [P()] * len(args)
    )


def run(function, *args):
    """A function, printed and read again, under the names that an ejected file has."""
    names = [f"x{i}" for i in range(len(args))]
    lines = printed(function, *args).lines
    body = [
        part
        for line in lines
        for part in broken(line.lstrip(), "    " + line[: len(line) - len(line.lstrip())])
    ]
    text = "\n".join([f"def program({', '.join(names)}):", *body])
    mesh = devices()
    found = {"jax": jax, "jnp": jnp, "lax": lax, "P": P, "mesh": mesh}
    found["constrained"] = lambda x, spec: lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    exec(text, found)
    return jax.jit(found["program"])(*args)


def scanned(x, n):
    def body(carry, part):
        return carry * 0.5 + part.sum() + n[0], part * carry

    return lax.scan(body, 0.0, x, reverse=True)


def looped(x, n):
    return lax.while_loop(lambda c: c[0] < n[4], lambda c: (c[0] + 1, c[1] * 1.5 + x), (0, x))


def chosen(x, n):
    return lax.switch(n[1], [lambda x: x, lambda x: -x, jnp.sin], x), lax.cond(
        x[0, 0] > 0, jnp.exp, jnp.cos, x
    )


def random(x, n):
    key = jax.random.fold_in(jax.random.key(3), n[2])
    first, second = jax.random.split(key)
    return x * jax.random.bernoulli(first, 0.5, x.shape), jax.random.normal(second, (5,))


def indexed(x, n):
    return x[:, n], x[n[:3]].at[0].add(1.0), jnp.take_along_axis(x, x.argsort(1), 1), x.at[n[1], 2].set(7.0)


def sliced(x, n):
    parts = jnp.split(x, 2, axis=1)
    updated = lax.dynamic_update_slice(x, parts[0], (n[1], 2))
    return (
        jnp.concatenate(parts[::-1], 1),
        lax.dynamic_slice(x, (n[1], 0), (2, 3)),
        jnp.pad(x, 1)[::-1, 1::2],
        updated,
    )


def reduced(x, n):
    ends = jnp.argmax(x, 0), jnp.argmin(x, 1), lax.top_k(x, 2), jnp.sort(x, 0)
    return x.sum(0), x.max(), x.prod(1), (x > 0).any(1), (n > 1).all(), jnp.cumsum(x, 1), *ends


def numbers(x, n):
    whole = n % 4, n // 3, n << 2, ~n, jnp.where(x[0] > 0, n, -1)
    real = jnp.where(x > 0, x, jnp.nan), jnp.clip(x, -1, 1), x**3, x.astype(jnp.bfloat16) * 0.1, 1e-7 * x
    return (
        *whole,
        *real,
        jnp.logaddexp(x, -jnp.inf),
        jax.nn.gelu(x),
        jax.nn.softmax(x),
        lax.rem(x, 0.7),
        jnp.iinfo(jnp.int32).max - n,
    )


def tied(x, n):
    kept, other = lax.optimization_barrier((x, n))
    return lax.with_sharding_constraint(kept, NamedSharding(devices(), P("data"))) @ kept.T, other


def per_shard(x, n):
    sums = jax.shard_map(
        lambda a: lax.psum(a.sum(0), "data"),
        mesh=devices(),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    return sums(x), n


def closed_over(x, n):
    """A body constrains a value of the function around it, which others read, too."""

    def body(carry, part):
        return carry + lax.with_sharding_constraint(x, NamedSharding(devices(), P("data"))).sum() * part, None

    return lax.scan(body, 0.0, x[0])[0], x * 2.0


def bits(x, n):
    word = lax.bitcast_convert_type(x, jnp.uint32)
    return word ^ jnp.uint32(0xDEADBEEF), word & 7, x.sum() * np.arange(6.0, dtype=np.float32)


def gradient(x, n):
    @jax.checkpoint
    def layer(w):
        return jnp.tanh(x.T @ jnp.tanh(x @ w))

    return jax.value_and_grad(lambda w: (layer(w) ** 2).mean())(jnp.ones((6, 6)) * n)


@pytest.mark.parametrize(
    "function",
    [
        scanned,
        looped,
        chosen,
        random,
        indexed,
        sliced,
        reduced,
        numbers,
        tied,
        per_shard,
        closed_over,
        bits,
        gradient,
    ],
    ids=lambda function: function.__name__,
)
def test_a_printed_program_gives_the_numbers_of_the_traced_one(function):
    wanted, got = jax.jit(function)(X, N), run(function, X, N)
    for one, other in zip(jax.tree.leaves(wanted), got, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(
            np.asarray(other, np.float64), np.asarray(one, np.float64), rtol=1e-6, atol=1e-6
        )


def test_convolutions_and_their_gradients_are_printed():
    def convolved(image, kernel):
        made = lax.conv_general_dilated(
            image, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (made**2).sum()

    wanted = jax.grad(convolved, (0, 1))(IMAGE, KERNEL)
    for one, other in zip(wanted, run(jax.grad(convolved, (0, 1)), IMAGE, KERNEL), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.parametrize(("start", "function"), [(-jnp.inf, lax.max), (jnp.inf, lax.min), (0.0, lax.add)])
def test_reductions_over_windows_and_their_gradients_are_printed(start, function):
    def pooled(image):
        made = lax.reduce_window(image, start, function, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return (made**2).sum()

    value, gradient = run(jax.value_and_grad(pooled), IMAGE)
    wanted = jax.value_and_grad(pooled)(IMAGE)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-6)


def test_an_operation_without_a_public_function_is_named_with_its_line():
    def calling(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    (fault,) = printed(calling, X).unwritten
    assert re.fullmatch(r"pure_callback \(.*\) at .*test_written.py:\d+", fault)


def test_a_long_constant_is_said_by_its_rule_or_stored():
    program = printed(lambda x: x.sum() * np.arange(100.0, dtype=np.float32), X)
    assert (program.unwritten, {*program.stored}) == ((), set())
    assert any("jnp.arange(0, 100, 1" in line for line in program.lines)
    program = printed(lambda x: x.sum() * np.sin(np.arange(100.0, dtype=np.float32)), X)
    (name,) = program.stored
    assert program.stored[name].shape == (100,)
    assert any(f'CONSTANTS["{name}"]' in line for line in program.lines)


@pytest.mark.parametrize(
    ("path", "name"),
    [("params/0/w", "params_0_w"), ("0/kernel", "x_0_kernel"), ("lambda", "lambda_"), ("", "x")],
)
def test_paths_become_identifiers(path, name):
    assert identifier(path) == name
