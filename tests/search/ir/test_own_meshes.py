"""Steps that name devices: where they say how values lie they are traced without, all else is refused at its line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.graph import walk
from autoshard.search.ir.trace import trace

HERE = "tests/search/ir/test_own_meshes.py"
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
MESH = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("dp", "ep"))
ON_MESH = NamedSharding(MESH, P(None, "ep"))
EXPLICIT = NamedSharding(AbstractMesh((2,), ("dp",), axis_types=(AxisType.Explicit,)), P("dp"))


def constrained(x):
    return jax.lax.with_sharding_constraint(x, ON_MESH)


def line(function) -> str:
    return f"{HERE}:{function.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize(
    ("placed", "called"),
    [
        (constrained, "jax.lax.with_sharding_constraint"),
        (lambda x: jax.device_put(x, ON_MESH), "jax.device_put"),
        (lambda x: jax.jit(jnp.negative, in_shardings=ON_MESH)(x), "jax.jit with shardings"),
        (lambda x: jnp.dot(x, x.T, out_sharding=EXPLICIT), "out_sharding= of dot_general"),
    ],
)
@pytest.mark.parametrize("is_in_loop", [False, True])
def test_what_says_how_values_lie_is_left_out_and_known_by_its_line(placed, called, is_in_loop):
    def step(x):
        return jax.lax.scan(lambda carry, _: (carry, placed(x)), 0, length=2)[1] if is_in_loop else placed(x)

    traced = trace(step, X)
    (said,) = traced.placements
    assert said.startswith(f"{called} at {HERE}:")
    ops = [op for _, graph in walk(traced.graph) for op in graph.ops]
    assert not {op.name for op in ops} & {"sharding_constraint", "device_put"}
    assert not any(isinstance(v, jax.sharding.Sharding) for op in ops for v in op.params.values())


def test_a_single_device_is_left_out_without_a_word():
    """The code of one device may name it."""
    traced = trace(lambda x: -jax.device_put(x, jax.devices()[0]), X)
    assert [op.name for op in traced.graph.ops] == ["neg"]
    assert not traced.placements


def test_a_kind_of_memory_stays_without_its_devices():
    on_host = NamedSharding(MESH, P(), memory_kind="pinned_host")
    (op,) = trace(lambda x: jax.device_put(x, on_host), X).graph.ops
    assert op.params["devices"] == (jax.memory.Space.Host,)
    assert op.result_values[0].is_on_host


def test_what_jax_says_of_values_under_a_mesh_that_is_set_is_not_the_users():
    def step(w, x):
        return jax.grad(lambda w: jax.lax.scan(lambda c, w: (c @ w, None), x, w)[0].sum())(w)

    w, x = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32), X
    with jax.set_mesh(MESH):
        assert trace(step, w, x).placements == ()


def mapped(x):
    return jax.shard_map(jnp.negative, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))(x)


def summed(x):
    return jax.lax.psum(x, "batch")


def gathered(x):
    return jax.lax.all_gather(x, "batch")


def resharded(x):
    return jax.sharding.reshard(x, P("dp"))


def named(x):
    return jax.lax.with_sharding_constraint(x, P("dp"))


@pytest.mark.parametrize("is_in_loop", [False, True])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (mapped, r"jax.shard_map .*{'dp': 1, 'ep': 2}"),
        (summed, "the axis 'batch'"),
        (gathered, "the axis 'batch'"),
        (resharded, "names axes of a mesh"),
        (named, "names axes of a mesh"),
    ],
)
def test_code_of_several_devices_is_refused_at_its_line(function, said, is_in_loop):
    def step(x):
        return jax.lax.scan(lambda x, _: (function(x), None), x, length=2)[0] if is_in_loop else function(x)

    with pytest.raises(InputError, match=said) as caught:
        trace(step, X)
    assert line(function) in str(caught.value)


def test_explicit_shardings_are_refused():
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), pytest.raises(InputError, match="the axis 'dp' of a mesh"):
        trace(resharded, X)


def test_a_name_that_nobody_defined_is_the_users_own_error():
    with pytest.raises(NameError, match="undefined"):
        trace(lambda x: undefined, X)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
