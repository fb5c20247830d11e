"""Forward ops recomputed in the backward phase.

Operands that are not recomputed come from the caller, for example through a barrier. Light ops on almost no data, such as a
mask or one number for every element, are recomputed too. Behind a barrier such a value would be an array, because the
compiler stores the operands of a barrier; recomputed, it is computed on the fly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.search.ir.graph import Atom, Graph, Op, Phase
from autoshard.search.ir.sinking import cheap_makers
from autoshard.search.memory.written import Written

SCOPE = "recomputed"
"""Suffix of the name scopes of recomputed ops. (`jax.checkpoint` recomputes ops in the scope `rematted_computation`.)"""


def is_recomputed(op: Op | None) -> bool:
    """True if an op was added to recompute another one."""
    return op is not None and op.scope.endswith(SCOPE)


class OpCopier:
    """Recomputes ops of a forward graph in another place.

    Attributes:
      made: by forward value, its replacement in that place.
    """

    def __init__(
        self,
        forward: Graph,
        is_recomputed: Callable[[int], bool],
        reach: Callable[[Sequence[int]], Sequence[int]],
        copy: Callable[[Op, tuple[Atom, ...]], tuple[int, ...]],
    ) -> None:
        self._forward, self._ops = forward, forward.ops
        self._is_recomputed, self._reach, self._copy = is_recomputed, reach, copy
        self._maker = forward.made_at
        self._sunk: set[int] = set()
        self.made: dict[int, int] = {}

    def comes_anew(self, v: int) -> bool:
        """True if a value is recomputed."""
        return v in self._maker and self._is_recomputed(self._maker[v])

    def value(self, v: int) -> int:
        """The replacement of a forward value; the ops that it still needs are copied first, in program order."""
        missing = [self._ops[i] for i in sorted(self._missing(v))]
        needed = dict.fromkeys((*(a for op in missing for a in op.operands), v))
        entering = [a for a in needed if a not in self.made and not self._is_made_here(a)]
        self.made.update(zip(entering, self._reach(entering), strict=True))
        for op in missing:
            inputs = tuple(self.made[a] if isinstance(a, int) else a for a in op.inputs)
            self.made.update(zip(op.outputs, self._copy(op, inputs), strict=True))
        return self.made[v]

    def _is_made_here(self, v: int) -> bool:
        """True if a value is recomputed, either by choice or because cheap ops make it."""
        if v not in self._sunk and not self.comes_anew(v):
            makers = cheap_makers(v, self._forward, self._forward.maker)
            self._sunk.update(u for op in makers for u in op.outputs)
        return v in self._sunk or self.comes_anew(v)

    def _missing(self, v: int) -> set[int]:
        """The ops to copy before a value is available."""
        found: set[int] = set()
        left = [v]
        while left:
            u = left.pop()
            if u not in self.made and self._is_made_here(u) and self._maker[u] not in found:
                found.add(self._maker[u])
                left += self._ops[self._maker[u]].operands
        return found


def copied(written: Written, op: Op, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
    """Appends a copy of an op to the backward phase; returns the values that the copy makes."""
    outputs = tuple(written.new(value) for value in op.result_values)
    written.ops.append(replace(_in_backward(op), inputs=inputs, outputs=outputs))
    return outputs


def _in_backward(op: Op) -> Op:
    """An op, with those in its bodies, in the backward phase and in the scope of recomputed ops."""
    inside = op.with_bodies(lambda body: body.with_ops(_in_backward))
    return replace(inside, phase=Phase.BACKWARD, scope=f"{op.scope}/{SCOPE}" if op.scope else SCOPE)
