"""The step as the search sees it: one flat list of ops, loops unrolled into counts.

The graph nests: a `scan` holds its body. Sharding decisions do not care for nesting, only for what flows where and how
often, so the bodies are laid out flat and every op gets a `count`, the number of times it runs in one step. What crosses
a loop's border passes through *boundary* ops, which compute nothing and have a spec of their own like any other:

* `input` stands for an argument of the step; its operand is the result that replaces it in the next step, so state that
  comes back resharded pays for it;
* `carry` reads a loop's initial value once and the body's result every iteration: all three get one spec;
* `slice` takes an iteration's part of a stacked operand, `stack` collects the results: the stacked dimension is not
  split, the others keep their spec;
* `enter` and `join` carry other operands in and branch results out; `output` stands for a result of the step.

A multi-operand identity (`optimization_barrier`) becomes one identity per operand. A `while` loop's trip count is not
known; it is taken as one.
"""

from dataclasses import dataclass
from typing import Any

from autoshard.factors import Factor, Kind, Rule, rule_for
from autoshard.graph import Graph, Op, Phase, Role, Step, Value

Site = tuple[Any, ...]
"""Where an op stands in the nested graph: the path of its graph, then its index."""

BOUNDARIES = frozenset({"input", "output", "carry", "slice", "stack", "enter", "join"})


