"""A step rewritten so that its backward phase recomputes forward values instead of reading what was kept.

The rewritten step is a step like any other: its recomputation is ops of the backward phase, so that strategies, costs, live
ranges, the executor and the compiler need know nothing of it. What is recomputed is said by *sites*, places of forward ops.

An op so named is made once more, ahead of the first backward op that reads what it makes, and all backward readers read
that. It reads the copies of other ops so named, and of everything else what the forward phase made. That is handed over
through a barrier together with a gradient that arrives there: without it the compiler would find both copies alike, and
compute neither later nor twice (XLA:GPU, measured). Weight gradients of layers behind are in the barrier too (`_Debts`).

A loop over layers is differentiated into two: the backward one reads, for every iteration, residuals that the forward one
stacks up. Ops inside the forward loop are made once more inside the backward one. What these read is stacked in the
residual's place: a loop's carry, an op's result that is kept; slices of the same stacked parameters are sliced again.
Residuals that nobody reads any more are not stacked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from search.ir import _jax
from search.ir.factors import Kind, rule_for
from search.ir.graph import Atom, Graph, Op, Phase, Site, Step, Value, verify, without_dead_ops

SCOPE = "recomputed"
"""Added to the name scopes of what is recomputed. (What `jax.checkpoint` recomputes stands in `rematted_computation`.)"""


def recomputed(step: Step, sites: frozenset[Site]) -> Step:
    """The step with the forward ops at these sites recomputed in its backward phase.

    Args:
      step: the traced step.
      sites: of ops of the outermost graph, of ops in the body of a forward loop whose residuals a backward loop reads, or
        of such ops in the body of a loop that holds both phases.

    Returns:
      A step with the same arguments and results; the same step where there are no sites.
    """
    if not sites:
        return step
    graph = _Rewriting(step.graph, (), sites).run()
    verify(graph)
    return replace(step, graph=graph)


def loop_pairs(graph: Graph) -> dict[int, list[int]]:
    """By forward loop, the backward loops of the same graph that read what it stacks; both by op index."""
    maker = {v: i for i, op in enumerate(graph.ops) for v in op.outputs}
    pairs: dict[int, list[int]] = {}
    for b, op in enumerate(graph.ops):
        if op.name != "scan" or op.phase is not Phase.BACKWARD:
            continue
        xs = op.inputs[sum(op.loop_counts) :]
        for f in sorted({maker[a] for a in xs if isinstance(a, int) and a in maker}):
            forward = graph.ops[f]
            is_loop = forward.name == "scan" and forward.phase is Phase.FORWARD
            if is_loop and not set(_stacked(forward)).isdisjoint(a for a in xs if isinstance(a, int)):
                pairs.setdefault(f, []).append(b)
    return pairs


def _stacked(loop: Op) -> tuple[int, ...]:
    """The stacked results of a scan."""
    return loop.outputs[loop.loop_counts[1] :]


class _Copies:
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
        self._ops, self._is_recomputed, self._reach, self._copy = forward.ops, is_recomputed, reach, copy
        self._maker = {v: i for i, op in enumerate(forward.ops) for v in op.outputs}
        self.made: dict[int, int] = {}

    def comes_anew(self, v: int) -> bool:
        """Whether a value is recomputed."""
        return v in self._maker and self._is_recomputed(self._maker[v])

    def value(self, v: int) -> int:
        """What stands for a forward value; what it takes is made first, in program order."""
        missing = [self._ops[i] for i in sorted(self._missing(v))]
        needed = dict.fromkeys((*(a for op in missing for a in op.operands), v))
        entering = [a for a in needed if a not in self.made and not self.comes_anew(a)]
        self.made.update(zip(entering, self._reach(entering), strict=True))
        for op in missing:
            inputs = tuple(self.made[a] if isinstance(a, int) else a for a in op.inputs)
            self.made.update(zip(op.outputs, self._copy(op, inputs), strict=True))
        return self.made[v]

    def _missing(self, v: int) -> set[int]:
        """The ops that have to be made once more before a value is there."""
        found: set[int] = set()
        left = [v]
        while left:
            u = left.pop()
            if u not in self.made and self.comes_anew(u) and self._maker[u] not in found:
                found.add(self._maker[u])
                left += self._ops[self._maker[u]].operands
        return found


class _Written:
    """Values and ops of a graph that is being written."""

    def __init__(self, values: Sequence[Value]) -> None:
        self.values, self.ops = list(values), list[Op]()

    def new(self, value: Value) -> int:
        """One more value."""
        self.values.append(value)
        return len(self.values) - 1

    def copy(self, op: Op, inputs: tuple[Atom, ...]) -> tuple[int, ...]:
        """One more op, which does what a given one does, in the backward phase; what it makes."""
        outputs = tuple(self.new(value) for value in op.result_values)
        scope = f"{op.scope}/{SCOPE}" if op.scope else SCOPE
        self.ops.append(replace(_in_backward(op), inputs=inputs, outputs=outputs, scope=scope))
        return outputs


class _Debts:
    """Weight gradients, which nothing in the backward phase waits for while what they read is held for them.

    XLA's scheduler puts such products off to the end of the step, into the windows of their own reductions, and so would
    hold what all layers recompute (XLA:GPU, measured). Therefore each piece that is recomputed waits for the gradients due
    before the piece that came before it. Those since then are let be: their reductions shall have time to hide.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._leaving = graph, _leaving(graph)
        self._new: list[int] = []
        self._old: list[int] = []

    def read(self, op: Op) -> None:
        """A backward op."""
        if self._leaving.issuperset(op.outputs) and _sums(self._graph, op):
            self._new += op.outputs

    def due(self) -> list[int]:
        """What has to be there before the next piece is recomputed."""
        due, self._old, self._new = self._old, self._new, []
        return due


