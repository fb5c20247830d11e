"""Products, convolutions and look-ups whose terms are summed by collectives that the program names, not by constraints.

XLA's partitioner finds most reductions of a sum from the specs that are imposed on it, and misses three (measured on
XLA:GPU, all reductions of a product on a mesh of three axes, and of a look-up on two; a convolution's are treated as a
product's, `tests/gpu/test_three_axes.py`):

* on meshes of three axes, terms that are scattered over one axis and then reduced over another. Unless both use the
  dims that it expects, it makes one all-reduce of the whole array over all these axes;
* terms that are scattered over some axes, and then sliced over idle axes. It makes an all-reduce, and one slice of the
  two;
* results of a look-up in a table whose rows are split, if they are scattered. It makes an all-reduce, and a slice.

It also moves whole parts for a convolution whose halos the program has to exchange by name (`has_named_halos`).

For these, each device computes its own terms (`executors.kernels`) and reduces them as planned. The paths to all
readers must begin alike, and all shapes must split evenly.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile

import numpy as np

from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import Value
from autoshard.search.ir.sharding import ReshardPath, ReshardStep
from autoshard.search.ir.spec import PARTIAL, WHOLE, Spec, divides
from autoshard.search.problem.convolution_copies import CONVOLUTION
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.layouts import PRODUCT
from autoshard.search.problem.reshard import REDUCTIONS, SLICE
from autoshard.search.problem.reshard_paths import ReshardPaths

LOOK_UP = "gather"
"""The primitive of a look-up in a table."""

INDEX_BYTES = 4
"""Smallest index that can count the rows of any table, and below the first of them."""

AXES_THAT_ARE_JOINED = 3
"""Number of mesh axes from which on the partitioner joins reductions. Source: the measurement above; on two axes it
makes all reductions as they are imposed."""


def named_sums(paths: ReshardPaths, in_sums: Collection[tuple[int, int]]) -> Mapping[int, ReshardPath]:
    """The reductions of such products, convolutions and look-ups, by the value that each makes.

    Args:
      paths: the resharding paths of all values.
      in_sums: results that a sum takes as they are made, by op class and result. The compiler moves their reductions
        behind the sum.
    """
    found: dict[int, ReshardPath] = {}
    for i, op in enumerate(paths.program.ops):
        is_product = op.name in (PRODUCT, CONVOLUTION) and (paths.folded.class_of[i], 0) not in in_sums
        is_look_up = op.name == LOOK_UP and _may_shift(paths.program.values[op.operands[1]])
        if (is_product or is_look_up) and _is_lost(paths, i):
            (reductions,) = dict.fromkeys(map(_reductions, _paths(paths, i)))
            found[op.results[0]] = reductions
    return found


def _is_lost(paths: ReshardPaths, i: int) -> bool:
    """True if the compiler would not follow the planned path, and the terms can be summed by name: all readers' paths
    begin alike and split evenly."""
    op, num_axes = paths.program.ops[i], len(paths.costed.resharder.mesh.shape)
    if PARTIAL not in paths.made(op.results[0]):
        return False
    found = list(_paths(paths, i))
    reductions = dict.fromkeys(map(_reductions, found))
    is_lost = op.name == CONVOLUTION and has_named_halos(op, _read(paths, i))
    is_lost |= any(
        _is_joined(path, num_axes) or _is_sliced(path) or (op.name == LOOK_UP and _num_scattered(path) > 0)
        for path in found
    )
    return is_lost and len(reductions) == 1 and all(_is_even(paths, i, path) for path in reductions)


def has_named_halos(op: FlatOp, specs: Sequence[Spec]) -> bool:
    """True if an op that reads operands in these specs has halos that the program exchanges by name. The partitioner also
    gathers the operands of a kernel's gradient if channels are split besides the rows that it sums over."""
    factors, operands = op.rule.factors, op.rule.operands
    split = {dims[d][0] for dims, spec in zip(operands, specs, strict=True) for d in spec if d > WHOLE}
    has_channels = any(factors[f].kind is Kind.PARALLEL for f in split)
    rows = (window for window in op.rule.windows if window.factor in split)
    is_named = any(w.is_named or (has_channels and factors[w.factor].kind is Kind.SUM) for w in rows)
    return is_named and not op.rule.is_on_shards


def _read(paths: ReshardPaths, i: int) -> list[Spec]:
    """The specs in which an op reads its operands."""
    ports, op_class = paths.graph.ports, paths.folded.class_of[i]
    return [paths.spec(ports[op_class, n, False]) for n in range(len(paths.program.ops[i].operands))]


def _may_shift(indices: Value) -> bool:
    """True if indices can be counted from the first row of a device's part, also below zero."""
    return np.issubdtype(indices.dtype, np.signedinteger) and indices.dtype.itemsize >= INDEX_BYTES


def _paths(paths: ReshardPaths, i: int) -> Iterator[ReshardPath]:
    """The path of an op's result to each of its readers."""
    (v,) = paths.program.ops[i].results
    for reader in paths.program.uses.get(v, ()):
        for operand, read in enumerate(paths.program.ops[reader].operands):
            if read == v:
                yield (*paths.to_rest(v), *paths.to_reader(reader, operand).path)


def _reductions(path: ReshardPath) -> ReshardPath:
    return tuple(takewhile(_reduces, path))


def _reduces(step: ReshardStep) -> bool:
    return step.kind in REDUCTIONS


def _num_scattered(path: ReshardPath) -> int:
    return sum(step.kind == "reduce-scatter" for step in path)


def _is_joined(path: ReshardPath, num_axes: int) -> bool:
    is_in_turn = len(_reductions(path)) > 1 and _num_scattered(path) > 0
    return is_in_turn and num_axes >= AXES_THAT_ARE_JOINED


def _is_sliced(path: ReshardPath) -> bool:
    behind = path[len(_reductions(path)) :]
    return bool(behind) and behind[0].kind == SLICE and _num_scattered(path) > 0


def _is_even(paths: ReshardPaths, i: int, reductions: ReshardPath) -> bool:
    """True if an op and its reductions split evenly all the way."""
    op, program, mesh_shape = paths.program.ops[i], paths.program, paths.costed.resharder.mesh.shape
    (v,) = op.results
    lies = [(v, paths.made(v)), *((v, step.after) for step in reductions)]
    lies += zip(op.operands, _read(paths, i), strict=True)
    is_even = all(divides(spec, program.values[u].shape, mesh_shape) for u, spec in lies)
    return is_even and PARTIAL not in reductions[-1].after
