"""Ops of the forward phase, made once more in the backward phase.

What these read besides is handed over. But what light ops make of next to nothing, a mask or one number for every element,
is made once more too. Handed over it would be an array, as the compiler stores what a barrier holds; made anew it is
computed on the fly.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoshard.search.ir.graph import Atom, Graph, Op, Phase
from autoshard.search.ir.sinking import light_makers
from autoshard.search.memory.written import Written

SCOPE = "recomputed"
"""Added to the name scopes of what is recomputed. (What `jax.checkpoint` recomputes stands in `rematted_computation`.)"""


class Copies:
    """What ops of a forward graph make, made once more elsewhere.

    Attributes:
      made: by forward value, what stands for it there.
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
        self._maker = {v: i for i, op in enumerate(forward.ops) for v in op.outputs}
        self._maker_op = {v: op for op in forward.ops for v in op.outputs}
        self._light: set[int] = set()
        self.made: dict[int, int] = {}

    def comes_anew(self, v: int) -> bool:
        """Whether a value is recomputed."""
        return v in self._maker and self._is_recomputed(self._maker[v])

    def value(self, v: int) -> int:
        """What stands for a forward value; what it takes is made first, in program order."""
        missing = [self._ops[i] for i in sorted(self._missing(v))]
        needed = dict.fromkeys((*(a for op in missing for a in op.operands), v))
        entering = [a for a in needed if a not in self.made and not self._is_made_here(a)]
        self.made.update(zip(entering, self._reach(entering), strict=True))
        for op in missing:
            inputs = tuple(self.made[a] if isinstance(a, int) else a for a in op.inputs)
            self.made.update(zip(op.outputs, self._copy(op, inputs), strict=True))
        return self.made[v]

    def _is_made_here(self, v: int) -> bool:
        """Whether it is made anew though it may not be recomputed."""
        if v not in self._light and not self.comes_anew(v):
            makers = light_makers(v, self._forward, self._maker_op)
            self._light.update(u for op in makers for u in op.outputs)
        return v in self._light or self.comes_anew(v)

    def _missing(self, v: int) -> set[int]:
        """The ops that have to be made once more before a value is there."""
        found: set[int] = set()
        left = [v]
        while left:
            u = left.pop()
            if u not in self.made and self._is_made_here(u) and self._maker[u] not in found:
                found.add(self._maker[u])
                left += self._ops[self._maker[u]].operands
        return found


def copied(written: Written, op: Op, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
    """Appends an op that does what a given one does, in the backward phase; what it makes."""
    outputs = tuple(written.new(value) for value in op.result_values)
    scope = f"{op.scope}/{SCOPE}" if op.scope else SCOPE
    written.ops.append(replace(_in_backward(op), inputs=inputs, outputs=outputs, scope=scope))
    return outputs


def _in_backward(op: Op) -> Op:
    bodies = {
        key: tuple(replace(b, ops=tuple(map(_in_backward, b.ops))) for b in bodies)
        for key, bodies in op.bodies.items()
    }
    return replace(op, phase=Phase.BACKWARD, bodies=bodies)
