"""Ports, copies and edges: who shares a value, who may keep it, and how often it is handed over."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import ReadPhase, flatten, read_phase
from autoshard.search.problem.folding import fold
from autoshard.search.problem.op_groups import MIN_DECIDED_BYTES, op_groups
from autoshard.search.problem.strategy_graph import (
    STUCK,
    Copy,
    Port,
    StrategyGraph,
    strategy_graph,
)
from tests.search.problem.partitions import apart


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def connected(step, *args, is_folded=False, backward="") -> StrategyGraph:
    """A step's graph; unless it is folded, every op is a class of its own. Ops named `backward` are put into that phase."""
    program = flatten(trace(step, *args))
    ops = [replace(op, phase=Phase.BACKWARD) if op.name == backward else op for op in program.ops]
    program = replace(program, ops=tuple(ops))
    whole = fold(program) if is_folded else apart(program)
    return strategy_graph(whole, op_groups(whole))


def name(graph: StrategyGraph, op_class: int) -> str:
    op = graph.folded.op(op_class)
    return graph.folded.program.step.arguments[op.site[0]].name if op.name == "input" else op.name


def copies_of(graph: StrategyGraph, maker: str) -> dict[ReadPhase, Copy]:
    found = [c for c in graph.copies if name(graph, c.maker[0]) == maker]
    assert len({c.maker for c in found}) <= 1
    return {c.phase: c for c in found}


def readers(graph: StrategyGraph, ports) -> list[str]:
    """The primitives of the groups that some ports belong to."""
    return sorted(graph.folded.op(graph.groups[p.node].op_classes[0]).name for p in ports)


# --- programs for the laws


def mlp(params, x):
    def loss(params):
        y = x
        for w, b in params:
            y = jnp.tanh(y @ w + b)
        return jnp.mean(y**2)

    return [
        (w - 0.1 * dw, b - 0.1 * db) for (w, b), (dw, db) in zip(params, jax.grad(loss)(params), strict=True)
    ]


def attention(params, x):
    def loss(params):
        q, k, v = (x @ w for w in params)
        return jnp.sum((jax.nn.softmax(q @ k.T) @ v) ** 2)

    return [w - 0.1 * d for w, d in zip(params, jax.grad(loss)(params), strict=True)]


def recurrent(w, x):
    def loss(w):
        return jnp.sum(lax.scan(lambda y, part: (jnp.tanh(y @ w + part), y), x[0], x)[1] ** 2)

    return w - 0.1 * jax.grad(loss)(w)


W = array(128, 128)
STEPS = {
    "mlp": (mlp, [(W, array(128))] * 6, array(256, 128)),
    "attention": (attention, [W] * 3, array(256, 128)),
    "recurrent": (recurrent, W, array(8, 256, 128)),
}
GRAPHS = {
    (step, is_folded): connected(*STEPS[step], is_folded=is_folded)
    for step in STEPS
    for is_folded in (False, True)
}
ALL = pytest.mark.parametrize("graph", GRAPHS.values(), ids=[f"{s}-{f}" for s, f in GRAPHS])


# --- ports


@ALL
def test_ports_name_a_value_s_dimensions_by_the_factors_of_its_group(graph):
    for (op_class, index, is_result), port in graph.ports.items():
        rule = graph.folded.op(op_class).rule
        group = graph.groups[port.node]
        assert op_class in group.op_classes
        dims = (rule.results if is_result else rule.operands)[index]
        assert len(port.dims) == len(dims)
        for named, dim in zip(port.dims, dims, strict=True):
            large = [f for f in dim if rule.factors[f].size > 1]
            assert len(named) == len(large)
            for n, f in zip(named, large, strict=True):
                is_stuck = rule.factors[f].kind is Kind.UNSPLITTABLE
                assert n == (STUCK if is_stuck else group.factor_of[op_class, f])
    ends = [
        (k, i, False)
        for k in range(len(graph.folded.members))
        for i in range(len(graph.folded.op(k).operands))
    ]
    ends += [
        (k, r, True) for k in range(len(graph.folded.members)) for r in range(len(graph.folded.op(k).results))
    ]
    assert set(graph.ports) == set(ends)


