"""Loops over layers, cut between two layers.

Layers under `scan` are one op, forward and backward. A cut makes several loops of the forward one, each over a run of
its iterations: the carry goes from one to the next, stacked operands (parameters) are sliced, and the stacks that each
makes (residuals) stay apart. A backward loop that reads such stacks is cut at the same iterations, and reads each part
from its loop. Other readers of a stack get its parts concatenated; for gradients, this happens once for all
microbatches (`shared_gradients`).

A loop is worth cutting if it slices more bytes of parameters than its iterations share: layers have their own
parameters, and the steps of a recurrent network share theirs.

In a cut, a loop that may be cut counts as many positions as it has iterations.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.search.ir.graph import Atom, Op
from autoshard.search.memory.loop_pairs import Loop
from autoshard.search.memory.written import Written
from autoshard.search.pipeline.pipeline_step import SCOPE, PipelineStep
from autoshard.search.pipeline.stage_cut import StageCut

IterationBounds = tuple[int, ...]
"""The first iterations of the parts of a loop, and the end of the last one."""


def num_positions(step: PipelineStep, op: Op) -> int:
    """Number of positions of a forward op in a cut."""
    return int(op.params["length"]) if is_of_layers(step, op) else 1


def is_of_layers(step: PipelineStep, op: Op) -> bool:
    """True if an op is a loop that may be cut."""
    if op.name != "scan" or op.params["reverse"]:
        return False
    num_consts, num_carry = op.loop_counts

    def num_bytes(atoms: Sequence[Atom]) -> int:
        return sum(step.values[v].num_bytes for v in atoms if isinstance(v, int) and v in step.weights)

    return num_carry > 0 and num_bytes(op.inputs[num_consts + num_carry :]) > num_bytes(
        op.inputs[:num_consts]
    )


def between_ops(step: PipelineStep, cut: StageCut) -> tuple[PipelineStep, StageCut]:
    """The step with its loops cut where a cut goes through them, and the cut of the new forward ops."""
    bounds: dict[Op, IterationBounds] = {}
    firsts: list[tuple[Op, int]] = []
    position = 0
    for op in step.forward_ops:
        num = num_positions(step, op)
        inside = [start - position for start in cut.starts if position <= start < position + num]
        firsts += [(op, start) for start in inside]
        if any(inside):
            bounds[op] = tuple(sorted({0, *inside, num}))
        position += num
    splitting = _Splitting(step, bounds)
    after = splitting.run() if bounds else step
    index = {op: i for i, op in enumerate(after.forward_ops)}
    return after, StageCut(tuple(index[splitting.loops.get(first, first[0])] for first in firsts))


class _Splitting:
    """The body with its loops cut.

    Attributes:
      parts: by stack that is made in parts, its parts, and their first iterations.
      whole: the stacks that were concatenated again.
      loops: by loop and first iteration, the loop over a part.
    """

    def __init__(self, step: PipelineStep, bounds: dict[Op, IterationBounds]) -> None:
        self.step, self.bounds = step, bounds
        self.body = Written(step.values, SCOPE)
        self.sliced: list[Op] = []
        self.once: set[int] = set()
        self.like = dict(step.like)
        self.parts: dict[int, tuple[tuple[int, ...], IterationBounds]] = {}
        self.whole: set[int] = set()
        self.slices: dict[tuple[Atom, int, int], Atom] = {}
        self.loops: dict[tuple[Op, int], Op] = {}

    def run(self) -> PipelineStep:
        step = self.step
        for op in step.body:
            bounds = self.bounds.get(op) or self._bounds_of_stacks(op)
            if bounds is not None:
                self._split(op, bounds)
            else:
                self._put_together(op.operands, op)
                self.body.ops.append(op)
        handed_on = [*step.terms.values(), *(v for v, _ in step.pieces.values())]
        for v in handed_on:
            self._put_together((v,), step.maker[v])
        added = range(len(step.values), len(self.body.values))
        return replace(
            step,
            values=tuple(self.body.values),
            prologue=(*step.prologue, *self.sliced),
            body=tuple(self.body.ops),
            of_microbatch=step.of_microbatch | frozenset(v for v in added if v not in self.once),
            like=self.like,
        )

    def _bounds_of_stacks(self, op: Op) -> IterationBounds | None:
        """The iterations at which a backward loop is cut, if it reads stacks that are made in parts."""
        if op.name != "scan" or not op.params["reverse"]:
            return None
        stacks = op.sliced
        return next((self.parts[v][1] for v in stacks if isinstance(v, int) and v in self.parts), None)

    def _split(self, op: Op, bounds: IterationBounds) -> None:
        """Appends the loops over parts of a loop's iterations, in the order in which they run."""
        num_carry = op.loop_counts[1]
        self._put_together([v for v in op.operands if v in self.parts and self.parts[v][1] != bounds], op)
        runs = list(pairwise(bounds))[:: -1 if op.params["reverse"] else 1]
        ys = op.outputs[num_carry:]
        stacks: dict[tuple[int, int], tuple[int, ...]] = {}
        carried: Sequence[Atom] | None = None
        for run in runs:
            loop = Loop.of(replace(op, params=_of_length(op, run[1] - run[0])))
            if carried is not None:
                loop.inits = [(a, inner) for a, (_, inner) in zip(carried, loop.inits, strict=True)]
            loop.xs = [(self._part(a, run), inner) for a, inner in loop.xs]
            stacks[run] = tuple(self._new_part(v, run) for v in ys)
            values = self.body.values
            loop.ys = [(y, out, values[out]) for (y, _, _), out in zip(loop.ys, stacks[run], strict=True)]
            one, is_last = loop.put_together(), run == runs[-1]
            outputs = op.outputs[:num_carry] if is_last else tuple(map(self._like, op.outputs[:num_carry]))
            self.loops[op, run[0]] = part = replace(one, outputs=(*outputs, *stacks[run]))
            self.body.ops.append(part)
            carried = outputs
        for n, v in enumerate(ys):
            self.parts[v] = tuple(stacks[run][n] for run in pairwise(bounds)), bounds

    def _like(self, v: int) -> int:
        """A new value with the type and the spec of another one."""
        made = self.body.new(self.step.values[v])
        self.like[made] = v
        return made

    def _new_part(self, stack: int, run: tuple[int, int]) -> int:
        """A part of a stack."""
        made = self._like(stack)
        value = self.step.values[stack]
        self.body.values[made] = replace(value, shape=(run[1] - run[0], *value.shape[1:]))
        return made

    def _part(self, stack: Atom, run: tuple[int, int]) -> Atom:
        """The part of a stack that a loop over some iterations reads."""
        if not isinstance(stack, int):
            return stack
        if stack in self.parts:
            parts, bounds = self.parts[stack]
            return parts[bounds.index(run[0])]
        if (stack, *run) not in self.slices:
            self.slices[stack, *run] = self._sliced(stack, run)
        return self.slices[stack, *run]

    def _sliced(self, stack: int, run: tuple[int, int]) -> Atom:
        is_once = not self.step.is_of_microbatch(stack)
        first_op, first = len(self.body.ops), len(self.body.values)
        part = self.body.write(partial(_first, run[1] - run[0]), (stack,), None)
        assert isinstance(part, int)
        self.body.ops[-1] = _moved(self.body.ops[-1], run[0])
        self.like[part] = stack
        if is_once:
            self.sliced += self.body.ops[first_op:]
            del self.body.ops[first_op:]
            self.once.update(range(first, len(self.body.values)))
        return part

    def _put_together(self, values: Sequence[int], like: Op) -> None:
        """Concatenates stacks of their parts."""
        for v in dict.fromkeys(values):
            if v in self.parts and v not in self.whole:
                self.body.write(_concatenated, self.parts[v][0], self._maker(v, like), v)
                self.whole.add(v)

    def _maker(self, v: int, like: Op) -> Op:
        return self.step.maker.get(v, like)


def _of_length(op: Op, length: int) -> dict[str, Any]:
    return {**op.params, "length": length, "unroll": min(int(op.params["unroll"]), length)}


def _first(length: int, stack: Any) -> Any:
    return jax.lax.slice_in_dim(stack, 0, length)


def _moved(op: Op, start: int) -> Op:
    """A slice from the beginning of a stack, moved to another place: JAX traces it once for all places."""
    assert op.name == "slice", op.name
    (_, *starts), (length, *limits) = op.params["start_indices"], op.params["limit_indices"]
    places = {"start_indices": (start, *starts), "limit_indices": (start + length, *limits)}
    return replace(op, params={**op.params, **places})


def _concatenated(*parts: Any) -> Any:
    return jnp.concatenate(parts)
