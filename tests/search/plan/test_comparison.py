"""Two plans side by side: differences that add up, specs of both, nothing where nothing differs."""

import re
from dataclasses import replace

import pytest

from autoshard.search.plan.plan import Collective, Plan
from tests.decisions import with_decisions
from tests.search.plan.former import FOLDER
from tests.search.plan.test_summary import COLLECTIVES, SPLIT, make_plan, tree

PLAN = make_plan(tree("params", 4))
LONE = Collective("all-gather", ("data",), 8, 1 << 30, 5e-3)
OTHER = make_plan(tree("params", 4, kernel="P('data')"), collectives=(COLLECTIVES[0], LONE))


def amounts(found):
    return {amount.name: (amount.this, amount.other) for amount in found}


def test_a_plan_does_not_differ_from_itself():
    comparison = PLAN.compare(PLAN)
    assert not comparison.arguments
    assert all(amount.more == 0 for amount in (*comparison.time, *comparison.memory, *comparison.collectives))
    assert str(comparison).splitlines() == [
        "this plan is as fast as the other",
        "        this                other",
        "  mesh  2x8 (data x model)  2x8 (data x model)",
        "time per step",
        "  step  10 ms  10 ms  +0 s",
        "memory at the peak, per device",
        "  peak  10 GiB  10 GiB  +0 B",
        "collectives, by time: no difference",
        "collectives, by bytes per device: no difference",
        "arguments: all sharded alike",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"fingerprint": "0" * 16, "step": "eval_step"},
            "the plans are of different steps, train_step and eval_step",
        ),
        ({"cluster": PLAN.cluster | {"name": "mine"}}, "the plans are for different clusters, "),
        ({"is_sealed": False}, "a plan was edited by hand"),
    ],
)
def test_plans_whose_times_say_nothing_get_no_percentage(changes, said):
    text = str(PLAN.compare(replace(OTHER, **changes)))
    assert text.startswith(said)
    assert "%" not in text


def test_times_by_kind_are_those_of_both_and_add_up():
    comparison = PLAN.compare(OTHER)
    times = amounts(comparison.time)
    assert times["all-gather"] == (1e-3, 6e-3)
    assert times["all-reduce"] == (3e-3, 0.0)
    whole, *parts = comparison.time
    assert whole.name == "step"
    assert sum(part.more for part in parts) == pytest.approx(whole.more)


def test_the_other_way_round_the_signs_are_the_other_way_round():
    there, back = PLAN.compare(OTHER), OTHER.compare(PLAN)
    assert {a.name: a.more for a in there.time} == {a.name: -a.more for a in back.time}
    assert back.arguments == {path: (other, this) for path, (this, other) in there.arguments.items()}
    assert str(there).startswith("this plan is 16.7% faster than the other")
    assert str(back).startswith("this plan is 20.0% slower than the other")


def test_collectives_by_kind_axes_and_their_sizes():
    comparison = PLAN.compare(OTHER)
    assert amounts(comparison.collectives)["all-gather over data=2"] == (0.0, 5e-3)
    assert amounts(comparison.num_bytes)["all-gather over data=2"] == (0, 1 << 30)
    on_8x2 = with_decisions(PLAN, replace(PLAN.decisions, mesh={"data": 8, "model": 2}))
    assert amounts(PLAN.compare(on_8x2).collectives)["all-reduce over data=8"] == (0.0, 1e-3)


def test_memory_by_kind():
    estimates = replace(PLAN.estimates, peak_bytes=8 << 30, residents={"parameters": 8 << 30})
    memory = amounts(PLAN.compare(replace(PLAN, estimates=estimates)).memory)
    assert memory == {
        "peak": (10 << 30, 8 << 30),
        "parameters": (3 << 30, 8 << 30),
        "optimizer_state": (6 << 30, 0),
        "temporaries": (1 << 30, 0),
    }


def test_arguments_that_lie_otherwise_with_both_specs():
    comparison = PLAN.compare(OTHER)
    assert set(comparison.arguments.values()) == {(SPLIT, "P('data')")}
    assert len(comparison.arguments) == 4 * 3
    lines = str(comparison).splitlines()
    assert "arguments sharded differently (this | other): 12 arrays" in lines
    folded = "~ P(None, 'model') | P('data')  12x  params['block_*']['attn']['query'|'key'|'value']['kernel']"
    assert lines[-1] == folded


