"""The batch among the arguments that the step does not return: those whose first dim runs over examples.

The forward phase treats all examples alike along a batch's first dim, and finally adds them up. So the first dims of
arguments are followed through the ops, by factors. Dims that meet in one loop are one loop: those of inputs and labels meet
in the loss. The first dim of a frozen weight or table differs from a batch's in one of two ways:

* it meets a later dim of an argument: a matrix's rows meet the features, a bias meets the matrix's columns;
* a look-up, a slice per layer, a cut, or a contraction with a constant consumes it before any other argument meets it.

Dims of size one meet nothing. So if no argument is a batch by these rules, it may be one example: an argument whose first
dim has size one, and is not indexed away. If there is none either, as in a graph network whose nodes read one another, none
is taken for frozen.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.factors.rule import Kind, Rule
from autoshard.search.ir.graph import Atom, Graph, Op, Phase
from autoshard.search.ir.lineage import Body, bodies_of
from autoshard.search.ir.phases import takes_gradient

Loops = tuple[int | None, ...]
"""Per dim of a value: the number of its loop; None if the dim comes from no argument."""


def read_whole(graph: Graph, candidates: Sequence[int]) -> frozenset[int]:
    """The candidates that hold no examples: weights that no result replaces, tables, masks.

    Args:
      graph: the step's graph, with phases.
      candidates: the numbers of arguments with dims.
    """
    following = _LoopMerging()
    given = [following.begin(graph.values[v].shape) for v in graph.inputs]
    following.through(graph, given, [True] * len(given))
    read_in = reading_phases(graph)
    read = [i for i in candidates if read_in[graph.inputs[i]] != {Phase.UPDATE}]
    many = {i for i in read if following.is_batch(given[i][0])}
    single = {i for i in read if _is_single(graph, graph.inputs[i])}
    for examples in (many, single):
        if any(Phase.FORWARD in read_in[graph.inputs[i]] for i in examples):
            return frozenset(candidates) - examples
    return frozenset()


def _is_single(graph: Graph, argument: int) -> bool:
    """True if an argument may be one example: its first dim has size one and others are larger, and no forward op takes the
    first dim away before another argument is met."""
    shape = graph.values[argument].shape
    if shape[0] != 1 or max(shape) == 1:
        return False
    there = {argument}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and not there.isdisjoint(op.operands):
            if op.bodies or (op.name == "squeeze" and 0 in op.params["dimensions"]):
                return False
            if there.issuperset(op.operands):
                there.update(v for v in op.outputs if graph.values[v].shape[:1] == (1,))
    return True


def reading_phases(graph: Graph) -> defaultdict[int, set[Phase]]:
    """Per value, the phases of the ops that read it."""
    found: defaultdict[int, set[Phase]] = defaultdict(set)
    for op in graph.ops:
        for v in op.operands:
            found[v].add(op.phase)
    return found


class _LoopMerging:
    """The loops found so far, as a union-find: loops that meet are merged."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._is_whole: list[bool] = []

    def begin(self, shape: Sequence[int]) -> Loops:
        """New loops for an argument's dims; only the first dim's loop may run over examples."""
        return tuple(self._new(is_whole=dim > 0) if size > 1 else None for dim, size in enumerate(shape))

    def is_batch(self, loop: int | None) -> bool:
        """True if a loop may run over examples."""
        return loop is not None and not self._is_whole[self._root(loop)]

    def through(self, graph: Graph, given: Sequence[Loops], untouched: Iterable[bool]) -> list[Loops]:
        """Follows the dims of a graph's inputs through its forward phase, and returns those of its outputs.

        Args:
          graph: the step's graph, or a body.
          given: the loops of each input.
          untouched: per input, whether it is an argument of the step or is made of one alone.
        """
        there = _There(graph, dict(zip(graph.inputs, given, strict=True)))
        there.untouched.update(
            v for v, is_untouched in zip(graph.inputs, untouched, strict=True) if is_untouched
        )
        for op in graph.ops:
            if op.phase is Phase.FORWARD:
                made = self._through_bodies(there, op) if op.bodies else self._through_op(there, op)
                there.loops.update(zip(op.outputs, made, strict=True))
                if len(op.operands) == 1 and there.untouched.issuperset(op.operands) and not op.bodies:
                    there.untouched.update(op.outputs)
        return [there.of(a) for a in graph.outputs]

    # --- ops

    def _through_op(self, there: "_There", op: Op) -> list[Loops]:
        values = [there.graph.value(a) for a in op.inputs]
        rule = rule_for(op.name, values, op.result_values, op.params).in_rows
        carried = {dim[0] for dims in rule.results for dim in dims if dim}
        of_factor: dict[int, int] = {}
        for f, carriers in _carriers(rule, op, there).items():
            loops = [loop for _, loop in carriers if loop is not None]
            of_factor.update(
                (f, self._joined(a, b)) for a, b in zip(loops, loops[:1] * len(loops), strict=True)
            )
            if f not in carried and not _is_added_up(rule, f, carriers):
                self._read_whole(loop for a, loop in carriers if there.is_untouched(a))
        return [tuple(of_factor.get(dim[0]) if dim else None for dim in dims) for dims in rule.results]

    def _read_whole(self, loops: Iterable[int | None]) -> None:
        for loop in loops:
            if loop is not None:
                self._is_whole[self._root(loop)] = True

    # --- bodies

    def _through_bodies(self, there: "_There", op: Op) -> list[Loops]:
        """The loops of the results of control flow: those of all branches merged, or those of a loop's outputs."""
        found: list[Loops] = [(None,) * len(v.shape) for v in op.result_values]
        for body in bodies_of(op):
            made = self._through_body(there, body, is_of_steps=takes_gradient(op))
            found = [self._merged(a, b) for a, b in zip(found, made, strict=True)]
        return found

    def _through_body(self, there: "_There", body: Body, is_of_steps: bool) -> list[Loops]:
        given = [there.of(a) for a in body.operands]
        untouched = [there.is_untouched(a) for a in body.operands]
        if body.first_slice is not None:
            slices = range(body.first_slice, len(given))
            if not is_of_steps:
                self._read_whole(given[n][0] for n in slices if untouched[n])
            given = [loops[1:] if n in slices else loops for n, loops in enumerate(given)]
        carried = slice(body.first_carried, body.first_carried + body.num_carried)
        made = self.through(body.graph, given, untouched)
        around = [self._merged(a, b) for a, b in zip(given[carried], made, strict=False)]
        if around != given[carried]:
            given[carried] = around
            made = self.through(body.graph, given, untouched)
        stacks = made[body.num_carried :]
        return (
            made if body.first_slice is None else [*made[: body.num_carried], *((None, *s) for s in stacks)]
        )

    def _merged(self, loops: Loops, others: Loops) -> Loops:
        return tuple(
            b if a is None else a if b is None else self._joined(a, b)
            for a, b in zip(loops, others, strict=True)
        )

    # --- sets of loops that met

    def _new(self, is_whole: bool) -> int:
        self._parent.append(len(self._parent))
        self._is_whole.append(is_whole)
        return self._parent[-1]

    def _root(self, loop: int) -> int:
        while self._parent[loop] != loop:
            self._parent[loop] = loop = self._parent[self._parent[loop]]
        return loop

    def _joined(self, loop: int, other: int) -> int:
        loop, other = self._root(loop), self._root(other)
        self._is_whole[loop] |= self._is_whole[other]
        self._parent[other] = loop
        return loop


