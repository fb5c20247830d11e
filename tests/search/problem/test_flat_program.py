"""The flat program computes what the step computes, as often as the step does, and knows where everything stands."""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.search.ir import _jax
from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import Phase, walk
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.problem.flat_program import (
    FlatOp,
    FlatProgram,
    ReadPhase,
    flatten,
    read_phase,
)

W, X, STACK = np.eye(3, 4, dtype=np.float32), np.ones((2, 3), np.float32), np.ones((5, 2, 4), np.float32)


def straight(w, x):
    """A number from both arguments, one of them, and another number."""
    return jnp.sum(jnp.tanh(x @ w)), x, jnp.max(x)


def looped(w, x):
    """Constants, a carry and a slice go into a loop; a carry and a stack come out."""
    first = jnp.tanh(x @ w)

    def body(y, part):
        z = y * part + first
        return z, jnp.sin(z) @ w.T

    last, stack = lax.scan(body, first, jnp.exp(STACK) * first)
    return last, stack


def nested(w, x):
    """A loop in a loop in a loop, each with carries; a stack of stacks; a stack that is sliced again."""
    first = jnp.tanh(x @ w)

    def innermost(a, part):
        return a + part * first, a.sum(1)

    def inner(b, parts):
        c, sums = lax.scan(innermost, b, parts, length=2)
        return c * 0.5, (c @ w.T, sums)

    def outer(d, parts):
        e, (products, sums) = lax.scan(inner, d + 1.0, parts, length=3)
        return e, (products, sums * 2.0)

    parts = jnp.exp(jnp.broadcast_to(STACK[:1], (5, 3, 2, 2, 4)))
    last, (products, sums) = lax.scan(outer, first, parts)
    again, _ = lax.scan(lambda f, s: (f + s.sum(), None), last, products)
    return again, sums


def branched(w, x):
    """The last branch is taken. Some hand an operand back, some compute, one gives a number."""
    y = x @ w

    def hand_back(y, w):
        return w, y, 1.0

    def compute(y, w):
        return w * 2.0, jnp.sin(y), y.sum()

    first = lax.cond(y.sum() > 0, compute, hand_back, y, w)
    return first, lax.switch(x.sum().astype(int), (hand_back, hand_back, compute), jnp.tanh(y), first[0])


def repeated(w, x):
    """A while loop whose condition and whose body read constants."""
    limit, more = x.sum() - 2.0, jnp.exp(x)

    def go_on(carry):
        return carry[0] < limit

    return lax.while_loop(go_on, lambda carry: (carry[0] + 1.0, carry[1] * 1.5 + more), (x.min() - 1.0, x))


def fenced(w, x):
    y, z = lax.optimization_barrier((x @ w, jnp.sin(x)))
    return jnp.cos(y), z + 1.0


def with_constants(w, x):
    table = jnp.asarray(np.arange(12.0, dtype=np.float32).reshape(3, 4))

    def body(y, _):
        return y + x @ (w + table), None

    return lax.scan(body, x @ w, None, length=4)[0]


STEPS = (straight, looped, nested, branched, repeated, fenced, with_constants)
MODES = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)


def flat(step) -> FlatProgram:
    return flatten(trace(step, W, X))


def only(program: FlatProgram, name: str):
    (found,) = [op for op in program.ops if op.name == name]
    return found


# --- what it computes

TURNS = 4


