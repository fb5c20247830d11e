"""Values on their way between submeshes of one process: what arrives, and how it lies there."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.executors import transfers
from autoshard.executors.transfers import RepeatedTransfer


def submesh(first: int, *shape: int) -> Mesh:
    devices = jax.devices()[first : first + int(np.prod(shape))]
    return Mesh(np.array(devices).reshape(shape), ("replica", "data")[: len(shape)])


def value(shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    return jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), sharding)


def typed(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@pytest.mark.parametrize("spec", [P(), P("replica"), P(None, "data"), P("replica", "data")])
def test_values_that_stay_split_as_they_are_go_from_device_to_device(spec, monkeypatch):
    source, target = (NamedSharding(submesh(first, 2, 2), spec) for first in (0, 4))
    values = [value((4, 8), source), value((2, 2), source)]
    monkeypatch.setattr(transfers.jax, "device_put", None)  # its search for the way is what is saved
    there = RepeatedTransfer(list(map(typed, values)), [target] * 2)(*values)
    for before, after in zip(values, there, strict=True):
        assert after.sharding == target
        assert after.committed
        np.testing.assert_array_equal(after, before)
        for one, other in zip(before.addressable_shards, after.addressable_shards, strict=True):
            np.testing.assert_array_equal(one.data, other.data)


@pytest.mark.parametrize(
    ("shape", "spec"), [((4,), P("replica")), ((2, 2), P("data", "replica")), ((1, 2), P(None, "data"))]
)
def test_values_that_are_to_lie_otherwise_are_laid_out_anew(shape, spec):
    source = NamedSharding(submesh(0, 2, 2), P("replica", "data"))
    target = NamedSharding(submesh(4, *shape), spec)
    before = value((4, 8), source)
    (after,) = RepeatedTransfer([typed(before)], [target])(before)
    assert after.sharding == target
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("spec", [P(), P("replica"), P(None, "data"), P("data")])
def test_a_copy_on_the_same_submesh_outlives_what_it_was_made_of(spec):
    """An axis of size 1 splits nothing, so that the shards of both are alike."""
    mesh = submesh(0, 1, 4)
    before = value((4, 8), NamedSharding(mesh, P("replica")))
    (after,) = RepeatedTransfer([typed(before)], [NamedSharding(mesh, spec)])(before)
    before.delete()
    assert after.sharding.spec == spec
    np.testing.assert_array_equal(after, np.arange(32).reshape(4, 8))


def test_random_keys_go_with_arrays():
    source, target = (NamedSharding(submesh(first, 2, 2), P()) for first in (0, 4))
    values = value((4,), source), jax.device_put(jax.random.key(3), source), value((2,), source)
    there = RepeatedTransfer(list(map(typed, values)), [target] * 3)(*values)
    assert [x.sharding for x in there] == [target] * 3
    np.testing.assert_array_equal(there[0], values[0])
    np.testing.assert_array_equal(jax.random.key_data(there[1]), jax.random.key_data(values[1]))
    np.testing.assert_array_equal(there[2], values[2])
