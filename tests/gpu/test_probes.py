"""XLA:GPU leaves the probes of calibration as they are meant: nothing hoisted, joined, shrunk or copied."""

import json

from tests.gpu.apart import said

CHAIN = 32
"""Kernels of the launch probe; the counter is one more."""

UNROLLED = 4
"""Rounds of a product or a collective in the loop's body."""


def test_the_loops_hold_the_kernels_that_the_model_counts():
    kernels = json.loads(said("probe_kernels")[-1])
    assert kernels["launch"] == {"fusion": CHAIN + 1}
    assert kernels["scale"] == {"fusion": 2}  # itself and the counter
    assert sum(kernels["sum"].values()) == 4  # two stages, the touch, the counter
    assert kernels["product"] == {"custom-call": UNROLLED, "fusion": UNROLLED + 1}
    for kind in ("all-reduce", "all-gather"):
        found = kernels[kind]
        assert found.pop(kind) == UNROLLED
        assert sum(found.values()) == UNROLLED + 1, found  # touches and the counter