class Machine:
    """Runs a flat program, its loops' bodies turn by turn: of a while loop `TURNS`. It takes the last of all branches."""

    def __init__(self, program: FlatProgram, arguments) -> None:
        self.program, self.graphs = program, dict(walk(program.step.graph))
        self.known = dict(zip(program.inputs, arguments, strict=True))
        self.stacks: dict[int, list] = {}
        self.run(0, len(program.ops), 0)

    def run(self, start: int, end: int, turn: int) -> None:
        at = start
        while at < end:
            inner = [r for r in self.program.loops if r[0] == at and r[1] <= end and r != (start, end)]
            if inner:
                loop = max(inner)
                self.loop(*loop)
                at = loop[1]
            else:
                self.op(at, turn)
                at += 1

    def loop(self, start: int, end: int) -> None:
        before = self.program.ops[start - 1]
        is_while = self.graph_op(before.site).name == "while"
        carries = [op for op in self.program.ops[:start] if (op.name, op.site) == ("carry", before.site)]
        for turn in range(TURNS if is_while else self.program.ops[start].count // before.count):
            self.run(start, end, turn)
            again = [self.known[self.read_from(carry, "output")] for carry in carries]
            self.known |= {carry.results[0]: new for carry, new in zip(carries, again, strict=True)}

    def op(self, at: int, turn: int) -> None:
        op = self.program.ops[at]
        operands = [self.known.get(v) for v in op.operands]
        if op.name == "carry":
            made = self.known[self.read_from(op, "operand")]
        elif op.name == "slice":
            made = operands[0][turn]
        elif op.name == "stack":
            self.stacks[at] = [*(self.stacks[at] if turn else []), operands[0]]
            made = jnp.stack(self.stacks[at])
        elif is_constant(op):
            made = dict(self.graphs[op.site[:-2]].constants)[op.site[-1]]
        elif op.is_boundary or op.name == "optimization_barrier":
            made = operands[-1] if operands else self.known[op.results[0]]
        else:
            waiting = iter(operands)
            read = [next(waiting) if isinstance(a, int) else a.val for a in op.op.inputs]
            self.known.update(zip(op.results, _jax.bind(op.op.primitive, read, op.op.params), strict=True))
            return
        self.known[op.results[0]] = made

    def read_from(self, op, what: str) -> int:
        (v,) = [v for v, place in zip(op.operands, op.operand_places, strict=True) if place[0] == what]
        return v

    def graph_op(self, site):
        return self.graphs[site[:-1]].ops[site[-1]]

    def results(self) -> list:
        program, outputs = self.program, iter([op for op in self.program.ops if op.name == "output"])
        found = []
        for replaced in program.step.replaces:
            op = next(outputs) if replaced is None else program.ops[replaced]
            found.append(self.known[(op.operands or op.results)[0]])
        return found


@pytest.mark.devices
@MODES
def test_it_computes_what_the_step_computes(step):
    wanted = jax.tree.leaves(step(W, X))
    found = Machine(flat(step), [W, X]).results()
    assert len(found) == len(wanted)
    for one, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-5)


# --- how often, and where


def is_constant(op: FlatOp) -> bool:
    return op.name == "enter" and not op.operands


def runs(program: FlatProgram, path) -> int:
    """How often a graph runs in one step: as often as the loops around it, multiplied."""
    graphs = dict(walk(program.step.graph))
    around = [graphs[path[:n]].ops[path[n]] for n in range(0, len(path), 3)]
    return prod(op.params["length"] for op in around if op.name == "scan")


def at(program: FlatProgram, place):
    """What stands at a place of the nested graph: the path of its graph, and the value's number or the literal."""
    what, where, i = place
    if what == "enter":  # of a branch; the first operand of the op says which branch is taken
        return at(program, ("operand", where[:-2], i + 1))
    path = where[:-1] if what in ("operand", "result") else where
    graph = dict(walk(program.step.graph))[path]
    if what in ("operand", "result"):
        op = graph.ops[where[-1]]
        return path, (op.inputs if what == "operand" else op.outputs)[i]
    return path, (graph.inputs if what == "input" else graph.outputs)[i]


@MODES
def test_every_op_of_the_step_is_there_once_and_a_barrier_once_per_operand(step):
    program = flat(step)
    wanted = {
        (*path, i): len(op.operands) if op.name == "optimization_barrier" else 1
        for path, graph in walk(program.step.graph)
        for i, op in enumerate(graph.ops)
        if not op.bodies
    }
    assert Counter(op.site for op in program.ops if not op.is_boundary) == wanted
    assert all(
        op.op is dict(walk(program.step.graph))[op.site[:-1]].ops[op.site[-1]] for op in program.ops if op.op
    )


@MODES
def test_ops_run_as_often_as_the_loops_around_them_say(step):
    program = flat(step)
    for op in program.ops:
        if op.name in ("input", "output"):
            assert op.count == 1
        else:
            inside = (*op.site, "jaxpr", 0) if op.name in ("slice", "stack") else op.site[:-1]
            assert op.count == runs(program, inside[:-1] if is_constant(op) else inside)


