"""Which results replace which arguments in the next step, and what each argument is for.

A step is handed its state and hands it back, but nowhere says which result is which argument. A wrong guess is worse than
none: what is taken for state is donated, and a batch that the user meant to use again would be gone. So a result is paired
with an argument only on the evidence of all three:

* *Structure*: the same pytree, shapes and dtypes.
* *Making*: the update phase made some of it; gradients alone are not new parameters. Where there is such state, pytrees of
  several levels that the forward phase made may be state too, such as running statistics.
* *Dataflow*: some leaf *continues* its counterpart, that is, its elements are made from the old leaf's elements at the same
  places, and no gradient lies between. `w - 0.1 * g` continues `w`, but not the batch that the gradient is of; a prediction
  does not continue the batch either. A lone scalar proves nothing: a rate times a norm would continue the rate.

Where several arguments fit, those of which most leaves are continued fit best. An average of parameters continues both the
average and the parameters, new parameters only the parameters: a result that fits one argument takes it, the others choose
among the rest. If a choice is left, position makes it, or nothing does.

Roles follow: a state leaf that the forward phase reads and the update makes anew is a parameter, a floating one that only
the update reads is optimizer state.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from search.ir import _jax
from search.ir.factors import rule_for
from search.ir.graph import Graph, Op, Phase, Role, Value


@dataclass(frozen=True, slots=True)
class _Span:
    """A subtree of the arguments or of the results: its position among them, and its first leaf."""

    tree: Any
    position: int
    start: int

    @property
    def leaves(self) -> range:
        return range(self.start, self.start + self.tree.num_leaves)

    @property
    def is_nested(self) -> bool:
        return self.tree.num_nodes > self.tree.num_leaves


def replaced(
    graph: Graph, in_tree: Any, out_tree: Any, certain: Mapping[int, int] = MappingProxyType({})
) -> tuple[int | None, ...]:
    """For each flat result, the flat argument that it replaces in the next step, or None.

    Args:
      graph: the step's, with phases.
      in_tree: the pytree of `(args, kwargs)`.
      out_tree: the pytree of the result.
      certain: flat results of which it is known.
    """
    args, kwargs = in_tree.children()
    arguments = _children(args) + _children(kwargs, len(args.children()), args.num_leaves)
    pairing = _Pairing(graph, arguments, out_tree.num_leaves)
    for result, argument in certain.items():
        pairing.replaces[result] = argument
    whole, elements = (
        _Span(out_tree, 0, 0),
        _children(out_tree, 0 if _has_order(out_tree) else -out_tree.num_leaves),
    )
    pairing.pair([whole] if pairing.is_updated(whole) else [])
    pairing.pair([span for span in elements if pairing.is_updated(span)])
    if any(i is not None for i in pairing.replaces):
        pairing.pair([span for span in elements if span.is_nested])
    return tuple(pairing.replaces)


def _has_order(tree: Any) -> bool:
    """Whether the elements of a tree are told apart by their positions, not by names."""
    node = tree.node_data()
    return node is not None and issubclass(node[0], tuple | list)


def _children(tree: Any, first: int = 0, start: int = 0) -> list[_Span]:
    """The subtrees that have leaves; the first one has the position `first` and begins with the leaf `start`."""
    spans: list[_Span] = []
    for position, child in enumerate(tree.children(), first):
        spans.append(_Span(child, position, start))
        start += child.num_leaves
    return [span for span in spans if span.leaves]


class _Pairing:
    """Results paired so far."""

    def __init__(self, graph: Graph, arguments: Sequence[_Span], num_results: int) -> None:
        self.graph = graph
        self.replaces: list[int | None] = [None] * num_results
        self._arguments = arguments
        self._continued = _continued(graph)
        self._updated = {v for op in graph.ops if op.phase is Phase.UPDATE for v in op.outputs}

    def is_updated(self, result: _Span) -> bool:
        """Whether the update phase made some of it."""
        outputs = (self.graph.outputs[o] for o in result.leaves)
        return any(isinstance(o, int) and o in self._updated for o in outputs)

    def pair(self, results: Sequence[_Span]) -> None:
        """Pairs those of the results that are not yet, as far as the evidence goes."""
        fits = {r: self._fitting(r) for r in results if self.replaces[r.start] is None}
        while fits:
            result = min(fits, key=lambda r: len(fits[r]))
            choice = fits.pop(result)
            if len(choice) > 1:
                choice = [a for a in choice if a.position == result.position]
            for argument in choice:
                self.replaces[result.start : result.leaves.stop] = argument.leaves
                fits = {r: [a for a in others if a != argument] for r, others in fits.items()}

    def _fitting(self, result: _Span) -> list[_Span]:
        """The arguments that fit best."""
        taken = set(self.replaces)
        free = [a for a in self._arguments if taken.isdisjoint(a.leaves) and self._is_alike(a, result)]
        counts = [self._num_continued(a, result) for a in free]
        return [a for a, n in zip(free, counts, strict=True) if n == max(counts) > 0]

    def _is_alike(self, argument: _Span, result: _Span) -> bool:
        values = [self.graph.value(self.graph.inputs[i]) for i in argument.leaves]
        is_lone_scalar = not argument.is_nested and values[0].shape == () and not _is_random(values[0])
        return (
            argument.tree == result.tree
            and not is_lone_scalar
            and all(
                (v.shape, v.dtype) == (n.shape, n.dtype)
                for v, n in zip(
                    values, [self.graph.value(self.graph.outputs[o]) for o in result.leaves], strict=True
                )
            )
        )

    def _num_continued(self, argument: _Span, result: _Span) -> int:
        """How many leaves are made from their counterparts, rather than handed on."""
        outputs = [self.graph.outputs[o] for o in result.leaves]
        return sum(
            isinstance(new, int)
            and new != self.graph.inputs[i]
            and bool(self._continued.get(new, 0) >> i & 1)
            for new, i in zip(outputs, argument.leaves, strict=True)
        )


def _continued(graph: Graph) -> dict[int, int]:
    """By value, as the bits of a number: the inputs that it continues."""
    continued = {v: 1 << i for i, v in enumerate(graph.inputs)}
    for op in graph.ops:
        if op.phase is not Phase.BACKWARD:
            for old, new in _in_place(graph, op):
                continued[new] = continued.get(new, 0) | continued.get(old, 0)
    return continued


def _in_place(graph: Graph, op: Op) -> Iterator[tuple[int, int]]:
    """Operands and results of which the elements at one place belong together.

    Of loops, branches and ops of a single array or of which nothing is known, what has the same shape counts. So does all
    that becomes of random keys.
    """
    inputs = [graph.value(a) for a in op.inputs]
    rule = rule_for(op.name, inputs, op.result_values, op.params)
    is_loose = bool(op.bodies) or rule.is_unknown or rule.is_kernel or len(op.operands) == 1
    for i, old in enumerate(op.inputs):
        for r, new in enumerate(op.outputs):
            same_places = is_loose or rule.operands[i] == rule.results[r]
            same_shape = inputs[i].shape == op.result_values[r].shape
            is_key = _is_random(inputs[i]) and _is_random(op.result_values[r])
            if isinstance(old, int) and (is_key or (same_shape and same_places)):
                yield old, new


def _is_random(value: Value) -> bool:
    """Whether a value is a random key, typed or raw."""
    return _jax.is_key_dtype(value.dtype) or value.dtype == np.uint32


def roles(
    graph: Graph, replaces: tuple[int | None, ...], held: AbstractSet[int] = frozenset()
) -> tuple[Role, ...]:
    """What each argument is for; those that are `held` are state whether or not anything replaces them."""
    state = {i for i in replaces if i is not None} | held
    read_in: dict[int, set[Phase]] = {}
    for op in graph.ops:
        for v in op.operands:
            read_in.setdefault(v, set()).add(op.phase)
    changed = {
        i for o, i in zip(graph.outputs, replaces, strict=True) if i is not None and o != graph.inputs[i]
    }
    made_in = {v: op.phase for op in graph.ops for v in op.outputs}
    new_phase = {i: made_in.get(o) for o, i in zip(graph.outputs, replaces, strict=True) if i is not None}
    found: list[Role] = []
    for i, v in enumerate(graph.inputs):
        value, phases = graph.values[v], read_in.get(v, set())
        if _jax.is_key_dtype(value.dtype):
            found.append(Role.KEY)
        elif i not in state:
            found.append(Role.BATCH)
        elif not np.issubdtype(np.dtype(value.dtype), np.inexact) and not jnp.issubdtype(
            value.dtype, jnp.inexact
        ):
            found.append(Role.STATE)
        elif i not in changed or (Phase.FORWARD in phases and new_phase[i] is Phase.UPDATE):
            found.append(Role.PARAMETER)
        else:
            found.append(Role.OPTIMIZER_STATE if phases <= {Phase.UPDATE} else Role.STATE)
    return tuple(found)
