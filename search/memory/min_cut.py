"""Which values to keep and which to recompute, at a price per kept byte: a minimum cut.

A value is *at hand* in the backward phase if it is kept or its op runs again. An op runs again only if all its operands are
at hand. Keeping a value costs the price of its bytes, and the time of writes and reads that serve this alone; running an op
again costs its time. With a variable for each value (is it at hand) and for each op (does it run again), the costs are

    price x bytes + time to keep it
                    for a value that is at hand though its op does not run again,
    time            for an op that runs again,
    infinity        for an op that runs again though a value that it reads is not at hand,

each of which is paid when one variable is true and another false. So the cheapest choice is a minimum cut, and all choices
that are cheapest at some price are found by cuts at several prices. This is project selection (Picard 1976, "Maximal closure
of a graph"), for the model in which Chen et al. (2016, "Training deep nets with sublinear memory cost") recompute segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PICOSECONDS = 1e12
"""Per second: costs are whole numbers to the flow solver."""


@dataclass(frozen=True, slots=True, eq=False)
class Recomputation:
    """Ops that can run again, and the values that they make.

    Attributes:
      op_s: [ops] seconds to run each again; infinite where it cannot.
      reads: per op: the values that it reads; values that are at hand anyway are left out.
      maker: [values] the op that makes each.
      num_bytes: [values] of each while it is kept; infinite where it cannot be.
      needed: values that the backward phase reads.
      keep_s: [values] seconds to keep each.
    """

    op_s: np.ndarray
    reads: Sequence[Sequence[int]]
    maker: np.ndarray
    num_bytes: np.ndarray
    needed: Sequence[int]
    keep_s: np.ndarray | float = 0.0


def cheapest(problem: Recomputation, price_s_per_byte: float | np.ndarray) -> np.ndarray:
    """[ops]: whether each runs again, if a kept byte costs that many seconds; among equal choices the one with the fewest
    ops.

    Args:
      problem: the ops and values.
      price_s_per_byte: of all values, or [values] of each.
    """
    from ortools.graph.python import max_flow

    num_ops, num_values = len(problem.op_s), len(problem.maker)
    source, sink, first_value = num_ops + num_values, num_ops + num_values + 1, num_ops
    finite_bytes = np.nan_to_num(problem.num_bytes, posinf=0.0)
    price_s = np.where(np.isinf(problem.num_bytes), np.inf, finite_bytes * price_s_per_byte + problem.keep_s)
    reads = [(op, first_value + v) for op, values in enumerate(problem.reads) for v in values]
    tails = [
        *range(first_value, source),
        *range(num_ops),
        *(op for op, _ in reads),
        *[source] * len(problem.needed),
    ]
    heads = [
        *problem.maker,
        *[sink] * num_ops,
        *(v for _, v in reads),
        *(first_value + v for v in problem.needed),
    ]
    costs_s = np.concatenate([price_s, problem.op_s, np.full(len(reads) + len(problem.needed), np.inf)])
    finite = np.isfinite(costs_s)
    capacities = np.rint(np.where(finite, costs_s, 0.0) * PICOSECONDS).astype(np.int64)
    capacities[~finite] = capacities.sum() + 1
    flow = max_flow.SimpleMaxFlow()
    ends: list[Any] = [
        np.array(tails, np.int32),
        np.array(heads, np.int32),
        capacities,
    ]  # its stubs want scalars
    flow.add_arcs_with_capacity(*ends)
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, f"the flow solver says {status}"
    runs = np.zeros(sink + 1, bool)
    runs[flow.get_source_side_min_cut()] = True
    return runs[:num_ops]
