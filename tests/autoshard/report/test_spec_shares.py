"""Bytes of an argument on a device, against JAX's shardings."""

import math

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.report.spec_shares import local_bytes

MESH = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    "spec",
    [
        P(),
        P("data"),
        P(None, "model"),
        P(("data", "model"), None),
        P("model", "data"),
        P(None, ("data", "model")),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "complex64"])
def test_they_are_those_of_the_shard_that_jax_makes(spec, dtype):
    mesh = AbstractMesh(tuple(MESH.values()), tuple(MESH))
    shape = NamedSharding(mesh, spec).shard_shape((64, 16))
    said = str(spec).removeprefix("PartitionSpec").removeprefix("P")
    wanted = math.prod(shape) * jax.numpy.dtype(dtype).itemsize
    assert local_bytes(f"{dtype}[64,16]", f"P{said}", MESH) == wanted
    assert local_bytes(f"{dtype}[64,16]", f"P{said} on host", MESH) == wanted


def test_scalars_uneven_splits_and_unknown_types():
    assert local_bytes("int32[]", "P()", MESH) == 4
    assert local_bytes("float32[9]", "P('model')", MESH) == 3 * 4
    assert local_bytes("key<fry>[]", "P()", MESH) is None
    assert local_bytes("", "P()", MESH) is None