@dataclass(frozen=True, slots=True, eq=False)
class FlatOp:
    """One op of the flat program.

    Attributes:
      name: a primitive's name, or a boundary's.
      rule: its factors; operands that are literals are left out.
      operands: the values read.
      results: the values made.
      count: how often it runs in one step.
      operand_counts: how often each operand is handed over: differs from `count` at a loop's border only.
      phase: as in the graph.
      op: the graph's op; None for a boundary.
      site: where that op stands; for an input or output, its index.
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

    @property
    def is_boundary(self) -> bool:
        """Whether it stands for no computation."""
        return self.op is None


@dataclass(frozen=True, eq=False)
class Program:
    """The flat program: ops in program order over numbered values.

    Attributes:
      step: the traced step that it came from.
      values: every value.
      ops: inputs first, then the step's ops, then outputs.
      inputs: the `input` ops' values, one per argument of the step.
      loops: for each loop, the half-open range of op positions of its body; inner loops after outer ones.
    """

    step: Step
    values: tuple[Value, ...]
    ops: tuple[FlatOp, ...]
    inputs: tuple[int, ...]
    loops: tuple[tuple[int, int], ...]


def flatten(step: Step) -> Program:
    """The flat program of a traced step."""
    layer = _Layout()
    graph = step.graph
    inputs = tuple(layer.new_value(graph.values[v]) for v in graph.inputs)
    slots = [len(layer.ops) + i for i in range(len(inputs))]
    layer.ops.extend([None] * len(inputs))
    outputs = layer.lay(graph, inputs, 1, ())
    replaced = {r: o for o, r in zip(outputs, step.replaces, strict=True) if r is not None}
    for i, (slot, value, argument) in enumerate(zip(slots, inputs, step.arguments, strict=True)):
        new = replaced.get(i)
        operands = () if new is None or new == value else (new,)
        phase = Phase.UPDATE if argument.role is Role.OPTIMIZER_STATE else Phase.FORWARD
        layer.ops[slot] = layer.boundary("input", operands, value, (1,) * len(operands), 1, phase, (i,))
    for i, (out, r) in enumerate(zip(outputs, step.replaces, strict=True)):
        if r is None and out is not None:
            result = layer.new_value(layer.values[out])
            layer.ops.append(layer.boundary("output", (out,), result, (1,), 1, Phase.UPDATE, (i,)))
    return Program(step, tuple(layer.values), tuple(layer.ops), inputs, tuple(layer.loops))


class _Layout:
    """Lays nested graphs out flat."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Any] = []
        self.loops: list[tuple[int, int]] = []

    def new_value(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def lay(self, graph: Graph, inputs: tuple[int | None, ...], count: int, path: Site) -> tuple[int | None, ...]:
        """Appends the graph's ops; None stands for a literal, among the inputs and the outputs alike."""
        number: dict[int, int | None] = dict(zip(graph.inputs, inputs, strict=True))
        for v, _ in graph.constants:
            number[v] = self.new_value(graph.values[v])
            self.append("enter", (), number[v], (), count, Phase.FORWARD, (*path, v))
        for i, op in enumerate(graph.ops):
            operands = tuple(number[a] if isinstance(a, int) else None for a in op.inputs)
            results = self._op(op, operands, count, (*path, i))
            number.update(zip(op.outputs, results, strict=True))
        return tuple(number[a] if isinstance(a, int) else None for a in graph.outputs)

    def _op(self, op: Op, operands: tuple[int | None, ...], count: int, site: Site) -> tuple[int | None, ...]:
        if op.name == "scan":
            return self._scan(op, operands, count, site)
        if op.name == "while":
            return self._while(op, operands, count, site)
        if op.name == "cond":
            return self._cond(op, operands, count, site)
        if op.name == "optimization_barrier":
            return tuple(self.identity(op, v, count, site) for v in operands if v is not None)
        in_values = tuple(self.values[v] if v is not None else a.aval for v, a in zip(operands, op.inputs, strict=True))
        rule = rule_for(op.name, in_values, op.result_values, op.params)
        kept = tuple(i for i, v in enumerate(operands) if v is not None)
        rule = Rule(
            rule.factors, tuple(rule.operands[i] for i in kept), rule.results, rule.flops_per_point, rule.is_additive
        )
        results = tuple(self.new_value(v) for v in op.result_values)
        read = tuple(v for v in operands if v is not None)
        self.ops.append(FlatOp(op.name, rule, read, results, count, (count,) * len(read), op.phase, op, site))
        return results

    def append(self, name: str, operands: tuple, result: int, counts: tuple, count: int, phase: Phase, site: Site) -> int:
        self.ops.append(self.boundary(name, operands, result, counts, count, phase, site))
        return result

    def boundary(
        self, name: str, operands: tuple, result: int, counts: tuple, count: int, phase: Phase, site: Site
    ) -> FlatOp:
        """A boundary op that makes `result`; a stacked operand or result has one more leading dimension."""
        shape = self.values[result].shape
        inner = shape[1:] if name == "stack" else shape
        factors = [Factor(n) for n in inner]
        dims = tuple((i,) for i in range(len(inner)))
        operand_dims = result_dims = dims
        if name in ("slice", "stack"):
            length = shape[0] if name == "stack" else self.values[operands[0]].shape[0]
            stacked = ((len(factors),), *dims)
            factors.append(Factor(length, Kind.UNSPLITTABLE))
            operand_dims, result_dims = (stacked, dims) if name == "slice" else (dims, stacked)
        rule = Rule(tuple(factors), tuple(operand_dims for _ in operands), (result_dims,))
        return FlatOp(name, rule, tuple(operands), (result,), count, tuple(counts), phase, None, site)

    def identity(self, op: Op, operand: int, count: int, site: Site) -> int:
        """One operand's way through a barrier."""
        value = self.values[operand]
        dims = tuple((i,) for i in range(len(value.shape)))
        rule = Rule(tuple(Factor(n) for n in value.shape), (dims,), (dims,), is_additive=True)
        result = self.new_value(value)
        self.ops.append(FlatOp(op.name, rule, (operand,), (result,), count, (count,), op.phase, op, site))
        return result

    def _enter(self, operand: int | None, count: int, phase: Phase, site: Site) -> int | None:
        if operand is None:
            return None
        result = self.new_value(self.values[operand])
        return self.append("enter", (operand,), result, (count,), count, phase, site)

    def _scan(self, op: Op, operands: tuple[int | None, ...], count: int, site: Site) -> tuple[int | None, ...]:
        body, (num_consts, num_carry) = op.bodies["jaxpr"][0], op.loop_counts
        trips = count * max(int(op.params["length"]), 1)
        path = (*site, "jaxpr", 0)
        consts = tuple(self._enter(v, count, op.phase, site) for v in operands[:num_consts])
        inits = operands[num_consts : num_consts + num_carry]
        inner = [body.values[v] for v in body.inputs]
        carries = tuple(self.new_value(v) for v in inner[num_consts : num_consts + num_carry])
        slots = self._reserve(len(carries))
        slices = []
        start = len(self.ops)
        for stacked, value in zip(operands[num_consts + num_carry :], inner[num_consts + num_carry :], strict=True):
            if stacked is None:
                slices.append(None)
                continue
            result = self.new_value(value)
            slices.append(self.append("slice", (stacked,), result, (count,), trips, op.phase, site))
        outputs = self.lay(body, (*consts, *carries, *slices), trips, path)
        self._fill_carries(slots, carries, inits, outputs[:num_carry], (count, trips), op.phase, site)
        stacks: list[int | None] = []
        for i, y in enumerate(outputs[num_carry:], num_carry):
            result = self.new_value(op.result_values[i])
            operand, counts = ((), ()) if y is None else ((y,), (trips,))
            stacks.append(self.append("stack", operand, result, counts, trips, op.phase, site))
        self.loops.append((start, len(self.ops)))
        return (*carries, *stacks)

    def _while(self, op: Op, operands: tuple[int | None, ...], count: int, site: Site) -> tuple[int | None, ...]:
        cond, body = op.bodies["cond_jaxpr"][0], op.bodies["body_jaxpr"][0]
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        entered = tuple(self._enter(v, count, op.phase, site) for v in operands[: num_cond + num_body])
        inits = operands[num_cond + num_body :]
        carries = tuple(self.new_value(body.values[v]) for v in body.inputs[num_body:])
        slots = self._reserve(len(carries))
        start = len(self.ops)
        self.lay(cond, (*entered[:num_cond], *carries), count, (*site, "cond_jaxpr", 0))
        outputs = self.lay(body, (*entered[num_cond:], *carries), count, (*site, "body_jaxpr", 0))
        self._fill_carries(slots, carries, inits, outputs, (count, count), op.phase, site)
        self.loops.append((start, len(self.ops)))
        return carries

    def _cond(self, op: Op, operands: tuple[int | None, ...], count: int, site: Site) -> tuple[int | None, ...]:
        branch_outputs = []
        for j, branch in enumerate(op.bodies["branches"]):
            inputs = tuple(self._enter(v, count, op.phase, site) for v in operands[1:])
            branch_outputs.append(self.lay(branch, inputs, count, (*site, "branches", j)))
        results = []
        for i, outs in enumerate(zip(*branch_outputs, strict=True)):
            read = tuple(v for v in outs if v is not None)
            result = self.new_value(op.result_values[i])
            results.append(self.append("join", read, result, (count,) * len(read), count, op.phase, site))
        return tuple(results)

    def _reserve(self, num: int) -> list[int]:
        slots = list(range(len(self.ops), len(self.ops) + num))
        self.ops.extend([None] * num)
        return slots

    def _fill_carries(self, slots, carries, inits, outputs, counts, phase, site) -> None:
        for slot, carry, init, out in zip(slots, carries, inits, outputs, strict=True):
            pairs = [(v, c) for v, c in zip((init, out), counts, strict=True) if v is not None and v != carry]
            read, read_counts = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
            self.ops[slot] = self.boundary("carry", read, carry, read_counts, counts[0], phase, site)