@ALL
def test_results_are_partial_over_what_they_sum_unless_their_group_reads_them(graph):
    inside = {
        d.producer
        for d in graph.folded.dependencies
        if graph.node_of[d.producer] == graph.node_of[d.consumer]
    }
    for (op_class, _, is_result), port in graph.ports.items():
        rule, group = graph.folded.op(op_class).rule, graph.groups[port.node]
        shown = {f for dim in port.dims for f in dim}
        summed = {
            n for (k, f), n in group.factor_of.items() if k == op_class and rule.factors[f].kind is Kind.SUM
        }
        is_scalar = not graph.folded.program.values[graph.folded.op(op_class).results[0]].shape
        may_be = is_result and not is_scalar and (group.is_sum or op_class not in inside)
        assert set(port.partial_over) == (summed - shown if may_be else set())
        assert list(port.partial_over) == sorted(port.partial_over)


@ALL
def test_every_class_is_in_the_group_that_it_is_said_to_be_in(graph):
    assert all(k in graph.groups[node].op_classes for k, node in enumerate(graph.node_of))
    assert [c.node for c in graph.copies] == list(range(len(graph.groups), graph.num_nodes))
    assert [graph.is_sum(n) for n in range(graph.num_nodes)] == [g.is_sum for g in graph.groups] + [
        False
    ] * len(graph.copies)
    assert graph.copy_of == {(*c.maker, c.phase): c for c in graph.copies}


def test_a_product_s_result_is_partial_over_the_loop_that_it_sums():
    graph = connected(lambda x, w: jnp.tanh(x @ w), array(8, 16), array(16, 4))
    (product,) = [k for k in range(len(graph.folded.members)) if name(graph, k) == "dot_general"]
    left, right, made = (
        graph.ports[product, 0, False],
        graph.ports[product, 1, False],
        graph.ports[product, 0, True],
    )
    rows, depth, columns = made.dims[0][0], made.partial_over[0], made.dims[1][0]
    assert (left.dims, right.dims) == (((rows,), (depth,)), ((depth,), (columns,)))
    assert (left.partial_over, right.partial_over, made.partial_over) == ((), (), (depth,))


# --- edges


def handed_over(graph: StrategyGraph) -> Counter:
    """By maker and reading port: how often values are handed over, those of each phase once for each value and run."""
    program, class_of = graph.folded.program, graph.folded.class_of
    most: dict = {}
    for i, op in enumerate(program.ops):
        for operand, (v, count) in enumerate(zip(op.operands, op.operand_counts, strict=True)):
            made, r = program.maker[v]
            maker, port = (class_of[made], r), graph.ports[class_of[i], operand, False]
            if program.values[v].shape and port != graph.ports[*maker, True]:
                key = maker, port, read_phase(op)
                most.setdefault(key, {})[v] = max(most.get(key, {}).get(v, 0), count)
    return Counter((maker, port, sum(counts.values())) for (maker, port, _), counts in most.items())


@ALL
def test_values_are_handed_to_every_port_as_often_as_the_program_does(graph):
    copies = {c.node for c in graph.copies}
    found = Counter((e.maker, e.target, e.count) for e in graph.edges if e.target.node not in copies)
    assert found == handed_over(graph)


@ALL
def test_edges_and_copies_are_in_the_order_of_what_they_hand_over(graph):
    for makers in ([e.maker for e in graph.edges], [c.maker for c in graph.copies]):
        assert makers == sorted(makers)


@ALL
def test_every_way_begins_where_the_value_is_made_and_leads_through_its_own_copies(graph):
    copies = {c.node: c for c in graph.copies}
    into = {e.target.node: e for e in graph.edges if e.target.node in copies}
    for edge in graph.edges:
        assert (
            edge.value == graph.folded.program.values[graph.folded.op(edge.maker[0]).results[edge.maker[1]]]
        )
        here, passed = edge, []
        while here.source.node in copies:
            passed.append(copies[here.source.node])
            assert passed[-1].maker == edge.maker
            here = into[here.source.node]
        assert here.source == graph.ports[*edge.maker, True]
        phases = [c.phase for c in passed]
        assert phases in ([], [ReadPhase.REST]) or (len(phases) <= 2 and phases[1:] in ([], [ReadPhase.REST]))
        if passed and passed[0].phase is not ReadPhase.REST and edge.target.node not in copies:
            assert edge.target in passed[0].targets
    assert all(into[c.node].source == c.source and into[c.node].count == c.count for c in graph.copies)


def test_what_stays_in_its_group_has_no_edge():
    graph = connected(lambda x: jnp.sin(x) * 2.0, array(8, 8))
    assert sorted(name(graph, e.maker[0]) for e in graph.edges) == ["mul", "x"]


