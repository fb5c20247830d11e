"""Groups of ops: by hand, and against a joiner that tries every union anew."""

from functools import cache
from itertools import combinations
from math import prod

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.op_groups import Loop, OpGroup, op_groups
from tests.search.problem import partitions


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def apart(step, *args) -> FoldedProgram:
    """The program with every op in a class of its own."""
    return partitions.apart(flatten(trace(step, *args)))


def grouped(step, *args) -> list[list[str]]:
    """The primitives of each group, those with a single boundary left out."""
    whole = apart(step, *args)
    names = [[whole.op(k).name for k in group.op_classes] for group in op_groups(whole)]
    return [found for found in names if found[0] not in ("input", "output")]


# --- by hand


def test_a_chain_of_light_ops_is_one_group_and_products_stand_alone():
    def step(x, w, b):
        return jnp.tanh(jnp.tanh(x) @ w + b) * 2.0

    assert grouped(step, array(16, 8), array(8, 4), array(4)) == [
        ["tanh"],
        ["dot_general"],
        ["broadcast_in_dim", "add", "tanh", "mul"],
    ]


def test_statistics_join_the_activations_that_they_normalise():
    def step(x):
        y = jnp.sin(x)
        centred = y - jnp.mean(y, -1, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True))

    whole = apart(step, array(16, 8))
    (found,) = [g for g in op_groups(whole) if len(g.op_classes) > 1]
    assert [whole.op(k).name for k in found.op_classes].count("reduce_sum") == 2
    assert found.sizes == (16, 8)


@pytest.mark.parametrize(("size", "num_groups"), [(128, 2), (127, 1)])
def test_a_sum_of_64_kib_ends_its_group(size, num_groups):
    """So it may be scattered, as the compiler does it: XLA, `reduce_scatter_creator.cc`."""
    found = grouped(lambda x: jnp.cos(jnp.sin(x).sum(0).T), array(4, size, size))
    assert len(found) == num_groups
    assert found[0][:2] == ["sin", "reduce_sum"]


def test_a_large_statistic_stays_with_what_it_normalises():
    step = lambda x: (y := jnp.sin(x)) / jnp.sqrt(jnp.sum(y**2, -1, keepdims=True))  # noqa: E731
    assert [names[0] for names in grouped(step, array(256, 256, 8))] == ["sin"]


def test_a_rotary_table_does_not_tie_the_heads_of_queries_to_those_of_keys():
    """Queries have 8 heads, keys 2: both are turned by one table, over places and features."""

    def step(q, k, angles):
        table = jnp.cos(angles)
        return jnp.sin(q) * table[None, :, None, :], jnp.sin(k) * table[None, :, None, :]

    whole = apart(step, array(4, 16, 8, 32), array(4, 16, 2, 32), array(16, 32))
    assert sorted(g.sizes for g in op_groups(whole) if len(g.op_classes) > 1) == [
        (4, 16, 2, 32),
        (16, 32, 4, 8),
    ]


def test_a_value_and_its_transpose_are_one_group_that_ties_no_loop_to_itself():
    whole = apart(lambda x: jnp.sin(x) + jnp.cos(x).T, array(8, 8))
    (group,) = [g for g in op_groups(whole) if len(g.op_classes) > 1]
    assert group.sizes == (8, 8)
    assert grouped(lambda x: (y := jnp.sin(x)) + y.T, array(8, 8)) == [["sin", "transpose", "add"]]


def test_a_reshape_joins_where_the_loops_agree():
    def split(x):
        return jnp.sin(x).reshape(16, 4, 2) * 2.0

    assert [len(g) for g in grouped(split, array(16, 8))] == [1, 2]
    assert [len(g) for g in grouped(lambda x: jnp.sin(x).reshape(16, 1, 8) * 2.0, array(16, 8))] == [3]


