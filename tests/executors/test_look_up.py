"""Look-ups in tables whose rows are split: devices serve their own rows, with one device's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import GatherDimensionNumbers, GatherScatterMode

from autoshard.executors.jit import build
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import AXIS_NAMES, PARTIAL, WHOLE
from autoshard.search.ir.trace import trace

ROWS, WIDTH, MESH = 24, 16, (2, 4)
TABLE = jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, WIDTH), np.float32))
INDICES = jnp.array([[0, 5, 6, 23], [11, 12, 17, 18], [-1, 24, 3, 100], [-25, 7, 23, 0]] * 2)
"""First and last rows of parts, and what lies outside of the table on both sides."""


def stated(step, read, made, *args):
    """A step of one look-up, of which is said how it reads and what becomes of its terms."""
    specs = {("operand", (0,), n): (spec,) for n, spec in enumerate(read)}
    sharding = StepSharding(MESH, AXIS_NAMES[2], {**specs, ("result", (0,), 0): made}, {})
    program = build(trace(step, *args), sharding, jax.devices())
    assert "reduce_scatter[" in str(jax.make_jaxpr(program.fn)(*args))
    return program.fn(*jax.device_put(args, program.shardings))


def gathered(mode):
    """The look-up alone, its indices as `gather` takes them."""
    numbers = GatherDimensionNumbers(offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lambda table, indices: jax.lax.gather(table, indices, numbers, (1, WIDTH), mode=mode)


@pytest.mark.parametrize("mode", [GatherScatterMode.CLIP, GatherScatterMode.FILL_OR_DROP])
@pytest.mark.parametrize(
    ("table", "indices", "made"),
    [
        ((WHOLE, 0), (0, WHOLE), ((0, PARTIAL), (0, 0))),  # rows over four devices, scattered over examples
        ((WHOLE, 0), (0, WHOLE), ((0, PARTIAL), (0, 1))),  # over positions
        ((1, 0), (WHOLE, WHOLE), ((2, PARTIAL), (2, 0))),  # columns over two devices as well
        ((0, 0), (WHOLE, WHOLE), ((PARTIAL, PARTIAL), (PARTIAL, 0), (1, 0))),  # rows over both axes
    ],
)
def test_every_index_is_served_once(mode, table, indices, made):
    step, args = gathered(mode), (TABLE, INDICES[..., None])
    np.testing.assert_array_equal(stated(step, (table, indices), made, *args), jax.jit(step)(*args))


def test_an_index_of_two_dimensions_is_served_by_who_has_both():
    """An element of a matrix whose rows and columns are both split."""
    numbers = GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(1, 0))
    indices = jnp.stack(jnp.meshgrid(jnp.arange(WIDTH), jnp.arange(ROWS)), -1)

    def step(table, indices):
        return jax.lax.gather(table, indices, numbers, (1, 1), mode=GatherScatterMode.PROMISE_IN_BOUNDS)

    made = ((PARTIAL, PARTIAL), (PARTIAL, 0), (1, 0))
    found = stated(step, ((0, 1), (WHOLE, WHOLE)), made, TABLE, indices)
    np.testing.assert_array_equal(found, TABLE)
