"""A plan changes where numbers are computed, never which: some steps on simulated devices against one device.

Plans are fast ones, the smallest ones and some drawn at random, so that states are sharded every way, partial sums travel,
and copies are kept and made anew.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.executors.jit import build
from autoshard.search.ir.graph import Graph, Phase, Site, Step
from autoshard.search.ir.spec import PARTIAL, Spec
from autoshard.search.memory import offload
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.memory.recompute import recomputed
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.result import SearchResult
from tests import zoo
from tests.executors import plans
from tests.executors.agreement import Reference, assert_equal
from tests.executors.test_spmd import shared

NUM_STEPS = 3

OPTIONS = {
    "mlp": {"optimizer": optax.adam(1e-3)},  # under every plan
    "megatron": {"vocab": 257, "seq": 63},  # no axis divides these: padded
}
"""By model, options of its maker."""

PLANS = {
    "8-smallest": lambda step: plans.smallest(step, (8,)),
    "2x4-fastest": lambda step: plans.fastest(step, (2, 4)),
    "2x4-drawn": lambda step: plans.drawn(step, (2, 4), seed=0),
    "2x2x2-fastest": lambda step: plans.fastest(step, (2, 2, 2)),
    "2x2x2-smallest": lambda step: plans.smallest(step, (2, 2, 2)),
    "6-smallest": lambda step: plans.smallest(step, (6,)),
    "2x3-fastest": lambda step: plans.fastest(step, (2, 3)),
    "2x3-drawn": lambda step: plans.drawn(step, (2, 3), seed=1),
}

MICROBATCHED = {
    "8-fastest": lambda step: plans.fastest(step, (8,)),
    "2x4-fastest": PLANS["2x4-fastest"],
    "2x2x2-drawn": lambda step: plans.drawn(step, (2, 2, 2), seed=0),
}
"""Plans whose sums over microbatches are partial."""

RUN = {
    "mlp": ("8-smallest", "2x4-drawn", "2x2x2-fastest", "6-smallest", "2x3-drawn"),  # it compiles fast
    "dlrm": ("2x2x2-smallest",),
    "resnet": ("2x3-fastest",),
    "layers": ("2x4-drawn",),
}
"""By model, the plans to run: each kind of plan with each kind of model, not all with all."""

RUN_SLOWLY = {
    "mlp": ("2x4-fastest", "2x2x2-smallest", "2x3-fastest"),
    "layers": ("8-smallest",),
    "dlrm": ("8-smallest", "2x4-drawn", "2x3-drawn"),
    "moe": ("8-smallest", "2x4-fastest", "2x2x2-fastest", "2x3-fastest"),
    "resnet": ("8-smallest", "2x2x2-fastest"),
    "gpt_linen": ("2x2x2-fastest",),
    "gpt_nnx": ("2x3-fastest",),
    "gpt_nnx_optimizer": ("2x2x2-fastest",),
    "gpt_scan": ("8-smallest",),
    "lstm": ("2x3-fastest", "2x4-drawn"),
    "autoencoder": ("2x3-fastest", "2x4-drawn"),
    "megatron": ("2x4-drawn",),
    **dict.fromkeys(("evoformer", "t5", "vit"), ("2x2x2-fastest",)),
}
"""Kinds of plan and of model that meet others above."""


def runs(plans_of_models: dict[str, tuple[str, ...]], *marks: pytest.MarkDecorator) -> list[Any]:
    return [pytest.param(m, plan, marks=marks) for m, named in plans_of_models.items() for plan in named]


def slowly(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def tied() -> zoo.Case:
    """Two layers between a look-up of an embedding and a product with it."""
    vocab, seq, width, batch = 64, 32, 64, 24

    def init():
        keys = jax.random.split(jax.random.key(0))
        return {
            "embedding": jax.random.normal(keys[0], (vocab, width), jnp.float64) / 4,
            "layers": list(jax.random.normal(keys[1], (2, 2, width, width), jnp.float64) / 8),
        }

    def loss_fn(params, batch):
        x = params["embedding"][batch["tokens"]]
        for up, down in params["layers"]:
            x = x + jnp.tanh(x @ up) @ down
        log_probs = jax.nn.log_softmax(x @ params["embedding"].T)
        return -jnp.take_along_axis(log_probs, batch["targets"][..., None], -1).mean()

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), {"loss": loss}

    inputs = dict.fromkeys(("tokens", "targets"), zoo.case.Integers((batch, seq), vocab))
    return zoo.Case("tied", step, init, inputs)


@functools.cache
def on_one_device(model: str, dtype: Any) -> Reference:
    if model == "layers":
        return Reference.of(shared(), NUM_STEPS)
    if model == "tied":
        return Reference.of(tied(), NUM_STEPS)
    return Reference.of(zoo.make_small(model, dtype=dtype, **OPTIONS.get(model, {})), NUM_STEPS)


@pytest.mark.parametrize(("model", "plan"), [*runs(RUN), *runs(RUN_SLOWLY, pytest.mark.slow)])
def test_float64_losses_and_states_equal_one_devices(model, plan):
    with jax.enable_x64(True):
        single = on_one_device(model, jnp.float64)
        found = PLANS[plan](single.step)
        assert_equal(single.on_many_devices(found), single.results)


@pytest.mark.parametrize("model", ["mlp", slowly("moe")])  # others: tests/scenarios/flax_examples
def test_float32_losses_equal_one_devices(model):
    single = on_one_device(model, jnp.float32)
    _, history = single.on_many_devices(PLANS["2x4-fastest"](single.step))
    for wanted, got in zip(single.results[1], history, strict=True):
        np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("tied", "8-fastest"),
        slowly("gpt_linen", "8-fastest"),
        slowly("gpt_linen", "2x2x2-drawn"),
        slowly("llama", "2x4-fastest"),
    ],
)
def test_sums_over_microbatches_that_stay_partial_equal_one_devices(model, plan):
    with jax.enable_x64(True):
        single = on_one_device(model, jnp.float64)
        found = MICROBATCHED[plan](microbatched(single.step, 3))
        assert any(PARTIAL in spec for spec in accumulators(found))
        assert_equal(single.on_many_devices(found), single.results)


@pytest.mark.parametrize("model", ["tied", slowly("gpt_linen")])
def test_terms_of_a_tied_embedding_for_which_recomputation_waits_equal_one_devices(model):
    with jax.enable_x64(True):
        single = on_one_device(model, jnp.float64)
        found = plans.fastest(recomputed(single.step, residuals_of(single.step.graph)), (8,))
        assert any(waited_terms(found))
        assert_equal(single.on_many_devices(found), single.results)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("tied", "8-fastest"),
        slowly("gpt_linen", "8-fastest"),
        slowly("llama", "2x4-drawn"),
        slowly("autoencoder", "2x2x2-drawn"),
    ],
)
def test_terms_for_which_recomputation_waits_in_microbatches_equal_one_devices(model, plan):
    with jax.enable_x64(True):
        single = on_one_device(model, jnp.float64)
        step = microbatched(single.step, 3)
        (loop,) = (i for i, op in enumerate(step.graph.ops) if op.name == "scan")
        (body,) = step.graph.ops[loop].bodies["jaxpr"]
        sites = frozenset((loop, "jaxpr", 0, *site) for site in residuals_of(body))
        found = (PLANS | MICROBATCHED)[plan](recomputed(step, sites))
        assert any(waited_terms(found))
        assert_equal(single.on_many_devices(found), single.results)


@pytest.mark.parametrize(
    ("model", "num_microbatches"),
    [("mlp", 3), *(slowly(model, 3) for model in ("dlrm", "gpt_linen", "gpt_scan")), slowly("layers", 4)],
)
def test_state_in_the_hosts_memory_that_microbatches_read_equals_one_devices(
    model, num_microbatches, monkeypatch
):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with jax.enable_x64(True):
        single = on_one_device(model, jnp.float64)
        step = microbatched(single.step, num_microbatches)
        hosted = may_be_hosted(step)
        found = plans.drawn(step, (8,), 0, hosted)
        assert num_hosted(found) == len(hosted) > 0
        assert_equal(single.on_many_devices(found), single.results)


@pytest.mark.parametrize("model", ["mlp", slowly("dlrm"), slowly("llama"), slowly("moe"), slowly("resnet")])
def test_state_and_residuals_that_wait_on_the_host_equal_one_devices(model, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1 << 8)
    with jax.enable_x64(True):
        single = on_one_device(model, jnp.float64)
        hosted, offloaded = may_be_hosted(single.step), residuals_of(single.step.graph)
        found = plans.drawn(single.step, (2, 4), 0, hosted, offloaded)
        assert num_hosted(found) == len(hosted) > 0
        fetched = [op for op in found.step.graph.ops if op.is_transfer and op.phase is Phase.BACKWARD]
        assert len(fetched) >= len(offloaded) > 3  # of the state itself, fewer
        assert_equal(single.on_many_devices(found), single.results)


def may_be_hosted(step: Step) -> frozenset[int]:
    """The arguments, scalars aside, that may rest on the host."""
    return frozenset(i for i in offload.may_rest_on_host(step) if step.abstract_inputs()[i].shape)


def num_hosted(found: SearchResult) -> int:
    """How many arguments the program expects on the host."""
    shardings = jax.tree.leaves(build(found.step, found.sharding, jax.devices()).shardings)
    return sum(s.memory_kind == "pinned_host" for s in shardings)


def residuals_of(graph: Graph) -> frozenset[Site]:
    """The ops of the forward phase that make large arrays of floats which the backward phase reads."""
    read = {v for op in graph.ops if op.phase is Phase.BACKWARD for v in op.operands}
    return frozenset(
        (i,)
        for i, op in enumerate(graph.ops)
        if op.phase is Phase.FORWARD and any(v in read and offload.may_wait(graph, v) for v in op.outputs)
    )


def waited_terms(found: SearchResult) -> list[tuple[Spec, ...]]:
    """How terms lie for which barriers wait; nothing where they do not."""
    terms = [specs for (what, *_), specs in found.sharding.specs.items() if what == "terms"]
    assert all(PARTIAL in spec for specs in terms for spec in specs)
    return terms


def accumulators(found: SearchResult) -> list[Spec]:
    """How the sums lie that loops add up."""
    paths = ReshardPaths(found.on_mesh.memory.costed, found.chosen)
    return [paths.made(op.results[0]) for op in paths.program.ops if op.is_accumulator]
