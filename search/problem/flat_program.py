"""The step as the search sees it: one flat list of ops, loops unrolled into counts.

The graph nests: a `scan` holds its body. Sharding decisions do not depend on nesting, but only on the values' paths and
counts. So the bodies are laid out flat and every op gets a `count`, the number of times it runs in one step. A value
that crosses a loop's border passes through *boundary* ops, which compute nothing and have a spec of their own like any
other:

* `input` stands for an argument of the step; its operand is the result that replaces it in the next step, so state that
  comes back resharded pays for it. Where that has another type, it is an `output` of its own besides;
* `carry` reads a loop's initial value once and the body's result every iteration: all three get one spec. One that
  begins with zeros and that each iteration only adds to, an *accumulator*, reads no initial value, because zeros have
  any spec; it is additive: it may hold terms of a sum from iteration to iteration. Its phase is its addition's;
* `slice` takes an iteration's part of a stacked operand, `stack` collects the results: the stacked dimension is not
  split, the others keep their spec;
* `enter` and `join` carry other operands in and branch results out; an `enter` without an operand is an array that a
  graph holds; `output` stands for a result of the step.

A multi-operand identity (`optimization_barrier`) becomes one identity for each operand that is read behind it; each
identity comes after some of the others' operands (`FlatOp.after`). A `while` loop's trip count is not known; it is
taken as one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from autoshard.search.ir.factors import Factor, Kind, Rule
from autoshard.search.ir.graph import Atom, Graph, Op, Phase, Role, Site, Step, Value, walk
from autoshard.search.ir.sharding import Place
from autoshard.search.problem.op_rules import OpRules

BARRIER = "optimization_barrier"

ADDITIONS = frozenset({"add", "add_any"})

ZEROS_STAY = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "copy"})
"""Ops that make zeros of zeros; the initial value of a sum is made by them."""

ENTER = "enter"
"""Boundary at which a value that was made before goes into a loop or a branch."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatOp:
    """One op of the flat program.

    Attributes:
      name: a primitive's name, or a boundary's.
      rule: its factors; operands that are literals are left out.
      operands: the values read.
      results: the values made.
      count: number of its runs in one step.
      operand_counts: number of times that each operand is read; differs from `count` at a loop's border only.
      phase: its phase in the graph; an accumulator has its addition's.
      op: the graph's op; None for a boundary.
      site: where that op, or the one at whose border it is, stands; for an input or output of the step, its index; for
        an array that a graph holds, the graph's path, `enter` and its number, which is the site of no op.
      operand_places: per operand, the place in the nested graph where it is read.
      result_places: per result, the places where it appears.
      after: values that must be made before the op, besides its operands, and the places where it depends on them.
      repeats: number of corresponding ops for which it stands in a step that was shortened; `count` is that of all
        together.
    """

    name: str
    rule: Rule
    operands: tuple[int, ...]
    results: tuple[int, ...]
    count: int
    operand_counts: tuple[int, ...]
    phase: Phase
    op: Op | None
    site: Site
    operand_places: tuple[Place, ...]
    result_places: tuple[tuple[Place, ...], ...]
    after: tuple[tuple[int, Place], ...] = ()
    repeats: int = 1

    @property
    def is_boundary(self) -> bool:
        """Whether it stands for no computation."""
        return self.op is None

    @property
    def is_transfer(self) -> bool:
        """Whether it copies an array between a device's memory and its host's."""
        return self.op is not None and self.op.is_transfer

    @property
    def is_host_update(self) -> bool:
        """Whether the host computes it, in its own memory."""
        return self.op is not None and self.op.is_host_update

    @property
    def is_accumulator(self) -> bool:
        """Whether it is the sum of a loop, from zeros on."""
        return self.name == "carry" and self.rule.is_additive

    @property
    def number(self) -> int:
        """The place of an input or output of the step among its inputs or outputs."""
        return self.site[0]


class ReadPhase(StrEnum):
    """The phase in which a value is read. A value that is read at REST serves all of them."""

    REST = "rest"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


