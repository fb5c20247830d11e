"""The workspace that matrix products need under all strategies: memory of a fixed size beside operands and results."""

from autoshard.cost_model.cluster import Device
from autoshard.search.ir.factors.reduction import POOLING_GRADIENT
from autoshard.search.problem.convolution_copies import CONVOLUTION
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.rings import ATTENTIONS

WORKSPACE_BYTES = 4 * 2**20
"""Workspace of a matrix product. Source: XLA:GPU's default for cuBLASLt."""

OTHERS = frozenset({CONVOLUTION, POOLING_GRADIENT, *ATTENTIONS})
"""Ops with workspaces of other sizes, or none."""


def is_product(folded: FoldedProgram, i: int) -> bool:
    """Whether an op is a matrix product for cuBLAS."""
    op = folded.program.ops[i]
    is_heavy = op.op is not None and op.name not in OTHERS and folded.is_heavy[folded.class_of[i]]
    return is_heavy and bool(op.rule.flops_per_point)


def workspaces(folded: FoldedProgram, device: Device) -> dict[int, float]:
    """Workspace bytes of a program's products, by position."""
    if device.platform == "cpu":
        return {}
    return {i: WORKSPACE_BYTES for i in range(len(folded.program.ops)) if is_product(folded, i)}