@MODES
def test_an_array_that_a_graph_holds_stands_at_no_op_of_the_step(step):
    program = flat(step)
    sites = {(*path, i) for path, graph in walk(program.step.graph) for i in range(len(graph.ops))}
    held = {(*path, "enter", v) for path, graph in walk(program.step.graph) for v, _ in graph.constants}
    assert {op.site for op in program.ops if is_constant(op)} == held
    assert held.isdisjoint(sites)


@MODES
def test_operands_are_handed_over_as_often_as_what_stands_at_their_place_runs(step):
    program = flat(step)
    for op in program.ops:
        for place, count in zip(op.operand_places, op.operand_counts, strict=True):
            what, where, _ = place
            assert count == runs(program, where[:-1] if what == "operand" else where)


@MODES
def test_operands_are_read_where_the_value_appears(step):
    program = flat(step)
    for op in program.ops:
        for v, place in zip(op.operands, op.operand_places, strict=True):
            made, r = program.maker[v]
            appears = [at(program, p) for p in program.ops[made].result_places[r]]
            path, number = at(program, place)
            if appears:
                assert (path, number) in appears
                assert dict(walk(program.step.graph))[path].values[number].shape == program.values[v].shape
            else:
                assert number in dict(dict(walk(program.step.graph))[path].constants)


@MODES
def test_every_result_and_every_input_of_a_body_is_some_value(step):
    program = flat(step)
    wanted = [
        ("input", path, i) for path, graph in walk(program.step.graph) for i in range(len(graph.inputs))
    ]
    wanted += [
        ("result", (*path, n), r)
        for path, graph in walk(program.step.graph)
        for n, op in enumerate(graph.ops)
        for r in range(len(op.outputs))
    ]
    inside = [op for op in program.ops if op.name != "output"]
    assert sorted(p for op in inside for places in op.result_places for p in places) == sorted(wanted)


@MODES
def test_every_value_is_made_once_and_read_after_it_unless_a_loop_or_a_step_ends_with_it(step):
    program = flat(step)
    made = [v for op in program.ops for v in op.results]
    assert sorted(made) == list(range(len(program.values)))
    for i, op in enumerate(program.ops):
        for r, v in enumerate(op.results):
            assert program.maker[v] == (i, r)
        late = [
            place for v, place in zip(op.operands, op.operand_places, strict=True) if program.maker[v][0] > i
        ]
        assert all(place[0] == "output" and op.name in ("input", "carry") for place in late)
    for v in made:
        assert program.uses.get(v, []) == [
            i for i, op in enumerate(program.ops) for o in op.operands if o == v
        ]


@MODES
def test_a_loop_reaches_from_its_slices_to_its_stacks_inner_loops_before_outer_ones(step):
    program = flat(step)
    wanted = []
    for path, graph in walk(program.step.graph):
        for i, loop in enumerate(graph.ops):
            if loop.name in ("scan", "while"):
                site = (*path, i)
                inside = [
                    n
                    for n, op in enumerate(program.ops)
                    if op.name not in ("input", "output")
                    and (
                        op.site[: len(site)] == site
                        and (len(op.site) > len(site) or op.name in ("slice", "stack"))
                    )
                ]
                assert inside == list(range(inside[0], inside[-1] + 1))
                wanted.append((inside[0], inside[-1] + 1))
    assert sorted(program.loops) == sorted(wanted)
    for n, (start, end) in enumerate(program.loops):
        assert not any(start <= first and last <= end for first, last in program.loops[n + 1 :])


def test_inputs_come_first_with_what_replaces_them_and_outputs_last():
    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(state["w"])
        return jnp.max(x), {"w": state["w"] - 0.1 * gradient, "fixed": state["fixed"]}, jnp.min(x)

    program = flatten(trace(step, {"fixed": W + 1, "w": W}, X))
    fixed, w, x = program.ops[:3]
    assert [(op.name, op.site, op.result_places) for op in program.ops[:3]] == [
        ("input", (i,), ((("input", (), i),),)) for i in range(3)
    ]
    assert program.inputs == tuple(op.results[0] for op in (fixed, w, x))
    assert (fixed.operands, x.operands) == ((), ())
    assert w.operand_places == (("output", (), 2),)
    assert program.ops[program.maker[w.operands[0]][0]].name == "sub"
    assert [(op.name, op.site, op.operand_places, op.result_places) for op in program.ops[-2:]] == [
        ("output", (i,), (("output", (), i),), ((("output", (), i),),)) for i in (0, 3)
    ]


