"""Every primitive of JAX has a rule or stands in a list here: a new one shows as a failure to read."""

import sys

import jax
import jax.numpy
import jax.scipy
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.search.ir import _jax
from autoshard.search.ir.factors import Kind, has_rule, rule_for

MODULES = (
    *("jax._src.lax", "jax._src.ad_util", "jax._src.ad_checkpoint", "jax._src.custom_derivatives"),
    *("jax._src.dispatch", "jax._src.pjit", "jax._src.random", "jax._src.prng"),
)
"""Where the primitives of train steps live; submodules included."""

COLLECTIVES = {
    *("psum", "pmax", "pmin", "ppermute", "pbroadcast", "pbroadcast_dynamic", "all_gather", "all_to_all"),
    *("reduce_scatter", "axis_index", "all_gather_invariant", "all_gather_reduced", "psum_invariant"),
    *(
        "preduced",
        "precv",
        "psend",
        "ragged_all_to_all",
        "unreduced_pmax",
        "unreduced_pmin",
        "unreduced_psum",
    ),
    *("unreduced_reduce_scatter", "pvary", "reduced_vary_cast", "reduced_vary_cast_p"),
    *("vary_unreduced_cast", "vary_unreduced_cast_p", "psum_invariant_start"),
    *(f"{name}_{end}" for name in ("all_gather", "all_to_all") for end in ("start", "done")),
    *(f"{name}_{end}" for name in ("ppermute", "psum", "reduce_scatter") for end in ("start", "done")),
    "all_gather_reduced_start",
}
"""Over named axes: steps for one device hold none. Those over dimensions, which `vmap` makes, are spelt out."""

INLINED = frozenset(_jax.CALLS) | {"custom_lin", "custom_jvp_call_jaxpr", "ragged_dot_general"}
"""Calls, what is spelt out, and what no finished trace holds."""

CONTROL_FLOW = {"scan", "while", "cond"}
"""Their bodies' ops have factors."""

KNOWN_WITHOUT_RULE = COLLECTIVES | {
    *(
        "create_token",
        "after_all",
        "dce_sink",
        "tie",
        "program_order",
        "unreachable",
    ),  # carry no data to split
    *("custom_linear_solve", "platform_index", "call_hi_primitive"),  # hold programs that nothing inlines yet
    *("scaled_dot", "relayout"),
}


def primitives() -> set[str]:
    return {
        value.name
        for name, module in list(sys.modules.items())
        if name.startswith(MODULES)
        for value in list(vars(module).values())
        if isinstance(value, Primitive)
    }


def test_every_primitive_is_known():
    known = KNOWN_WITHOUT_RULE | INLINED | CONTROL_FLOW
    assert {name for name in primitives() if not has_rule(name)} <= known


def test_nothing_is_known_to_lack_the_rule_that_it_has():
    assert not {name for name in KNOWN_WITHOUT_RULE | INLINED | CONTROL_FLOW if has_rule(name)}


def test_an_unknown_primitive_splits_nothing():
    x, y = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4, 1, 6), (3,)))
    rule = rule_for("no such primitive", (x, object()), (y,), {})
    assert {factor.kind for factor in rule.factors} == {Kind.UNSPLITTABLE}
    assert rule.operands == (((0,), (), (1,)), ())
    assert rule.results == (((2,),),)


@pytest.mark.devices
def test_random_bits_are_parallel_in_keys_and_places():
    keys = jax.random.split(jax.random.key(0), 4)
    trace = jax.make_jaxpr(jax.vmap(lambda key: jax.random.bits(key, (8, 6))))(keys)
    (eqn,) = getattr(trace, "jaxpr", trace).eqns
    rule = rule_for("random_bits", [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars], eqn.params)
    assert [(factor.size, factor.kind) for factor in rule.factors] == [(n, Kind.PARALLEL) for n in (4, 8, 6)]
    assert (rule.operands, rule.results) == ((((0,),),), (((0,), (1,), (2,)),))


@pytest.mark.devices
@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_random_bits_are_the_same_in_pieces(spec: P):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "x")
    key = jax.random.key(3)
    draw = jax.jit(lambda key: jax.random.bits(key, (8, 6)), out_shardings=NamedSharding(mesh, spec))
    np.testing.assert_array_equal(draw(key), jax.random.bits(key, (8, 6)))
    compiled = draw.lower(key).compile().as_text()
    assert not any(
        name in compiled for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )


@pytest.mark.parametrize("name", sorted(KNOWN_WITHOUT_RULE | INLINED | CONTROL_FLOW))
def test_any_name_gets_a_rule(name: str):
    assert rule_for(name, (), (), {}).factors == ()
