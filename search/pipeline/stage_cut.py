"""A cut of the forward phase into stages, and what decides where it is good: the work between cuts, the bytes that cross.

Any cut of a program into runs of ops, in the order in which they stand, is a valid pipeline: what a run reads, it or one
before it has made. A cut costs what has to be sent at it for each microbatch: the values made before it and read behind
it. (What skips a stage counts at both of its borders.)

The work of an op is its floating-point operations, which its factor rule knows; a loop's is that of its body, as often as
it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Graph, Op, Value


@dataclass(frozen=True, slots=True)
class StageCut:
    """Where the forward phase is cut.

    Attributes:
      starts: of each stage but the first: the position of its first op, of those that run for each microbatch in the
        forward phase. An op has one position; a loop over layers has one for each.
    """

    starts: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """In how many stages it is cut."""
        return len(self.starts) + 1

    def stages(self, num_positions: int) -> list[int]:
        """The stage at each position."""
        return [sum(start <= i for start in self.starts) for i in range(num_positions)]


def crossing_bytes(ops: Sequence[Op], values: Sequence[Value], num_positions: Sequence[int]) -> np.ndarray:
    """By position: the bytes made before it and read from it on; [sum of num_positions + 1].

    Inside of a loop, that is also what it carries; what it reads, its last iteration reads too.
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
    """Floating-point operations of an op, of its bodies as often as they run (`while`: once; branches: the most)."""
    if op.bodies:
        bodies = [sum(num_flops(o, b.values) for o in b.ops) for each in op.bodies.values() for b in each]
        return max(bodies) if op.name == "cond" else sum(bodies) * int(op.params.get("length", 1))
    graph = Graph(tuple(values), (), (), (), ())
    rule = rule_for(op.name, [graph.value(a) for a in op.inputs], op.result_values, op.params)
    return rule.flops_per_point * rule.num_points