def test_a_result_that_is_a_number_has_no_output():
    assert [op.name for op in flat(lambda w, x: (jnp.sin(x), 2.0)).ops].count("output") == 1


# --- what it may split


@MODES
def test_the_factors_of_a_dimension_multiply_to_its_size(step):
    program = flat(step)
    for op in program.ops:
        for values, dims in ((op.operands, op.rule.operands), (op.results, op.rule.results)):
            for v, of_value in zip(values, dims, strict=True):
                sizes = tuple(prod(op.rule.factors[f].size for f in dim) for dim in of_value)
                assert sizes == program.values[v].shape


@MODES
def test_borders_hand_every_dimension_on_but_the_one_that_a_loop_stacks_over(step):
    for op in flat(step).ops:
        if not op.is_boundary:
            continue
        whole = [f for f, factor in enumerate(op.rule.factors) if factor.kind is not Kind.PARALLEL]
        stacked = {"slice": op.rule.operands, "stack": op.rule.results}.get(op.name, ())
        assert [dims[0] for dims in stacked] == [tuple(whole)] * len(stacked)
        plain = [dims[1:] if dims in stacked else dims for dims in (*op.rule.operands, *op.rule.results)]
        assert len(set(plain)) <= 1
        assert all(len(dim) == 1 for dims in plain for dim in dims)


def test_literals_are_no_operands():
    program = flat(lambda w, x: jnp.sin(x) * 2.0)
    times = only(program, "mul")
    assert len(times.operands) == len(times.rule.operands) == 1
    assert [place[2] for place in times.operand_places] == [0]
    over = only(flat(lambda w, x: 2.0 / x), "div")
    assert [place[2] for place in over.operand_places] == [1]
    assert over.rule.operands == over.rule.results


def test_ops_that_look_alike_share_a_rule_and_others_do_not():
    def step(w, x):
        return (
            jnp.sin(x),
            jnp.sin(x + 1.0),
            jnp.sin(w),
            jnp.sum(x @ w, 0),
            jnp.sum(w[:2], 0),
            jnp.sum(x @ w, 1),
        )

    program = flat(step)
    sines = [op.rule for op in program.ops if op.name == "sin"]
    assert sines[0] is sines[1]
    assert sines[0] is not sines[2]
    over_rows, as_well, over_columns = (op.rule for op in program.ops if op.name == "reduce_sum")
    assert over_rows is as_well
    assert over_rows.results != over_columns.results


def test_a_barrier_lets_sums_pass():
    program = flat(fenced)
    fences = [op for op in program.ops if op.name == "optimization_barrier"]
    assert [program.values[op.results[0]].shape for op in fences] == [(2, 4), (2, 3)]
    for op in fences:
        assert op.rule.is_additive
        assert op.rule.operands == op.rule.results


def test_what_nobody_reads_behind_a_barrier_is_waited_for():
    def step(w, x):
        kept, _, also = lax.optimization_barrier((jnp.sin(x), x @ w, jnp.cos(x)))
        return kept + also

    program = flat(step)
    product = next(op.results[0] for op in program.ops if op.name == "dot_general")
    fences = [op for op in program.ops if op.name == "optimization_barrier"]
    assert len(fences) == 2
    assert [op.after for op in fences] == [((product, ("operand", fences[0].site, 1)),)] * 2


# --- in which phase


def trained(state, x):
    w, momentum = state
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    momentum = 0.9 * momentum + gradient
    return (w - 0.1 * momentum, momentum), jnp.max(gradient)


def test_optimizer_state_is_the_update_s_and_other_arguments_are_the_forward_phase_s():
    program = flatten(trace(trained, (W, W), X))
    assert [op.phase for op in program.ops[:3]] == [Phase.FORWARD, Phase.UPDATE, Phase.FORWARD]
    assert only(program, "output").phase is Phase.UPDATE
    assert all(op.phase is op.op.phase for op in program.ops if op.op is not None)