def _leaving(graph: Graph) -> set[int]:
    """What the backward phase makes for later phases alone."""
    read: set[int] = set()
    leaving: set[int] = set()
    for op in reversed(graph.ops):
        if op.phase is Phase.BACKWARD and read.isdisjoint(op.outputs):
            leaving |= set(op.outputs)
        elif op.phase is Phase.BACKWARD:
            read |= set(op.operands)
    return leaving


def _sums(graph: Graph, op: Op) -> bool:
    """Whether an op sums over something, so that its result holds less than its operands."""
    rule = rule_for(op.name, [graph.value(a) for a in op.inputs], op.result_values, op.params)
    return any(factor.kind is Kind.SUM for factor in rule.factors)


class _Rewriting:
    """One walk over a graph that holds both phases."""

    def __init__(self, graph: Graph, path: Site, sites: frozenset[Site]) -> None:
        self.graph, self.path, self.sites = graph, path, sites
        self.written = _Written(graph.values)
        self.copies = _Copies(graph, lambda i: (*path, i) in sites, self._held, self.written.copy)
        self.debts = _Debts(graph)
        self.pairs = loop_pairs(graph)
        self.place: dict[int, int] = {}
        self.backward: dict[int, None] = {}
        self.reader: Op | None = None

    def run(self) -> Graph:
        forward_of = {b: f for f, backward in self.pairs.items() for b in backward}
        for i, op in enumerate(self.graph.ops):
            if op.phase is Phase.BACKWARD:
                self.reader = op
                inputs = tuple(map(self._read, op.inputs))
                self.debts.read(op)
                op = replace(op, inputs=inputs)
            if i in forward_of:
                op = self._recomputing(forward_of[i], op)
            if op.phase is Phase.BACKWARD:
                self.backward |= dict.fromkeys(v for v in op.outputs if self.written.values[v].shape)
            self.place[i] = len(self.written.ops)
            self.written.ops.append(self._inside(i, op))
        graph = replace(self.graph, values=tuple(self.written.values), ops=tuple(self.written.ops))
        return _without_unread_stacks(graph)

    def _inside(self, i: int, op: Op) -> Op:
        """An op that holds both phases in its own body is rewritten there."""
        paths = {key: [(*self.path, i, key, j) for j in range(len(b))] for key, b in op.bodies.items()}
        is_inside = any(site[: len(p)] == p for ps in paths.values() for p in ps for site in self.sites)
        if i in self.pairs or not is_inside:
            return op
        return replace(
            op,
            bodies={
                key: tuple(
                    _Rewriting(b, p, self.sites).run() for b, p in zip(bodies, paths[key], strict=True)
                )
                for key, bodies in op.bodies.items()
            },
        )

    def _read(self, atom: Atom) -> Atom:
        """What a backward op reads."""
        if not isinstance(atom, int):
            return atom
        return self.copies.value(atom) if self.copies.comes_anew(atom) else self.copies.made.get(atom, atom)

    def _held(self, kept: Sequence[int]) -> Sequence[int]:
        """Values of the forward phase, not before a gradient has arrived and what is owed is paid."""
        if not kept:
            return ()
        arrived = self._arrived()
        ties = (*self.debts.due(), *(() if arrived is None else (arrived,)))
        inputs = tuple(dict.fromkeys((*kept, *ties)))
        results = tuple(self.written.values[a] for a in inputs)
        source = self.reader.source_info if self.reader else None
        barrier = Op(_jax.optimization_barrier_p, {}, inputs, (), results, Phase.BACKWARD, "", source, {})
        return self.written.copy(barrier, inputs)[: len(kept)]

    def _arrived(self) -> int | None:
        """A gradient that the op reads for which all this is done, or the newest one."""
        own = [v for v in (self.reader.operands if self.reader else ()) if v in self.backward]
        return own[0] if own else next(reversed(self.backward), None)

    def _recomputing(self, f: int, backward: Op) -> Op:
        """A backward loop that recomputes what it reads of a forward one, which is rewritten too."""
        body = (*self.path, f, "jaxpr", 0)
        forward = self.written.ops[self.place[f]]
        is_recomputed = [(*body, i) in self.sites for i in range(len(forward.bodies["jaxpr"][0].ops))]
        if not any(is_recomputed):
            return backward
        loops = _LoopPair(forward, backward, is_recomputed.__getitem__, self.written.new, self._read)
        self.written.ops[self.place[f]], backward = loops.run()
        return backward


