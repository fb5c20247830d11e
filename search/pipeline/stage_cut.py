"""A cut of the forward phase into stages: the work between cuts, and the bytes that cross them.

Any cut of a program into runs of ops, in program order, is a valid pipeline: a run reads only values of itself and of
earlier runs. A cut costs the transfer of the values made before it and read behind it, for each microbatch. A value
that skips a stage counts at both of its borders.

The work of an op is its floating-point operations, by its factor rule. The work of a loop is that of its body, times
its iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Graph, Op, Value


@dataclass(frozen=True, slots=True)
class StageCut:
    """A cut of the forward phase.

    Attributes:
      starts: for each stage but the first, the position of its first op among the forward ops that run for each
        microbatch. An op has one position; a loop over layers has one for each layer.
    """

    starts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.starts) + 1

    def stages(self, num_positions: int) -> list[int]:
        """The stage at each position."""
        return [sum(start <= i for start in self.starts) for i in range(num_positions)]


def crossing_bytes(ops: Sequence[Op], values: Sequence[Value], num_positions: Sequence[int]) -> np.ndarray:
    """By position, the bytes that are made before it and read from it on; [sum of num_positions + 1].

    Inside a loop, the carry crosses, too; other operands of the loop cross until its last iteration.
    """
    ends = list(accumulate(num_positions))
    made = {v: end for op, end in zip(ops, ends, strict=True) for v in op.outputs}
    read = {v: end for op, end in zip(ops, ends, strict=True) for v in op.operands if v in made}
    change = np.zeros(sum(num_positions) + 2)
    for v, end in read.items():
        change[made[v]] += values[v].num_bytes
        change[end] -= values[v].num_bytes
    for op, num, end in zip(ops, num_positions, ends, strict=True):
        if num > 1:
            carried = sum(v.num_bytes for v in op.result_values[: op.loop_counts[1]])
            change[end - num + 1] += carried
            change[end] -= carried
    return np.cumsum(change)[:-1]


def num_flops(op: Op, values: Sequence[Value]) -> float:
    """Floating-point operations of an op. Bodies count as often as they run: that of `while` once, of `cond` the
    largest branch."""
    if op.bodies:
        bodies = [sum(num_flops(o, b.values) for o in b.ops) for each in op.bodies.values() for b in each]
        return max(bodies) if op.name == "cond" else sum(bodies) * int(op.params.get("length", 1))
    graph = Graph(tuple(values), (), (), (), ())
    rule = rule_for(op.name, [graph.value(a) for a in op.inputs], op.result_values, op.params)
    return rule.flops_per_point * rule.num_points