@pytest.mark.parametrize(
    "step",
    [
        lambda x: jnp.sin(jnp.cumsum(jnp.sin(x), 0)),
        lambda x: jnp.sin(jnp.sin(x) @ jnp.cos(x)),
        lambda x: jnp.sin(jnp.sin(x)[jnp.array([2, 0, 1])]),
        lambda x: jnp.sin(lax.scan(lambda y, z: (y + z, None), jnp.sin(x[0]), jnp.cos(x))[0]),
    ],
    ids=["running sum", "product", "look-up", "loop"],
)
def test_what_is_not_light_stands_alone(step):
    whole = apart(step, array(8, 8))
    alone = [g for g in op_groups(whole) if len(g.op_classes) == 1]
    assert {g.op_classes[0] for g in alone} >= {k for k in range(len(whole.members)) if not whole.is_light[k]}


def test_the_update_is_decided_apart_from_the_backward_phase():
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.sin(w) * x))(w)
        return w - 0.1 * gradient

    whole = apart(step, array(8, 8), array(8, 8))
    phases = [{whole.op(k).phase for k in g.op_classes} for g in op_groups(whole)]
    assert {Phase.UPDATE} in phases
    assert all(found == {Phase.UPDATE} or Phase.UPDATE not in found for found in phases)


def test_a_size_of_one_is_no_loop():
    (group,) = [g for g in op_groups(apart(lambda x: jnp.sin(x) * 2.0, array(8, 1))) if len(g.op_classes) > 1]
    assert group.sizes == (8,)


# --- sums


def sums(step, *args) -> list[list[str]]:
    whole = apart(step, *args)
    return [[whole.op(k).name for k in g.op_classes] for g in op_groups(whole) if g.is_sum]


X, W = array(16, 8), array(8, 8)


def test_a_sum_of_products_is_reduced_once():
    assert sums(lambda x, a, b, c: x @ a + x @ b + x @ c, X, W, W, W) == [["add", "add"]]


def test_what_is_only_passed_on_to_a_sum_belongs_to_it():
    assert sums(lambda x, a, b: (x @ a).T + (-(x @ b)).T, X, W, W) == [
        ["transpose", "neg", "transpose", "add"]
    ]


@pytest.mark.parametrize(
    "step",
    [
        lambda x, a, b: jnp.sin(x @ a + 0.0),
        lambda x, a, b: -(x @ a),
        lambda x, a, b: x @ a + x,
        lambda x, a, b: (x @ a) * (x @ b),
        lambda x, a, b: jnp.sin(x @ a) + x @ b,
        lambda x, a, b: x @ a + jnp.ones((16, 8)),
        lambda x, a, b: lax.optimization_barrier((x @ a, b))[0] + x @ b,
    ],
)
def test_no_sum_is_what_is_not_a_sum_of_several_partial_terms(step):
    assert sums(step, X, W, W) == []


def test_a_sum_and_what_computes_with_it_are_two_groups():
    assert grouped(lambda x, a, b: jnp.sin(x @ a + x @ b) * 2.0, X, W, W) == [
        ["dot_general"],
        ["dot_general"],
        ["add"],
        ["sin", "mul"],
    ]


# --- what a loop adds up


def added_up(gradient, *weights) -> list[list[str]]:
    """The sums of a step that adds up something of each of four microbatches."""

    def step(xs, *weights):
        def body(total, x):
            return total + gradient(x, *weights), None

        shape = jax.eval_shape(gradient, X, *weights)
        return lax.scan(body, jnp.zeros(shape.shape, shape.dtype), xs)[0] * 0.5

    return sums(step, array(4, 16, 8), *weights)


@pytest.mark.parametrize(
    ("gradient", "between"),
    [
        (lambda x, a: x.T @ x @ a, []),
        (lambda x, a: jnp.sin(x).sum(0), []),
        (lambda x, a: (x.T @ x).astype(jnp.bfloat16).T, ["convert_element_type", "transpose"]),
        (lambda x, a: x.T @ x + jnp.sin(x).T @ x, ["add"]),
        (lambda x, a: jnp.sin(x).sum(0)[None, None].sum((0, 1)), ["broadcast_in_dim", "reduce_sum"]),
    ],
    ids=["product", "rows", "moved", "two products", "moved rows"],
)
def test_what_a_loop_adds_up_is_a_sum_with_what_leads_to_it(gradient, between):
    assert added_up(gradient, W) == [["carry", *between, "add"]]


