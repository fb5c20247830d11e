"""What the jit executor writes: shardings, donation, the collectives of the plan, and state born on its shards."""

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.executors.jit import Program, build
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from tests import zoo
from tests.executors import plans

WIDTH, BATCH = 256, 64


def create(key):
    keys = jax.random.split(key, 3)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in keys]
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def step(state, x):
    def loss(params):
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


STATE = jax.eval_shape(create, jax.random.key(0))
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
MANY = jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)
"""So many examples that weights travel rather than activations."""


def compiled_text(program: Program) -> str:
    return program.fn.lower(*program.args).compile().as_text()


def gathers_of(text: str, shape: tuple[int, ...]) -> int:
    """All-gathers whose result has this shape."""
    wanted = ",".join(map(str, shape))
    return len(re.findall(rf"= f32\[{wanted}\][^ ]* all-gather\(", text))


def searched() -> Program:
    traced = trace(step, STATE, X)
    return build(traced, plans.fastest(traced, (8,)).sharding, jax.devices())


def test_shardings_of_arguments_and_results_are_the_plans():
    program = searched()
    compiled = program.fn.lower(*program.args).compile()
    wanted = jax.tree.leaves(program.shardings)
    got = jax.tree.leaves(compiled.input_shardings[0])
    shapes = [x.shape for x in jax.tree.leaves(program.args)]
    assert all(g.is_equivalent_to(w, len(s)) for g, w, s in zip(got, wanted, shapes, strict=True))
    state_out = jax.tree.leaves(compiled.output_shardings[0])
    state_in = jax.tree.leaves(program.shardings[0])
    assert all(o.is_equivalent_to(i, 2) for o, i in zip(state_out, state_in, strict=True))


def test_state_is_donated_and_aliased():
    program = searched()
    assert program.donated == (True, False)
    header = compiled_text(program).splitlines()[0]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", header)
    assert aliases is not None
    assert len(re.findall(r"-alias\)", aliases[1])) == 6


@pytest.mark.parametrize(("rest", "num_gathers"), [(P(), 6), (P("data"), 3)], ids=["whole", "sharded"])
def test_state_is_gathered_as_often_as_the_plan_says(rest, num_gathers):
    traced = trace(step, STATE, MANY)
    pins = {f"state['{kind}'][{i}]": rest for kind in ("params", "momentum") for i in range(3)}
    found = find(traced, plans.cluster((8,)), Options(plans.PLENTY_BYTES, (8,), pins | {"x": P("data")}))
    planned = sum(c.count for c in found.plan.estimates.collectives if c.kind == "all-gather")
    compiled = gathers_of(compiled_text(build(traced, found.sharding, jax.devices())), (WIDTH, WIDTH))
    assert compiled == planned == num_gathers


def test_fsdp_gathers_a_weight_again_in_the_backward_phase():
    traced = trace(step, STATE, MANY)
    pins = {f"state['{kind}'][{i}]": P("data") for kind in ("params", "momentum") for i in range(3)}
    pins["x"] = P("data")
    gathers = {}
    for is_fresh in (True, False):
        sharding = plans.with_copies(traced, pins, is_fresh)
        gathers[is_fresh] = gathers_of(compiled_text(build(traced, sharding, jax.devices())), (WIDTH, WIDTH))
    # The backward phase does not read the first weight: the batch has no gradient.
    assert gathers == {True: 5, False: 3}


def test_tensor_parallel_weights_stay_where_they_are():
    traced = trace(step, STATE, X)
    column, row = P(None, "data"), P("data", None)
    pins = {
        f"state['{kind}'][{i}]": (column, row)[i % 2] for kind in ("params", "momentum") for i in range(2)
    }
    pins["x"] = P()
    found = find(traced, plans.cluster((8,)), Options(plans.PLENTY_BYTES, (8,), pins))
    text = compiled_text(build(traced, found.sharding, jax.devices()))
    assert gathers_of(text, (WIDTH, WIDTH)) == 0


def test_shardings_are_imposed_on_what_is_lowered():
    traced = trace(step, STATE, X)
    program = build(traced, plans.smallest(traced, (2, 4)).sharding, jax.devices())
    text = program.fn.lower(*program.args).as_text()
    assert "sdy.sharding_constraint" in text
    assert '"data"=2, "model"=4' in text


def branching(w, x):
    def loss(w):
        y = x @ w
        return jnp.mean(jax.lax.cond(y.mean() > 0, jnp.sin, lambda y: jnp.cumsum(y, axis=1), y) ** 2)

    return w - 0.1 * jax.grad(loss)(w)


