"""Plans with less overlap or without any, as the compiler makes them."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.search import applying
from autoshard.search.device.prediction import MARGIN
from autoshard.search.driver import find
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.verification.judge import CompilerVerifier
from autoshard.verification.result import Verification
from tests.search.chain import chain
from tests.zoo import make_lstm

LSTM = make_lstm(num_layers=2, hidden=2048, vocab=8192, seq=16, batch=2048)


@cache
def recurrence(overlap: float) -> Verification:
    return proven(trace(LSTM.step, *LSTM.abstract_args()), "8xH100-80GB", 64 << 30, (2, 4), overlap)


@cache
def products(overlap: float) -> Verification:
    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
    x = jax.ShapeDtypeStruct((1 << 17, 2048), jnp.float32)
    return proven(trace(chain, weights, x), "64xA100-80GB-Ethernet", 1 << 30, (2, 4, 8), overlap)


def proven(step: Step, name: str, cap_bytes: int, mesh: tuple[int, ...], overlap: float) -> Verification:
    """A step's plan with another share of the scheduler's budget."""
    cluster = parse_cluster(name)
    options = Options(cap_bytes, mesh, remat="never", microbatches=1)
    plan = replace(find(step, cluster, options).plan, overlap=overlap, is_sealed=False)
    found = applying.apply(step, plan, cluster)
    assert found.plan.overlap == overlap
    return CompilerVerifier(cluster, Compiler(), lambda line: None).verified(found)


def test_a_program_without_overlap_has_the_same_collectives_and_holds_what_is_predicted():
    with_overlap, without = recurrence(1.0), recurrence(0.0)
    assert without.differing == with_overlap.differing
    assert without.compiled.peak_bytes == pytest.approx(without.predicted.peak_bytes, rel=MARGIN)


def test_a_program_that_overlaps_less_holds_less_as_predicted():
    whole, less = products(1.0), products(0.1)
    assert less.compiled.peak_bytes < 0.95 * whole.compiled.peak_bytes
    for one in (whole, less):
        assert one.compiled.peak_bytes == pytest.approx(one.predicted.peak_bytes, rel=MARGIN)
