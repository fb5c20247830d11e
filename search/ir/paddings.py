"""Zeros around the operand of a convolution or a sum over windows become padding of its own.

`jnp.pad` before a convolution, and the gradient of an average pooling, are ops of their own, of extents that divide no
more. XLA folds them into the windows that read them, and so does this pass. Then equal parts of both sides lie over one
another again, and can be split with halos (`search.ir.factors.windows`). A cut behind a convolution, the gradient of such
a padding, is negative padding. No number changes: only zeros are added or left out.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.search.ir.graph import Graph, Op, without_dead_ops
from autoshard.search.ir.identities import STAY_ZERO

CONVOLUTION, SUM = "conv_general_dilated", "reduce_window_sum"

Edges = Sequence[tuple[int, int, int]]
"""By dimension: rows of padding before, behind, and between two rows."""


def with_own_padding(graph: Graph) -> Graph:
    """The graph without paddings by zeros that only windows read, and without cuts behind convolutions."""
    paddings = {v: op for v, op in graph.maker.items() if op.name == "pad" and _pads_zeros(op, graph.maker)}
    ops = [_padded(op, paddings).with_bodies(with_own_padding) for op in graph.ops]
    made = {v: op for op in ops for v in op.outputs}
    uses = Counter([v for op in ops for v in op.operands] + [*graph.made])
    cut = (_cut(op, made, uses) if op.outputs[:1] and op.outputs[0] in paddings else op for op in ops)
    return without_dead_ops(replace(graph, ops=tuple(cut)))


def _pads_zeros(op: Op, made: Mapping[int, Op]) -> bool:
    filling = op.inputs[1]
    while isinstance(filling, int) and filling in made and made[filling].name in STAY_ZERO:
        filling = made[filling].inputs[0]
    return not isinstance(filling, int) and not np.any(filling.val)


def _edges(op: Op) -> Edges:
    """The rows that a padding adds, or cuts off."""
    return [(int(low), int(high), int(between)) for low, high, between in op.params["padding_config"]]


def _padded(op: Op, paddings: Mapping[int, Op]) -> Op:
    """An op that reads the operand of a padding instead of the padded one."""
    if op.name not in (CONVOLUTION, SUM) or op.inputs[0] not in paddings:
        return op
    padding = paddings[op.inputs[0]]
    edges, dims = _edges(padding), _window_dims(op)
    others = [edge for d, edge in enumerate(edges) if d not in dims]
    key = "lhs_dilation" if op.name == CONVOLUTION else "base_dilation"
    dilation = op.params[key]
    is_plain = all(edge[2] == 0 or n == 1 for edge, n in zip([edges[d] for d in dims], dilation, strict=True))
    if any(map(any, others)) or min(map(min, edges)) < 0 or not is_plain:
        return op
    own = zip([edges[d] for d in dims], op.params["padding"], dilation, strict=True)
    pads = tuple((low + a * n, high + b * n) for (a, b, _), (low, high), n in own)
    wider = tuple(n * (edges[d][2] + 1) for d, n in zip(dims, dilation, strict=True))
    params = {**op.params, "padding": pads, key: wider}
    return replace(op, params=params, inputs=(padding.inputs[0], *op.inputs[1:]))


def _window_dims(op: Op) -> Sequence[int]:
    """The dimensions of the first operand that an op's padding is for."""
    if op.name == SUM:
        return range(len(op.params["padding"]))
    return op.params["dimension_numbers"].lhs_spec[2:]


def _cut(op: Op, made: Mapping[int, Op], uses: Mapping[int, int]) -> Op:
    """A convolution whose result is only read by a cut, as one that makes less."""
    source, edges = op.inputs[0], _edges(op)
    maker = made.get(source) if isinstance(source, int) else None
    if maker is None or maker.name != CONVOLUTION or uses[source] > 1:
        return op
    dims: Sequence[int] = maker.params["dimension_numbers"].out_spec[2:]
    if not _only_cuts(edges, dims):
        return op
    pads_before: Sequence[tuple[int, int]] = maker.params["padding"]
    strides: Sequence[int] = maker.params["window_strides"]
    own = zip(dims, pads_before, strides, strict=True)
    pads: Sequence[tuple[int, int]] = tuple(
        (low + edges[d][0] * n, high + edges[d][1] * n) for d, (low, high), n in own
    )
    params: dict[str, Any] = {**maker.params, "padding": pads}
    return replace(maker, params=params, outputs=op.outputs, result_values=op.result_values)


def _only_cuts(edges: Edges, dims: Collection[int]) -> bool:
    """Whether rows are only cut off, in these dimensions."""
    are_others_left = not any(any(edge) for d, edge in enumerate(edges) if d not in dims)
    return are_others_left and all(max(edge) <= 0 and not edge[2] for edge in edges)