def test_a_transpose_inside_a_group_is_a_reshard_of_it_to_itself():
    graph = connected(lambda x: (y := jnp.sin(x)) + y.T, array(8, 8))
    (inside,) = [e for e in graph.edges if e.source.node == e.target.node]
    assert inside.source.dims == inside.target.dims[::-1]


def test_numbers_travel_for_free():
    graph = connected(lambda x, a: jnp.sin(x) * a, array(8, 8), array())
    assert all(e.value.shape for e in graph.edges)


def test_what_a_loop_reads_in_every_turn_is_handed_over_once():
    graph = connected(recurrent, W, array(8, 256, 128))
    counts = {
        name(graph, e.maker[0]): e.count for e in graph.edges if name(graph, e.maker[0]) in ("enter", "slice")
    }
    assert counts == {"enter": 8, "slice": 8}
    assert {e.count for e in graph.edges if name(graph, e.maker[0]) == "w"} == {1}


# --- copies


def projected(x, a, b, c):
    return x @ a, x @ b, x @ c


def test_readers_of_one_phase_share_a_copy():
    graph = connected(lambda x, *w: projected(jnp.sin(x), *w), array(256, 128), W, W, W)
    found = copies_of(graph, "sin")
    assert list(found) == [ReadPhase.FORWARD]
    copy = found[ReadPhase.FORWARD]
    assert readers(graph, copy.targets) == ["dot_general"] * 3
    assert (copy.kept_from, copy.count) == ((), 1)
    assert copy.source == graph.ports[copy.maker[0], 0, True]
    edges = [e for e in graph.edges if e.source.node == copy.node]
    assert [(e.target, e.source) for e in edges] == [(t, Port(copy.node, ())) for t in copy.targets]


def test_one_reader_needs_no_copy_whatever_its_phase():
    for backward in ("", "dot_general"):
        graph = connected(lambda x, w: jnp.sin(x) @ w, array(256, 128), W, backward=backward)
        assert graph.copies == ()


def turned(x, w):
    """A sine's transpose is read by its own group, which adds it to the sine, and by a product."""
    sine = jnp.sin(x)
    transposed = sine.T
    return transposed + sine, transposed @ w


def test_a_reader_in_the_value_s_own_group_needs_no_copy():
    assert connected(turned, W, W).copies == ()
    assert connected(turned, W, W, backward="add").copies == ()
    retained = connected(turned, W, W, backward="dot_general")
    (copy,) = retained.copies
    assert (copy.phase, readers(retained, copy.kept_from)) == (ReadPhase.BACKWARD, ["sin"])


def squared(w, x):
    """The product's operand, computed by a product, is read by its gradient again."""
    return jax.grad(lambda w: jnp.sum(((x @ w) @ w) ** 2))(w)


def kept(rows: int) -> bool:
    """Whether what the forward phase reads of so many rows of x may be kept for the backward phase."""
    found = copies_of(connected(squared, W, array(rows, 128)), "x")
    return ReadPhase.BACKWARD in found and bool(found[ReadPhase.BACKWARD].kept_from)


def test_what_both_phases_read_may_be_kept_if_it_is_large():
    rows = MIN_DECIDED_BYTES // (4 * 128)
    assert kept(rows)
    assert not kept(rows - 1)
    assert MIN_DECIDED_BYTES == 64 * 1024


def test_a_kept_copy_is_of_one_that_the_forward_phase_reads():
    graph = connected(squared, W, array(256, 128))
    copy = copies_of(graph, "x")[ReadPhase.BACKWARD]
    forward = {graph.ports[k, i, False] for k, i in read_by(graph, copy.maker, ReadPhase.FORWARD)}
    backward = {graph.ports[k, i, False] for k, i in read_by(graph, copy.maker, ReadPhase.BACKWARD)}
    assert (set(copy.kept_from), set(copy.targets)) == (forward, backward)
    assert ReadPhase.FORWARD not in copies_of(graph, "x")


def read_by(graph: StrategyGraph, maker, phase: ReadPhase) -> list[tuple[int, int]]:
    dependencies = [d for d in graph.folded.dependencies if (d.producer, d.result) == maker]
    return [(d.consumer, d.operand) for d in dependencies if read_phase(graph.folded.op(d.consumer)) is phase]


