"""cuDNN's attention as a blockwise op.

`jax.nn.dot_product_attention(implementation="cudnn")` is one op for the forward phase and one for the gradients. Its layout,
scale and mask are parameters, so that nothing has to be recognised. Attention with a bias, with lengths, in packed or paged
form, with dropout or with a score function of the user's stays as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np

from autoshard.search.ir.attention.layout import KEY, QUERY, plain_layout
from autoshard.search.ir.attention.op import BACKWARD, FORWARD, AttentionOp
from autoshard.search.ir.attention.scores import Mask, Node, Scores
from autoshard.search.ir.factors.attention import HEADS_FIRST
from autoshard.search.ir.graph import Op

FUSED = {"dot_product_attention_fwd_wrapper": FORWARD, "dot_product_attention_bwd_wrapper": BACKWARD}

NUM_ARRAYS = {FORWARD: 10, BACKWARD: 13}
"""Operands without those of a user's score function: three arrays, seven optional ones, and three of the gradient."""

HIDDEN = -1e30
"""The number that replaces a hidden score. Source: a choice of ours; its exponential is zero beside any score."""


def from_cudnn(op: Op, shapes: Sequence[tuple[int, ...]]) -> Op | None:
    """The blockwise op that computes the same; None for other ops, and for attention in another form."""
    if op.name not in FUSED or not _is_plain(op, shapes):
        return None
    name, heads_first = FUSED[op.name], op.params["layout"] == HEADS_FIRST
    heads_at = 1 if heads_first else 2
    layout = plain_layout(heads_first, shapes[0][heads_at] > shapes[1][heads_at])
    made = op.result_values[: 2 if name == FORWARD else 3]
    if name == FORWARD and len(made) < 2:
        return None
    inputs = (
        op.inputs[:3] if name == FORWARD else (*op.inputs[:3], op.inputs[11], op.inputs[10], op.inputs[12])
    )
    params = {"layout": layout, "scores": _scores(op.params), "dtypes": tuple(v.dtype for v in made)}
    return replace(
        op,
        primitive=AttentionOp(name),
        params=params,
        inputs=inputs,
        outputs=op.outputs[: len(made)],
        result_values=made,
    )


def _is_plain(op: Op, shapes: Sequence[tuple[int, ...]]) -> bool:
    is_used = any(prod(shape) for shape in shapes[3:10])
    is_masked_plainly = op.params["mask_type"].name in ("NO_MASK", "CAUSAL")
    is_alike = len(shapes) == NUM_ARRAYS[FUSED[op.name]] and not op.params["dropout_rate"]
    at = 2 if op.params["layout"] == HEADS_FIRST else 1
    has_one_length = shapes[0][at] == shapes[1][at]
    return is_alike and has_one_length and is_masked_plainly and not is_used


def _scores(params: dict[str, Any]) -> Scores:
    """The scaled score, causal or in a window behind each position."""
    lax, number = jax.lax, str(np.dtype(np.float32))
    nodes = [
        Node(None, leaf=("score",)),
        Node(None, leaf=("number", float(params["scale"]), number)),
        Node(lax.mul_p, _params(lax.mul, 1.0, 1.0), (0, 1)),
    ]
    if params["mask_type"].name == "NO_MASK":
        return Scores(tuple(nodes), None, number)
    nodes += [
        Node(None, leaf=("position", QUERY, "int32")),
        Node(None, leaf=("position", KEY, "int32")),
        Node(lax.ge_p, operands=(3, 4)),
    ]
    if window := params["sliding_window_length"]:
        nodes += [
            Node(lax.sub_p, _params(lax.sub, 1, 1), (3, 4)),
            Node(None, leaf=("number", window, "int32")),
            Node(lax.lt_p, operands=(6, 7)),
            Node(lax.and_p, operands=(5, 8)),
        ]
    shown = len(nodes) - 1
    nodes += [
        Node(None, leaf=("number", HIDDEN, number)),
        Node(lax.select_n_p, operands=(shown, shown + 1, 2)),
    ]
    return Scores(tuple(nodes), Mask(shown, 0, HIDDEN), number)


def _params(function: Callable[..., Any], *operands: float) -> tuple[tuple[str, Any], ...]:
    """The parameters that this version of JAX gives to a function's primitive."""
    return tuple(jax.make_jaxpr(function)(*operands).eqns[0].params.items())
