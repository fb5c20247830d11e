"""A schedule drawn."""

import json

from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.simulator import StageCost, simulate
from autoshard.search.pipeline.timeline import text, trace_events

TWO = simulate(build_schedule("1f1b", 2, 2, 2), [StageCost(1, 2, residual_bytes=2**30)] * 2)


def test_tasks_stand_where_they_run():
    assert text(TWO, 38) == (
        "1f1b: 2 stages, 2 microbatches, 9 s, 33.3% idle\n"
        "0 F0--F1--........B0------....B1------\n"
        "1 ....F0--B0------F1--B1------........\n"
        "residuals held: at most 2 GiB per device"
    )


def test_later_stages_of_a_worker_are_in_small_letters():
    lines = text(simulate(build_schedule("zb-v", 2, 1, 1), [StageCost(1, 1, 1)] * 2), 14).split("\n")
    assert lines[1] == "0 F0f0b0B0w0W0"


def test_any_schedule_fits_80_columns():
    for name, stages in (("1f1b", 12), ("zb-v", 24), ("chimera", 12)):
        lines = text(simulate(build_schedule(name, stages, 48, 12), [StageCost(1, 1, 1)] * stages)).split(
            "\n"
        )
        assert {len(line) for line in lines[1:]} == {80}


def test_the_trace_has_every_task_every_transfer_and_what_is_held():
    trace = json.loads(json.dumps(trace_events(TWO)))
    events = trace["traceEvents"]
    by_phase = {phase: [e for e in events if e["ph"] == phase] for phase in "MXCsf"}
    assert {e["args"]["name"] for e in by_phase["M"]} == {"worker 0 (stage 0)", "worker 1 (stage 1)"}
    assert len(by_phase["X"]) == len(by_phase["C"]) == 8
    last = max(by_phase["X"], key=lambda e: e["ts"])
    assert (last["name"], last["tid"], last["ts"], last["dur"]) == ("B0.1", 0, 7e6, 2e6)
    assert max(e["args"]["bytes"] for e in by_phase["C"]) == 2 * 2**30
    ends = {(e["name"], e["tid"]): e["ts"] + e["dur"] for e in by_phase["X"]}
    assert len(by_phase["s"]) == len(by_phase["f"]) == 4
    for sent, read in zip(by_phase["s"], by_phase["f"], strict=True):
        assert sent["id"] == read["id"]
        assert sent["tid"] != read["tid"]
        assert ends[sent["name"], sent["tid"]] == sent["ts"] <= read["ts"]
