"""Factor rules, looked up for all ops of a step."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

from autoshard.search.ir.trace import trace
from autoshard.search.problem.op_rules import primitives_without_rule

X = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)


def primitive(name):
    """A primitive that nobody has a rule for."""
    made = Primitive(name)
    made.def_abstract_eval(lambda x: x)
    return made


def in_a_row(f, x):
    return f(f(x))


def in_a_loop(f, x):
    return jax.lax.scan(lambda carry, _: (f(f(carry)), None), x, length=3)[0]


def in_a_branch(f, x):
    return jax.lax.cond(x[0, 0] > 0, lambda y: f(f(y)), lambda y: y, x)


@pytest.mark.parametrize("run", [in_a_row, in_a_loop, in_a_branch])
def test_primitives_without_a_rule_are_counted_with_the_first_one_s_place(run):
    """Single numbers have nothing to split, so that nothing is lost where they are computed in full."""
    mystery, scalar = primitive("mystery"), primitive("scalar_mystery")

    def unknown(x):
        return mystery.bind(jnp.sin(x))

    def step(x):
        return run(unknown, x), scalar.bind(jnp.max(x))

    ((name, (count, where)),) = primitives_without_rule(trace(step, X)).items()
    line = unknown.__code__.co_firstlineno + 1
    assert (name, count) == ("mystery", 2)
    assert where.endswith(f"test_op_rules.py:{line}")
