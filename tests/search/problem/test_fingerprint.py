"""A fingerprint changes with what a plan depends on, and with nothing else."""

import os
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.search.ir.factors import Factor, Kind, rule_for
from autoshard.search.ir.graph import Phase, Role, Step
from autoshard.search.ir.trace import trace
from autoshard.search.problem import op_rules
from autoshard.search.problem.fingerprint import data, fingerprint

SQUARE = jax.ShapeDtypeStruct((8, 8), "float32")
INTS = jax.ShapeDtypeStruct((8, 8), "int32")
IMAGE = jax.ShapeDtypeStruct((8, 8, 8, 8), "float32")


def of(step, *args) -> str:
    return fingerprint(trace(step, *args))


# --- what differs


def scan(reverse: bool):
    return lambda x: lax.scan(lambda carry, row: (carry + row, carry * row), x[0], x, reverse=reverse)


def conv(**options):
    return lambda x, k: lax.conv_general_dilated(
        x, k, **({"window_strides": (1, 1), "padding": "SAME"} | options)
    )


def laid(images: str):
    return conv(dimension_numbers=(images, "OIHW", images))


def looked_up(mode: str):
    return lambda x, i: x.at[i].get(mode=mode)


def named(scope: str):
    def step(x):
        with jax.named_scope(scope):
            return jnp.tanh(x)

    return step


DIFFER = {
    "the axis of a sum": (lambda x: x.sum(0), lambda x: x.sum(1), SQUARE),
    "the axis of a maximum's place": (lambda x: x.argmax(0), lambda x: x.argmax(1), SQUARE),
    "the axis of a running sum": (lambda x: lax.cumsum(x, 0), lambda x: lax.cumsum(x, 1), SQUARE),
    "its direction": (lambda x: lax.cumsum(x), lambda x: lax.cumsum(x, reverse=True), SQUARE),
    "the sides of a product": (lambda x, y: x @ y, lambda x, y: x @ y.T, SQUARE, SQUARE),
    "its operands": (lambda x, y: x @ y, lambda x, y: y @ x, SQUARE, SQUARE),
    "its summed dimensions": (
        lambda x, y: lax.dot_general(x, y, (((1,), (0,)), ((), ()))),
        lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))),
        SQUARE,
        SQUARE,
    ),
    "its precision": (
        lambda x, y: jnp.matmul(x, y, precision="highest"),
        lambda x, y: jnp.matmul(x, y, precision="default"),
        SQUARE,
        SQUARE,
    ),
    "a permutation": (
        lambda x: x.transpose(0, 1, 3, 2),
        lambda x: x.transpose(0, 2, 1, 3),
        IMAGE,
    ),
    "a comparison": (lambda x: x < 1, lambda x: x > 1, SQUARE),
    "a power": (lambda x: x**2, lambda x: x**3, SQUARE),
    "a padding": (conv(padding=((1, 1), (1, 1))), conv(padding=((2, 0), (1, 1))), IMAGE, IMAGE),
    "a window's step": (conv(rhs_dilation=(1, 2)), conv(rhs_dilation=(2, 1)), IMAGE, IMAGE),
    "a layout": (laid("NCHW"), laid("NHWC"), IMAGE, IMAGE),
    "a slice": (lambda x: x[1:5], lambda x: x[2:6], SQUARE),
    "what becomes of places outside": (looked_up("clip"), looked_up("fill"), SQUARE, INTS),
    "a broadcast dimension": (
        lambda x: lax.broadcast_in_dim(x[0], (8, 8), (0,)),
        lambda x: lax.broadcast_in_dim(x[0], (8, 8), (1,)),
        SQUARE,
    ),
    "the direction of a loop": (scan(False), scan(True), SQUARE),
    "a loop's body": (
        lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y), x),
        lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.cosh(y), x),
        SQUARE,
    ),
    "the side of a literal": (lambda x: x - 1.0, lambda x: 1.0 - x, SQUARE),
    "the order of operands": (lambda x, y: x - y, lambda x, y: y - x, SQUARE, SQUARE),
    "a primitive": (jnp.tanh, jnp.cosh, SQUARE),
    "a type": (lambda x: x.astype("bfloat16"), lambda x: x.astype("float16"), SQUARE),
    "a scope": (named("encoder"), named("decoder"), SQUARE),
    "an argument's name": (lambda x: jnp.tanh(x), lambda y: jnp.tanh(y), SQUARE),
    "a result's name": (lambda x: {"a": jnp.tanh(x)}, lambda x: {"b": jnp.tanh(x)}, SQUARE),
    "which result is which": (lambda x: (x.sum(), x.max()), lambda x: (x.max(), x.sum()), SQUARE),
    "what is handed on": (lambda x, y: (x + y, y), lambda x, y: (y, x + y), SQUARE, SQUARE),
}


@pytest.mark.parametrize("what", DIFFER)
def test_another_step_has_another(what):
    first, second, *args = DIFFER[what]
    assert of(first, *args) != of(second, *args)


@pytest.mark.parametrize(
    "other", [jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((8, 8), "bfloat16"), INTS]
)
def test_another_shape_or_type_has_another(other):
    assert of(lambda x: x + x, SQUARE) != of(lambda x: x + x, other)


STEP = trace(lambda w, x: (w + x @ w, {"loss": jnp.tanh(x).sum()}), SQUARE, SQUARE)