def test_a_partial_value_that_two_phases_read_is_first_brought_to_rest():
    graph = connected(squared, W, array(256, 128))
    (first,) = [c for c in graph.copies if c.phase is ReadPhase.REST]
    assert name(graph, first.maker[0]) == "dot_general"
    assert first.source.partial_over
    assert (first.targets, first.kept_from, first.count) == ((), (), 1)
    resting = Port(first.node, ())
    after = [e for e in graph.edges if e.maker == first.maker and e.target != resting]
    backward = graph.copy_of[*first.maker, ReadPhase.BACKWARD]
    assert {e.source for e in after} == {resting, Port(backward.node, ())}
    assert backward.source == resting


def test_a_phase_counts_whose_readers_are_inside_of_the_group_and_outside():
    """A sum's transpose is read by that sum's group and by a sine, and by a cosine in the backward phase."""

    def step(x, w):
        terms = x @ w + w @ x
        transposed = terms.T
        return transposed + terms, jnp.sin(transposed), jnp.cos(transposed)

    assert ReadPhase.REST in copies_of(connected(step, W, W, backward="cos"), "transpose")
    assert ReadPhase.REST not in copies_of(connected(step, W, W), "transpose")


def test_what_one_phase_reads_is_reduced_on_its_way():
    graph = connected(lambda x, w: jnp.tanh(x @ w) * 2.0, array(256, 128), W)
    assert ReadPhase.REST not in {c.phase for c in graph.copies}


def test_copies_count_each_value_once_for_all_its_readers():
    step, params, x = STEPS["mlp"]
    for is_folded in (False, True):
        graph = connected(step, params, x, is_folded=is_folded)
        program = graph.folded.program
        for copy in graph.copies:
            values = [program.ops[i].results[copy.maker[1]] for i in graph.folded.members[copy.maker[0]]]
            if copy.phase is ReadPhase.REST:
                assert copy.count == len(values)
            else:
                is_read = [
                    any(read_phase(program.ops[u]) is copy.phase for u in program.uses[v]) for v in values
                ]
                assert copy.count == sum(is_read)


# --- what the compiler joins


def cast(params, batch):
    """Weights are cast for the forward phase; gradients are cast back, clipped, and read by the update."""

    def loss(params):
        half = [w.astype(jnp.bfloat16) for w in params]
        y = batch["x"].astype(jnp.bfloat16)
        for w in half:
            y = jnp.tanh(y @ w)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    gradients = jax.grad(loss)(params)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients))
    return [w - 0.1 * g / norm for w, g in zip(params, gradients, strict=True)], norm


def test_inputs_and_their_casts_and_what_only_the_update_reads_are_joined():
    graph = connected(cast, [W, W], {"x": array(256, 128)})
    joined = Counter(name(graph, k) for k, _ in graph.combined)
    assert joined["params[0]"] == joined["params[1]"] == joined["batch['x']"] == 1
    products = [k for k in range(len(graph.folded.members)) if name(graph, k) == "dot_general"]
    weights_gradients = [k for k in products if (k, 0) in graph.combined]
    assert len(weights_gradients) == 2
    assert len(products) == 5
    forward = [k for k in products if read_phase(graph.folded.op(k)) is ReadPhase.FORWARD]
    assert not {(k, 0) for k in forward} & graph.combined
    assert joined["tanh"] == 0
    casts = [k for k in range(len(graph.folded.members)) if name(graph, k) == "convert_element_type"]
    early = [
        k for k in casts if read_phase(graph.folded.op(k)) is ReadPhase.FORWARD and (k, 0) in graph.combined
    ]
    assert len(early) == 3


def test_what_is_computed_from_inputs_is_not_joined():
    graph = connected(lambda w, v: (jnp.sin(w) @ v, (w + v) @ v, -w @ v), W, W)
    joined = {name(graph, k) for k, _ in graph.combined}
    assert joined - {"dot_general"} == {"w", "v", "neg"}


def test_a_loop_s_part_of_an_input_and_a_stack_of_gradients_are_joined():
    def step(weights, x):
        def loss(weights):
            return jnp.sum(lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0] ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    graph = connected(step, array(4, 128, 128), array(256, 128))
    stacks = [k for k in range(len(graph.folded.members)) if name(graph, k) == "stack"]
    assert any((k, 0) in graph.combined for k in stacks)
    slices = [k for k in range(len(graph.folded.members)) if name(graph, k) == "slice"]
    of_weights = [
        k for k in slices if name(graph, graph.folded.dependencies_into[k][0].producer) == "weights"
    ]
    assert of_weights
    assert all((k, 0) in graph.combined for k in of_weights)
    others = [k for k in slices if k not in of_weights]
    assert others
    assert not any((k, 0) in graph.combined for k in others)


