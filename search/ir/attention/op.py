"""Attention as one op: blocks of scores that are never held whole, with keys and values at hand or travelling in a ring.

`search.memory.attention` puts these ops in the place of attention that a step spells out. The forward op maps queries,
keys and values to the output and to the log-sum-exp of each row of scores. The backward op computes a block's
probabilities anew from this statistic (Dao et al., "FlashAttention", 2022; Rabe and Staats, "Self-attention Does Not Need
O(n^2) Memory", 2021). Both work through blocks of `block_size` queries and keys, so that the largest intermediate is one
block of scores. A block without an unmasked score is skipped.

If devices split the sequence, keys and values travel the ring of these devices (Liu et al., "Ring Attention with Blockwise
Transformers", 2023). Each device adds up what its queries see of the keys that are there, and joins it to the rest by the
log-sum-exp. In the backward phase, the gradients of keys and values travel with them, and are at home in the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.search.ir.attention.backward import backward
from autoshard.search.ir.attention.forward import forward
from autoshard.search.ir.attention.ring import ALONE, Ring

FORWARD, BACKWARD = "blockwise_attention", "blockwise_attention_gradient"


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """A blockwise attention, in the place of a primitive: the graph's ops hold it, and the executor applies it.

    Attributes:
      name: `FORWARD` or `BACKWARD`.
    """

    name: str
    multiple_results: bool = True

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters, as `bind` takes them."""
        return params

    def bind(self, *operands: Any, **params: Any) -> list[Any]:
        """The results on one device."""
        return applied(self.name, params, ALONE, *operands)


def applied(name: str, params: Mapping[str, Any], ring: Ring, *operands: Any) -> list[Any]:
    """The results of an attention op on a device's shards."""
    function: Callable[..., list[Any]] = forward if name == FORWARD else backward
    return function(params["layout"], params["scores"], params["dtypes"], ring, *operands)
