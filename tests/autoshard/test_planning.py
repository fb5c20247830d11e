"""From what a user asks to what the search is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_cluster, parse_hardware
from autoshard.options import Options
from autoshard.planning import applied, limit_bytes, traced
from autoshard.search.plan.peak_band import compiled
from autoshard.search.plan.plan import Plan

H100 = parse_cluster("8xH100-80GB").device.memory_bytes


@pytest.mark.parametrize(
    ("cluster", "memory", "num_bytes"),
    [
        ("8xH100-80GB", "50%", H100 // 2),
        ("8xH100-80GB", " 12.5 % ", H100 // 8),
        ("8xH100-80GB", "100%", H100),
        ("8xH100-80GB", "33.333%", H100 * 33333 // 100000),
        ("8xA100-40GB+8xH100-80GB", "50%", H100 // 2),
        ("8xH100-80GB", "40GiB", 40 << 30),
    ],
)
def test_a_cap_is_a_size_or_a_share_of_the_largest_device(cluster, memory, num_bytes):
    assert limit_bytes(parse_hardware(cluster), Options(memory=memory)) == num_bytes


@pytest.mark.parametrize("memory", ["%", "0%", "-1%", "nan%", "inf%", "half%", "90%%"])
def test_a_share_that_is_none(memory):
    with pytest.raises(InputError, match="wanted a share of a device's memory such as '90%', got"):
        limit_bytes(parse_hardware("8xH100-80GB"), Options(memory=memory))


@pytest.mark.parametrize("memory", [0, "0GiB"])
def test_a_cap_is_positive(memory):
    with pytest.raises(InputError, match=f"^wanted a positive memory cap, got memory={memory!r}\n"):
        limit_bytes(parse_hardware("8xH100-80GB"), Options(memory=memory))


def test_a_compiled_peak_outlives_new_estimates_but_no_edit():
    def step(w, x):
        return w - x.sum() * w

    shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((8, 8), "float32")
    cluster = parse_cluster("2xH100-80GB")
    plan = compiled(autoshard.search(step, *shapes, cluster=cluster, mesh=(2,)), 123_456)
    saved = plan.to_json()
    on_step = traced(step, cluster, shapes, {})
    assert applied(on_step, Plan.from_json(saved), "plan").plan.estimates.compiled_peak_bytes == 123_456
    edited = Plan.from_json({**saved, "memory_bytes": saved["memory_bytes"] - 1})
    assert applied(on_step, edited, "plan").plan.estimates.compiled_peak_bytes is None


def attended(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")


WIDE = jax.ShapeDtypeStruct((8, 16, 4, 256), jnp.bfloat16)
"""Heads of 256 channels, which cuDNN's attention takes on Hopper and later."""


@pytest.mark.parametrize("cluster", ["8xA100-80GB", "8xH100-80GB+8xA100-80GB"])
def test_a_kernel_must_suit_the_oldest_gpu_of_the_cluster(cluster):
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        traced(attended, parse_hardware(cluster), (WIDE,), {})
    assert traced(attended, parse_hardware("8xH100-80GB+8xH200"), (WIDE,), {}).graph.outputs


@pytest.mark.devices
@pytest.mark.parametrize("options", [{}, {"cluster": "8xH100-80GB"}], ids=str)
def test_cpus_that_simulate_gpus_have_no_attention_of_cudnn(options):
    step = autoshard.parallelize(attended, **options)
    with pytest.raises(InputError, match=r"test_planning.py:\d+ runs on NVIDIA GPUs only, not on CPUs"):
        step(jnp.zeros(WIDE.shape, WIDE.dtype))
    with pytest.raises(InputError, match=r"test_planning.py:\d+ runs on NVIDIA GPUs only, not on CPUs"):
        step.init(lambda: attended(jnp.zeros(WIDE.shape, WIDE.dtype)))


def test_large_arrays_that_the_step_closes_over_are_named():
    weights = [np.ones((512, 512), np.float32), np.ones((512, 512), np.float32)]

    def step(w, x):
        return w - jax.grad(lambda w: jnp.mean((x @ weights[0] @ weights[1] @ w) ** 2))(w)

    shapes = jax.ShapeDtypeStruct((512, 4), jnp.float32), jax.ShapeDtypeStruct((8, 512), jnp.float32)
    with pytest.warns(
        autoshard.AutoshardWarning, match=r"closes over 2 MiB of arrays, the largest of shape \(512, 512\)"
    ):
        traced(step, parse_cluster("1xH100-80GB"), shapes, {})
