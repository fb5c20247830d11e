"""Memory of convolutions and poolings, as XLA's GPU compiler writes them."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.process import Job, compile_all_apart

CALL = re.compile(r"= \(\w+\[[^()]*, (u8\[\d+\])\S*\) custom-call\(.*custom_call_target=\"__cudnn\$(\w+)\"")
FORWARD, KERNELS, IMAGES = "convForward", "convBackwardFilter", "convBackwardInput"


def differentiated(num_dims, size, features, dtype, stride=1, groups=1):
    """A convolution and both of its gradients."""
    dims = "DHW"[-num_dims:]
    numbers = (f"N{dims}C", f"{dims}IO", f"N{dims}C")
    images = jax.ShapeDtypeStruct((4, *(size,) * num_dims, features), dtype)
    kernel = jax.ShapeDtypeStruct((*(3,) * num_dims, features // groups, features), dtype)

    def convolved(x, w):
        strides = (stride,) * num_dims
        return lax.conv_general_dilated(
            x, w, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def step(x, w):
        y, back = jax.vjp(convolved, x, w)
        return y, back(jnp.cos(y))

    return jax.jit(step), (images, kernel)


CASES = {
    "small": differentiated(2, 32, 16, jnp.float32),
    "large": differentiated(2, 256, 128, jnp.float32),
    "half": differentiated(2, 256, 128, jnp.bfloat16),
    "strided": differentiated(2, 32, 16, jnp.float16, stride=2),
    "grouped": differentiated(2, 32, 16, jnp.float32, groups=4),
    "depthwise": differentiated(2, 32, 16, jnp.float32, groups=16),
    "volumes": differentiated(3, 16, 16, jnp.bfloat16),
    "sequence": differentiated(1, 512, 16, jnp.float32),
}


@pytest.mark.parametrize("gpu", ["V100-16GB", "A100-40GB", "H100-80GB", "B200"])
def test_no_convolution_has_a_workspace(gpu):
    cluster = parse_cluster(f"1x{gpu}")
    jobs = [Job(module_bytes(lower(step, args)), cluster) for step, args in CASES.values()]
    for case, compiled in zip(CASES, compile_all_apart(jobs), strict=True):
        kinds = {kind: workspace for workspace, kind in CALL.findall(compiled.text)}
        assert {FORWARD, KERNELS} <= kinds.keys() <= {FORWARD, KERNELS, IMAGES}, case
        assert set(kinds.values()) == {"u8[0]"}, case


@pytest.mark.parametrize(("window", "stride"), [(2, 2), (3, 2), (3, 1)])
def test_the_gradient_of_a_max_pooling_keeps_an_index_for_each_dimension(window, stride):
    def step(x):
        windows, strides = (1, window, window, 1), (1, stride, stride, 1)
        y, back = jax.vjp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, windows, strides, "SAME"), x)
        return back(jnp.cos(y))

    images = jax.ShapeDtypeStruct((4, 64, 64, 32), jnp.float32)
    job = Job(module_bytes(lower(jax.jit(step), (images,))), parse_cluster("1xH100-80GB"))
    (compiled,) = compile_all_apart([job])
    size = 64 // stride
    (places,) = re.findall(r"= \((f32\[[^()]*)\) fusion\(", re.sub(r"\{[^{}]*\}", "", compiled.text))
    assert places.count(f"s32[4,{size},{size},32]") == 4
