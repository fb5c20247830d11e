"""A shortened step is the step of the model with fewer layers, and what it lacks follows from one layer less."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.cost_model.xla import hlo
from autoshard.executors.jit import build
from autoshard.search.ir.graph import Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.trace import trace
from autoshard.verification.shorten import NotShortened, ShortPrograms, shorten
from tests import zoo
from tests.executors import plans

UNPLANNED = StepSharding((1,), ("data",), {}, {})
WIDTH = 64


# --- models of the zoo


MODELS = {
    "gpt_nnx_optimizer": (6, 4, (2,)),
    "llama": (6, 4, (2,)),
    "moe": (6, 5, (1,)),  # the first layer's loss is not added to another's: the stack starts with the second
    "t5": (5, 4, (1, 1)),
    "vit": (12, 4, (8,)),  # "block_10" comes before "block_2"
}
"""Name -> layers, layers of the shortened model, blocks left out per stack."""

SLOW = {"gpt_nnx_optimizer", "moe", "t5", "vit"}
"""Models that take long to trace. Stacks of their own has the convolutional network below, too, and twelve layers, of which
"layer_10" comes before "layer_2", the plain small model."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS]
)
def test_each_result_is_that_of_the_model_with_fewer_layers(name):
    deep, shallow, missing = MODELS[name]
    found = shortened(traced_from_zoo(name, num_layers=deep))
    assert found.missing == missing
    wanted = expressions(traced_from_zoo(name, num_layers=shallow))
    got = expressions(found.short[0])
    unread = {k for k in got if k not in wanted}
    assert all(re.search(r"\.v(_row|_col)?\[", name) for name, _ in unread), (
        "only Adafactor's placeholders may stay"
    )
    assert {k: got[k] for k in got if k not in unread} == wanted


def test_stages_of_a_convolutional_network_are_stacks_of_their_own():
    found = shortened(traced_from_zoo("resnet", blocks_per_stage=(6, 6)))
    assert sorted(found.missing) == [
        1,
        2,
    ]  # a stage that halves the image starts with a block unlike the others


@pytest.mark.parametrize("name", ["mlp", "dlrm", "gpt_scan", "autoencoder"])
def test_without_a_stack_the_step_stays_whole(name):
    found = shorten(traced_from_zoo(name), UNPLANNED)
    assert isinstance(found, NotShortened)
    assert "has no stack of 5 layers or more" in found.reason


# --- small models that are written in some way


