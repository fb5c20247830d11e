"""A plan that keeps to its cap only without overlap, as the compiler makes it."""

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.search.device.prediction import MARGIN
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.verification.judge import CompilerVerifier
from tests.zoo import make_lstm

CLUSTER = parse_cluster("8xH100-80GB")
CAP_BYTES = 1654 << 20


def test_without_overlap_a_program_keeps_to_its_cap_and_holds_what_is_predicted():
    """The scheduler that hides communication would take more than the cap."""
    case = make_lstm(num_layers=2, hidden=2048, vocab=8192, seq=16, batch=2048)
    options = Options(CAP_BYTES, (2, 4), remat="never", offload="never", microbatches=1)
    found = find(trace(case.step, *case.abstract_args()), CLUSTER, options)
    assert not found.plan.overlap
    proof = CompilerVerifier(CLUSTER, Compiler(), lambda line: None).verified(found)
    assert proof.fits
    assert proof.compiled.peak_bytes == pytest.approx(proof.predicted.peak_bytes, rel=MARGIN)
    assert not proof.differing