class _There:
    """The loops of a graph's values, and the values that are an argument or made of one alone."""

    def __init__(self, graph: Graph, loops: dict[int, Loops]) -> None:
        self.graph, self.loops = graph, loops
        self.untouched: set[int] = set()

    def is_untouched(self, atom: Atom) -> bool:
        """True if an operand is an argument, or made of one alone."""
        return isinstance(atom, int) and atom in self.untouched

    def of(self, atom: Atom) -> Loops:
        """The loops of a value or literal."""
        known = self.loops.get(atom) if isinstance(atom, int) else None
        return (None,) * len(self.graph.value(atom).shape) if known is None else known


def _carriers(rule: Rule, op: Op, there: _There) -> dict[int, list[tuple[Atom, int | None]]]:
    """Per factor, the operands with a dim of it, each with that dim's loop."""
    found: dict[int, list[tuple[Atom, int | None]]] = {}
    for atom, dims in zip(op.inputs, rule.operands, strict=True):
        for dim, loop in zip(dims, there.of(atom), strict=True):
            if dim:
                found.setdefault(dim[0], []).append((atom, loop))
    return found


def _is_added_up(rule: Rule, factor: int, carriers: Sequence[tuple[Atom, int | None]]) -> bool:
    """True if an op reduces over a factor that every operand with dims has, each from an argument. Look-ups and products
    with constants do not."""
    num_ranked = sum(any(dims) for dims in rule.operands)
    is_sum = rule.factors[factor].kind in (Kind.SUM, Kind.REDUCE)
    return is_sum and len(carriers) >= num_ranked and all(loop is not None for _, loop in carriers)
