"""Workspace memory of kernels, and the copies of operands that libraries read.

cuBLAS has a workspace of a fixed size beside each product's operands and results. A convolution has none: XLA writes its
call with `u8[0]` (`ConvRewriter`), for all kinds, types, GPUs and sizes. Only the autotuner resizes that buffer
(`ConvAlgorithmPicker`), to the workspace of the fastest algorithm. The autotuner measures on the device, so that workspace
is not known before.

The gradient of a max pooling is written as two kernels: one finds the place of each window's largest element, the next one
scatters there (`SelectAndScatterExpander`). The places are a workspace: one index array for each dimension.
"""

from math import prod
from typing import Any

from autoshard.cost_model.xla.gpu_targets import is_hopper_or_later
from autoshard.search.ir.factors.reduction import POOLING_GRADIENT
from autoshard.search.ir.spec import shard_shape
from autoshard.search.problem.convolution_copies import ConvolutionCopy
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.fusion import Fusion, is_view
from autoshard.search.problem.layouts import Order, product_order
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.rings import ATTENTIONS
from autoshard.search.problem.workspaces import WORKSPACE_BYTES, is_product

SLICED_WORKSPACE_BYTES = 32 * 2**20
"""Workspace of a matrix product that reads a slice in place. Source: XLA:GPU on Hopper, cuBLAS's recommended workspace."""


INDEX_BYTES = 4
"""Size of an index. Source: XLA, `SelectAndScatterExpander` (`s32`)."""

MERGED_BYTES = 64 * 2**20
"""Products that move no more are merged with others that share an operand. Source: XLA,
`xla_gpu_dot_merger_threshold_mb`."""


class Workspaces:
    """Workspaces and copied operands of a program's ops, under some strategies."""

    def __init__(self, paths: ReshardPaths, fusion: Fusion) -> None:
        self.paths, self.fusion = paths, fusion
        self.uses = paths.program.uses
        self.device = paths.costed.resharder.mesh.cluster.device
        self.is_hopper = is_hopper_or_later(self.device.name)

    def num_bytes(self, i: int) -> float:
        """Workspace bytes of an op's kernel."""
        op = self.paths.program.ops[i]
        if op.name in ATTENTIONS:
            op_class = self.paths.folded.class_of[i]
            strategy = self.paths.chosen[self.paths.graph.node_of[op_class]]
            return self.paths.costed.attentions(op_class)[strategy].workspace_bytes
        if self.device.name == "CPU":
            return 0.0
        if op.name == POOLING_GRADIENT:
            return self._places_bytes(i)
        if not is_product(self.paths.folded, i):
            return 0.0
        is_sliced = any(self._is_sliced(i, operand) for operand in range(len(op.operands)))
        return SLICED_WORKSPACE_BYTES if is_sliced and self.is_hopper else WORKSPACE_BYTES

    def _places_bytes(self, i: int) -> float:
        """Bytes per device of the places from which a max pooling took its results."""
        pooled = self.paths.program.ops[i].operands[0]
        spec = self.paths.spec(self.paths.graph.ports[self.paths.folded.class_of[i], 0, False])
        shape = self.paths.program.values[pooled].shape
        mesh = self.paths.costed.resharder.mesh.shape
        return float(INDEX_BYTES * len(shape) * prod(shard_shape(spec, shape, mesh)))

    def _is_sliced(self, i: int, operand: int) -> bool:
        """Whether an op reads a part of a larger array in place: a loop's part of a stack, or of a merged product."""
        made = self._viewed(i, operand)
        if is_view(self.paths.program.ops[made]):
            return self.is_part_of_stack(i, operand)
        v, one = self.paths.program.ops[i].operands[operand], self.paths.program.ops[made]
        return self._is_merged(one) and self._is_of_one(v, one)

    def is_part_of_stack(self, i: int, operand: int) -> bool:
        """Whether an op reads a loop's part of a stack in place. A gathered stack has another layout, and its parts are
        copied."""
        at, is_moved = self._viewed(i, operand), bool(self.paths.to_reader(i, operand).path)
        is_slice = self.paths.program.ops[at].name == "slice"
        return is_slice and not is_moved and not self.paths.to_reader(at, 0).path

    def _viewed(self, i: int, operand: int) -> int:
        """The op that makes the array under an operand's views, or slices it."""
        at = self.paths.maker[self.paths.program.ops[i].operands[operand]][0]
        while is_view(made := self.paths.program.ops[at]) and made.name != "slice":
            at = self.paths.maker[made.operands[0]][0]
        return at

    def _is_of_one(self, v: int, made: FlatOp) -> bool:
        """Whether a device has a single example of a value, so that its part of a merged product is of one piece."""
        first = self.paths.program.values[v].shape[:1]
        spec, mesh = self.paths.made(made.results[0]), self.paths.costed.resharder.mesh.shape
        return prod(n for d, n in zip(spec, mesh, strict=True) if d == 0) >= prod(first)

    def _is_merged(self, made: FlatOp) -> bool:
        """Whether XLA merges a product with others of the same left operand, so that its result is a part of theirs."""
        if made.name != "dot_general":
            return False
        left, *_ = made.operands
        twins = [
            op
            for op in (self.paths.program.ops[u] for u in self.uses.get(left, ()))
            if op.name == "dot_general" and op.operands[0] == left and _summed(op) == _summed(made)
        ]
        values = (*made.operands, *made.results)
        moved = sum(self.paths.local_bytes(v, self.paths.made(v)) for v in values)
        return len(twins) > 1 and moved <= MERGED_BYTES

    def copied_as(self, i: int, operand: int) -> ConvolutionCopy | Order | None:
        """The form in which an operand is written out for cuBLAS or cuDNN; None where it is read in its present layout."""
        copy = None if self.device.name == "CPU" else self.fusion.copied_as(i, operand)
        return None if isinstance(copy, tuple) and self._lies_as_wanted(i, operand) else copy

    def _lies_as_wanted(self, i: int, operand: int) -> bool:
        """Whether a device's part of a product's operand has the product's order already, for example because it is a
        single example."""
        op, v = self.paths.program.ops[i], self.paths.program.ops[i].operands[operand]
        spec = self.paths.spec(self.paths.graph.ports[self.paths.folded.class_of[i], operand, False])
        part = shard_shape(spec, self.paths.program.values[v].shape, self.paths.costed.resharder.mesh.shape)
        order = product_order(op, operand, part)
        return order is None or order == tuple(d for d in self.fusion.layouts.of[v].order if part[d] > 1)

    def copied_bytes(self, i: int, operand: int) -> float:
        """Bytes per device of the copy of an operand for cuBLAS or cuDNN."""
        written, v = self.copied_as(i, operand), self.paths.program.ops[i].operands[operand]
        growth = written.growth if isinstance(written, ConvolutionCopy) else float(written is not None)
        port = self.paths.graph.ports[self.paths.folded.class_of[i], operand, False]
        return growth * self.paths.local_bytes(v, self.paths.spec(port))


def _summed(op: FlatOp) -> Any:
    """A product's phase, and the dimensions of its left operand that it sums over and that are a batch's."""
    assert op.op is not None
    (contracting, _), (batch, _) = op.op.params["dimension_numbers"]
    return op.phase, contracting, batch