_READ_PHASE = {
    Phase.FORWARD: ReadPhase.FORWARD,
    Phase.BACKWARD: ReadPhase.BACKWARD,
    Phase.UPDATE: ReadPhase.UPDATE,
}


def read_phase(op: FlatOp) -> ReadPhase:
    """The phase in which an op reads: the next step's state is read by the update."""
    return ReadPhase.UPDATE if op.name == "input" else _READ_PHASE[op.phase]


@dataclass(frozen=True, eq=False)
class FlatProgram:
    """The flat program: ops in program order over numbered values.

    Attributes:
      step: the traced step that it came from.
      values: every value.
      ops: inputs first, then the step's ops, then outputs.
      inputs: the `input` ops' values, one per argument of the step.
      loops: for each loop, the half-open range of op positions of its body; inner loops before outer ones.
    """

    step: Step
    values: tuple[Value, ...]
    ops: tuple[FlatOp, ...]
    inputs: tuple[int, ...]
    loops: tuple[tuple[int, int], ...]

    @cached_property
    def maker(self) -> dict[int, tuple[int, int]]:
        """By value: the position of the op that makes it, and which of its results it is."""
        return {v: (i, r) for i, op in enumerate(self.ops) for r, v in enumerate(op.results)}

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """By value: the positions of the ops that read it, once for each operand that it is."""
        uses: dict[int, list[int]] = {}
        for i, op in enumerate(self.ops):
            for v in op.operands:
                uses.setdefault(v, []).append(i)
        return uses

    @cached_property
    def is_shortened(self) -> bool:
        """Whether some of its ops stand for several."""
        return any(op.repeats > 1 for op in self.ops)

    @cached_property
    def value_at(self) -> dict[Place, int]:
        """By place in the step, the value that appears there."""
        return {
            place: v
            for op in self.ops
            for v, places in zip(op.results, op.result_places, strict=True)
            for place in places
        }

    @cached_property
    def in_place(self) -> frozenset[int]:
        """Values that are written over others: the new state over the old one, a loop's sum over that so far."""
        return frozenset(v for op in self.ops if op.name == "input" or op.is_accumulator for v in op.operands)


def flatten(step: Step) -> FlatProgram:
    """The flat program of a traced step."""
    layer = _Flattening()
    graph = step.graph
    inputs = tuple(layer.new_value(graph.values[v]) for v in graph.inputs)
    slots = [len(layer.ops) + i for i in range(len(inputs))]
    layer.ops.extend([None] * len(inputs))
    outputs = layer.lay(graph, inputs, 1, ())
    replaced = {r: o for o, r in zip(outputs, step.replaces, strict=True) if r is not None}
    place_of = {r: i for i, r in reversed([*enumerate(step.replaces)])}
    retyped = {o: step.rests_as[o] for o, _ in step.retyped if outputs[o] is not None}
    retyped = {o: i for o, i in retyped.items() if i is not None}
    made_anew = {o: layer.new_value(graph.value(graph.outputs[o])) for o in retyped}
    replaced |= {i: made_anew[o] for o, i in retyped.items()}
    for i, (slot, value, argument) in enumerate(zip(slots, inputs, step.arguments, strict=True)):
        new = replaced.get(i)
        operands = () if new is None or new == value else (new,)
        phase = Phase.UPDATE if argument.role is Role.OPTIMIZER_STATE else Phase.FORWARD
        reads = [("output", (), place_of[i])] if operands and i in place_of else []
        layer.ops[slot] = layer.boundary(
            "input", operands, value, (1,) * len(operands), 1, phase, (i,), reads, [("input", (), i)]
        )
    for i, (out, r) in enumerate(zip(outputs, step.replaces, strict=True)):
        if r is None and out is not None:
            result = made_anew[i] if i in made_anew else layer.new_value(layer.values[out])
            reads = [("output", (), i)]
            layer.ops.append(
                layer.boundary(
                    "output", (out,), result, (1,), 1, Phase.UPDATE, (i,), reads, [("output", (), i)]
                )
            )
    return FlatProgram(step, tuple(layer.values), _repeated(step, layer.ops), inputs, tuple(layer.loops))