@pytest.mark.parametrize(
    "gradient",
    [
        lambda x, a: jnp.sin(x.T @ x),
        lambda x, a: jnp.pad(x.T @ x, 1),
        lambda x, a: jnp.broadcast_to(x.sum(0), (3, 8)),
        lambda x, a: jnp.ones((8, 8)),
        lambda x, a: x.T @ x + 1.0,
        lambda x, a: (y := x.T @ x) + jnp.sin(y),
        lambda x, a: x.T @ x + x.astype(jnp.bfloat16).T @ x.astype(jnp.bfloat16),
    ],
    ids=["not linear", "not moved", "spread", "numbers", "a number", "read by others", "two types"],
)
def test_the_compiler_leaves_other_reductions_in_the_loop(gradient):
    assert not any("carry" in names for names in added_up(gradient, W))


# --- laws


OPS = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "sine": lambda x, y: jnp.sin(x),
    "turn": lambda x, y: x.T,
    "product": lambda x, y: x @ y,
    "normalise": lambda x, y: x / jnp.sum(y, 1, keepdims=True),
    "bias": lambda x, y: x + jnp.sum(y, 0),
    "maximum": lambda x, y: x - jnp.max(y, 1)[:, None],
    "heads": lambda x, y: (jnp.exp(x).reshape(8, 4, 2) * jnp.cos(y).reshape(8, 4, 2)).reshape(8, 8),
    "scale": lambda x, y: x * jnp.tanh(jnp.sum(y)),
    "running": lambda x, y: jnp.cumsum(x, 0),
}


@st.composite
def programs(draw) -> FoldedProgram:
    """Steps on square arrays, of ops that read any two results before them; every op is a class."""
    chosen = draw(
        st.lists(
            st.tuples(st.sampled_from(sorted(OPS)), st.integers(0), st.integers(0)), min_size=1, max_size=7
        )
    )

    def step(x, y):
        values = [x, y]
        for name, left, right in chosen:
            values.append(OPS[name](values[-1 - left % len(values)], values[-1 - right % len(values)]))
        return values[-1], values[-2]

    return apart(step, array(8, 8), array(8, 8))


def loops_of(whole: FoldedProgram, op_class: int) -> list[Loop]:
    return [(op_class, f) for f, factor in enumerate(whole.op(op_class).rule.factors) if factor.size > 1]


def check(whole: FoldedProgram, group: OpGroup) -> None:
    """What holds for every group."""
    factors = {(k, f): whole.op(k).rule.factors[f] for k in group.op_classes for _, f in loops_of(whole, k)}
    splittable = [loop for loop in factors if factors[loop].kind is not Kind.UNSPLITTABLE]
    assert list(group.factor_of) == splittable
    assert all(factors[loop].size == group.sizes[f] for loop, f in group.factor_of.items())
    first_used = list(dict.fromkeys(group.factor_of.values()))
    assert first_used == list(range(len(group.sizes)))
    for k in group.op_classes:
        own = [group.factor_of[loop] for loop in loops_of(whole, k) if loop in group.factor_of]
        assert len(set(own)) == len(own)
    assert list(group.op_classes) == sorted(group.op_classes)
    assert len(group.sizes) == max(
        sum((k, f) in group.factor_of for _, f in loops_of(whole, k)) for k in group.op_classes
    )


@given(programs())
def test_every_group_unifies_loops_of_equal_size_and_adds_none(whole):
    groups = op_groups(whole)
    assert sorted(k for g in groups for k in g.op_classes) == list(range(len(whole.members)))
    assert [g.op_classes[0] for g in groups] == sorted(g.op_classes[0] for g in groups)
    for group in groups:
        check(whole, group)