def accumulated(dtype) -> StrategyGraph:
    """Of a loop that adds up products of some type."""

    def body(total, part):
        return total + (part.T @ part).astype(total.dtype), None

    return connected(lambda x: lax.scan(body, jnp.zeros((8, 8)), jnp.sin(x))[0], array(4, 16, 8, dtype=dtype))


@pytest.mark.parametrize(("dtype", "terms"), [(jnp.float32, []), (jnp.bfloat16, ["bfloat16"])])
def test_of_sums_of_converted_terms_it_is_known_what_these_were(dtype, terms):
    graph = accumulated(dtype)
    assert [str(value.dtype) for value in graph.terms.values()] == terms
    assert all(name(graph, op_class) == "carry" for op_class, _ in graph.terms)


@pytest.mark.parametrize(("initial", "num_reductions"), [(0.0, 1), (1.0, 4)])
def test_a_number_that_a_loop_only_adds_up_from_zero_is_reduced_once_behind_it(initial, num_reductions):
    """A loss in microbatches is such a number. Source: XLA, `while_loop_all_reduce_code_motion.cc`."""

    def body(total, part):
        return total + jnp.sum(jnp.sin(part)), None

    graph = connected(lambda x: lax.scan(body, initial, x)[0], array(4, 16, 8))
    (summed,) = [k for k in range(len(graph.folded.members)) if name(graph, k) == "reduce_sum"]
    assert graph.folded.counts[summed] == 4
    assert graph.num_reductions[summed] == num_reductions


def as_half(x):
    return x.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("step", "narrowed"),
    [
        (lambda x, w: jnp.sin(as_half(x @ w)), {"dot_general"}),
        (lambda x, w: jnp.sin(as_half(x)).astype(jnp.float32) @ w, {"x", "convert_element_type"}),
        (lambda x, w: (lambda y: (jnp.sin(as_half(y)), y))(x @ w), set()),
        (lambda x, w: as_half(x @ w) @ as_half(w), {"dot_general"}),
        (lambda x, w: (lambda y: y @ jnp.sin(y))(as_half(x @ w)), set()),
        (lambda x, w: jnp.sin(x) @ w, set()),
    ],
)
def test_a_value_moves_in_the_narrower_type_if_it_and_its_conversion_have_one_reader_each(step, narrowed):
    graph = connected(step, array(64, 64), array(64, 64))
    assert {name(graph, op_class) for (op_class, _), _ in graph.narrowed} == narrowed
    assert {str(value.dtype) for value in graph.narrowed.values()} <= {"bfloat16"}


def test_a_parameter_that_the_forward_phase_converts_moves_there_in_the_narrower_type_and_rests_in_its_own():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.sin(as_half(w) + x)))(w)

    graph = connected(step, array(256, 128), array(8, 256, 128, dtype=jnp.bfloat16))
    assert {
        (name(graph, op_class), is_updating): str(value.dtype)
        for ((op_class, _), is_updating), value in graph.narrowed.items()
        if name(graph, op_class) == "w"
    } == {("w", False): "bfloat16"}


def test_a_number_that_is_converted_moves_nowhere():
    def step(x):
        return jnp.sin(x) * jax.jit(lambda number: number.astype(jnp.float32))(np.float16(2))

    graph = connected(step, array(64, 64))
    assert "convert_element_type" in {name(graph, k) for k in range(len(graph.folded.members))}
    assert not graph.narrowed


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_weight_that_is_widened_by_itself_moves_in_its_own_type(is_trained):
    """For several phases, too."""

    def step(w, x):
        def loss(w):
            return jnp.sum(jnp.sin(x @ w.astype(jnp.float32)) @ w.astype(jnp.float32))

        return w - jax.grad(loss)(w) if is_trained else loss(w)

    graph = connected(step, array(64, 64, dtype=jnp.bfloat16), array(64, 64))
    moved = {
        name(graph, op_class): str(value.dtype)
        for ((op_class, _), _), value in graph.narrowed.items()
        if graph.folded.op(op_class).phase is Phase.FORWARD
    }
    assert moved == {"convert_element_type": "bfloat16"}


def test_what_a_loop_has_added_up_is_joined():
    graph = accumulated(jnp.float32)
    assert {name(graph, op_class) for op_class, _ in graph.combined} == {"x", "carry"}