def test_borders_of_a_loop_are_in_its_phase():
    def step(w, x):
        gradient = jax.grad(
            lambda w: jnp.sum(lax.scan(lambda y, _: (jnp.tanh(y @ w.T @ w), None), x @ w, None, 3)[0])
        )(w)
        return w - 0.1 * gradient

    program = flat(step)
    phases = {
        site: graph.ops[site[-1]].phase
        for path, graph in walk(program.step.graph)
        for site in [(*path, i) for i in range(len(graph.ops))]
    }
    borders = [
        op
        for op in program.ops
        if op.name in ("carry", "slice", "stack") or (op.name == "enter" and op.operands)
    ]
    assert {phases[op.site] for op in borders} == {Phase.FORWARD, Phase.BACKWARD}
    assert all(op.phase is phases[op.site] for op in borders)


def test_new_state_is_read_by_the_update():
    program = flatten(trace(trained, (W, W), X))
    assert [read_phase(op) for op in program.ops[:3]] == [ReadPhase.UPDATE] * 3
    for op in program.ops[3:]:
        assert read_phase(op).value == op.phase.value


def carried(body, first=0.0) -> bool:
    """Whether a loop's carry is an accumulator."""

    def step(w, x):
        return lax.scan(lambda y, part: body(y, part, x @ w), jnp.full((2, 4), first, np.float32), STACK)

    return only(flat(step), "carry").is_accumulator


def test_an_accumulator_begins_with_zeros_and_is_only_added_to():
    assert carried(lambda y, part, z: (y + part, None))
    assert carried(lambda y, part, z: (jnp.tanh(part) * z + y, part))
    assert not carried(lambda y, part, z: (y + part, None), first=1.0)
    assert not carried(lambda y, part, z: (y - part, None))
    assert not carried(lambda y, part, z: (y + y, None))
    assert not carried(lambda y, part, z: (y + jnp.tanh(y), None))
    assert not carried(lambda y, part, z: (y + part, y.sum()))
    assert not carried(lambda y, part, z: (y + part, y))
    assert not carried(lambda y, part, z: ((total := y + part), total))
    assert not carried(lambda y, part, z: (part, None))


def test_an_accumulator_reads_no_zeros_and_is_written_over():
    def step(w, x):
        return lax.scan(lambda y, part: (y + part, None), jnp.zeros((2, 4)), STACK)[0] + x @ w

    program = flat(step)
    (total,) = (op for op in program.ops if op.name == "carry")
    assert total.operands == only_adding(program).results
    assert program.in_place == {*total.operands}


def test_gradients_that_a_loop_adds_up_are_the_backward_phase_s():
    program = flatten(microbatched(trace(trained, (W, W), X), 2))
    (gradient,) = (op for op in program.ops if op.is_accumulator and program.values[op.results[0]].shape)
    assert gradient.phase is Phase.BACKWARD


def only_adding(program: FlatProgram):
    return next(op for op in program.ops if op.name == "add" and op.count == len(STACK))


def test_the_update_of_a_leaf_ends_before_that_of_the_next_begins():
    """The trace squares all gradients, then scales all: temporaries of all leaves at once."""

    def step(params, x):
        grads = jax.grad(lambda ws: jnp.sum(jnp.tanh(x @ ws[0]) @ ws[1]))(params)
        squares = [jnp.square(g) for g in grads]
        scaled = [g * lax.rsqrt(s) for g, s in zip(grads, squares, strict=True)]
        return [w - 0.1 * g for w, g in zip(params, scaled, strict=True)]

    params = [np.ones((3, 4), np.float32), np.ones((4, 2), np.float32)]
    traced = trace(step, params, X)
    program = flatten(traced)
    shapes = [
        program.values[op.results[0]].shape for op in program.ops if op.name in ("square", "mul", "rsqrt")
    ]
    assert {op.name for op in traced.graph.ops} >= {"square", "rsqrt"}
    leaves = [shape for shape in shapes if shape in ((3, 4), (4, 2))][-8:]
    assert leaves == sorted(leaves)
    assert len(set(leaves)) == 2
    at = {v: i for i, op in enumerate(program.ops) for v in op.results}
    assert all(at[v] < i for i, op in enumerate(program.ops) if op.name != "input" for v in op.operands)
