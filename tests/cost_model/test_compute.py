"""The roofline: the slower of arithmetic and memory, worked out by hand."""

import numpy as np
import pytest

from cost_model.compute import (
    KERNEL_LAUNCH_S,
    MATMUL_EFFICIENCY,
    MEMORY_EFFICIENCY,
    VECTOR_EFFICIENCY,
    op_time_s,
)
from cost_model.hardware import Device

TOY = Device("toy", 2**30, 1e9, (("float32", 1e12), ("bfloat16", 4e12), ("vector", 1e11)))


def test_a_large_product_is_bound_by_arithmetic():
    assert op_time_s(TOY, 1e12, 1.0, "float32", is_matmul=True) == pytest.approx(1 / MATMUL_EFFICIENCY)
    assert op_time_s(TOY, 1e12, 1.0, "bfloat16", is_matmul=True) == pytest.approx(0.25 / MATMUL_EFFICIENCY)


def test_an_elementwise_op_is_bound_by_memory():
    assert op_time_s(TOY, 1e9, 1e9, "bfloat16", is_matmul=False) == pytest.approx(1 / MEMORY_EFFICIENCY)


def test_what_is_no_product_runs_on_ordinary_cores():
    assert op_time_s(TOY, 1e11, 0.0, "bfloat16", is_matmul=False) == pytest.approx(1 / VECTOR_EFFICIENCY)


def test_launch_is_added_only_when_asked_for():
    assert op_time_s(TOY, 0.0, 0.0, "float32", is_matmul=False) == 0.0
    assert op_time_s(TOY, 0.0, 0.0, "float32", is_matmul=False, launch_s=KERNEL_LAUNCH_S) == KERNEL_LAUNCH_S


def test_strategies_are_priced_at_once():
    flops, num_bytes = np.array([1e12, 5e11, 0.0]), np.array([1e6, 1e6, 1e9])
    times = op_time_s(TOY, flops, num_bytes, "float32", is_matmul=True)
    pairs = zip(flops, num_bytes, strict=True)
    assert times.tolist() == [op_time_s(TOY, float(f), float(b), "float32", is_matmul=True) for f, b in pairs]
    assert isinstance(op_time_s(TOY, 1.0, 1.0, "float32", is_matmul=True), float)