def deep_step(apply: Callable, num_layers: int = 8, batch: int = 128) -> Step:
    """A step with clipping and Adam around `apply(layers, x) -> loss`; leaves come in the order of their names."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    square, row = (
        jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
        jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
    )
    params = {f"layer_{i}": {"up": square, "down": square, "bias": row} for i in range(num_layers)}

    def loss_of(params, x):
        return apply([params[f"layer_{i}"] for i in range(num_layers)], x)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}
    return trace(step, state, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))


def layer(p, x):
    return x + jnp.tanh(x @ p["up"]) @ p["down"] + p["bias"]


def plain(layers, x):
    for p in layers:
        x = layer(p, x)
    return jnp.mean(x**2)


def checkpointed(layers, x):
    for p in layers:
        x = jax.checkpoint(layer)(p, x)
    return jnp.mean(x**2)


def cast_first(layers, x):
    return plain(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layers), x.astype(jnp.bfloat16))


def in_pairs(layers, x):
    """Every other layer has another activation."""
    for even, odd in zip(layers[::2], layers[1::2], strict=True):
        x = layer(even, x)
        x = x + jax.nn.relu(x @ odd["up"]) @ odd["down"] + odd["bias"]
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    ("apply", "deep", "shallow"),
    [(plain, 12, 4), (checkpointed, 12, 4), (cast_first, 12, 4), (in_pairs, 10, 8)],
    ids=["plain", "checkpointed", "cast first", "in pairs"],
)
def test_each_result_is_that_of_fewer_layers(apply, deep, shallow):
    found = shortened(deep_step(apply, deep))
    assert expressions(found.short[0]) == expressions(deep_step(apply, shallow))
    one_less = shallow - (2 if apply is in_pairs else 1)
    assert expressions(found.less[0][0]) == expressions(deep_step(apply, one_less))


def test_layers_that_share_their_weights_are_left_out_without_them():
    def tied(layers, x, times=8):
        for _ in range(times):
            x = layer(layers[0], x)
        return jnp.mean(x**2)

    found = shortened(deep_step(tied, 1))
    (missing,) = found.missing
    assert missing == 3
    assert expressions(found.short[0]) == expressions(
        deep_step(functools.partial(tied, times=8 - missing), 1)
    )


def test_what_reads_all_layers_at_once_stays_as_it_is():
    def stacked(layers, x):
        outputs = []
        for p in layers:
            x = layer(p, x)
            outputs.append(jnp.mean(x, axis=0))
        return jnp.mean(jnp.stack(outputs) ** 2)

    step = deep_step(stacked)
    found = shortened(step)
    assert found.missing == (4,)
    assert products(found.short[0]) == products(step) - 4 * 6
    widest = [max(len(op.inputs) for op in s.graph.ops) for s in (step, found.short[0])]
    assert widest == [8, 8]


def test_layers_that_read_past_their_neighbours_stay():
    def dense(layers, x):
        before = x
        for p in layers:
            before, x = x, layer(p, x) + before
        return jnp.mean(x**2)

    found = shorten(deep_step(dense), UNPLANNED)
    assert isinstance(found, NotShortened)
    assert re.search(
        r"no layer of the step 'step' can be left out: .* at .*reads past the layers next to", found.reason
    )


def test_a_layer_that_is_planned_otherwise_is_kept():
    step = deep_step(plain, 9)
    name = "state['params']['layer_4']['up']"
    place = ("input", (), [a.name for a in step.arguments].index(name))
    found = shortened(step, StepSharding((8,), ("data",), {place: ((0, 1),)}, {}))
    assert found.missing == (4,)
    short, sharding = found.short
    ((_, _, i),) = sharding.specs
    assert short.arguments[i].name == name


def test_the_same_arrays_are_donated():
    step = deep_step(plain)
    short = shortened(step).short[0]
    assert build(step, UNPLANNED, jax.devices()).donated == (True, False)
    assert build(short, UNPLANNED, jax.devices()).donated == (True, False)


# --- under a plan


@functools.cache
def planned(batch: int) -> tuple[Step, StepSharding]:
    step = deep_step(plain, batch=batch)
    return step, plans.fastest(step, (2, 4)).sharding


@pytest.mark.devices
@pytest.mark.parametrize("batch", [128, pytest.param(8192, marks=pytest.mark.slow)])
def test_collectives_and_arguments_of_the_whole_program_follow(batch):
    found = shortened(*planned(batch))
    whole, short = compiled(*planned(batch)), compiled(*found.short)
    less = [compiled(*pair) for pair in found.less]
    assert len(whole) > 2, "some collective"
    following = {key: found.extrapolate(short.get(key, 0), [x.get(key, 0) for x in less]) for key in whole}
    assert following == whole


@pytest.mark.devices
def test_numbers_are_those_of_fewer_layers_under_the_plan_of_many():
    found = shortened(*planned(128))
    shallow = deep_step(plain, 8 - found.missing[0])
    rng = np.random.default_rng(0)
    arguments = [
        np.asarray(abs(rng.standard_normal(a.shape)) / 8, a.dtype) for a in shallow.abstract_inputs()
    ]
    wanted, got = run(shallow, UNPLANNED, arguments), run(*found.short, arguments)
    for name, w, g in zip(shallow.results, wanted, got, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5, err_msg=name)


# --- means


def traced_from_zoo(name: str, **options: Any) -> Step:
    case = zoo.MAKERS[name](**options)
    return trace(case.step, *case.abstract_args())


def shortened(step: Step, sharding: StepSharding = UNPLANNED) -> ShortPrograms:
    found = shorten(step, sharding)
    assert isinstance(found, ShortPrograms), found
    return found


def products(step: Step) -> int:
    return sum(op.name == "dot_general" for op in step.graph.ops)


def expressions(step: Step) -> dict[Any, int]:
    """A hash per result of the expression of arguments that it is, literals and parameters included."""
    graph = step.graph
    made = dict(zip(graph.inputs, map(hash, numbered([a.name for a in step.arguments])), strict=True))
    made |= {v: hash(np.asarray(c).tobytes()) for v, c in graph.constants}

    def read(atom: Any) -> int:
        return made[atom] if isinstance(atom, int) else hash(str(atom))

    for op in graph.ops:
        params = sorted((k, v if isinstance(v, tuple | int) else str(v)) for k, v in op.params.items())
        said = hash((op.name, op.phase, repr(params), *map(read, op.inputs)))
        made.update((v, hash((said, r))) for r, v in enumerate(op.outputs))
    return dict(zip(numbered(step.results), map(read, graph.outputs), strict=True))


def numbered(names: Sequence[str]) -> list[tuple[str, int]]:
    """Each name with `*` for its numbers, and which of those names it is."""
    kinds = [re.sub(r"\d+", "*", name) for name in names]
    stats = [tuple(map(int, re.findall(r"\d+", name))) for name in names]
    of_kind: dict[str, list[Any]] = {}
    for kind, number in sorted(zip(kinds, stats, strict=True)):
        of_kind.setdefault(kind, []).append(number)
    return [(kind, of_kind[kind].index(number)) for kind, number in zip(kinds, stats, strict=True)]


def compiled(step: Step, sharding: StepSharding) -> dict[Any, int]:
    """Bytes of the arguments and of each kind of collective over each axis."""
    program = build(step, sharding, jax.devices())
    executable = program.fn.lower(*program.args).compile()
    mesh = dict(zip(sharding.axis_names, sharding.mesh_shape, strict=True))
    totals = hlo.totals(hlo.collectives(executable.as_text(), mesh))
    memory = executable.memory_analysis()
    return {key: num_bytes for key, (_, num_bytes) in totals.items()} | {
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
    }


def run(step: Step, sharding: StepSharding, arguments: Sequence[Any]) -> list[np.ndarray]:
    program = build(step, sharding, jax.devices())
    flat, tree = jax.tree.flatten(program.args)
    placed = [jax.device_put(jnp.array(x), s.sharding) for x, s in zip(arguments, flat, strict=True)]
    return [np.asarray(x) for x in jax.tree.leaves(program.fn(*jax.tree.unflatten(tree, placed)))]