@dataclass(eq=False)
class _Loop:
    """A scan, taken apart."""

    op: Op
    body: Graph
    consts: list[tuple[Atom, int]]
    inits: list[tuple[Atom, int]]
    xs: list[tuple[Atom, int]]
    ys: list[tuple[Atom, int, Value]]

    @classmethod
    def of(cls, op: Op) -> "_Loop":
        body, (num_consts, num_carry) = op.bodies["jaxpr"][0], op.loop_counts
        entering = list(zip(op.inputs, body.inputs, strict=True))
        leaving = list(zip(body.outputs, op.outputs, op.result_values, strict=True))
        first_x = num_consts + num_carry
        parts = entering[:num_consts], entering[num_consts:first_x], entering[first_x:]
        return cls(op, body, *parts, leaving[num_carry:])

    @property
    def carries(self) -> tuple[tuple[Atom, ...], tuple[int, ...], tuple[Value, ...]]:
        """What the body hands on, and what comes out at the end."""
        n = len(self.inits)
        return self.body.outputs[:n], self.op.outputs[:n], self.op.result_values[:n]

    def put_together(self) -> Op:
        """The scan of the parts as they are now."""
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


class _LoopPair:
    """A forward loop, and the backward loop that recomputes some of its ops.

    Attributes:
      forward: the one.
      backward: the other.
      new_value: makes a value of the graph that they stand in.
      read: what stands for a value of that graph where the backward loop stands.
    """

    def __init__(
        self,
        forward: Op,
        backward: Op,
        is_recomputed: Callable[[int], bool],
        new_value: Callable[[Value], int],
        read: Callable[[Atom], Atom],
    ) -> None:
        self.forward, self.backward = _Loop.of(forward), _Loop.of(backward)
        self.new_value, self.read = new_value, read
        self.written = _Written(self.backward.body.values)
        self.constants = list(self.backward.body.constants)
        self.copies = _Copies(self.forward.body, is_recomputed, self._reached, self.written.copy)

    def run(self) -> tuple[Op, Op]:
        """Both loops anew."""
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
        """A value of the forward loop's body that is not recomputed, in the backward loop's."""
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
        """The backward body's own input for something outside."""
        outer = self.read(outer)
        for known, inner in entering:
            if isinstance(outer, int) and known == outer:
                return inner
        entering.append((outer, inner := self.written.new(self.forward.body.values[v])))
        return inner

    def _stack(self, v: int) -> int:
        """What the forward loop stacks up of a value in its body."""
        for y, out, _ in self.forward.ys:
            if isinstance(y, int) and y == v:
                return out
        value = self.forward.body.values[v]
        length = int(self.forward.op.params["length"])
        stacked = Value((length, *value.shape), value.dtype, value.weak_type)
        self.forward.ys.append((v, out := self.new_value(stacked), stacked))
        return out


def _in_backward(op: Op) -> Op:
    bodies = {
        key: tuple(replace(b, ops=tuple(map(_in_backward, b.ops))) for b in bodies)
        for key, bodies in op.bodies.items()
    }
    return replace(op, phase=Phase.BACKWARD, bodies=bodies)


def _without_unread_stacks(graph: Graph) -> Graph:
    """Loops stack up only what is read."""
    read = {a for a in graph.outputs if isinstance(a, int)} | {v for op in graph.ops for v in op.operands}
    return without_dead_ops(replace(graph, ops=tuple(_only(read, graph.ops))))


def _only(read: set[int], ops: Sequence[Op]) -> Iterator[Op]:
    for op in ops:
        if op.name == "scan" and not read.issuperset(_stacked(op)):
            loop = _Loop.of(op)
            loop.ys = [y for y in loop.ys if y[1] in read]
            op = loop.put_together()
        yield op