@given(programs())
def test_ops_join_as_long_as_that_adds_no_loop_the_largest_values_first(whole):
    groups, tied = op_groups(whole), joined(whole)
    assert {frozenset(g.op_classes) for g in groups} == {frozenset(classes) for classes, _ in tied}
    for classes, loops in tied:
        (group,) = [g for g in groups if set(g.op_classes) == classes]
        found = {
            frozenset(loop for loop, f in group.factor_of.items() if f == n) for n in range(len(group.sizes))
        }
        assert found == {frozenset(one) for one in loops if one <= set(group.factor_of)}
        assert group.is_sum == is_sum(whole, min(classes))


def joined(whole: FoldedProgram) -> list[tuple[set[int], list[set[Loop]]]]:
    """Groups of classes, each with its loops, as sets of those that are one."""
    groups = [({k}, [{loop} for loop in loops_of(whole, k)]) for k in range(len(whole.members))]
    values = whole.program.values

    def num_elements(d) -> int:
        return prod(values[whole.op(d.producer).results[d.result]].shape)

    for d in sorted(whole.dependencies, key=lambda d: (-num_elements(d), d.producer, d.consumer, d.operand)):
        met = [next(g for g in groups if k in g[0]) for k in (d.producer, d.consumer)]
        if may_join(whole, d.producer, d.consumer) and (pairs := meeting(whole, d)) is not None:
            together = united(
                [one for g in (met if met[0] is not met[1] else met[:1]) for one in g[1]], pairs
            )
            is_tied = any(a[0] == b[0] for one in together for a, b in combinations(one, 2))
            if not is_tied and len(together) <= max(len(g[1]) for g in met):
                groups = [g for g in groups if g is not met[0] and g is not met[1]]
                groups.append((met[0][0] | met[1][0], together))
    return groups


def may_join(whole: FoldedProgram, producer: int, consumer: int) -> bool:
    if is_sum(whole, producer) or is_sum(whole, consumer):
        return is_sum(whole, producer) and is_sum(whole, consumer)
    in_update = [whole.op(k).phase is Phase.UPDATE for k in (producer, consumer)]
    return whole.is_light[producer] and whole.is_light[consumer] and in_update[0] == in_update[1]


def meeting(whole: FoldedProgram, d) -> list[tuple[Loop, Loop]] | None:
    """The loops that a value's dimensions are for its maker and for its reader; None where they cut it otherwise."""
    made, read = whole.op(d.producer).rule, whole.op(d.consumer).rule
    pairs = []
    for ours, theirs in zip(made.results[d.result], read.operands[d.operand], strict=True):
        a = [(d.producer, f) for f in ours if made.factors[f].size > 1]
        b = [(d.consumer, f) for f in theirs if read.factors[f].size > 1]
        if [made.factors[f].size for _, f in a] != [read.factors[f].size for _, f in b]:
            return None
        pairs += zip(a, b, strict=True)
    return pairs


def united(loops: list[set[Loop]], pairs: list[tuple[Loop, Loop]]) -> list[set[Loop]]:
    for a, b in pairs:
        one = set().union(*(found for found in loops if a in found or b in found))
        loops = [found for found in loops if not found & one] + [one]
    return loops


def is_sum(whole: FoldedProgram, op_class: int) -> bool:
    """Whether an op adds up results of products, or hands one on to such a sum."""

    @cache
    def carries(k: int) -> bool:
        fed = [d.producer for d in whole.dependencies if d.consumer == k]
        is_plain = whole.op(k).rule.is_additive and whole.is_light[k] and bool(fed)
        return is_plain and all(whole.is_heavy[p] or carries(p) for p in fed)

    @cache
    def kept(k: int) -> bool:
        readers = [d.consumer for d in whole.dependencies if d.producer == k]
        return carries(k) and (len(whole.op(k).operands) > 1 or any(map(kept, readers)))

    return kept(op_class)
