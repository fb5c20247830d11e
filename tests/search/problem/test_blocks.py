"""Blocks against the names that a model gives its layers, which `find_blocks` does not read."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.ir.graph import Phase, Step
from autoshard.search.ir.trace import trace
from autoshard.search.problem.blocks import _longest_run, _newest, _term, find_blocks

WIDTH, BATCH = 8, 16
SQUARE, ROW = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, WIDTH), (WIDTH,)))


def traced(apply, *stacks, extra=None) -> Step:
    """A step on stacks of layers: every layer is named, forward, backward and in an update that clips by the whole norm.

    Layer i of stack n is `stack_n_layer_i`; `apply(stacks, extra, x)` names it where it computes.
    """

    def step(params, momentum, extra, x):
        gradients = jax.grad(lambda params: jnp.mean(apply(params, extra, x) ** 2))(params)
        norm = jnp.float32(0.0)
        for g in jax.tree.leaves(gradients):
            norm = norm + jnp.sum(g**2)
        norm = jnp.sqrt(norm)

        def updated(path, p, g, m):
            with jax.named_scope(layer_name(*(part.idx for part in path[:2]))):
                m = 0.9 * m + g / norm
                return p - 0.1 * m, m

        both = jax.tree_util.tree_map_with_path(updated, params, gradients, momentum)
        return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), both)

    x = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return trace(step, list(stacks), list(stacks), extra, x)


def layer_name(stack: int, layer: int) -> str:
    return f"stack_{stack}_layer_{layer}"


def plain(p, y):
    return y + jnp.tanh(y @ p["w"] + p["b"])


def biased(p, y):
    """Its bias' gradient is a sum of what comes from the next layer."""
    return y + jnp.tanh(y @ p["w"]) + p["b"]


def gated(p, y):
    return y + jax.nn.sigmoid(y @ p["gate"]) * (y @ p["w"])


def stack_of(apply, n=0):
    def applied(stacks, extra, x):
        for i, p in enumerate(stacks[n]):
            with jax.named_scope(layer_name(n, i)):
                x = apply(p, x)
        return x

    return applied


def two_stacks(stacks, extra, x):
    return stack_of(gated, 1)(stacks, extra, stack_of(plain, 0)(stacks, extra, x))


def masked(stacks, extra, x):
    for i, p in enumerate(stacks[0]):
        with jax.named_scope(layer_name(0, i)):
            x = plain(p, x) * extra["mask"]
    return x


def cast(stacks, extra, x):
    """All weights are cast ahead of the first layer."""
    half = [{k: leaf.astype(jnp.bfloat16) for k, leaf in p.items()} for p in stacks[0]]
    return stack_of(plain)([half], extra, x)


PLAIN, GATED = {"w": SQUARE, "b": ROW}, {"gate": SQUARE, "w": SQUARE}
STEPS = {
    "plain": partial(traced, stack_of(plain), [PLAIN] * 7),
    "biased": partial(traced, stack_of(biased), [PLAIN] * 7),
    "gated": partial(traced, stack_of(gated), [GATED] * 5),
    "two stacks": partial(traced, two_stacks, [PLAIN] * 6, [GATED] * 5),
    "masked": partial(traced, masked, [PLAIN] * 6, extra={"mask": ROW}),
    "cast": partial(traced, cast, [PLAIN] * 6),
}
ALL = pytest.mark.parametrize("name", STEPS)


@cache
def step_of(name: str) -> Step:
    return STEPS[name]()


def layer_blocks(step: Step) -> tuple[dict[tuple[int, int], int], list[int | None], list[int | None]]:
    """By stack and layer, the block that it is; the blocks of all ops and of all arguments."""
    blocks = find_blocks(step)
    of_layer = {(n, i): block for n, stack in enumerate(blocks.stacks) for i, block in enumerate(stack)}
    return of_layer, list(blocks.of_op), list(blocks.of_argument)


# --- against names


