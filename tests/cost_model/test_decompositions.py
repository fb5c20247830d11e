"""Times of matrix decompositions beside published measurements of cuSOLVER, and the laws that they keep."""

import numpy as np
import pytest

from autoshard.cost_model.cluster import Device
from autoshard.cost_model.decompositions import STEPS, decomposition_s
from autoshard.cost_model.hardware import parse_cluster

H100 = parse_cluster("8xH100-80GB").device
A100 = parse_cluster("8xA100-80GB").device
V100 = parse_cluster("8xV100-16GB").device

FLOPS = {"cholesky": 1 / 3, "lu": 2 / 3, "qr": 8 / 3, "eigh": 9.0, "svd": 21.0}
"""Leading coefficients. Source: Golub & Van Loan, "Matrix Computations", 4th edition."""

ORDER = ("cholesky", "lu", "qr", "eigh", "svd")


def seconds(
    name: str, n: int, device: Device = H100, num: float = 1, rows: int = 0, dtype: str = "float32"
) -> float:
    points = num * (rows or n) * n
    num_bytes, flops = 2 * points * np.dtype(dtype).itemsize, FLOPS[name] * points * n
    return float(decomposition_s(device, STEPS[name], (rows or n, n), num, dtype, num_bytes, flops))


@pytest.mark.parametrize(
    ("measured_s", "predicted_s"),
    [
        (376e-6, seconds("cholesky", 512)),  # pytorch#173515
        (1954e-6, seconds("cholesky", 2048)),
        (22.2e-3, seconds("cholesky", 2048, num=64)),
        (41e-3, seconds("lu", 4096, V100)),  # jax#9694
        (44e-3, seconds("lu", 4096, A100)),
        (189e-6, seconds("qr", 32, rows=128)),  # pytorch#173788
        (0.90, seconds("eigh", 1024, V100, num=16)),  # jax#10180
        (0.91, seconds("eigh", 100, num=500)),  # pytorch#174674
        (47.6e-3, seconds("svd", 400, A100, dtype="complex128")),  # tenferro-rs#1849
    ],
)
def test_times_are_of_the_order_of_published_ones(measured_s, predicted_s):
    assert measured_s / 3 < predicted_s < 3 * measured_s


@pytest.mark.parametrize("name", ORDER)
def test_time_grows_with_the_size_of_a_matrix_and_in_the_end_with_its_cube(name):
    sizes = [1, 2, 3, 16, 32, 33, 100, 1024, 4096, 16384, 1 << 17, 1 << 18]
    times = [seconds(name, n) for n in sizes]
    assert times == sorted(times)
    assert times[-1] / times[-2] == pytest.approx(8, rel=0.1)


@pytest.mark.parametrize("n", [64, 512, 4096, 16384])
def test_a_decomposition_takes_longer_than_one_with_less_to_do(n):
    order = [seconds(name, n) for name in ("cholesky", "qr", "eigh", "svd")]
    assert order == sorted(order)


def test_a_large_eigendecomposition_takes_seconds_and_the_others_a_fraction_of_that():
    assert 1 < seconds("eigh", 16384) < 10
    assert seconds("qr", 16384) < seconds("eigh", 16384) / 3
    assert seconds("cholesky", 16384) < seconds("eigh", 16384) / 20


@pytest.mark.parametrize("name", ORDER)
def test_two_halves_of_a_batch_take_no_less_than_the_batch(name):
    for n in (16, 512):
        whole_s = seconds(name, n, num=64)
        assert seconds(name, n, num=32) <= whole_s <= 2 * seconds(name, n, num=32)


def test_small_matrices_of_a_batch_have_their_eigenvalues_found_together():
    assert seconds("eigh", 32, num=64) < 2 * seconds("eigh", 32)
    assert seconds("eigh", 64, num=64) > 32 * seconds("eigh", 64)


def test_double_precision_is_slower_where_the_device_computes_it_slower():
    assert seconds("qr", 16384, V100, dtype="float64") > 1.5 * seconds("qr", 16384, V100)


def test_no_matrix_takes_no_longer_than_a_launch():
    assert seconds("eigh", 0) == seconds("eigh", 512, num=0) == H100.launch_s