def with_op(**changes) -> Step:
    ops = (replace(STEP.graph.ops[0], **changes), *STEP.graph.ops[1:])
    return replace(STEP, graph=replace(STEP.graph, ops=ops))


def with_argument(**changes) -> Step:
    arguments = (replace(STEP.arguments[0], **changes), *STEP.arguments[1:])
    return replace(STEP, arguments=arguments)


@pytest.mark.parametrize(
    "other",
    [
        with_argument(role=Role.OPTIMIZER_STATE),
        with_argument(name="v"),
        replace(STEP, results=("result[0]", "result[1]['cost']")),
        replace(STEP, replaces=(1, None)),
        with_op(phase=Phase.UPDATE),
        with_op(scope="encoder"),
    ],
)
def test_all_that_decides_counts(other):
    assert fingerprint(other) != fingerprint(STEP)


@pytest.mark.parametrize(
    "changed",
    [
        lambda rule: replace(rule, flops_per_point=7.0),
        lambda rule: replace(rule, factors=(Factor(8, Kind.UNSPLITTABLE), *rule.factors[1:])),
    ],
)
def test_so_do_the_factors_of_its_ops(changed, monkeypatch):
    before = fingerprint(STEP)
    monkeypatch.setattr(op_rules, "rule_for", lambda *op: changed(rule_for(*op)))
    assert fingerprint(STEP) != before


# --- what does not


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x - 0.1 * x, lambda x: x - 0.2 * x),
        (lambda x: x + np.ones((8, 8), "float32"), lambda x: x + np.eye(8, dtype="float32")),
        (lambda x: x * 2, lambda x: x * 2),
    ],
    ids=["a literal", "a constant", "the line"],
)
def test_a_plan_survives_another(first, second):
    assert of(first, SQUARE) == of(second, SQUARE)


def test_the_literals_type_counts():
    assert of(lambda x: x * np.float32(2), SQUARE) != of(
        lambda x: x + np.zeros((8, 8), "float32") * 2, SQUARE
    )


TELLING = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
sys.path.insert(0, {root!r})
from tests.search.problem.test_fingerprint import everything, of
print(of(*everything()))
"""


def everything():
    """A step whose parameters hold code, keys, sets and jaxprs."""

    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.where(abs(x) < 1, g, 0.0),))

    def step(w, x, key):
        def loss(w):
            noise = jax.random.normal(key, x.shape)
            y = jax.checkpoint(lambda w: jnp.tanh((x + noise) @ w))(w)
            y = lax.cond(jnp.sum(y) > 0, clipped, lambda y: y, y)
            y = lax.scan(lambda carry, row: (carry + row, lax.sort(row)), y[0], y)[1]
            y = lax.reduce(y, 0.0, lambda a, b: a + b, (0,)) + jnp.zeros(8).at[x[:, 0].astype("int32")].add(
                y[0]
            )
            return jnp.mean(jax.pure_callback(np.asarray, SQUARE, lax.stop_gradient(x))) + jnp.mean(y)

        return w - jax.grad(loss)(w)

    return step, SQUARE, SQUARE, jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.devices
def test_it_is_the_same_in_every_process(tmp_path):
    """Made and traced again; under another hash seed, in another folder."""
    told = of(*everything())
    assert of(*everything()) == told
    ran = subprocess.run(
        [sys.executable, "-c", TELLING.format(root=str(Path(__file__).parents[3]))],
        cwd=tmp_path,
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == told


def test_it_is_sixteen_digits():
    assert len(of(jnp.tanh, SQUARE)) == 16
    assert int(of(jnp.tanh, SQUARE), 16) > 0


# --- parameters


class Mode(Enum):
    CLIP = 1
    FILL = 2


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Mode.CLIP, "CLIP"),
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("NHWC", "NHWC"),
        (np.dtype("bfloat16"), "bfloat16"),
        (np.dtype("float32"), "float32"),
        ((1, [2, Mode.FILL]), (1, (2, "FILL"))),
        ({"b": 1, "a": np.dtype("int8")}, (("a", "int8"), ("b", 1))),
        (frozenset({"model", "data"}), ("data", "model")),
        (len, "builtin_function_or_method"),
        (lambda x: x, "function"),
        (object(), "object"),
        (np.ones(3), "ndarray"),
        (lax.GatherDimensionNumbers((0,), (1,), (1,)), ((0,), (1,), (1,), (), ())),
    ],
)
def test_parameters_as_data(value, told):
    assert data(value) == told


@pytest.mark.devices
def test_a_weak_type_makes_no_other_graph():
    def step(w, average, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(x @ w))(w)
        average = jax.lax.fori_loop(0, 3, lambda i, a: a + value, 0.9 * average)
        return w - gradient, average + 0.1 * value

    w, x = jnp.ones((4, 2)), jnp.ones((8, 4))
    weak, strong = (trace(step, w, average, x) for average in (0.0, np.float32(0)))
    assert fingerprint(weak) == fingerprint(strong)
    assert (weak.weak_arguments, strong.weak_arguments) == ({1}, frozenset())
    assert trace(lambda w, x: (w, x), True, 1).weak_arguments == {1}  # a Python bool is not weak


@pytest.mark.devices
def test_a_weak_type_that_adapts_to_another_makes_another_graph():
    def step(w, scale):
        return w * scale

    w = jnp.ones(4, jnp.bfloat16)
    assert fingerprint(trace(step, w, 2.0)) != fingerprint(trace(step, w, np.float32(2)))
