"""Predicted memory of the blocks that a shortened step lacks.

The compiler's scheduler spends the memory that is left below the cap. It should have as much to spend on a shortened
program as on the whole one. So the cap is lowered by the memory of the missing blocks at the whole step's peak. Arguments
aside, this memory is the least peak of all of the device's kernels, less the least peak without the kernels of the
missing blocks.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from autoshard.search.device.combiner import combined
from autoshard.search.device.kernel_order import program_order
from autoshard.search.device.kernel_times import KernelTime
from autoshard.search.device.lowering import Kernel, Lowered, lower
from autoshard.search.device.prediction import in_least_order
from autoshard.search.device.timeline import peak
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.live_ranges import LiveRanges


def omitted_bytes(
    costed: CostedGraph, live_ranges: LiveRanges, chosen: Sequence[int], left_out: Sequence[AbstractSet[int]]
) -> tuple[int, ...]:
    """Bytes per device by which the least peak is lower without some of the step's ops; arguments are not counted.

    Args:
      left_out: sets of ops of the step's outermost graph, one for each result.
    """
    lowered = _without_arguments(lower(costed, live_ranges, chosen))
    outermost = [_outermost(op) for op in live_ranges.program.ops]
    mesh = costed.resharder.mesh

    def least_bytes(ops: AbstractSet[int]) -> float:
        kernels = _without(lowered, {at for at, op in enumerate(outermost) if op in ops})
        left = in_least_order(combined(kernels, mesh))
        return peak(left, program_order(left)).num_bytes

    whole_bytes = least_bytes(frozenset())
    return tuple(max(0, round(whole_bytes - least_bytes(ops))) for ops in left_out)


def _outermost(op: FlatOp) -> int | None:
    """The op of the outermost graph that contains a flat op; None for the step's inputs, outputs and constants."""
    return next((path[0] for places in op.result_places for _, path, _ in places if path), None)


def _without_arguments(lowered: Lowered) -> Lowered:
    buffers = (replace(b, num_bytes=0.0) if b.is_argument else b for b in lowered.buffers)
    return replace(lowered, buffers=tuple(buffers))


def _without(lowered: Lowered, positions: AbstractSet[int]) -> Lowered:
    """Empties the kernels at these positions. They only make the buffers that other kernels read: in the shortened step
    the block before passes those on."""
    read = {b for kernel in lowered.kernels if kernel.position not in positions for b in kernel.reads}

    def emptied(kernel: Kernel) -> Kernel:
        handed_on = tuple(b for b in kernel.makes if b in read)
        return replace(
            kernel,
            reads=(),
            makes=handed_on,
            after=(),
            collective=None,
            workspace_bytes=0.0,
            time=KernelTime(0.0, 0.0),
        )

    return replace(
        lowered, kernels=tuple(emptied(k) if k.position in positions else k for k in lowered.kernels)
    )