@ALL
def test_every_op_of_a_layer_is_of_its_block_in_all_phases(name):
    step = step_of(name)
    of_layer, of_op, _ = layer_blocks(step)
    named = dict.fromkeys(Phase, 0)
    for op, block in zip(step.graph.ops, of_op, strict=True):
        if found := re.search(r"stack_(\d)_layer_(\d+)", op.scope):
            named[op.phase] += 1
            assert block == of_layer[int(found[1]), int(found[2])], f"{op.name} in {op.scope}"
    assert min(named.values()) > 10


@ALL
def test_every_leaf_of_a_layer_is_of_its_block_its_momentum_too(name):
    step = step_of(name)
    of_layer, _, of_argument = layer_blocks(step)
    seen = set()
    for argument, block in zip(step.arguments, of_argument, strict=True):
        if found := re.fullmatch(r"(params|momentum)\[(\d)\]\[(\d+)\]\['\w+'\]", argument.name):
            layer = int(found[2]), int(found[3])
            assert block == of_layer[layer], argument.name
            seen.add((found[1], layer))
    assert len(seen) == 2 * len(of_layer)


def test_stacks_are_numbered_through_in_the_order_of_the_forward_phase():
    found = {name: find_blocks(step_of(name)).stacks for name in STEPS}
    assert found == {
        "plain": (range(7),),
        "biased": (range(7),),
        "gated": (range(5),),
        "two stacks": (range(6), range(6, 11)),
        "masked": (range(6),),
        "cast": (range(6),),
    }


def test_what_all_layers_read_is_of_no_block():
    step = step_of("masked")
    of_argument = dict(zip((a.name for a in step.arguments), find_blocks(step).of_argument, strict=True))
    assert of_argument["extra['mask']"] is None


def test_the_cast_of_a_layer_s_weight_is_the_layer_s():
    step = step_of("cast")
    blocks = find_blocks(step)
    maker = dict(zip(step.graph.inputs, blocks.of_argument, strict=True))
    casts = [
        (maker[op.inputs[0]], block)
        for op, block in zip(step.graph.ops, blocks.of_op, strict=True)
        if op.name == "convert_element_type" and op.phase is Phase.FORWARD and op.inputs[0] in maker
    ]
    assert casts == [(i, i) for i in range(6) for _ in range(2)]


