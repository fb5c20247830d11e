"""Sums of powers of the distance from a mean, made in microbatches.

`sum((x - m) ** 2)`, with a mean m over all examples, reads for each example a value that is known only after the last one. A
microbatch g has a mean of its own, m_g. The sum over its examples is a polynomial F_g in the mean, so Taylor's series around
m_g ends, and is exact:

    F_g(m) = F_g(m_g) + F_g'(m_g) (m - m_g) + F_g''(m_g) / 2 (m - m_g)^2 + ...

A microbatch returns its m_g and the coefficients; the mean of all and the sum of these series are made after the last one.
For a variance this is the update of Chan, Golub and LeVeque ("Updating formulae and a pairwise algorithm for computing
sample variances", 1982). It avoids the cancellation in a sum of squares less the square of the sum.

The distances may be weighted, chosen by a mask, converted to another type of float and raised to a power. All of that must
work element by element, and be a polynomial in the mean. Its degree is followed through the ops; JAX makes its derivatives.
Where the mean differs from one place to another (a variance for each feature), the sum over these places is made last.

Any linear function of sums over examples may replace `m`. Its counterpart m_g is that function of the microbatch's sums,
times the number of microbatches. The series is exact around any other value, too, but its terms would be large.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import factorial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from autoshard.cost_model.memo import memo
from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Graph, Op, without_dead_ops
from autoshard.search.memory.batch_states import (
    OF_MICROBATCH,
    BatchSplit,
    Finished,
    Partial,
    PerExample,
    State,
    is_unsplit,
    local_value,
)
from autoshard.search.memory.microbatch_body import around, in_parts
from autoshard.search.memory.written import Written

MOST = 4
"""The highest power: that of a kurtosis."""

_KEEPING = frozenset({"neg", "copy", "name", "convert_element_type"})
_ADDING = frozenset({"add", "sub", "add_any"})


def with_moments(graph: Graph, split: BatchSplit) -> Graph:
    """The graph with sums of powers of such distances rewritten for microbatches, in bodies too.

    Args:
      graph: the split's.
      split: by a walk that is not strict.
    """
    written = Written(graph.values)
    is_same = True
    for i, op in enumerate(graph.ops):
        is_same &= _rewritten(i, op, split, written)
    return (
        graph
        if is_same
        else without_dead_ops(replace(graph, values=tuple(written.values), ops=tuple(written.ops)))
    )


def _rewritten(i: int, op: Op, split: BatchSplit, written: Written) -> bool:
    """Appends an op as microbatches make it; returns whether it is unchanged."""
    if i in split.inner:
        bodies = {key: tuple(with_moments(s.graph, s) for s in each) for key, each in split.inner[i].items()}
        is_same = all(a is b for key in bodies for a, b in zip(bodies[key], op.bodies[key], strict=True))
        written.ops.append(op if is_same else replace(op, bodies=bodies))
        return is_same
    moment = _moment(op, split) if op.name == "reduce_sum" and split.makes_finished(op) else None
    if moment is None:
        written.ops.append(op)
        return True
    moment.write(written)
    return False


def _moment(op: Op, split: BatchSplit) -> "_Moment | None":
    """The sum as a polynomial in a mean; None if it is none."""
    search = _MeanSearch(op, split)
    degree = search.degree(op.inputs[0])
    if degree is None or not 1 <= degree <= MOST or len(search.means) != 1 or len(search.places) != 1:
        return None
    (mean,), (place,) = search.means, search.places
    shape = split.graph.value(op.inputs[0]).shape
    aligned = _aligned(mean, split, shape)
    if aligned is None or place.dim not in op.params["axes"] or aligned.sizes[place.dim] != 1:
        return None
    chain = _MeanChain(aligned.source, split)
    is_float = all(jnp.issubdtype(split.graph.value(a).dtype, jnp.floating) for a in (mean, op.outputs[0]))
    if not (is_float and chain.is_linear):
        return None
    return _Moment(op, split, degree, place, mean, aligned, tuple(search.ops), tuple(search.leaves), chain)


class _MeanSearch:
    """Goes back from a sum's operand to the values available in each microbatch, and to the mean.

    Attributes:
      ops: the ops on the way.
      leaves: the values available in each microbatch.
      means: the sums over all examples that are read.
      places: the states of leaves that carry examples.
    """

    def __init__(self, op: Op, split: BatchSplit) -> None:
        self.split, self.shape = split, split.graph.value(op.inputs[0]).shape
        self.ops: dict[int, None] = {}
        self.leaves: dict[int, None] = {}
        self.means: dict[int, None] = {}
        self.places: dict[PerExample, None] = {}
        self.number = {op: i for i, op in enumerate(split.graph.ops)}

    def degree(self, atom: Atom) -> int | None:
        """The degree of an operand as a polynomial in the mean; None if it is none."""
        return self._degree(atom) if isinstance(atom, int) else 0

    @memo
    def _degree(self, v: int) -> int | None:
        state = self.split.states[v]
        if isinstance(state, Partial):
            self.means[v] = None
            return 1
        if isinstance(state, PerExample) or is_unsplit(state):
            self.leaves[v] = None
            if isinstance(state, PerExample):
                self.places[state] = None
            return 0
        op = self.split.scope.maker.get(v)
        if op is None or not isinstance(state, Finished) or op.result_values[0].shape != self.shape:
            return None
        self.ops[self.number[op]] = None
        return self._of(op, [self.degree(a) for a in op.inputs])

    def _of(self, op: Op, read: Sequence[int | None]) -> int | None:
        known = [d for d in read if d is not None]
        if len(known) < len(read) or not jnp.issubdtype(op.result_values[0].dtype, jnp.floating):
            return None
        if op.name in _ADDING or op.name in _KEEPING:
            return max(known)
        if op.name == "mul":
            return sum(known)
        if op.name in ("square", "integer_pow"):
            power = 2 if op.name == "square" else op.params["y"]
            return power * known[0] if power > 0 else None
        if op.name == "div":
            return None if known[1] else known[0]
        if op.name == "select_n":
            return None if known[0] else max(known)
        return None


@dataclass(frozen=True, slots=True)
class _Aligned:
    """A mean before its broadcast: the value, and its sizes, 1 for each broadcast dim."""

    source: int
    sizes: tuple[int, ...]


def _aligned(mean: int, split: BatchSplit, shape: tuple[int, ...]) -> _Aligned | None:
    graph = split.graph
    op = split.scope.maker.get(mean)
    source, sizes = mean, graph.values[mean].shape
    if (
        op is not None
        and op.name == "broadcast_in_dim"
        and isinstance(op.inputs[0], int)
        and len(op.inputs) == 1
    ):
        source = op.inputs[0]
        read = dict(zip(op.params["broadcast_dimensions"], graph.values[source].shape, strict=True))
        sizes = tuple(read.get(d, 1) for d in range(len(sizes)))
    sizes = sizes or (1,) * len(shape)
    return _Aligned(source, sizes) if len(sizes) == len(shape) else None


class _MeanChain:
    """The ops that make a mean, from the values available in each microbatch.

    Attributes:
      ops: from sums over examples to the mean, by their places.
      leaves: the values that these read.
      is_linear: whether each microbatch can make its own mean so.
    """

    def __init__(self, mean: int, split: BatchSplit) -> None:
        self.ops: dict[int, None] = {}
        self.leaves: dict[int, None] = {}
        self.is_linear = True
        number = {op: i for i, op in enumerate(split.graph.ops)}
        left = [mean]
        while left:
            v = left.pop()
            op = split.scope.maker.get(v)
            if not isinstance(split.states[v], Partial):
                self.leaves[v] = None
            elif op is None or not self._is_followed(op, split):
                self.is_linear = False
            else:
                self.ops[number[op]] = None
                left += op.operands

    def _is_followed(self, op: Op, split: BatchSplit) -> bool:
        is_source = any(isinstance(s, PerExample) for s in split.read(op))
        return op.name == "reduce_sum" if is_source else not op.bodies and op.name != "optimization_barrier"


@dataclass(frozen=True, eq=False)
class _Moment:
    """A sum over examples of a polynomial in a mean.

    Attributes:
      op: the op that sums.
      split: the states of its graph.
      degree: the polynomial's.
      place: the place of the examples in the op's operand.
      mean: the mean as the ops read it.
      aligned: the mean before its broadcast.
      ops: the ops that make the operand, by their places.
      leaves: the values that they read besides the mean.
      chain: the ops that make the mean.
    """

    op: Op
    split: BatchSplit
    degree: int
    place: PerExample
    mean: int
    aligned: _Aligned
    ops: tuple[int, ...]
    leaves: tuple[int, ...]
    chain: _MeanChain

    def write(self, written: Written) -> None:
        """Appends the ops that make the sum."""
        leaves = tuple(dict.fromkeys((*self.leaves, *self.chain.leaves)))
        of_each = written.write_all(partial(self._of_each, leaves), leaves, self.op)
        assert all(isinstance(v, int) for v in of_each)
        written.write(self._combined, (self.aligned.source, *of_each), self.op, self.op.outputs[0])

    # --- in each microbatch

    def _of_each(self, leaves: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
        """Each microbatch's mean and coefficients: [count, ...]."""
        of_each = [self._in_parts(x, v) for x, v in zip(arrays, leaves, strict=True)]
        axes = [0 if isinstance(self._state(v), PerExample) else None for v in leaves]
        made = jax.vmap(partial(self._of_one, leaves), in_axes=axes, axis_size=self.split.count)(*of_each)
        return tuple(checkpoint_name(x, OF_MICROBATCH) for x in made)

    def _state(self, v: int) -> State:
        """The state by which a leaf is divided among microbatches: a leaf of the operand's size is divided even if it
        depends on no example."""
        state, dim, summed = self.split.states[v], self.place.dim, self.split.graph.value(self.op.inputs[0])
        shape = self.split.graph.values[v].shape
        is_as_large = len(shape) == len(summed.shape) and shape[dim] == summed.shape[dim]
        return self.place if is_unsplit(state) and v in self.leaves and is_as_large else state

    def _in_parts(self, x: Any, v: int) -> Any:
        state, count = self._state(v), self.split.count
        if not isinstance(state, PerExample):
            return x
        value = self.split.graph.values[v]
        shape, dim = around(value, state, count)
        return in_parts(x, shape, dim, local_value(value, state, count).shape)

    def _of_one(self, leaves: Sequence[int], *arrays: Any) -> tuple[Any, ...]:
        """One microbatch's mean and coefficients."""
        known = dict(zip(leaves, arrays, strict=True))
        mean = self._own_mean(known)

        def total(mean: Any) -> Any:
            return self._total(known, mean)

        coefficients, derivative = [], total
        for k in range(self.degree + 1):
            coefficients.append(derivative(mean) / factorial(k))
            derivative = _derived(derivative)
        return mean, *coefficients

    def _own_mean(self, known: Mapping[int, Any]) -> Any:
        """The mean of one microbatch, of the rank of the op's operand."""
        made = self._evaluated(sorted(self.chain.ops), known)[self.aligned.source]
        scale = jnp.asarray(self.split.count, made.dtype)
        return jax.lax.stop_gradient(jnp.reshape(made * scale, self.aligned.sizes))

    def _total(self, known: Mapping[int, Any], mean: Any) -> Any:
        """One microbatch's sum over the dims along which the mean is constant."""
        value, summed = self.split.graph.values[self.mean], self.split.graph.value(self.op.inputs[0])
        is_as_large = value.shape == summed.shape
        shape = local_value(value, self.place, self.split.count).shape if is_as_large else value.shape
        read = jnp.broadcast_to(mean, shape) if shape else jnp.reshape(mean, ())
        made = self._evaluated(sorted(self.ops), {**known, self.mean: read})[self.op.inputs[0]]
        return jnp.sum(made, self._constant_axes)

    def _evaluated(self, ops: Sequence[int], known: Mapping[int, Any]) -> dict[int, Any]:
        known = dict(known)
        for i in ops:
            op = self.split.graph.ops[i]
            read = [known[a] if isinstance(a, int) else a.val for a in op.inputs]
            known.update(zip(op.outputs, _applied(op, read), strict=True))
        return known

    # --- once, after the last microbatch

    @property
    def _constant_axes(self) -> tuple[int, ...]:
        """The summed dims along which the mean is constant."""
        return tuple(d for d in self.op.params["axes"] if self.aligned.sizes[d] == 1)

    def _combined(self, mean: Any, own: Any, *coefficients: Any) -> Any:
        """The sum, from the means and coefficients of all microbatches."""
        dtype = coefficients[0].dtype
        distance = (jnp.reshape(mean, self.aligned.sizes)[None] - own).astype(dtype)
        distance = jnp.squeeze(distance, tuple(d + 1 for d in self._constant_axes))
        series = sum((c * distance**k for k, c in enumerate(coefficients[1:], 1)), coefficients[0])
        kept = [d for d in range(len(self.aligned.sizes)) if d not in self._constant_axes]
        rest = [kept.index(d) + 1 for d in self.op.params["axes"] if d in kept]
        return jnp.sum(series, (0, *rest), dtype=dtype)


def _applied(op: Op, read: list[Any]) -> list[Any]:
    """An op's results, for operands that may hold fewer examples."""
    return _jax.bind(op.primitive, read, op.params)


def _derived(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The derivative of a function that works element by element."""
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]
