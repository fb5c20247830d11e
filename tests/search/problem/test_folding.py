"""Classes of ops: colour refinement against one that compares neighbourhoods, and what passes between classes."""

import random
import re
from collections import Counter
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import FlatProgram, flatten
from autoshard.search.problem.folding import ROUNDS, _mix, fold, separate
from tests.search.problem.partitions import partitioned

ROW, SQUARE, BATCH = (jnp.zeros(shape) for shape in ((8,), (8, 8), (16, 8)))


def mlp(num_layers: int):
    """A stack of layers with biases between an embedding and a head, trained with momentum."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss(params, x):
        y = x @ params["embedding"]
        for layer in params["layers"]:
            y = y + jnp.tanh(y @ layer["w"] + layer["b"])
        return jnp.mean((y @ params["head"]) ** 2)

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss)(params, x), state)
        return optax.apply_updates(params, updates), state

    layers = [{"w": SQUARE, "b": ROW} for _ in range(num_layers)]
    params = {"embedding": SQUARE, "head": SQUARE, "layers": layers}
    return step, params, optimizer.init(params), BATCH


def scanned(weights, x):
    """Two products of a loop's body; its carry is read inside and after."""

    def body(y, w):
        return jnp.tanh(y @ w) @ w, jnp.sum(y)

    last, sums = lax.scan(body, x, weights)
    return last + jnp.sum(sums)


def attention(q, k, v, x):
    """Three alike products of one operand that are told apart by where they go."""
    scores = (x @ q) @ (x @ k).T
    return jnp.exp(scores) @ (x @ v)


def flat(step, *args) -> FlatProgram:
    return flatten(trace(step, *args))


PROGRAMS = {
    "mlp": flat(*mlp(9)),
    "scan": flat(scanned, jnp.zeros((4, 8, 8)), BATCH),
    "attention": flat(attention, SQUARE, SQUARE, SQUARE, BATCH),
}
ALL = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


# --- which ops are alike


def by_neighbourhood(program: FlatProgram, rounds: int) -> set[frozenset[int]]:
    """Ops apart as far as anything tells them apart that is at most so many producers or consumers away."""

    def look(i: int):
        op = program.ops[i]
        name = program.step.arguments[op.site[0]].name if op.name == "input" else op.op.scope if op.op else ""
        sizes = [program.values[v].itemsize for v in (*op.operands, *op.results)]
        return op.name, op.rule, op.phase, op.count, op.operand_counts, sizes, re.sub(r"\d+", "", name)

    meets = [(*program.maker[v], i, n) for i, op in enumerate(program.ops) for n, v in enumerate(op.operands)]
    colors = numbered([look(i) for i in range(len(program.ops))])
    for _ in range(rounds):
        above, below = ([[] for _ in program.ops] for _ in range(2))
        for producer, r, consumer, n in meets:
            above[consumer].append((colors[producer], r, n))
            below[producer].append((colors[consumer], r, n))
        colors = numbered([(c, sorted(a), sorted(b)) for c, a, b in zip(colors, above, below, strict=True)])
    return {frozenset(i for i, c in enumerate(colors) if c == color) for color in colors}


def numbered(looks: list) -> list[int]:
    """A number for each, the same where they are equal."""
    return [looks.index(look) for look in looks]


@ALL
def test_ops_are_alike_whose_neighbourhoods_are(program):
    assert set(map(frozenset, fold(program).members)) == by_neighbourhood(program, ROUNDS)


def test_colours_are_mixed_as_splitmix64_does():
    """The first numbers of its generator seeded with 0: Steele, Lea and Flood 2014; Vigna's splitmix64.c."""
    seeds = np.array([0, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A], np.uint64)
    assert _mix(seeds).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_refinement_stops_where_a_query_is_told_from_a_key():
    counts = [len(by_neighbourhood(PROGRAMS["mlp"], rounds)) for rounds in range(ROUNDS + 2)]
    assert all(fewer < more for fewer, more in pairwise(counts))


def test_a_deeper_stack_has_no_more_classes():
    assert len(fold(flat(*mlp(40))).members) == len(fold(flat(*mlp(12))).members)


def test_layers_far_from_both_ends_are_decided_together():
    whole = fold(flat(*mlp(20)))
    arguments = whole.program.step.arguments
    names = [
        {arguments[whole.program.ops[i].site[0]].name for i in m}
        for m in whole.members
        if whole.program.ops[m[0]].name == "input"
    ]
    (weights,) = [n for n in names if "params['layers'][10]['w']" in n]
    assert len(weights) > 10
    assert all("['w']" in name for name in weights)


def test_a_query_is_not_a_key():
    whole = fold(PROGRAMS["attention"])
    classes = whole.class_of[:3]
    assert len(set(classes)) == 3


def test_marks_keep_arguments_apart():
    program = flat(*mlp(20))
    names = [a.name for a in program.step.arguments]
    marks = ["" for _ in names]
    marks[names.index("params['layers'][10]['w']")] = "pinned"
    alike, other = (names.index(f"params['layers'][{n}]['w']") for n in (9, 10))
    plain, marked = fold(program), fold(program, marks)
    assert plain.class_of[alike] == plain.class_of[other]
    assert marked.class_of[alike] != marked.class_of[other]
    same = fold(program, ["" for _ in names])
    assert len(same.members) == len(plain.members) < len(marked.members)


