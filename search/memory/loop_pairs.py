"""The two loops into which a loop over layers is differentiated: the backward loop reads the stacks of the forward loop.

Recomputed ops of the forward body are copied into the backward body. Their operands are stacked in the residual's place: a
carry of the loop, or a kept result of an op. Slices of stacked parameters are taken from the same parameters. Stacks that no
op reads are removed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Graph, Op, Phase, Value, without_dead_ops
from autoshard.search.memory.copies import OpCopier, copied
from autoshard.search.memory.written import Written


def loop_pairs(graph: Graph) -> dict[int, list[int]]:
    """By forward loop, the backward loops of the same graph that read its stacks; both by op index."""
    maker = graph.made_at
    pairs: dict[int, list[int]] = {}
    for b, op in enumerate(graph.ops):
        if op.name != "scan" or op.phase is not Phase.BACKWARD:
            continue
        xs = [a for a in op.sliced if isinstance(a, int)]
        for f in sorted({maker[a] for a in xs if a in maker}):
            forward = graph.ops[f]
            is_loop = forward.name == "scan" and forward.phase is Phase.FORWARD
            if is_loop and not set(forward.stacked).isdisjoint(xs):
                pairs.setdefault(f, []).append(b)
    return pairs


@dataclass(eq=False)
class Loop:
    """A scan, separated into its body, operands and stacked results."""

    op: Op
    body: Graph
    consts: list[tuple[Atom, int]]
    inits: list[tuple[Atom, int]]
    xs: list[tuple[Atom, int]]
    ys: list[tuple[Atom, int, Value]]

    @classmethod
    def of(cls, op: Op) -> "Loop":
        body, (num_consts, num_carry) = op.bodies["jaxpr"][0], op.loop_counts
        entering = list(zip(op.inputs, body.inputs, strict=True))
        leaving = list(zip(body.outputs, op.outputs, op.result_values, strict=True))
        first_x = num_consts + num_carry
        parts = entering[:num_consts], entering[num_consts:first_x], entering[first_x:]
        return cls(op, body, *parts, leaving[num_carry:])

    @property
    def carries(self) -> tuple[tuple[Atom, ...], tuple[int, ...], tuple[Value, ...]]:
        """The carries: the body's outputs, the scan's results and their types."""
        n = len(self.inits)
        return self.body.outputs[:n], self.op.outputs[:n], self.op.result_values[:n]

    def put_together(self) -> Op:
        """The scan assembled from the current parts."""
        again, outputs, values = self.carries
        entering = (*self.consts, *self.inits, *self.xs)
        body = replace(
            self.body,
            inputs=tuple(inner for _, inner in entering),
            outputs=(*again, *(y for y, _, _ in self.ys)),
        )
        counts = len(self.consts), len(self.inits), len(self.xs), len(self.ys)
        return replace(
            self.op,
            params=_jax.scan_params(self.op.params, *counts),
            inputs=tuple(outer for outer, _ in entering),
            outputs=(*outputs, *(out for _, out, _ in self.ys)),
            result_values=(*values, *(value for _, _, value in self.ys)),
            bodies={"jaxpr": (without_dead_ops(body),)},
        )


class LoopPair:
    """A forward loop, and the backward loop that recomputes some of its ops.

    Attributes:
      forward: the forward loop.
      backward: the backward loop.
      new_value: adds a value to the graph that holds both loops.
      read: the replacement of a value of that graph at the backward loop.
    """

    def __init__(
        self,
        forward: Op,
        backward: Op,
        is_recomputed: Callable[[int], bool],
        new_value: Callable[[Value], int],
        read: Callable[[Atom], Atom],
    ) -> None:
        self.forward, self.backward = Loop.of(forward), Loop.of(backward)
        self.new_value, self.read = new_value, read
        self.written = Written(self.backward.body.values)
        self.constants = list(self.backward.body.constants)
        self.copies = OpCopier(self.forward.body, is_recomputed, self._reached, partial(copied, self.written))

    def run(self) -> tuple[Op, Op]:
        """Both loops after the rewrite."""
        made_as = {out: y for y, out, _ in self.forward.ys}
        anew: dict[int, int] = {}
        for outer, inner in list(self.backward.xs):
            y = made_as.get(outer) if isinstance(outer, int) else None
            if isinstance(y, int) and self.copies.comes_anew(y):
                anew[inner] = y
                self.backward.xs.remove((outer, inner))
        for op in self.backward.body.ops:
            self.written.ops.append(replace(op, inputs=tuple(self._read(a, anew) for a in op.inputs)))
        outputs = tuple(self._read(a, anew) for a in self.backward.body.outputs)
        self.backward.body = replace(
            self.backward.body,
            values=tuple(self.written.values),
            constants=tuple(self.constants),
            ops=tuple(self.written.ops),
            outputs=outputs,
        )
        num_carry = len(self.backward.inits)
        self.backward.ys = [
            (y, out, value) for y, (_, out, value) in zip(outputs[num_carry:], self.backward.ys, strict=True)
        ]
        return self.forward.put_together(), self.backward.put_together()

    def _read(self, atom: Atom, anew: dict[int, int]) -> Atom:
        return self.copies.value(anew[atom]) if isinstance(atom, int) and atom in anew else atom

    def _reached(self, kept: Sequence[int]) -> Sequence[int]:
        return [self._reached_one(v) for v in kept]

    def _reached_one(self, v: int) -> int:
        """The backward body's counterpart of a value of the forward body that is not recomputed."""
        content = dict(self.forward.body.constants)
        if v in content:
            self.constants.append((inner := self.written.new(self.forward.body.values[v]), content[v]))
            return inner
        entered = {inner: outer for outer, inner in self.forward.consts}
        if v in entered:
            return self._entering(self.backward.consts, entered[v], v)
        sliced = {inner: outer for outer, inner in self.forward.xs}
        return self._entering(self.backward.xs, sliced[v] if v in sliced else self._stack(v), v)

    def _entering(self, entering: list[tuple[Atom, int]], outer: Atom, v: int) -> int:
        """The backward body's input for a value outside of the loop, added if there is none."""
        outer = self.read(outer)
        for known, inner in entering:
            if isinstance(outer, int) and known == outer:
                return inner
        entering.append((outer, inner := self.written.new(self.forward.body.values[v])))
        return inner

    def _stack(self, v: int) -> int:
        """The forward loop's stack of a value in its body, added if there is none."""
        for y, out, _ in self.forward.ys:
            if isinstance(y, int) and y == v:
                return out
        value = self.forward.body.values[v]
        length = int(self.forward.op.params["length"])
        stacked = Value((length, *value.shape), value.dtype)
        self.forward.ys.append((v, out := self.new_value(stacked), stacked))
        return out


def without_unread_stacks(graph: Graph) -> Graph:
    """The graph with only those stacks of its loops that are read."""
    read = {*graph.made} | {v for op in graph.ops for v in op.operands}
    return without_dead_ops(replace(graph, ops=tuple(_only(read, graph.ops))))


def _only(read: set[int], ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        if op.name == "scan" and not read.issuperset(op.stacked):
            loop = Loop.of(op)
            loop.ys = [y for y in loop.ys if y[1] in read]
            op = loop.put_together()
        yield op
