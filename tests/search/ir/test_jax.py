"""What is read off JAX's equations, and what is written into those that are bound."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from autoshard.search.ir import _jax, _jax_kernels
from tests.extended_dtypes import META

HERE = "tests/search/ir/test_jax.py"


def wave(x):
    return jnp.sin(x)


WAVE = f"{HERE}:{wave.__code__.co_firstlineno + 1}"


def equations(function, *args):
    traced = jax.make_jaxpr(function)(*args)
    return _jax.open_jaxpr(traced).eqns


def test_what_is_bound_again_keeps_its_scope_and_its_line():
    (eqn,) = equations(wave, 1.0)

    def again(x):
        with _jax.provenance("layer/attention", eqn.source_info):
            return _jax.bind(eqn.primitive, [x], eqn.params)

    (copy,) = equations(again, 1.0)
    assert _jax.source_line(copy.source_info) == _jax.source_line(eqn.source_info) == WAVE
    assert str(copy.source_info.name_stack) == "layer/attention"


def test_what_has_no_line_takes_that_of_its_caller():
    def again(x):
        with _jax.provenance("", None):
            return jnp.cos(x)

    (eqn,) = equations(again, 1.0)
    assert _jax.source_line(eqn.source_info).startswith(HERE)
    assert str(eqn.source_info.name_stack) == ""
    assert _jax.source_line(None) == ""


@pytest.mark.devices
def test_bytes_of_an_element():
    assert [_jax.itemsize(np.dtype(d)) for d in ("float32", "int8", "bool", "complex64")] == [4, 1, 1, 8]
    assert _jax.itemsize(jnp.dtype(jnp.bfloat16)) == 2
    assert _jax.itemsize(META) == 4
    for key in (jax.random.key(0), jax.random.key(0, impl="rbg")):
        assert _jax.itemsize(key.dtype) == jax.random.key_data(key).nbytes


@pytest.mark.parametrize(
    "lowering", [functools.partial(print), type("Lowering", (), {"__call__": print})(), dict]
)
def test_a_primitive_may_be_lowered_by_any_callable(lowering):
    primitive = Primitive("lowered by any callable")
    mlir.register_lowering(primitive, lowering)
    eqn = SimpleNamespace(primitive=primitive, params={}, invars=())
    assert _jax_kernels.as_partitioning(eqn) is None


@pytest.mark.devices
def test_a_loops_constants_come_before_its_carries():
    def step(w, x, rows):
        return jax.lax.scan(lambda carry, row: ((carry[0] @ w, carry[1] + row), None), (x, 0.0), rows)[0]

    (scan,) = equations(step, jnp.zeros((3, 3)), jnp.zeros((2, 3)), jnp.zeros(4))
    assert _jax.scan_counts(scan.params) == (1, 2)


@pytest.mark.devices
def test_doubles_are_narrow_only_while_there_are_none():
    double = np.dtype("float64")
    assert _jax.narrowed(double) == np.dtype("float32")
    with jax.enable_x64(True):
        assert _jax.narrowed(double) == double
    assert _jax.narrowed(jax.random.key(0).dtype) == jax.random.key(0).dtype
