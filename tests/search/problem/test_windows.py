"""Windows of values in small programs, read off by hand."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.windows import Windows

SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def windows(step, *args):
    return Windows(fold(flatten(trace(step, *args))))


def products_in(found, maker, reader):
    """How many products run in a window."""
    start, end = found.between(maker, reader)
    return sum(op.name == "dot_general" for op in found.folded.program.ops[start:end])


def positions(found, name):
    return [at for at, op in enumerate(found.folded.program.ops) if op.name == name]


def chain(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w.astype(jnp.float32))
    return x


HALVES = [jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 3


def test_a_parameter_has_all_that_runs_before_its_reader_cast_or_not():
    found = windows(chain, HALVES, SQUARE)
    casts, products = positions(found, "convert_element_type"), positions(found, "dot_general")
    assert [products_in(found, cast, reader) for cast, reader in zip(casts, products, strict=True)] == [
        0,
        1,
        2,
    ]
    assert [products_in(found, at, cast) for at, cast in enumerate(casts)] == [0, 1, 2]


def test_an_activation_has_nothing_though_light_ops_lie_between():
    found = windows(chain, HALVES, SQUARE)
    first, second, _ = positions(found, "dot_general")
    (tanh, *_) = positions(found, "tanh")
    assert products_in(found, first, tanh) == products_in(found, tanh, second) == 0


def test_a_gradient_has_all_that_runs_behind_it():
    def step(weights, x):
        grads = jax.grad(lambda weights: jnp.sum(chain(weights, x)))(weights)
        return [w - g for w, g in zip(weights, grads, strict=True)]

    found = windows(step, [SQUARE] * 3, SQUARE)
    *_, gradient_3, _, gradient_2, _, gradient_1 = positions(found, "dot_general")
    ops, uses = found.folded.program.ops, found.folded.program.uses
    left = [
        products_in(found, at, uses[ops[at].results[0]][0]) for at in (gradient_3, gradient_2, gradient_1)
    ]
    assert left == [4, 2, 0]


def test_new_state_has_the_rest_of_the_step():
    def step(w, v, x):
        return w - jnp.sum(x @ x), v @ v @ v

    found = windows(step, SQUARE, SQUARE, SQUARE)
    (update,) = positions(found, "sub")
    assert products_in(found, update, 0) == 2


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_loop_has_the_iteration(is_backward):
    def step(stacked, x):
        def body(x, ws):
            for w in ws:
                x = x @ w
            return x, x @ x

        return jax.lax.scan(body, x, stacked)

    stacked = [jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)] * 3
    found = windows(step, stacked, SQUARE)
    products, (stack,), slices = (
        positions(found, "dot_general"),
        positions(found, "stack"),
        positions(found, "slice"),
    )
    if is_backward:
        assert [products_in(found, at, stack) for at in products] == [3, 2, 1, 0]
    else:
        assert [products_in(found, s, p) for s, p in zip(slices, products, strict=False)] == [0, 1, 2]
        (carry,) = positions(found, "carry")
        assert products_in(found, carry, products[0]) == 0, (
            "what is carried is there when an iteration begins"
        )
        assert products_in(found, products[2], carry) == 1, "and is wanted when it ends"


def test_what_a_loop_hands_on_is_there_behind_it():
    def step(x, w):
        x = jax.lax.fori_loop(0, 4, lambda _, x: x @ x, x)
        y = w @ w
        return x @ y

    found = windows(step, SQUARE, SQUARE)
    (carry, *_), products = positions(found, "carry"), positions(found, "dot_general")
    assert products_in(found, carry, products[-1]) == 1
    assert products_in(found, 1, products[1]) == 1, "an argument has the loop for itself"
