"""Halos as XLA's GPU compiler makes them: permutes and peak as predicted."""

import pytest

import autoshard
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.process import compile_apart
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.executors.jit import build
from autoshard.search.ir.trace import trace
from tests.executors import plans
from tests.images import DownAndUp, Grouped, Plain, Volumes, shapes, training
from tests.zoo import make_unet

CASES = {
    "rows": (Plain(), (1, 512, 512, 3)),
    "down and up": (DownAndUp(), (1, 1024, 1024, 3)),
    "groups": (Grouped(), (1, 8192, 8192, 3)),
    "volumes": (Volumes(32), (1, 128, 128, 128, 2)),
}

SLOW = frozenset(CASES) - {"rows"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_the_compiled_program_exchanges_and_holds_what_was_predicted(case):
    model, shape = CASES[case]
    prove(training(model), *shapes(model, shape))


@pytest.mark.slow
def test_a_diffusion_models_u_net_at_high_resolution():
    case = make_unet(stage_features=(32, 64), image=512, batch=1)
    prove(case.step, *case.abstract_args())


@pytest.mark.slow
@pytest.mark.parametrize("beside_channels", [False, True])
def test_rows_and_columns_or_channels(beside_channels, monkeypatch):
    """A second dimension's exchange carries the corners. Beside channels, gradients of kernels exchange rows by name."""
    cluster, model = parse_cluster("8xH100-80GB"), Plain()
    monkeypatch.setattr(plans, "cluster", lambda mesh: cluster)
    found = plans.by_rows(trace(training(model), *shapes(model, (1, 512, 512, 3))), (2, 4), beside_channels)
    program = build(found.step, found.sharding, None)
    answer = compile_apart(module_bytes(lower(program.fn, program.args)), cluster)
    moved = CompiledStats.of(answer, found.plan.decisions.mesh).collectives
    predicted = {(c.kind, c.axes): (c.count, c.bytes) for c in found.plan.estimates.collectives}
    for axis in ("model",) if beside_channels else ("data", "model"):
        assert moved["collective-permute", (axis,)] == predicted["collective-permute", (axis,)]


def prove(step, *args):
    plan = autoshard.search(step, *args, cluster="8xH100-80GB", mesh=(8,), stages=1, verify="never")
    assert "spatial parallel over 8" in str(plan).splitlines()[0]
    proof = autoshard.verify(step, *args, plan=plan)
    assert proof.fits
    assert proof.differing == ()
    predicted = {c.kind: (c.count, c.bytes) for c in plan.estimates.collectives}["collective-permute"]
    (moved,) = [one for one in proof.collectives if one.kind == "collective-permute"]
    assert (moved.compiled_count, moved.compiled_bytes) == predicted
