"""The classes by which kernels are added up: those that a plan predicts, and those that a profiler saw.

A plan has ops of JAX and a profiler has names of GPU kernels. Both are told apart this far: products and convolutions run
in libraries or in tensor cores, attention in kernels of its own, and all that XLA makes itself is bound by memory.
"""

from enum import StrEnum

from autoshard.search.ir.factors import attention


class KernelClass(StrEnum):
    """A class of kernels that compute."""

    PRODUCTS = "products"
    CONVOLUTIONS = "convolutions"
    ATTENTION = "attention"
    FUSED = "elementwise and fused"
    OTHER = "other kernels"


_OF_OP = {
    "dot_general": KernelClass.PRODUCTS,
    "conv_general_dilated": KernelClass.CONVOLUTIONS,
    **dict.fromkeys(attention.RULES, KernelClass.ATTENTION),
    **dict.fromkeys(
        (
            "custom_partitioning",
            "pallas_call",
            "cholesky",
            "eigh",
            "fft",
            "lu",
            "sort",
            "svd",
            "triangular_solve",
        ),
        KernelClass.OTHER,
    ),
}


def class_of_op(primitive: str) -> KernelClass:
    """The class of the kernels that run a JAX primitive.

    Example:
      >>> class_of_op("dot_general").value
      'products'
    """
    return _OF_OP.get(primitive, KernelClass.FUSED)
