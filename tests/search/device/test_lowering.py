"""What XLA keeps that the step does not name: copies that libraries want, activations beside products, parts of stacks.

Each was seen in XLA:GPU's buffers; here it is read off the kernels and buffers that a device is taken to have.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cost_model.hardware import parse_cluster
from search.device.lowering import Lowered, lower
from search.ir.trace import trace
from search.mesh_problem import StepProblem
from search.problem.live_ranges import Resident

PLENTY_BYTES = 1 << 45


def lowered(step, *args, mesh=(1,), pins=None, gpu="H100-80GB") -> Lowered:
    traced, pins, cluster = trace(step, *args), pins or {}, parse_cluster(f"{mesh[0]}x{gpu}")
    marks = [str(pins.get(a.name)) for a in traced.arguments]
    on_mesh = StepProblem.of(traced, marks, cluster.device).on(cluster, mesh)
    solution, _ = on_mesh.fitting(on_mesh.pinned(pins), PLENTY_BYTES, 5.0)
    return lower(on_mesh.memory.costed, on_mesh.live_ranges, solution.labels)


def readers(found: Lowered, num_bytes: int) -> list[int]:
    """By how many kernels each array of this size is read, arguments left out."""
    arrays = [b for b, buffer in enumerate(found.buffers) if buffer.num_bytes == num_bytes]
    return [
        sum(b in kernel.reads for kernel in found.kernels) for b in arrays if not found.buffers[b].is_argument
    ]


def convolved(padding):
    def step(kernel, images):
        def loss(kernel):
            out = lax.conv_general_dilated(
                images, kernel, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return jnp.sum(out**2)

        return kernel - 0.1 * jax.grad(loss)(kernel)

    return step


KERNEL, IMAGES = jnp.zeros((3, 3, 32, 32)), jnp.zeros((4, 64, 64, 32))


def test_uneven_padding_is_written_out_once_for_both_phases():
    padded_bytes = 4 * 4 * 65 * 65 * 32
    assert readers(lowered(convolved("SAME"), KERNEL, IMAGES), padded_bytes) == [2]
    assert readers(lowered(convolved(((1, 1), (1, 1))), KERNEL, IMAGES), padded_bytes) == []


def test_a_kernel_is_transposed_for_cudnn_and_updated_as_it_lies_there():
    found = lowered(convolved("SAME"), KERNEL, IMAGES)
    (argument,) = [b for b, x in enumerate(found.buffers) if x.is_argument and x.num_bytes == KERNEL.nbytes]
    first = next(k for k in found.kernels if argument in k.reads)
    (copy,) = first.makes
    assert found.buffers[copy].num_bytes == KERNEL.nbytes
    last = max(k.position for k in found.kernels if copy in k.reads)
    assert last == max(k.position for k in found.kernels)


def gated(activation):
    def step(weights, x):
        def loss(weights):
            gate, up, down = weights
            return jnp.sum(((activation(x @ gate) * (x @ up)) @ down) ** 2)

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    return step


@pytest.mark.parametrize(
    ("gpu", "activation", "dtype", "kept"),
    [  # both products and their product in any case
        ("H100-80GB", jax.nn.gelu, jnp.float32, 4),  # and the activation
        ("H100-80GB", jax.nn.gelu, jnp.bfloat16, 4),  # and the tanh
        ("A100-80GB", jax.nn.gelu, jnp.float32, 4),  # and the tanh, which is slower to compute there
        ("H100-80GB", jax.nn.silu, jnp.float32, 3),
        ("H100-80GB", jax.nn.relu, jnp.float32, 3),
    ],
    ids=["gelu in float32", "gelu in bfloat16", "gelu on an A100", "silu", "relu"],
)
def test_what_a_gated_layer_keeps_for_the_backward_phase(gpu, activation, dtype, kept):
    weights = [jnp.zeros((256, 1024), dtype), jnp.zeros((256, 1024), dtype), jnp.zeros((1024, 256), dtype)]
    x = jnp.zeros((2048, 256), dtype)
    found = lowered(gated(activation), weights, x, gpu=gpu)
    size = 2048 * 1024 * dtype.dtype.itemsize
    residuals = [b for b in found.buffers if b.resident is Resident.RESIDUALS and b.num_bytes == size]
    assert len(residuals) == kept


def test_a_stack_is_gathered_once_and_its_parts_are_copied():
    def step(weights, x):
        def loss(weights):
            return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    weights, x = jnp.zeros((4, 256, 256)), jnp.zeros((8192, 256))
    pins = {"weights": P(None, "data"), "x": P("data")}
    found = lowered(step, weights, x, mesh=(8,), pins=pins)
    gathers = [k for k in found.kernels if k.collective is not None and k.collective.kind == "all-gather"]
    assert [(k.collective.num_bytes, k.loops) for k in gathers if k.collective] == [(weights.nbytes, ())]
    (whole,) = gathers[0].makes
    parts = [k for k in found.kernels if whole in k.reads]
    assert len(parts) == 2
    assert all(k.loops and found.buffers[k.makes[0]].num_bytes == weights.nbytes / 4 for k in parts)
