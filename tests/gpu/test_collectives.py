"""A compiled step contains the collectives that its plan lists: by kind, mesh axes and bytes.

The judge is XLA's own GPU compiler, which needs no GPU (`cost_model.xla.compiler`). XLA combines small collectives, so
bytes are compared and counts are not.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cost_model.xla.process import Compiler
from autoshard.search.device.prediction import MARGIN
from autoshard.verification.judge import CompilerVerifier
from tests.zoo import make_mlp

from .compiled import COLLECTIVES_ALONE, JOBS, Job, compiled, planned

SHARE = 0.01
"""Of a kind's bytes over an axis; the cases here agree to the byte, but for scalars."""

FLOOR_BYTES = 1 << 16
"""Below it nobody cares: losses, norms' sums and the like, which XLA merges or moves as it likes."""

WITHOUT_SOFTMAX = {
    "mlp on 8": {"all-gather", "reduce-scatter"},
    "mlp on 2x4": {"all-gather", "reduce-scatter"},
    "mlp on 2x4 by hand": {"all-gather", "reduce-scatter"},
    "mlp on 8x8": {"all-reduce"},
}
"""By case of `compiled`, whose peaks are compared, too: kinds of collectives without which it would be misnamed."""

WHAT_IT_SHOWS = {
    "tensor parallel": {"all-gather", "reduce-scatter"},  # its fastest plan, which is ZeRO-2
    "sequence parallel": {"all-gather", "reduce-scatter"},
    "fsdp": {"all-gather", "reduce-scatter"},
    "mixed on 8x8": {"all-reduce"},
    "vocabulary parallel": {"all-reduce"},
    "grouped heads on 2x4": {"all-gather", "reduce-scatter"},
    "experts": {"all-to-all"},
    "scanned, tight": {"all-gather", "reduce-scatter"},
    "scanned with checkpoint on 2x4": {"all-gather"},
    "tables by rows": {"all-reduce"},
    "tables on 2x4": {"all-gather", "reduce-scatter"},
    "microbatches of an MLP": {"all-reduce"},
    "microbatches on 2x4": {"all-reduce", "reduce-scatter"},
    "microbatches of grouped heads": {"all-reduce"},
    "recomputed in microbatches": {"reduce-scatter"},
    "recomputed in microbatches on 2x4": {"all-reduce"},
}
"""By case, likewise."""

CAPS = {"sequence parallel": 33_316_169, "scanned, tight": 612_837_750, "recomputed, scanned": 656_168_132}
"""Caps in bytes of cases with a slack, which the smallest peak takes long to look for."""

ASKED = {name: replace(job, cap_bytes=CAPS.get(name)) for name, job in JOBS.items()} | {
    "microbatches of an MLP": Job(lambda: make_mlp((1024, 2048, 1024), batch=1 << 15), (8,), microbatches=4)
}
"""By case, what to plan."""

SLOW = {
    "tensor parallel": "vocabulary parallel",
    "fsdp": "mlp on 8",
    "grouped heads on 2x4": "mlp on 2x4",
    "mixed on 8x8": "mlp on 8x8",
    "scanned with checkpoint on 2x4": "scanned, tight",
    "microbatches on 2x4": "microbatches of an MLP",
    "microbatches of grouped heads": "microbatches of an MLP",
    "recomputed in microbatches": "microbatches of an MLP",
    "recomputed in microbatches on 2x4": "microbatches of an MLP",
}
"""Cases that take long to compile, and the one that shows their law in small; of what recomputes, the test below does."""


def _marks(name):
    return [pytest.mark.slow] if name in SLOW else []


@pytest.mark.parametrize("name", [pytest.param(n, marks=_marks(n)) for n in WHAT_IT_SHOWS])
def test_the_compiler_emits_what_the_plan_lists(name):
    plan, numbers = compiled(ASKED[name])
    predicted = {(c.kind, c.axes): c.bytes for c in plan.estimates.collectives}
    compiled_bytes = {key: num_bytes for key, (_, num_bytes) in numbers.collectives.items()}
    differing = {
        key: (predicted.get(key, 0), compiled_bytes.get(key, 0))
        for key in sorted(predicted | compiled_bytes)
        if _differ(predicted.get(key, 0), compiled_bytes.get(key, 0))
    }
    assert not differing, "predicted and compiled bytes per device"
    shown = {kind for (kind, _), num_bytes in compiled_bytes.items() if num_bytes > FLOOR_BYTES}
    assert shown >= WHAT_IT_SHOWS[name]


@pytest.mark.parametrize("name", WITHOUT_SOFTMAX)
def test_the_compiler_emits_what_a_plan_of_products_lists_and_lets_wait_beside_it_what_is_predicted(name):
    """By the compiler's rules, that is: taken as equally likely, other orders' peaks are off by 14%."""
    _, cluster, found = planned(ASKED[name])
    proof = CompilerVerifier(cluster, Compiler(flags=COLLECTIVES_ALONE), lambda line: None).verified(found)
    assert not [c for c in proof.collectives if c.differs]
    assert {c.kind for c in proof.collectives if c.compiled_bytes > FLOOR_BYTES} >= WITHOUT_SOFTMAX[name]
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=MARGIN)


def _differ(predicted: int, compiled: int) -> bool:
    return abs(predicted - compiled) > max(FLOOR_BYTES, SHARE * max(predicted, compiled))


def test_a_step_that_recomputes_keeps_to_its_cap():
    """A cap far below what any sharding reaches on its own. The compiler neither merges the copies nor makes them early."""
    _, cluster, found = planned(ASKED["recomputed, scanned"])
    assert found.plan.decisions.retention
    proof = CompilerVerifier(cluster, Compiler(flags=COLLECTIVES_ALONE), progress=lambda line: None).verified(
        found
    )
    assert proof.compiled.peak_bytes <= found.plan.memory_bytes
    assert not [c for c in proof.collectives if c.differs]


def test_a_product_of_ragged_groups_is_what_the_compiler_makes_of_it():
    tokens, experts, hidden, inner = 4096, 8, 256, 1024

    def step(w, x, sizes):
        return w - jax.grad(lambda w: jnp.mean(jax.lax.ragged_dot(x, w, sizes) ** 2))(w)

    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((experts, hidden, inner), (tokens, hidden)))
    args = w, x, jax.ShapeDtypeStruct((experts,), jnp.int32)
    plan = autoshard.search(step, *args, cluster="8xH100-80GB", stages=1)
    assert not autoshard.verify(step, *args, plan=plan).differences


@pytest.mark.parametrize(("dtype", "itemsize"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_what_is_converted_moves_in_the_narrower_type(dtype, itemsize):
    """Rows of a table that is split by columns, on their way to the examples and back."""
    examples, seq, width = 1024, 64, 256

    def step(table, bias, tokens):
        def loss(table):
            row = table[tokens].astype(dtype) + bias.astype(dtype)
            return jnp.mean(jnp.einsum("esw,etw->est", row, row).astype(jnp.float32) ** 2)

        return table - jax.grad(loss)(table)

    table, bias = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1 << 16, width), (seq, width)))
    args = table, bias, jax.ShapeDtypeStruct((examples, seq), jnp.int32)
    pin = {"table": P(None, "data"), "tokens": P("data")}
    plan = autoshard.search(step, *args, cluster="8xH100-80GB", mesh=(8,), pin=pin, stages=1)
    collectives = autoshard.verify(step, *args, plan=plan).collectives
    exchanged = next(c for c in collectives if c.kind == "all-to-all")
    assert exchanged.compiled_bytes == 2 * itemsize * examples * seq * width // 8
    assert not any(c.differs for c in collectives)
