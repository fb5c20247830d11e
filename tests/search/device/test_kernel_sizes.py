"""What the scheduler takes kernels for on GPUs before Hopper, against the constants in XLA."""

from dataclasses import replace

import pytest

from autoshard.search.device.kernel_sizes import sized
from autoshard.search.device.lowering import FROM_HOST, Copies, Lowered, Sums
from tests.search.device.programs import collective, kernel

LOW_US, MEDIUM_US, HIGH_US = 1.0, 1000.0, 5000.0
"""`kLowCost`, `kMediumCost` and `kHighLatency` of `ApproximateLatencyEstimator`."""


@pytest.mark.parametrize(
    ("one", "size_us"),
    [
        (kernel(0, [0], [1]), MEDIUM_US),
        (replace(kernel(0, [0], [1]), nest=((8, 8), (-1,))), MEDIUM_US),
        (replace(kernel(0, [0], [1]), root=Copies((1, 0), is_tiled=False)), MEDIUM_US),
        (replace(kernel(0, [0], [1]), root=Copies((1, 0), is_tiled=True)), LOW_US),
        (replace(kernel(0, [0], [1]), root=Sums((0,))), LOW_US),
        (collective(0, [0], [1]), HIGH_US),
        (collective(0, [0], [1], kind=FROM_HOST), HIGH_US),
    ],
)
@pytest.mark.parametrize("time_s", [1e-9, 1.0])
def test_a_kernel_has_a_size_however_long_it_takes(one, size_us, time_s):
    timed = replace(one, time=replace(one.time, seconds=time_s))
    (found,) = sized(Lowered((timed,), ())).kernels
    assert found.time.scheduled_s == pytest.approx(size_us * 1e-6)
    assert found == replace(timed, time=found.time)
    assert found.time.seconds == time_s
