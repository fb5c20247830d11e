"""Parts of images and volumes that exchange halos have one device's numbers, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.executors.jit import build
from autoshard.search.ir.trace import trace
from tests.executors import plans
from tests.images import DownAndUp, Grouped, Volumes, training

RTOL, NOISE = 1e-9, 1e-12
"""Tolerance, as a share of the largest element and absolute: some steps of rounding."""

CASES = {
    "volumes": (Volumes(), (1, 16, 4, 4, 2), (4,)),
    "groups": (Grouped(), (1, 128, 16, 3), (4,)),
    "rows": (DownAndUp(), (1, 64, 16, 3), (8,)),
    "rows and columns": (DownAndUp(), (1, 32, 64, 3), (2, 4)),
    "channels and rows": (DownAndUp(), (1, 32, 16, 3), (2, 4)),
}

SLOW = frozenset(CASES) - {"volumes"}
"""Cases whose rules `tests/search/ir/test_factors_split.py` holds op by op."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_parts_with_halos_have_one_devices_numbers(case):
    model, shape, mesh = CASES[case]
    with jax.enable_x64():
        x = jax.random.normal(jax.random.key(1), shape, jnp.float64)
        arrays, function = (model.init(jax.random.key(0), x), x), training(model)
        found = plans.by_rows(trace(function, *arrays), mesh, case == "channels and rows")
        assert "collective-permute" in {one.kind for one in found.plan.estimates.collectives}
        program = build(found.step, found.sharding, jax.devices())
        whole = jax.jit(function)(*arrays)
        ours = program.fn(*jax.device_put(jax.tree.map(jnp.copy, arrays), program.shardings))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=RTOL, atol=NOISE + RTOL * np.abs(other).max())
