"""The roofline: the slowest of arithmetic, memory and launch, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.cost_model.compute import DEPTH, START_S, Product, kernel_s, product_s
from autoshard.cost_model.hardware import Device, parse_cluster

TOY = Device(
    "toy",
    2**30,
    1e9,
    (("float32", 1e12), ("vector", 1e11)),
    matmul_efficiency=0.5,
    vector_efficiency=0.5,
    memory_efficiency=0.5,
    launch_s=1e-6,
)
MANY = replace(TOY, num_cores=100, matmul_efficiency=1.0, memory_efficiency=1.0)
PEAK = 1e12


def tiled_s(tiles_in_turn, tile_m, tile_n, k):
    """So many tiles on one of the hundred cores, each of a hundredth of the peak."""
    return START_S + tiles_in_turn * 2 * tile_m * tile_n * (k + DEPTH) / (PEAK / 100)


def test_a_kernel_takes_its_slowest_part():
    assert kernel_s(TOY, 1e9) == pytest.approx(2.0)
    assert kernel_s(TOY, 0.0, 1e11) == pytest.approx(2.0)
    assert kernel_s(TOY, 1e9, 2e11) == pytest.approx(4.0)
    assert kernel_s(TOY, 0.0) == 1e-6


def test_products_on_unknown_cores_run_at_their_rate():
    assert product_s(TOY, Product(1, 1e4, 1e4, 1e4), 0.0, PEAK) == pytest.approx(4.0)
    assert product_s(TOY, Product(1, 1e2, 1e2, 1e2), 1e9, PEAK) == pytest.approx(2.0)
    assert product_s(TOY, Product(1, 1, 1, 1), 0.0, PEAK) == 1e-6


def test_a_full_wave_of_the_largest_tiles():
    assert product_s(MANY, Product(1, 1280, 2560, 10**4), 0.0, PEAK) == pytest.approx(
        tiled_s(1, 128, 256, 10**4)
    )


def test_one_tile_more_is_a_wave_more():
    full, more = (product_s(MANY, Product(batch, 128, 256, 10**4), 0.0, PEAK) for batch in (100, 101))
    assert full == pytest.approx(tiled_s(1, 128, 256, 10**4))
    assert full < 1.2 * full < more <= 2 * full


def test_edges_are_computed_whole():
    """100 x 200 elements take what 128 x 256 take."""
    odd, even = (product_s(MANY, Product(100, m, n, 1000), 0.0, PEAK) for m, n in ((100, 200), (128, 256)))
    assert odd == even


def test_few_tiles_split_the_sum():
    """One tile of a hundred cores: in sixteen parts the sum takes a sixteenth, and the parts are added in memory."""
    k = 2**20
    split = START_S + (tiled_s(1, 64, 64, k / 16) - START_S) / 0.65 + 16 * 8 * 64 * 64 / 1e9 + 1e-6
    assert product_s(MANY, Product(1, 64, 64, k), 0.0, PEAK) == pytest.approx(split)


def test_short_sums_are_slow():
    deep, short = (product_s(MANY, Product(100, 128, 256, k), 0.0, PEAK) / k for k in (8192, 64))
    wanted = (tiled_s(1, 128, 256, 64) / 64) / (tiled_s(1, 128, 256, 8192) / 8192)
    assert short / deep == pytest.approx(wanted)
    assert short > 2 * deep


def test_rows_and_columns_are_alike():
    assert product_s(MANY, Product(3, 1000, 77, 500), 1e3, PEAK) == product_s(
        MANY, Product(3, 77, 1000, 500), 1e3, PEAK
    )


MEASURED = [
    ("H100-80GB", (1, 256, 256, 256), 6.722),
    ("H100-80GB", (1, 512, 4096, 2048), 530),
    ("H100-80GB", (1, 1024, 1024, 1024), 252.8),
    ("H100-80GB", (1, 4096, 1024, 4096), 751.7),
    ("H100-80GB", (1, 4096, 4096, 4096), 780.2),
    ("H100-80GB", (2, 2048, 1024, 512), 348.2),
    ("H100-80GB", (4, 256, 256, 4096), 186.9),
    ("H100-80GB", (4, 4096, 4096, 1024), 722.3),
    ("B200", (1, 256, 256, 256), 6.765),
    ("B200", (1, 512, 4096, 2048), 761.3),
    ("B200", (1, 1024, 1024, 1024), 288),
    ("B200", (1, 4096, 1024, 4096), 1205),
    ("B200", (1, 4096, 4096, 4096), 1417),
    ("B200", (2, 2048, 1024, 512), 460.3),
    ("B200", (4, 256, 256, 4096), 202.4),
    ("B200", (4, 4096, 4096, 1024), 1350),
]
"""GPU, sizes (batch, m, n, k) and TFLOP/s in bfloat16. Source: XLA, `default_matmul_perf_table.txtpb`, 2026."""


@pytest.mark.parametrize(("gpu", "sizes", "measured"), MEASURED)
def test_products_take_what_was_measured(gpu, sizes, measured):
    device, (batch, m, n, k) = parse_cluster(f"8x{gpu}").device, sizes
    num_bytes = 2 * batch * (m * k + k * n + m * n)
    seconds = product_s(device, Product(*sizes), num_bytes, device.peak_flops_per_s("bfloat16"))
    assert 2 * batch * m * n * k / seconds / 1e12 == pytest.approx(measured, rel=0.25)


def test_strategies_are_priced_at_once():
    m, num_bytes = np.array([64.0, 100.0, 4096.0]), np.array([1e6, 1e3, 1e9])
    times = product_s(MANY, Product(2, m, 512, 64), num_bytes, PEAK)
    pairs = zip(m, num_bytes, strict=True)
    assert times.tolist() == [product_s(MANY, Product(2, a, 512, 64), b, PEAK) for a, b in pairs]
    assert isinstance(product_s(MANY, Product(1, 1, 1, 1), 1.0, PEAK), float)
    assert isinstance(kernel_s(MANY, 1.0), float)