def test_state_that_is_only_written_is_the_block_s_that_writes_it():
    def loss(layers, x):
        means = []
        for p in layers:
            x = plain(p, x)
            means.append(jnp.mean(x, 0))
        return jnp.mean(x**2), means

    def step(state, x):
        gradients, means = jax.grad(loss, has_aux=True)(state["layers"], x)
        layers = jax.tree.map(lambda p, g: p - 0.1 * g, state["layers"], gradients)
        return {"layers": layers, "means": means}

    state = {"layers": [PLAIN] * 6, "means": [ROW] * 6}
    found = trace(step, state, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
    by_name = dict(zip((a.name for a in found.arguments), find_blocks(found).of_argument, strict=True))
    assert [by_name[f"state['means'][{i}]"] for i in range(6)] == list(range(6))


def test_the_norm_of_all_gradients_is_of_no_block():
    step = step_of("plain")
    found = [b for op, b in zip(step.graph.ops, find_blocks(step).of_op, strict=True) if op.name == "sqrt"]
    assert found == [None] * len(found) != []


# --- what is a stack


@pytest.mark.parametrize("num_layers", [4, 5])
def test_a_stack_has_five_layers_or_more(num_layers):
    step = traced(stack_of(plain), [PLAIN] * num_layers)
    assert len(find_blocks(step).stacks) == (num_layers >= 5)
    if num_layers < 5:
        assert set(find_blocks(step).of_op) == set(find_blocks(step).of_argument) == {None}


def test_ops_look_alike_of_one_primitive_type_and_parameters_and_phase():
    def step(x):
        parts = [x[i : i + 2] for i in range(3)]
        return parts, jnp.sum(x, 0), jnp.sum(x, 1), jnp.sum(x, 0), jnp.sin(x), jnp.sin(x[0]), x * 2.0, x * 3.0

    found = trace(step, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    looks = find_blocks(found).looks
    by_name = {}
    for op, look in zip(found.graph.ops, looks, strict=True):
        by_name.setdefault(op.name, []).append(look)
    first, *others = by_name["slice"]
    assert [first, first] == others[:2]
    over_rows, over_columns, again = by_name["reduce_sum"]
    assert over_rows == again != over_columns
    assert len(set(by_name["sin"])) == 2
    assert len(set(by_name["mul"])) == 1


@pytest.mark.parametrize(
    "control",
    [
        lambda f, x: jax.lax.fori_loop(0, 3, lambda _, y: f(y), x),
        lambda f, x: jax.lax.cond(x.sum() > 0, f, jnp.exp, x),
        lambda f, x: jax.lax.while_loop(lambda y: y.sum() > 0, f, x),
    ],
    ids=["scan", "cond", "while"],
)
def test_loops_and_branches_look_alike_whose_bodies_do(control):
    found = trace(
        lambda x: [control(lambda y, f=f: f(y), x) for f in (jnp.sin, jnp.sin, jnp.cos)],
        jax.ShapeDtypeStruct((8, 8), jnp.float32),
    )
    looks = [look for op, look in zip(found.graph.ops, find_blocks(found).looks, strict=True) if op.bodies]
    assert looks[0] == looks[1] != looks[2]


def longest_run(looks: list[int]) -> tuple[int, int, int] | None:
    """Every stretch of every period, from the shortest period; of each, the first that is longest."""
    best, covered = None, len(looks) // 10
    for period in range(1, len(looks)):
        lengths = []
        for start in range(len(looks) - period + 1):
            end = start + period
            while end < len(looks) and looks[end] == looks[end - period]:
                end += 1
            lengths.append(end - start)
        start = lengths.index(max(lengths))
        count = lengths[start] // period
        if count >= 5 and count * period > covered:
            best, covered = (start, period, count), count * period
    return best


@st.composite
def with_a_run(draw) -> list[int]:
    kinds = st.integers(0, 2)
    before, block, after = (draw(st.lists(kinds, max_size=n)) for n in (8, 4, 8))
    return [*before, *block * draw(st.integers(0, 7)), *block[: draw(st.integers(0, 3))], *after]


@given(with_a_run())
def test_the_longest_periodic_run_is_found(looks):
    assert _longest_run(np.array(looks, np.int64)) == longest_run(looks)


def test_a_run_that_covers_no_more_than_a_tenth_is_no_stack():
    assert _longest_run(np.array([*range(100, 153), *[1] * 6])) == (53, 1, 6)
    assert _longest_run(np.array([*range(100, 154), *[1] * 6])) is None


# --- where a value comes from


def test_an_op_that_reads_gradients_belongs_where_the_newest_was_made():
    origins = {1: frozenset([0]), 2: frozenset([1]), 3: frozenset([0, 1]), 4: frozenset([2]), 5: frozenset()}
    assert _newest([1, 2], origins) == 1
    assert _newest([1, 3], origins) == 0
    assert _newest([3, 5], origins) is None
    assert _newest([1, 2, 4], origins) is None
    assert _newest([], origins) is None


def test_a_term_of_a_running_total_belongs_where_the_other_operand_was_made():
    origins = {1: frozenset([0]), 2: frozenset([1]), 3: frozenset([0, 1])}
    assert _term([1, 2], {1}, origins) == (1, frozenset([0, 1]))
    assert _term([1, 2], set(), origins) == (1, frozenset([0, 1]))
    assert _term([1], set(), origins) == (0, frozenset())
    assert _term([3], set(), origins) == (None, frozenset([0, 1]))
    assert _term([3, 1], {1, 3}, origins) == (0, frozenset())