def _repeated(step: Step, ops: Sequence[FlatOp]) -> tuple[FlatOp, ...]:
    """The ops of a step that was shortened, counted as often as those run for which they stand.

    A boundary stands for as many ops as the makers of its operands. A value is read as often as it is made.
    """
    repeats = {
        (*path, i): op.repeats
        for path, graph in walk(step.graph)
        for i, op in enumerate(graph.ops)
        if op.repeats > 1
    }
    if not repeats and all(argument.repeats == 1 for argument in step.arguments):
        return tuple(ops)
    of_op = [_repeats_at(op, step, repeats) for op in ops]
    made = {v: n for op, n in zip(ops, of_op, strict=True) for v in op.results} | _parts_of_blocks(ops, of_op)
    for i, op in enumerate(ops):
        if op.is_boundary and op.name not in ("input", "output"):
            of_op[i] = max((of_op[i], *(made[v] for v in op.operands)))
            made |= dict.fromkeys(op.results, of_op[i])
    return tuple(_standing_for(op, n, made) for op, n in zip(ops, of_op, strict=True))


def _parts_of_blocks(ops: Sequence[FlatOp], repeats: Sequence[int]) -> dict[int, int]:
    """The results of an op outside of blocks that each go to a block of its own, and for how many results each stands.

    They are parts of one array (`unstack`, `split`). The parts of the blocks that were left out have no reader, so as many
    results are unread as the other blocks stand for.
    """
    read: dict[int, int] = {}
    for op, count in zip(ops, repeats, strict=True):
        read |= {v: max(count, read.get(v, 0)) for v in op.operands}
    found: dict[int, int] = {}
    for op, count in zip(ops, repeats, strict=True):
        parts = {v: read[v] for v in op.results if v in read}
        if count == 1 and len(op.results) > 1 and sum(parts.values()) == len(op.results):
            found |= parts
    return found


def _standing_for(op: FlatOp, repeats: int, made: Mapping[int, int]) -> FlatOp:
    """An op that stands for `repeats` ops, and reads values that each stand for `made` of them."""
    counts = tuple([made[v] * count for v, count in zip(op.operands, op.operand_counts, strict=True)])
    if repeats == 1 and counts == op.operand_counts:
        return op
    return replace(op, count=repeats * op.count, operand_counts=counts, repeats=repeats)


def _repeats_at(op: FlatOp, step: Step, repeats: Mapping[Site, int]) -> int:
    """The number of ops for which an op stands, with all the ops that it is nested in."""
    if op.name == "input":
        return step.arguments[op.number].repeats
    if op.name == "output" or (op.is_boundary and not op.operands):
        return 1
    return prod(repeats.get(op.site[:end], 1) for end in range(1, len(op.site) + 1, 3))


def update_by_leaf(ops: Sequence[Op]) -> Iterator[int]:
    """Positions of ops in a topological order: each op of the update is followed at once by those that only waited for it.

    A trace has the update op by op, each for all leaves of the state. The compiler finishes one leaf before the next, and no
    temporaries of all leaves are in memory together.
    """
    readers, missing = defaultdict[int, list[int]](list), dict[int, int]()
    maker = {v: i for i, op in enumerate(ops) for v in op.outputs}
    for i, op in enumerate(ops):
        made_by = {maker[v] for v in op.operands if v in maker}
        missing[i] = len(made_by)
        for j in made_by:
            readers[j].append(i)
    placed = set[int]()
    for first in range(len(ops)):
        ready = [first] if first not in placed else []
        while ready:
            i = ready.pop()
            placed.add(i)
            yield i
            for reader in reversed(readers[i]):
                missing[reader] -= 1
                if missing[reader] == 0 and ops[reader].phase is ops[i].phase is Phase.UPDATE:
                    ready.append(reader)


