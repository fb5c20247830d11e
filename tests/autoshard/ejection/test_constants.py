"""Constant arrays as source: evaluated, it makes the same bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.ejection.constants import MAX_PRINTED, constant, stored

NAMES = {"jnp": jnp, "np": np}
MASK = np.where(np.tri(16, 16, dtype=bool), np.float32(0), np.float32(-1e9))

RULED = {
    "one number": np.full((8, 16), -2.5, np.float32),
    "a negative zero": np.full((128,), -0.0, np.float32),
    "not a number": np.full((9, 9), np.nan, np.float32),
    "positions": np.arange(100, dtype=np.int32),
    "positions of each example": np.broadcast_to(np.arange(16, dtype=np.int32), (8, 16)),
    "backwards": np.arange(200, 0, -2).astype(np.int16),
    "a grid of floats": np.arange(96, dtype=np.float64).reshape(2, 6, 8),
    "halves of bfloat16": np.arange(0, 128).astype(jnp.bfloat16),
    "a causal mask": np.tri(16, 16, dtype=bool),
    "its complement": ~np.tri(16, 24, 8, dtype=bool),
    "an additive mask": MASK,
    "a mask for heads": np.broadcast_to(MASK, (1, 4, 16, 16)),
    "a diagonal below": np.tri(16, 16, -1, dtype=np.float32),
    "columns": np.repeat(np.array([[1.5, 2.5, 7.0]], np.float32), 40, axis=0),
}

OTHER = {
    "sines": np.sin(np.arange(100, dtype=np.float32)),
    "uneven steps": np.arange(100, dtype=np.float32) ** 2,
    "too large for float32": np.arange(2**24, 2**24 + 100, dtype=np.float64),
    "a broken mask": np.where(np.eye(16, dtype=bool), np.float32(3), MASK),
    "small floats": np.linspace(0, 1, 99, dtype=np.float32),
}


def is_same(x, y) -> bool:
    x, y = np.asarray(x), np.asarray(y)
    return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.fixture(autouse=True)
def in_float64():
    import jax

    with jax.enable_x64(True):
        yield


@pytest.mark.devices
@pytest.mark.parametrize("name", RULED)
def test_a_rule_makes_the_same_bits_in_one_line(name):
    said = constant(RULED[name])
    assert len(said) < 160
    assert is_same(eval(said, NAMES), RULED[name])


@pytest.mark.devices
@pytest.mark.parametrize("name", OTHER)
def test_what_follows_no_rule_is_stored(name, tmp_path):
    assert constant(OTHER[name]) is None
    said, array = stored(OTHER[name], name)
    np.savez(tmp_path / "step.npz", **{name: array})
    with np.load(tmp_path / "step.npz") as arrays:
        assert is_same(eval(said, NAMES | {"CONSTANTS": dict(arrays)}), OTHER[name])


@pytest.mark.devices
def test_types_that_numpys_files_do_not_know_are_stored(tmp_path):
    x = np.sin(np.arange(100)).astype(jnp.bfloat16)
    said, array = stored(x, "table")
    np.savez(tmp_path / "step.npz", table=array)
    with np.load(tmp_path / "step.npz") as arrays:
        assert is_same(eval(said, NAMES | {"CONSTANTS": dict(arrays)}), x)


@pytest.mark.devices
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from(["int32", "float32", "bool", "uint8"]),
    st.integers(0, 3),
)
def test_no_array_is_approximated(shape, dtype, seed):
    """Whatever is said of an array makes it, repeated along new dimensions too."""
    x = np.random.default_rng(seed).integers(0, 3, shape).astype(dtype)
    repeated = np.broadcast_to(x[:, None], (shape[0], 16, *shape[1:]))
    for one in (x, repeated):
        said = constant(one)
        assert said is None or is_same(eval(said, NAMES), one)
        assert said or one.size > MAX_PRINTED
