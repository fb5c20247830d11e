"""The first line of a printed plan, from shares alone: each expert's word, and plain facts where there is none."""

from dataclasses import replace

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.plan.headline import headline, mfu
from autoshard.search.plan.values import Estimates, PlanValues, Sharding, Stage
from autoshard.search.plan.work_shares import AxisUse, WorkShares
from tests.cost_model.test_hardware import toy_device

DATA = AxisUse("data", 8, examples=1.0)
OPTIMIZER_SPLIT = replace(DATA, optimizer_state=0.99)
ONCE_GATHERED = replace(OPTIMIZER_SPLIT, parameters=0.99, gathered=0.99, reductions_scattered=1.0)
TENSOR = AxisUse("model", 4, weights=0.97, parameters=0.99, optimizer_state=0.99)


def plan(*stages, arguments=None, retention=None, microbatches=1, schedule=""):
    """A plan whose stages have so many replicas, of such a mesh, with such shares; None of a file without shares."""
    shares = [one for _, _, one in stages if one is not None]
    return PlanValues(
        step="step",
        fingerprint="",
        jax="",
        cluster={},
        memory_bytes=1,
        executor="",
        schedule=schedule,
        microbatches=microbatches,
        stages=tuple(Stage(0, replicas, n) for n, (replicas, _, _) in enumerate(stages)),
        retention=retention or {},
        shardings=tuple(Sharding(mesh, arguments or {}, {}, {}) for _, mesh, _ in stages),
        estimates=Estimates(step_s=1.0, peak_bytes=1, shares=tuple(shares)),
    )


WORDS = [
    ([DATA], "data parallel over 8"),
    ([OPTIMIZER_SPLIT], "ZeRO-1 over 8"),
    ([replace(OPTIMIZER_SPLIT, reductions_scattered=1.0)], "ZeRO-2 over 8"),
    ([ONCE_GATHERED], "ZeRO-2 over 8"),
    ([replace(ONCE_GATHERED, regathered=0.9)], "FSDP over 8"),
    ([replace(ONCE_GATHERED, regathered=0.9), TENSOR], "FSDP over 8 x tensor parallel over 4"),
    ([replace(TENSOR, sums_scattered=1.0)], "tensor parallel over 4 with sequence parallelism"),
    ([AxisUse("data", 8, examples=0.4, experts=0.6)], "data + expert parallel over 8"),
    ([AxisUse("data", 8, experts=0.95)], "expert parallel over 8"),
    ([AxisUse("data", 8, positions=1.0)], "sequence parallel over 8"),
    ([AxisUse("data", 8, rows=1.0)], "spatial parallel over 8"),
    ([AxisUse("data", 8, rows=1.0, optimizer_state=1.0)], "ZeRO-1 + spatial parallel over 8"),
    ([AxisUse("data", 8, features=1.0)], "feature parallel over 8"),
    ([AxisUse("data", 8, positions=1.0, gathered=1.0, regathered=1.0)], "FSDP + sequence parallel over 8"),
    (
        [AxisUse("data", 8, examples=1.0, parameters=0.9, tables=0.9)],
        "data parallel over 8, tables split over 8",
    ),
    ([AxisUse("data", 8, examples=0.5, weights=0.5)], "data + tensor parallel over 8"),
    ([AxisUse("data", 8)], "replicated over 8"),
    ([AxisUse("data", 8, examples=0.17)], "data parallel over 8 (83% of the FLOPs replicated)"),
    ([AxisUse("data", 8, parameters=1.0)], "parameters split over 8"),
    ([DATA, AxisUse("model", 2, examples=1.0)], "data parallel over 16"),
    ([], "one device"),
]


@pytest.mark.parametrize(("axes", "words"), WORDS, ids=[words for _, words in WORDS])
def test_one_program_by_the_words_for_its_axes(axes, words):
    assert headline(plan((1, {}, WorkShares(tuple(axes))))) == words


def test_tables_whose_rows_are_read_for_their_update():
    shares = WorkShares((DATA,), runs={"forward gather": 1, "update gather #2": 1})
    assert headline(plan((1, {}, shares))) == "data parallel over 8, tables updated by rows"


def test_a_pipeline_by_its_stages_schedule_microbatches_and_replicas():
    stages = [(8, {"data": 1}, WorkShares())] * 4
    found = headline(plan(*stages, schedule="1f1b", microbatches=16))
    assert found == "4 stages x 1F1B, 16 microbatches, data parallel over 8"


def test_replicas_and_examples_split_inside_a_replica_are_one_kind():
    stages = [(2, {"data": 8}, WorkShares((DATA,)))] * 2
    assert (
        headline(plan(*stages, schedule="zb-h1", microbatches=4))
        == "2 stages x ZB-H1, 4 microbatches, data parallel over 16"
    )


def test_stages_that_share_their_work_differently_are_told_apart():
    one, other = (1, {}, WorkShares((DATA,))), (2, {}, WorkShares((TENSOR,)))
    assert headline(plan(one, one, other, schedule="gpipe", microbatches=4)) == (
        "3 stages x GPipe, 4 microbatches, "
        "stages 0-1: data parallel over 8; stage 2: data parallel over 2 x tensor parallel over 4"
    )


def test_a_plan_of_an_earlier_version_is_named_by_its_mesh():
    assert headline(plan((1, {"data": 2, "model": 4}, None))) == "split over data=2 x model=4"
    assert headline(plan((1, {"data": 1}, None))) == "one device"


@pytest.mark.parametrize(
    ("retention", "recomputed", "words"),
    [
        ({"forward block_*/dot_general": "remat 0-11 of 48"}, 0.25, "12 of 48 layers recomputed"),
        ({"forward block_*/dot_general": "remat 0-2, 5 of 8"}, 0.5, "4 of 8 layers recomputed"),
        ({"forward block_*/dot_general": "remat"}, 0.34, "34% of the forward FLOPs recomputed"),
        ({"forward block_*/exp": "remat"}, 0.0, "cheap ops recomputed"),
        ({"forward block_*/exp": "offload"}, 0.0, "residuals offloaded"),
    ],
)
def test_what_saves_memory_is_said(retention, recomputed, words):
    stage = (1, {}, WorkShares((DATA,), recomputed=recomputed))
    assert headline(plan(stage, retention=retention)) == f"data parallel over 8, {words}"


def test_microbatches_and_state_on_the_host_are_said():
    found = plan((1, {}, WorkShares((DATA,))), microbatches=4, arguments={"opt.mu": "P('data') on host"})
    assert headline(found) == "data parallel over 8, 4 microbatches, state on the host"


def test_mfu_is_model_flops_over_the_time_at_peak_speed():
    """Two dtypes: 8e12 FLOPs at 8 x 1e12 a second take 1 s, 32e12 at 8 x 2e12 take 2 s; a step of 6 s has half of that."""
    device = toy_device(flops_per_s=(("float32", 1e12), ("bfloat16", 2e12)))
    cluster = replace(parse_cluster("8xH100-80GB"), device=device)
    shares = WorkShares(model_flops={"float32": 8e12, "bfloat16": 32e12})
    assert mfu([shares], [cluster], 6.0) == pytest.approx(0.5)
    assert mfu([shares], [cluster, cluster], 6.0) == pytest.approx(0.25)
    assert mfu([None], [cluster], 6.0) is None
