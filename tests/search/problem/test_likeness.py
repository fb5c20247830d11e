"""Blocks are alike op by op, in whatever order their leaves come."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir.graph import Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.trace import trace
from autoshard.search.problem.blocks import find_blocks
from autoshard.search.problem.likeness import Likeness, UnlikeError

NUM_LAYERS = 8
SQUARE = jax.ShapeDtypeStruct((16, 16), "float32")
ROW = jax.ShapeDtypeStruct((16,), "float32")
BATCH = jax.ShapeDtypeStruct((32, 16), "float32")


def likeness(step: Step, sharding: StepSharding | None = None) -> tuple[Likeness, range]:
    """Compares the only stack of a step; also gives the stack."""
    blocks = find_blocks(step)
    (stack,) = blocks.stacks
    return Likeness(step, sharding or StepSharding((1,), ("data",), {}, {}), blocks), stack


# --- the order of update ops


@jax.custom_vjp
def shifted(x, low, high):
    return x + low - high


def backward(residuals, g):
    rows = g.sum(0)
    return g, *jax.lax.sort((rows, -rows), num_keys=1)


shifted.defvjp(lambda x, low, high: (x + low - high, None), backward)


def with_statistics(names_of: Callable[[int], tuple[str, str]]) -> Step:
    """One backward op makes two gradients of one shape, and each is only in a running mean of its own.

    `names_of` says under which names a layer keeps the first and the second.
    """

    def step(layers, means, x):
        def loss(layers):
            y = x
            for p in layers:
                y = y + shifted(jnp.tanh(y @ p["w"]), p["low"], p["high"])
            return jnp.mean(y**2)

        grads = jax.grad(loss)(layers)
        kept = []
        for i, (mean, g) in enumerate(zip(means, grads, strict=True)):
            by_name = dict(zip(names_of(i), (g["low"], g["high"]), strict=True))
            kept.append({name: 0.9 * mean[name] + by_name[name] for name in sorted(mean)})
        return [p | {"w": p["w"] - g["w"]} for p, g in zip(layers, grads, strict=True)], kept

    layer = {"w": SQUARE, "low": ROW, "high": ROW}
    return trace(step, [layer] * NUM_LAYERS, [{"a": ROW, "b": ROW}] * NUM_LAYERS, BATCH)


@pytest.mark.parametrize(
    "names_of",
    [lambda i: ("a", "b"), lambda i: ("a", "b") if i % 2 else ("b", "a")],
    ids=["alike", "in turn"],
)
def test_results_of_one_op_are_told_apart(names_of):
    found, stack = likeness(with_statistics(names_of))
    assert found.groups[0] == tuple(stack[1:-1])  # the outer ones read, and are read by, what is no block


# --- what is alike, and what passes


def deep(apply: Callable = lambda p, x, before: x + jnp.tanh(x @ p["w"])) -> Step:
    def step(layers, x):
        def loss(layers):
            before, y = x, x
            for p in layers:
                before, y = y, apply(p, y, before)
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers))

    return trace(step, [{"w": SQUARE}] * NUM_LAYERS, BATCH)


def test_corresponding_ops_do_the_same_with_corresponding_values():
    step = deep()
    found, _ = likeness(step)
    first, *others = found.groups[0]
    for block in others:
        for a, b in zip(found.members[first], found.members[block], strict=True):
            assert (step.graph.ops[a].name, step.graph.ops[a].phase) == (
                step.graph.ops[b].name,
                step.graph.ops[b].phase,
            )
            for v, w in zip(step.graph.ops[a].outputs, step.graph.ops[b].outputs, strict=True):
                assert found.slot_of(v) == found.slot_of(w)
                assert found.at(block, found.slot_of(v)) == w


@pytest.mark.parametrize("place", [("input", (), 4), ("result", (), 0)])
def test_a_block_that_lies_otherwise_is_not_alike(place):
    step = deep()
    what, path, n = place
    if what == "result":
        products = [i for i, op in enumerate(step.graph.ops) if op.name == "dot_general"]
        path = (products[4],)
    found, stack = likeness(step, StepSharding((8,), ("data",), {(what, path, n): ((0,),)}, {}))
    plain, _ = likeness(step)
    assert set(plain.groups[0]) - set(found.groups[0]) == {stack[4]}


def test_what_neighbours_pass_on_is_found_once():
    found, stack = likeness(deep())
    passed = found.passed(found.groups[0])
    assert len(passed) == len(set(passed))
    step = found.step
    names = {(step.graph.ops[found.members[stack[2]][p.maker[1]]].name) for p in passed}
    assert {"add", "add_any"} <= names


def test_what_reads_past_its_neighbour_is_said():
    found, _ = likeness(deep(lambda p, x, before: x + before + jnp.tanh(x @ p["w"])))
    with pytest.raises(UnlikeError, match=r"add(_any)? at .*tests/.*reads past the layers next to its own"):
        found.passed(found.groups[0])
