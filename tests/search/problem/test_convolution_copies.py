"""What XLA:GPU writes out for cuDNN, by the shapes in its compiled programs, and what it leaves to cuDNN."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.search.ir.trace import trace
from autoshard.search.problem.convolution_copies import CONVOLUTION, ConvolutionCopy, convolution_copy
from autoshard.search.problem.flat_program import flatten

NHWC = ("NHWC", "HWIO", "NHWC")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def copies(step, *args) -> list[list[ConvolutionCopy | None]]:
    """By convolution, in program order: how each operand is written out."""
    program = flatten(trace(step, *args))
    return [
        [convolution_copy(program, op, operand) for operand in range(2)]
        for op in program.ops
        if op.name == CONVOLUTION
    ]


def gradients(forward):
    """Of the images too, so that there are three convolutions: the result, the kernel's gradient, the images'."""
    return lambda x, w: jax.grad(lambda x, w: jnp.sum(forward(x, w) ** 2), (0, 1))(x, w)


def strided(x, w):
    return lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=NHWC)


def transposed(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NHWC)


def extents(found):
    return [[copy and copy.spatial for copy in of_one] for of_one in found]


@pytest.mark.parametrize("size", [16, 32])
def test_a_transposed_convolution_reads_its_images_with_zeros_between(size):
    """As XLA does: f32[64,34,34,128] of 16 rows, f32[64,66,66,64] of 32. For the kernel's gradient it turns the images,
    f32[128,31,31,64], and the cotangent, f32[64,33,33,64]; for theirs it pads the cotangent."""
    forward, *backward = extents(copies(gradients(transposed), array(8, size, size, 8), array(3, 3, 8, 4)))
    made, between = 2 * size, 2 * size - 1
    assert forward == [(made + 2, made + 2), None]
    turned = [(between, between), (made + 1, made + 1)]
    assert sorted(backward, key=str) == sorted([turned, [(made + 1, made + 1), None]], key=str)


def test_a_strided_convolution_s_gradients_leave_the_zeros_to_cudnn():
    forward, *backward = extents(copies(gradients(strided), array(8, 32, 32, 8), array(3, 3, 8, 4)))
    padded = [(33, 33), None]
    assert forward == padded
    assert sorted(backward, key=str) == sorted([padded, [None, None]], key=str)


def test_a_copy_grows_by_its_zeros():
    ((copy, _),) = copies(strided, array(8, 32, 16, 8), array(3, 3, 8, 4))
    assert copy is not None
    assert copy.growth == pytest.approx(33 * 17 / (32 * 16))


def test_an_even_convolution_reads_what_is_there():
    def even(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)

    assert extents(copies(gradients(even), array(8, 32, 32, 8), array(3, 3, 8, 4))) == [[None, None]] * 3
