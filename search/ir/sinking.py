"""Sinking: large, cheap constants of a loop are recomputed in every iteration.

JAX hoists loop-invariant values out of a `scan`. For a causal mask, `where(mask, scores, -1e9)`, these are the mask and the
constant, both broadcast to the scores' shape. Inside the body, each would be computed on the fly in the kernel that reads
it. Outside, it is an array that the compiled loop carries through all iterations, and each reads it from memory. (XLA does
not move it: its loop-invariant code motion skips values that are larger than their operands.)

So such ops are moved back. A loop's constant is computed in the body if it is large and cheap ops make it from literals,
iotas and much smaller values. The loop then reads these smaller values, which are still computed once, outside. An
optimization barrier, by which `jax.checkpoint` separates recomputed ops, does not hold a sunk value, which would become an
array there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Graph, Op, Value, without_dead_ops

LEAST_BYTES = 1 << 20
"""Smallest constant to sink, in bytes: a GPU reads smaller ones from its cache. Source: a choice of ours."""

MUCH_SMALLER = 16
"""Smallest ratio of a constant's bytes to those of the values that it is computed from. Source: a choice of ours."""

_MOVES = ("broadcast_in_dim", "iota", "reshape", "transpose", "squeeze", "convert_element_type", "select_n")
_LOGIC = ("eq", "ne", "ge", "gt", "le", "lt", "and", "or", "xor", "not")
_ARITHMETIC = ("add", "sub", "mul", "neg", "max", "min", "abs", "sign")
CHEAP = frozenset((*_MOVES, *_LOGIC, *_ARITHMETIC))
"""Primitives of at most one instruction per element."""


def sunk(graph: Graph, is_whole: bool = False) -> Graph:
    """The graph with large constants of its loops computed in their bodies, outermost loops first.

    Args:
      graph: the graph.
      is_whole: whether the values that a constant is computed from are computed in the body too, if they are large and cheap
        themselves.
    """

    def sinking(op: Op) -> Op:
        outer = _sunk_into(op, graph, is_whole) if op.name == "scan" else op
        return outer.with_bodies(lambda body: sunk(body, is_whole))

    return without_dead_ops(graph.with_ops(sinking))


def _sunk_into(loop: Op, graph: Graph, is_whole: bool) -> Op:
    """The loop with its large, cheap constants computed in its body."""
    num_consts, num_carry = loop.loop_counts
    (body,) = loop.bodies["jaxpr"]
    entering = list(zip(loop.inputs, body.inputs, strict=True))
    makers = {
        inner: cheap_makers(outer, graph, graph.maker, is_whole) for outer, inner in entering[:num_consts]
    }
    if not any(makers.values()):
        return loop
    kept = [(outer, inner) for outer, inner in entering[:num_consts] if not makers[inner]]
    sinking = _Sinking(graph, body, kept)
    for outer, inner in entering[:num_consts]:
        if isinstance(outer, int) and makers[inner]:
            sinking.make(outer, inner, makers[inner])
    entering = [*sinking.consts, *entering[num_consts:]]
    num_xs, num_ys = len(loop.inputs) - num_consts - num_carry, len(loop.outputs) - num_carry
    return replace(
        loop,
        params=_jax.scan_params(loop.params, len(sinking.consts), num_carry, num_xs, num_ys),
        inputs=tuple(outer for outer, _ in entering),
        bodies={"jaxpr": (sinking.body(tuple(inner for _, inner in entering)),)},
    )


def cheap_makers(
    constant: Atom, graph: Graph, maker: Mapping[int, Op], is_whole: bool = False
) -> Sequence[Op]:
    """The cheap ops that compute a large value from much smaller ones, in program order; empty if it is not to be sunk.

    Args:
      constant: the value.
      graph: the graph of the value and its ops.
      maker: the op that makes each value.
      is_whole: whether to go on behind much smaller values that are large themselves.
    """
    num_bytes = graph.value(constant).num_bytes
    if not isinstance(constant, int) or num_bytes < LEAST_BYTES:
        return ()
    found: dict[int, Op] = {}
    left, small_bytes = [constant], 0
    while left:
        v = left.pop()
        op = maker.get(v)
        inner = cheap_makers(v, graph, maker, is_whole) if is_whole and v != constant else ()
        if inner:
            found |= {made: one for one in inner for made in one.outputs}
        elif graph.values[v].num_bytes * MUCH_SMALLER <= num_bytes:
            small_bytes += graph.values[v].num_bytes
        elif op is None or op.name not in CHEAP:
            return ()
        elif v not in found:
            found[v] = op
            left += op.operands
    is_little = small_bytes * MUCH_SMALLER <= num_bytes
    return [op for op in graph.ops if op.outputs[0] in found] if is_little else ()


class _Sinking:
    """A loop's body under construction, with the ops that are moved into it.

    Attributes:
      consts: the loop's constants, as pairs of the value outside and the input of the body.
    """

    def __init__(self, graph: Graph, body: Graph, consts: Sequence[tuple[Atom, int]]) -> None:
        self.graph, self._body, self.consts = graph, body, list(consts)
        self._values = list(body.values)
        self._inside: dict[Atom, int] = {outer: inner for outer, inner in consts if isinstance(outer, int)}
        self._made: dict[int, int] = {}
        self._ops: list[Op] = []

    def make(self, outer: int, inner: int, ops: Sequence[Op]) -> None:
        """Computes a former constant in the body by these ops."""
        for op in ops:
            if op.outputs[0] not in self._inside:
                inputs = tuple(self._read(a) for a in op.inputs)
                self._inside[op.outputs[0]] = made = self._new(op.result_values[0])
                self._ops.append(replace(op, inputs=inputs, outputs=(made,)))
        self._made[inner] = self._inside[outer]

    def body(self, inputs: tuple[int, ...]) -> Graph:
        """The body with these inputs."""
        self._ops += [self._renamed(op) for op in self._body.ops]
        outputs = tuple(map(self._now, self._body.outputs))
        values, ops = tuple(self._values), tuple(self._ops)
        return replace(self._body, values=values, inputs=inputs, ops=ops, outputs=outputs)

    def _read(self, atom: Atom) -> Atom:
        """The body's copy of a value outside; a new constant if there is none yet."""
        if not isinstance(atom, int):
            return atom
        if atom not in self._inside:
            self._inside[atom] = inner = self._new(self.graph.values[atom])
            self.consts.append((atom, inner))
        return self._inside[atom]

    def _new(self, value: Value) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _now(self, atom: Atom) -> Atom:
        return self._made.get(atom, atom) if isinstance(atom, int) else atom

    def _renamed(self, op: Op) -> Op:
        """An op of the body that reads the sunk values; a barrier no longer holds them."""
        if op.name == "optimization_barrier" and not self._made.keys().isdisjoint(op.operands):
            held = list(zip(op.inputs, op.outputs, op.result_values, strict=True))
            self._made |= {out: self._made[a] for a, out, _ in held if a in self._made}
            held = [each for each in held if each[0] not in self._made]
            inputs, outputs, values = (tuple(each[n] for each in held) for n in range(3))
            return replace(op, inputs=inputs, outputs=outputs, result_values=values)
        return replace(op, inputs=tuple(map(self._now, op.inputs)))