def test_on_an_axis_of_another_size_the_same_spec_lies_otherwise():
    plan = make_plan({"w": SPLIT, "x": "P('data')", "b": "P()"}, mesh=(("data", 2), ("model", 8)))
    wider = make_plan({"w": SPLIT, "x": "P('data')", "b": "P()"}, mesh=(("data", 16), ("model", 1)))
    assert set(plan.compare(wider).arguments) == {"w", "x"}


def test_an_argument_that_one_plan_lacks():
    more = make_plan({"w": SPLIT, "x": "P()"})
    assert make_plan({"w": SPLIT}).compare(more).arguments == {"x": ("-", "P()")}


def test_json_says_the_same():
    data = PLAN.compare(OTHER).to_json()
    assert data["seconds"]["step"] == [PLAN.estimates.step_s, OTHER.estimates.step_s]
    assert data["collective_bytes"]["all-gather over data=2"] == [0, 1 << 30]
    assert len(data["arguments"]) == 12


def test_other_steps_and_clusters_are_named():
    other = replace(make_plan(tree("params", 4), cluster="16xH200"), fingerprint="fedcba9876543210")
    text = str(PLAN.compare(other))
    assert "16xH100-80GB" in text
    assert "16xH200" in text
    assert "train_step (fedcba9876543210)" in text


def test_it_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(PLAN.compare(OTHER)).splitlines())) <= 80


def test_pipelines_are_compared_with_one_another_and_with_one_program():
    one, stages, looped = (Plan.load(FOLDER / f"{name}.json") for name in ("jit", "mpmd", "spmd"))
    for plan, against in ((stages, one), (stages, looped), (one, looped)):
        comparison = plan.compare(against)
        whole, *parts = comparison.time
        assert (whole.this, whole.other) == (plan.estimates.step_s, against.estimates.step_s)
        assert sum(part.this for part in parts) == pytest.approx(whole.this)
        assert sum(part.other for part in parts) == pytest.approx(whole.other)
        assert [amount.name for amount in comparison.memory] == ["peak"]
        assert str(comparison).startswith("this plan is ")
    text = str(stages.compare(looped))
    assert re.search(r"executor +mpmd +spmd", text)
    assert re.search(r"schedule +1f1b +gpipe", text)
    assert "2 stages of 2x2 (replica x data)" in text


def test_collectives_of_stages_are_the_mean_of_all_devices():
    plan = Plan.load(FOLDER / "mpmd.json")
    sizes = {"replica": 2, "data": 2}
    wanted = sum(c.bytes for stage in plan.estimates.stages for c in stage.collectives) / 2
    found = amounts(plan.compare(plan).num_bytes)
    assert sum(this for this, _ in found.values()) == pytest.approx(wanted)
    assert all(f"{axis}={sizes[axis]}" in name for name in found for axis in ["replica"] if axis in name)


def test_a_device_has_the_collectives_of_all_stages_of_its_worker():
    """Under an interleaved schedule, each device of one worker runs both stages of two workers."""
    apart = Plan.load(FOLDER / "mpmd.json")
    together = replace(apart, workers=1)
    moved = [sum(amount.this for amount in p.compare(p).num_bytes) for p in (apart, together)]
    assert moved[1] == pytest.approx(2 * moved[0])


def test_lines_of_decisions_have_a_sign():
    more = make_plan({"w": SPLIT, "x": "P()", "y": "P()"})
    lines = str(more.compare(make_plan({"w": "P()", "x": "P()", "z": "P()"}))).splitlines()
    assert {line[0] for line in lines if line[-1] in "wyz"} == {"~", "+", "-"}
    recomputing = with_decisions(PLAN, replace(PLAN.decisions, retention={"forward tanh": "remat"}))
    assert "+ forward tanh  remat | -" in str(recomputing.compare(PLAN)).splitlines()


def test_markdown_has_all_decisions_in_a_table():
    text = PLAN.compare(OTHER).to_markdown()
    assert text.startswith("**this plan is 16.7% faster than the other**")
    path = next(iter(PLAN.compare(OTHER).arguments))
    assert f"| ~ | `{path}` | `{SPLIT}` | `P('data')` |" in text
    assert text.count("\n| ~ |") == len(PLAN.compare(OTHER).decisions)
    assert "The plans decide alike." in PLAN.compare(PLAN).to_markdown()