class _Flattening:
    """Lays nested graphs out flat."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Any] = []
        self.loops: list[tuple[int, int]] = []
        self.rules = OpRules()
        self.zeros: set[int] = set()

    def new_value(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def lay(
        self, graph: Graph, inputs: tuple[int | None, ...], count: int, path: Site
    ) -> tuple[int | None, ...]:
        """Appends the graph's ops; None stands for a literal, among the inputs and the outputs."""
        number: dict[int, int | None] = dict(zip(graph.inputs, inputs, strict=True))
        for v, _ in graph.constants:
            constant = number[v] = self.new_value(graph.values[v])
            self.append(ENTER, (), constant, (), count, Phase.FORWARD, (*path, ENTER, v), [], [])
        read = {a for op in graph.ops for a in op.operands} | {*graph.made}
        for i in update_by_leaf(graph.ops):
            op = graph.ops[i]
            operands = tuple(number[a] if isinstance(a, int) else None for a in op.inputs)
            if op.name == BARRIER:
                results = self._barrier(op, operands, [v in read for v in op.outputs], count, (*path, i))
            else:
                results = self._op(op, tuple(map(graph.value, op.inputs)), operands, count, (*path, i))
            number.update(zip(op.outputs, results, strict=True))
        return tuple(number[a] if isinstance(a, int) else None for a in graph.outputs)

    def _op(
        self, op: Op, inputs: tuple[Value, ...], operands: tuple[int | None, ...], count: int, site: Site
    ) -> tuple[int | None, ...]:
        if op.name == "scan":
            return self._scan(op, operands, count, site)
        if op.name == "while":
            return self._while(op, operands, count, site)
        if op.name == "cond":
            return self._cond(op, operands, count, site)
        rule = self.rules.of(op, inputs, tuple([v is not None for v in operands]))
        results = tuple(self.new_value(v) for v in op.result_values)
        if op.name in ZEROS_STAY and all(map(self._is_zero, op.inputs, operands)):
            self.zeros.update(results)
        read = tuple([v for v in operands if v is not None])
        operand_places = tuple([("operand", site, i) for i, v in enumerate(operands) if v is not None])
        result_places = tuple([(("result", site, r),) for r in range(len(results))])
        counts = (count,) * len(read)
        self.ops.append(
            FlatOp(
                op.name, rule, read, results, count, counts, op.phase, op, site, operand_places, result_places
            )
        )
        return results

    def _is_zero(self, atom: Atom, operand: int | None) -> bool:
        if isinstance(atom, int):
            return operand in self.zeros
        return not (np.any(atom.val) if np.ndim(atom.val) else atom.val)

    def append(self, name: str, operands: tuple, result: int, *details: Any) -> int:
        self.ops.append(self.boundary(name, operands, result, *details))
        return result

    def boundary(
        self,
        name: str,
        operands: tuple,
        result: int,
        counts: tuple,
        count: int,
        phase: Phase,
        site: Site,
        reads: Sequence[Place],
        makes: Sequence[Place],
    ) -> FlatOp:
        """A boundary op that makes `result`; a stacked operand or result has one more leading dimension."""
        shape = self.values[result].shape
        inner = shape[1:] if name == "stack" else shape
        kind = Kind.PARALLEL if self.values[result].has_shards else Kind.UNSPLITTABLE
        factors = [Factor(n, kind) for n in inner]
        dims = tuple((i,) for i in range(len(inner)))
        operand_dims = result_dims = dims
        if name in ("slice", "stack"):
            length = shape[0] if name == "stack" else self.values[operands[0]].shape[0]
            stacked = ((len(factors),), *dims)
            factors.append(Factor(length, Kind.UNSPLITTABLE))
            operand_dims, result_dims = (stacked, dims) if name == "slice" else (dims, stacked)
        rule = Rule(tuple(factors), tuple(operand_dims for _ in operands), (result_dims,))
        return FlatOp(
            name, rule, operands, (result,), count, counts, phase, None, site, tuple(reads), (tuple(makes),)
        )

    def _barrier(
        self, op: Op, operands: tuple[int | None, ...], is_read: Sequence[bool], count: int, site: Site
    ) -> tuple[int | None, ...]:
        there = {i: v for i, v in enumerate(operands) if v is not None}
        through = {
            i: self.identity(op, i, v, count, site, self._waited_for(there, i, is_read, site))
            for i, v in there.items()
            if is_read[i]
        }
        return tuple(through.get(i) for i in range(len(operands)))

    def _waited_for(
        self, there: dict[int, int], i: int, is_read: Sequence[bool], site: Site
    ) -> tuple[tuple[int, Place], ...]:
        """The values that an operand of a barrier must follow: those that are not read behind it. Of the others only
        values on the host count, or all if the operand itself is on the host."""

        def counts(j: int) -> bool:
            is_copied = self.values[there[i]].is_on_host or self.values[there[j]].is_on_host
            return j != i and (is_copied or not is_read[j])

        return tuple((v, ("operand", site, j)) for j, v in there.items() if counts(j))

    def identity(
        self,
        op: Op,
        i: int,
        operand: int,
        count: int,
        site: Site,
        after: tuple[tuple[int, Place], ...],
    ) -> int:
        """The identity of one operand of a barrier."""
        value = self.values[operand]
        dims = tuple((i,) for i in range(len(value.shape)))
        rule = Rule(tuple(Factor(n) for n in value.shape), (dims,), (dims,), is_additive=True)
        result = self.new_value(value)
        reads, makes = (("operand", site, i),), ((("result", site, i),),)
        self.ops.append(
            FlatOp(
                op.name, rule, (operand,), (result,), count, (count,), op.phase, op, site, reads, makes, after
            )
        )
        return result

    def _enter(
        self, op: Op, operand: int | None, count: int, site: Site, read: Place, make: Place
    ) -> int | None:
        if operand is None:
            return None
        result = self.new_value(self.values[operand])
        return self.append(ENTER, (operand,), result, (count,), count, op.phase, site, [read], [make])

    def _scan(
        self, op: Op, operands: tuple[int | None, ...], count: int, site: Site
    ) -> tuple[int | None, ...]:
        body, (num_consts, num_carry) = op.bodies["jaxpr"][0], op.loop_counts
        trips = count * max(int(op.params["length"]), 1)
        path = (*site, "jaxpr", 0)
        consts = tuple(
            self._enter(op, v, count, site, ("operand", site, i), ("input", path, i))
            for i, v in enumerate(operands[:num_consts])
        )
        carries = tuple(
            self.new_value(body.values[v]) for v in body.inputs[num_consts : num_consts + num_carry]
        )
        slots = self._reserve(len(carries))
        start = len(self.ops)
        slices: list[int | None] = []
        for i, stacked in enumerate(operands[num_consts + num_carry :], num_consts + num_carry):
            slices.append(None if stacked is None else self._slice(op, body, stacked, i, count, trips, site))
        outputs, readers = self.lay(body, (*consts, *carries, *slices), trips, path), readers_in(body)
        for i, (slot, carry) in enumerate(zip(slots, carries, strict=True)):
            init = (operands[num_consts + i], count, ("operand", site, num_consts + i))
            again = (outputs[i], trips, ("output", path, i))
            makes = [("input", path, num_consts + i), ("result", site, i)]
            is_sum = self._is_zero(op.inputs[num_consts + i], init[0])
            adding = only_adding(body, readers, num_consts + i, i) if is_sum else None
            if adding is None:
                self.ops[slot] = self._carry(op, carry, (init, again), count, site, makes)
            else:
                made = self._carry(op, carry, (again,), count, site, makes)
                rule = replace(made.rule, is_additive=True)
                self.ops[slot] = replace(made, rule=rule, phase=adding.phase)
        stacks: list[int | None] = []
        for i, y in enumerate(outputs[num_carry:], num_carry):
            result = self.new_value(op.result_values[i])
            read = () if y is None else (y,)
            places = [("output", path, i)] * len(read)
            counts = (trips,) * len(read)
            self.append("stack", read, result, counts, trips, op.phase, site, places, [("result", site, i)])
            stacks.append(result)
        self.loops.append((start, len(self.ops)))
        return (*carries, *stacks)

    def _slice(self, op: Op, body: Graph, stacked: int, i: int, count: int, trips: int, site: Site) -> int:
        result = self.new_value(body.values[body.inputs[i]])
        reads, makes = [("operand", site, i)], [("input", (*site, "jaxpr", 0), i)]
        return self.append("slice", (stacked,), result, (count,), trips, op.phase, site, reads, makes)

    def _carry(self, op: Op, carry: int, reads: tuple, count: int, site: Site, makes: list[Place]) -> FlatOp:
        kept = [(v, c, place) for v, c, place in reads if v is not None and v != carry]
        operands, counts = tuple(k[0] for k in kept), tuple(k[1] for k in kept)
        return self.boundary(
            "carry", operands, carry, counts, count, op.phase, site, [k[2] for k in kept], makes
        )

    def _while(
        self, op: Op, operands: tuple[int | None, ...], count: int, site: Site
    ) -> tuple[int | None, ...]:
        cond, body = op.bodies["cond_jaxpr"][0], op.bodies["body_jaxpr"][0]
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        num_consts = num_cond + num_body
        cond_path, body_path = (*site, "cond_jaxpr", 0), (*site, "body_jaxpr", 0)
        inside = [("input", cond_path, i) for i in range(num_cond)]
        inside += [("input", body_path, i) for i in range(num_body)]
        entered = tuple(
            self._enter(op, v, count, site, ("operand", site, i), inside[i])
            for i, v in enumerate(operands[:num_consts])
        )
        carries = tuple(self.new_value(body.values[v]) for v in body.inputs[num_body:])
        slots = self._reserve(len(carries))
        start = len(self.ops)
        self.lay(cond, (*entered[:num_cond], *carries), count, cond_path)
        outputs = self.lay(body, (*entered[num_cond:], *carries), count, body_path)
        for i, (slot, carry) in enumerate(zip(slots, carries, strict=True)):
            init = (operands[num_consts + i], count, ("operand", site, num_consts + i))
            again = (outputs[i], count, ("output", body_path, i))
            makes = [
                ("input", cond_path, num_cond + i),
                ("input", body_path, num_body + i),
                ("result", site, i),
            ]
            self.ops[slot] = self._carry(op, carry, (init, again), count, site, makes)
        self.loops.append((start, len(self.ops)))
        return carries

    def _cond(
        self, op: Op, operands: tuple[int | None, ...], count: int, site: Site
    ) -> tuple[int | None, ...]:
        outputs = []
        for j, branch in enumerate(op.bodies["branches"]):
            path = (*site, "branches", j)
            inputs = tuple(
                self._enter(op, v, count, site, ("enter", path, i), ("input", path, i))
                for i, v in enumerate(operands[1:])
            )
            outputs.append(self.lay(branch, inputs, count, path))
        results = []
        for r, outs in enumerate(zip(*outputs, strict=True)):
            kept = [(v, ("output", (*site, "branches", j), r)) for j, v in enumerate(outs) if v is not None]
            result = self.new_value(op.result_values[r])
            read, places = tuple(k[0] for k in kept), [k[1] for k in kept]
            counts = (count,) * len(read)
            self.append("join", read, result, counts, count, op.phase, site, places, [("result", site, r)])
            results.append(result)
        return tuple(results)

    def _reserve(self, num: int) -> list[int]:
        slots = list(range(len(self.ops), len(self.ops) + num))
        self.ops.extend([None] * num)
        return slots


def readers_in(body: Graph) -> Mapping[int, Sequence[Op | None]]:
    """By value: the ops that read it, once for each operand that it is, and None for each output."""
    found: dict[int, list[Op | None]] = {}
    for op in body.ops:
        for v in op.operands:
            found.setdefault(v, []).append(op)
    for v in body.made:
        found.setdefault(v, []).append(None)
    return found


def only_adding(body: Graph, readers: Mapping[int, Sequence[Op | None]], i: int, o: int) -> Op | None:
    """The addition of a loop's body that makes its output `o` of its input `i`, if nothing else reads either."""
    before, after = body.inputs[i], body.outputs[o]
    if not isinstance(after, int) or readers[after] != [None] or len(readers.get(before, ())) != 1:
        return None
    (adding,) = readers[before]
    is_addition = adding is not None and adding.name in ADDITIONS and after in adding.outputs
    return adding if is_addition else None
