"""Where the forward phase is cut into stages: balanced work, and few bytes that cross.

Any cut of a program into runs of ops, in the order in which they stand, is a valid pipeline: what a run reads, it or one
before it has made. A cut costs what has to be sent at it for each microbatch: the values made before it and read behind
it. (What skips a stage counts at both of its borders.)

The cuts are found by dynamic programming over ops, as Alpa clusters a step's ops into layers (Zheng et al. 2022, section
5.2): of all cuttings in which no stage has more than its share of the work by some tolerance, the one at which the fewest
bytes cross; of those with equally few, as there are between equal blocks, the most even one. The tolerance is the smallest
of a ladder that allows any.

The work of an op is its floating-point operations, which its factor rule knows; a loop's is that of its body, as often as
it runs. A backward phase is about twice its forward phase everywhere, so it does not change the shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from cost_model.errors import InputError
from search.ir.factors import rule_for
from search.ir.graph import Graph, Op, Value

TOLERANCES = (0.05, 0.1, 0.2, 0.5, 1.0, float("inf"))
"""By how much a stage may have more than its share of the work. Source: a choice of ours; Alpa allows 0.5."""

ROUNDING = 1e-9
"""Relative; sums of the same work in another order differ by less."""


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


def balanced_cut(
    ops: Sequence[Op], values: Sequence[Value], num_positions: Sequence[int], num_stages: int
) -> StageCut:
    """The cut of a program into stages of equal work at which the fewest bytes cross.

    Args:
      ops: what runs for each microbatch in the forward phase, in program order.
      values: by number.
      num_positions: of each op.
      num_stages: how many.

    Raises:
      InputError: there is not as much to cut.
    """
    work = np.array([num_flops(op, values) for op in ops])
    flops = np.repeat(work / num_positions, num_positions)
    if num_stages < 1 or np.count_nonzero(flops) < num_stages:
        raise InputError(
            f"wanted {num_stages} stages, but the step's forward phase has {np.count_nonzero(flops)} ops, or layers "
            "of a loop, that compute anything for a microbatch. Ask for fewer stages"
        )
    crossing = crossing_bytes(ops, values, num_positions)
    for tolerance in TOLERANCES:
        starts = _cut(flops, crossing, num_stages, (1 + tolerance) * flops.sum() / num_stages)
        if starts is not None:
            return StageCut(starts)
    raise AssertionError("any cut is allowed in the end")


def crossing_bytes(ops: Sequence[Op], values: Sequence[Value], num_positions: Sequence[int]) -> np.ndarray:
    """By position: the bytes made before it and read from it on; [sum of num_positions + 1].

    Inside of a loop, that is also what it carries; what it reads, its last iteration reads too.
    """
    ends = list(accumulate(num_positions))
    made = {v: end for op, end in zip(ops, ends, strict=True) for v in op.outputs}
    read = {v: end for op, end in zip(ops, ends, strict=True) for v in op.operands if v in made}
    change = np.zeros(ends[-1] + 2)
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


def _cut(
    flops: np.ndarray, crossing: np.ndarray, num_stages: int, most_flops: float
) -> tuple[int, ...] | None:
    """The best cut in which each stage has some work, and no more than so much; None if there is none.

    `best[j]` is the least cost of as many stages as there are so far, which end before op j: bytes that cross, and a part of
    a byte for unevenness.
    """
    num_ops, share = len(flops), flops.sum() / num_stages
    before = np.concatenate([[0.0], np.cumsum(flops)])
    firsts = np.searchsorted(before, before - most_flops * (1 + ROUNDING))
    best = np.full(num_ops + 1, np.inf)
    best[0] = 0.0
    origins: list[np.ndarray] = []
    for stage in range(num_stages):
        reached, origin = np.full(num_ops + 1, np.inf), np.zeros(num_ops + 1, int)
        for end in range(1, num_ops + 1) if stage < num_stages - 1 else (num_ops,):
            work = before[end] - before[firsts[end] : end]
            uneven = (work / share - 1) ** 2 / (num_stages + 1) ** 3
            costs = np.where(work > 0, best[firsts[end] : end] + uneven, np.inf)
            if len(costs):
                origin[end] = firsts[end] + np.argmin(costs)
                reached[end] = costs.min() + crossing[end]
        best = reached
        origins.append(origin)
    return _traced_back(origins) if np.isfinite(best[-1]) else None


def _traced_back(origins: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The starts of the stages behind the first."""
    starts, end = list[int](), len(origins[0]) - 1
    for origin in reversed(origins):
        end = int(origin[end])
        starts.append(end)
    return tuple(reversed(starts[:-1]))
