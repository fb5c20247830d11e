"""A plan without overlap, as the compiler makes it."""

from dataclasses import replace
from functools import cache

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.search import applying
from autoshard.search.device.prediction import MARGIN
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.verification.judge import CompilerVerifier
from autoshard.verification.result import Verification
from tests.zoo import make_lstm

CLUSTER = parse_cluster("8xH100-80GB")


@cache
def proven(overlap: bool) -> Verification:
    """The same plan with overlap or without."""
    case = make_lstm(num_layers=2, hidden=2048, vocab=8192, seq=16, batch=2048)
    step = trace(case.step, *case.abstract_args())
    options = Options(CLUSTER.device_memory_limit(), (2, 4), remat="never", microbatches=1)
    plan = replace(find(step, CLUSTER, options).plan, overlap=overlap, is_sealed=False)
    found = applying.apply(step, plan, CLUSTER)
    assert found.plan.overlap == overlap
    return CompilerVerifier(CLUSTER, Compiler(), lambda line: None).verified(found)


def test_a_program_without_overlap_has_the_same_collectives_and_holds_what_is_predicted():
    with_overlap, without = proven(True), proven(False)
    assert without.differing == with_overlap.differing
    assert without.compiled.peak_bytes == pytest.approx(without.predicted.peak_bytes, rel=MARGIN)