def specs_on(jaxpr, value) -> list[P]:
    """The specs that a value is brought to, one after the other."""
    specs = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint" and eqn.invars == [value]:
            specs.append(eqn.params["sharding"].spec)
            (value,) = eqn.outvars
    return specs


def moves(before: P, after: P) -> set[tuple[int | None, int | None]]:
    """From which dimension to which mesh axes move; None stands for no dimension."""
    was, becomes = (
        {a: d for d, axes in enumerate(spec) for a in (axes if isinstance(axes, tuple) else (axes,))}
        for spec in (before, after)
    )
    return {(was.get(a), becomes.get(a)) for a in ("data", "model") if was.get(a) != becomes.get(a)}


def test_what_a_branch_reads_arrives_step_by_step():
    """XLA's partitioner aborts where it is to go at once from one spec to another of this plan."""
    w = x = jax.random.normal(jax.random.key(0), (24, 24))
    traced = trace(branching, w, x)
    program = build(traced, plans.drawn(traced, (2, 3), seed=5).sharding, jax.devices())
    step = jax.make_jaxpr(program.fn)(w, x).eqns[0].params["jaxpr"]
    forward = next(eqn for eqn in step.eqns if eqn.primitive.name == "cond")
    ways = [specs_on(branch.jaxpr, branch.jaxpr.invars[0]) for branch in forward.params["branches"]]
    assert max(map(len, ways)) > 2
    assert all(len(moves(*pair)) <= 1 for way in ways for pair in pairwise(way))
    got = program.fn(*jax.device_put((jnp.copy(w), jnp.copy(x)), program.shardings))
    np.testing.assert_allclose(got, jax.jit(branching)(w, x), rtol=1e-5, atol=1e-6)


def test_init_creates_every_array_on_its_shards():
    parallel = autoshard.parallelize(step, memory="1200KB", mesh=(8,))
    state = parallel.init(create, jax.random.key(0), args=(X,))
    wanted = create(jax.random.key(0))
    sharded = 0
    for array, single in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert isinstance(array.sharding, NamedSharding)
        assert {s.data.shape for s in array.addressable_shards} == {array.sharding.shard_shape(array.shape)}
        sharded += array.sharding.shard_shape(array.shape) != array.shape
        np.testing.assert_allclose(array, single, rtol=1e-5, atol=1e-6)
    assert sharded >= 4
    lowered = jax.jit(create, out_shardings=jax.tree.map(lambda x: x.sharding, state)).lower(
        jax.random.key(0)
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes < sum(x.nbytes for x in jax.tree.leaves(wanted))


def test_init_state_and_an_ordinary_state_take_the_same_steps():
    x = np.random.default_rng(0).standard_normal((BATCH, WIDTH)).astype(np.float32)
    parallel = autoshard.parallelize(step, memory="1200KB", mesh=(8,))
    born, born_loss = parallel(parallel.init(create, jax.random.key(0), args=(X,)), x)
    placed, placed_loss = parallel(create(jax.random.key(0)), x)
    single, single_loss = jax.jit(step)(create(jax.random.key(0)), x)
    np.testing.assert_allclose([born_loss, placed_loss], [single_loss] * 2, rtol=1e-5)
    for a, b, c in zip(*map(jax.tree.leaves, (born, placed, single)), strict=True):
        assert a.sharding == b.sharding
        np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(b, c, rtol=1e-4, atol=1e-5)


def test_results_feed_the_next_call_without_moving():
    x = np.zeros((BATCH, WIDTH), np.float32)
    parallel = autoshard.parallelize(step, memory="1200KB", mesh=(2, 4))
    state = parallel.init(create, jax.random.key(0), args=(X,))
    before = [a.sharding for a in jax.tree.leaves(state)]
    state, _ = parallel(state, x)
    assert [a.sharding for a in jax.tree.leaves(state)] == before


@pytest.mark.parametrize("model", [pytest.param("gpt_linen", marks=pytest.mark.slow), "gpt_scan"])
def test_drawn_plans_lower_in_every_dtype(model):
    case = zoo.MAKERS[model](num_layers=2, dtype=jnp.bfloat16)
    traced = trace(case.step, *case.abstract_args())
    program = build(traced, plans.drawn(traced, (2, 4), seed=3).sharding, jax.devices())
    assert "sharding_constraint" in program.fn.lower(*program.args).as_text()
