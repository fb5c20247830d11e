"""Factorizations and solvers: batches are parallel, matrices stay whole. Also the Fourier transform."""

from collections.abc import Sequence
from math import log2, prod
from typing import Any

from autoshard.search.ir.factors.loops import Loops, mixing
from autoshard.search.ir.factors.rule import Kind, Rule, RuleFn


def batched(rank: int, cubic_flops: float = 0.0) -> RuleFn:
    """Rules for ops on stacks of arrays of which the first operand's have `rank` dims.

    `cubic_flops` is the FLOPs' leading coefficient: they are that times m * n * min(m, n) for m x n matrices.
    """

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        del params
        shape = ins[0].shape
        num_batch = len(shape) - rank
        loops = Loops()
        batch = loops.dims(shape[:num_batch])
        dims = [(*batch, *loops.dims(aval.shape[num_batch:], Kind.UNSPLITTABLE)) for aval in (*ins, *outs)]
        flops = cubic_flops * prod(shape) * min(shape[num_batch:], default=1)
        return loops.rule(dims[: len(ins)], dims[len(ins) :], flops=flops)

    return rule


def triangular_solve(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Right-hand sides are independent: columns with the matrix on the left, rows with it on the right."""
    del outs
    matrix, sides = (aval.shape for aval in ins)
    loops = Loops()
    batch = loops.dims(matrix[:-2])
    unknown, equation = loops.dim(matrix[-1], Kind.UNSPLITTABLE), loops.dim(matrix[-1], Kind.UNSPLITTABLE)
    side = loops.dim(sides[-1] if params["left_side"] else sides[-2])
    solved = (*batch, unknown, side) if params["left_side"] else (*batch, side, unknown)
    return loops.rule(((*batch, equation, unknown), solved), (solved,), flops_per_point=1.0)


def fft(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """5 n log2(n) FLOPs per transform of n points, FFTW's convention."""
    size = prod(params["fft_lengths"])
    flops_per_point = 5 * log2(size) if size > 1 else 0.0
    return mixing(_transformed, flops_per_point=flops_per_point, is_additive=True)(ins, outs, params)


def _transformed(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> range:
    rank = len(ins[0].shape)
    return range(rank - len(params["fft_lengths"]), rank)


# Leading coefficients: Golub and Van Loan, "Matrix Computations", 4th edition, sections 3.2 (LU), 4.2
# (Cholesky), 5.2 (QR), 7.4 (Hessenberg), 7.5 (Schur), 8.3 (symmetric eigenproblem), 8.6 (SVD).
RULES: dict[str, RuleFn] = {
    "cholesky": batched(2, 1 / 3),
    "lu": batched(2, 2 / 3),
    **dict.fromkeys(("qr", "geqrf", "geqp3", "householder_product"), batched(2, 4 / 3)),
    "hessenberg": batched(2, 10 / 3),
    "tridiagonal": batched(2, 4 / 3),
    **dict.fromkeys(("eig", "schur"), batched(2, 25)),
    "eigh": batched(2, 9),
    "svd": batched(2, 21),
    "ormqr": batched(2, 4),
    "symmetric_product": batched(2, 1),
    "cholesky_update": batched(2),
    "lu_pivots_to_permutation": batched(1),
    "tridiagonal_solve": batched(1),
    "triangular_solve": triangular_solve,
    "fft": fft,
}
