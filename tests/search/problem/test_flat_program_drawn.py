"""The flat program: loops and branches of any nesting, with literals handed into them at any place."""

import functools
from collections.abc import Callable
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autoshard.executors.jit import build
from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import FlatProgram, flatten
from tests.executors import plans

pytestmark = pytest.mark.devices

Function = Callable[[jax.Array, jax.Array | float], jax.Array]
"""Of an array and a scalar, which may be a literal."""

W = np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)
X = np.linspace(-1, 1, 48, dtype=np.float32).reshape(8, 6)

LEAVES: dict[str, Function] = {
    "scaled": lambda x, s: jnp.tanh(x) * s,
    "clamped": lambda x, s: lax.clamp(s, x, 1.0) - x,
    "chosen": lambda x, s: jnp.where(s > 0.3, jnp.sin(x), jnp.cos(x)),
    "padded": lambda x, s: lax.pad(x[1:], lax.convert_element_type(s, x.dtype), ((1, 0, 0), (0, 0, 0))),
    "barred": lambda x, s: sum(lax.optimization_barrier((x, s))),
    "converted": lambda x, s: x + lax.convert_element_type(s, jnp.int32),
}


def scan_with_constant(f: Function) -> Function:
    return lambda x, s: lax.scan(lambda x, _: (f(x, s), s), x, None, length=2)[0]


def scan_with_carry(f: Function) -> Function:
    def body(carry, _):
        x, s = carry
        return (f(x, s), s), x.mean()

    def looped(x, s):
        (x, s), means = lax.scan(body, (x, s), None, length=3)
        return x * s + means.sum()

    return looped


def scan_over_slices(f: Function) -> Function:
    def body(s, x):
        return s, f(x, s)

    return lambda x, s: lax.scan(body, s, jnp.stack([x, x + 1]))[1].sum(0)


def branches(f: Function) -> Function:
    return lambda x, s: lax.cond(x.sum() > 0, f, lambda x, s: x - s, x, s)


def while_loop(f: Function) -> Function:
    def looped(x, s):
        done = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], c[2]), c[2]), (0, x, s))
        return x + done[1]

    return lambda x, s: lax.stop_gradient(looped(x, s)) + x


def handed_a_literal(f: Function) -> Function:
    return lambda x, s: jax.jit(f)(x, 0.5) + s


WRAPPERS: tuple[Callable[[Function], Function], ...] = (
    *(scan_with_constant, scan_with_carry, scan_over_slices, branches, while_loop, handed_a_literal),
    *(jax.checkpoint, jax.jit),
)


@st.composite
def functions(draw: st.DrawFn) -> Function:
    """A few ops inside loops, branches and calls, up to five deep."""
    wraps = draw(st.lists(st.sampled_from(WRAPPERS), max_size=5))
    first, then = draw(st.tuples(*[st.sampled_from(list(LEAVES.values()))] * 2))
    inside = functools.reduce(lambda f, wrap: wrap(f), wraps, first)
    return lambda x, s: then(inside(x, s), s)


def trained(f: Function) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """A training step whose loss applies `f` to a literal."""

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(f(x @ w, 0.5) ** 2))(w)
        return w - 0.1 * grad, loss

    return step


def check_rules(program: FlatProgram) -> None:
    """Each operand's and result's factors multiply to its shape."""
    for op in program.ops:
        for values, dims_of in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for v, dims in zip(values, dims_of, strict=True):
                sizes = tuple(prod(op.rule.factors[f].size for f in dim) for dim in dims)
                assert sizes == program.values[v].shape, op.name


@given(f=functions())
def test_rules_fit_the_values_in_any_nesting(f: Function):
    check_rules(flatten(trace(trained(f), W, X)))


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_a_literal_handed_into_a_body(wrap: Callable[[Function], Function], leaf: str):
    check_rules(flatten(trace(trained(handed_a_literal(wrap(LEAVES[leaf]))), W, X)))


@settings(max_examples=3)
@given(f=functions(), seed=st.integers(0, 99))
def test_any_nesting_gives_one_devices_numbers(f: Function, seed: int):
    """In 64 bits: five loops deep, 32 bits' rounding grows to a thousandth."""
    with jax.enable_x64(True):
        step, arrays = trained(f), (W.astype(np.float64), X.astype(np.float64))
        traced = trace(step, *arrays)
        program = build(traced, plans.drawn(traced, (2, 4), seed).sharding, jax.devices())
        got = program.fn(*jax.device_put(arrays, program.shardings))
        for a, b in zip(got, jax.jit(step)(*arrays), strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


def test_rules_of_literals_of_different_types_are_told_apart():
    """A conversion from an integer is not additive, one from a float is."""

    def step(x):
        @jax.jit
        def body(s, n):
            def loop(x, _):
                return x + lax.convert_element_type(s, jnp.float32) * lax.convert_element_type(
                    n, jnp.float32
                ), None

            return lax.scan(loop, x, None, length=2)[0]

        return body(jnp.float16(0.5), jnp.int32(1))

    conversions = [op for op in flatten(trace(step, X)).ops if op.name == "convert_element_type"]
    assert {op.rule.is_additive for op in conversions} == {True, False}