@pytest.mark.parametrize(
    ("name", "step", "is_alike"),
    [
        ("sin", lambda x: (jnp.sin(x[0]), jnp.sin(x[1])), True),
        ("sin", lambda x: (jnp.sin(x[0]), jnp.sin(x[1][:8])), False),
        ("sin", lambda x: (jnp.sin(x[0]), jnp.sin(x[1].astype(jnp.bfloat16))), False),
        ("sin", lambda x: (jnp.sin(x[0]), lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x[1])), False),
        ("reduce_sum", lambda x: (jnp.sum(x[0], 0), jnp.sum(x[1], 1)), False),
        ("dot_general", lambda x: (x[0] @ x[1].T, x[0].T @ x[1]), False),
        ("sub", lambda x: (jnp.exp(x[0]) - jnp.sin(x[1]), jnp.sin(x[0]) - jnp.exp(x[1])), False),
    ],
)
def test_what_computes_or_stands_otherwise_is_decided_apart(name, step, is_alike):
    whole = fold(flat(step, [BATCH, BATCH]))
    classes = {whole.class_of[i] for i, op in enumerate(whole.program.ops) if op.name == name}
    assert len(classes) == (1 if is_alike else 2)


def test_arguments_that_are_decided_otherwise_are_taken_apart_and_nothing_else():
    program = flat(*mlp(20))
    whole = fold(program)
    decided = ["P()" if "[10]" in a.name else "" for a in program.step.arguments]
    found = separate(whole, decided)
    wanted = []
    for m in whole.members:
        are_inputs = program.ops[m[0]].name == "input"
        marks = sorted({decided[i] for i in m}) if are_inputs else [""]
        wanted += [tuple(i for i in m if not are_inputs or decided[i] == mark) for mark in marks]
    assert sorted(found.members) == sorted(wanted)
    assert len(whole.members) < len(wanted)
    for op_class, positions in enumerate(found.members):
        assert {whole.class_of[i] for i in positions} == {found.whole_of[op_class]}
    assert whole.whole_of == tuple(range(len(whole.members)))


# --- what passes between classes


@ALL
def test_classes_are_a_partition_in_the_order_of_their_first_ops(program):
    whole = fold(program)
    assert sorted(i for m in whole.members for i in m) == list(range(len(program.ops)))
    assert [m[0] for m in whole.members] == sorted(m[0] for m in whole.members)
    assert all(list(m) == sorted(m) for m in whole.members)
    for op_class, positions in enumerate(whole.members):
        assert {whole.class_of[i] for i in positions} == {op_class}
        assert whole.op(op_class) is program.ops[positions[0]]
        assert whole.counts[op_class] == sum(program.ops[i].count for i in positions)


@ALL
@pytest.mark.parametrize("num_classes", [1, 2, 5, 20])
def test_any_partition_hands_over_what_the_program_does(program, num_classes):
    """Every operand of the flat program, as often as it is handed over, between the classes of its maker and its reader."""
    drawn = random.Random(num_classes).choices(range(num_classes), k=len(program.ops))
    members = tuple(tuple(i for i, c in enumerate(drawn) if c == n) for n in sorted(set(drawn)))
    whole = partitioned(program, members)
    wanted = Counter()
    for i, op in enumerate(program.ops):
        for position, (v, count) in enumerate(zip(op.operands, op.operand_counts, strict=True)):
            made, r = program.maker[v]
            wanted[whole.class_of[made], r, whole.class_of[i], position] += count
    found = [(d.producer, d.result, d.consumer, d.operand) for d in whole.dependencies]
    assert found == sorted(wanted)
    assert {key: d.count for key, d in zip(found, whole.dependencies, strict=True)} == wanted
    for op_class in range(len(members)):
        into = [d for d in whole.dependencies if d.consumer == op_class]
        assert whole.dependencies_into.get(op_class, []) == into


# --- what is heavy, and what is light


@pytest.mark.parametrize(
    ("name", "is_heavy", "is_light", "step", "args"),
    [
        ("dot_general", True, False, jnp.matmul, (BATCH, SQUARE)),
        ("gather", True, False, lambda x, i: x[i], (BATCH, np.zeros(4, np.int32))),
        ("reduce_sum", False, True, lambda x: jnp.sum(x, 0), (BATCH,)),
        ("add", False, True, lambda x, y: x + y, (BATCH, BATCH)),
        ("cumsum", False, False, lambda x: jnp.cumsum(x, 0), (BATCH,)),
        ("input", False, False, jnp.sin, (BATCH,)),
        ("sin", False, True, jnp.sin, (BATCH,)),
        ("sin", False, True, jnp.sin, (jnp.zeros(()),)),
    ],
)
def test_what_is_heavy_and_what_is_light(name, is_heavy, is_light, step, args):
    whole = fold(flat(step, *args))
    (op_class,) = {
        k for k in range(len(whole.members)) if whole.op(k).name == name and k < len(whole.members)
    }
    assert (whole.is_heavy[op_class], whole.is_light[op_class]) == (is_heavy, is_light)
