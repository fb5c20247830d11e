"""Two plans, decision by decision: what was changed, added and removed, in groups."""

from dataclasses import replace

from autoshard.search.plan.differences import ADDED, CHANGED, REMOVED, differences
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.plan import Plan
from tests.decisions import with_decisions
from tests.search.plan.former import FOLDER
from tests.search.plan.test_summary import make_plan

PLAN = make_plan({"w": "P('data')", "m": "P()", "x": "P('data')"})


def told(plan, against):
    return [(d.group, d.name, d.kind, d.this, d.other) for d in differences(plan, against)]


def test_a_plan_has_no_differences_from_itself():
    assert told(PLAN, PLAN) == []


def test_each_kind_of_decision_is_in_its_group():
    other = with_decisions(
        PLAN,
        replace(PLAN.decisions, retention={"forward tanh": "remat"}, microbatches=4),
        memory_bytes=PLAN.memory_bytes // 2,
    )
    said = {(group, name): kind for group, name, kind, _, _ in told(PLAN, other)}
    assert said == {
        ("plan", "memory cap"): CHANGED,
        ("microbatches", "microbatches"): CHANGED,
        ("retention", "forward tanh"): REMOVED,
    }
    assert ("retention", "forward tanh", ADDED, "remat", None) in told(other, PLAN)


def test_arguments_are_grouped_by_their_role():
    roles = {"w": "float32[8] parameter", "m": "float32[8] optimizer_state", "x": "float32[8] batch"}
    plan = replace(PLAN, outline=Outline(roles, {}, {}))
    there = make_plan({"m": "P('data')", "w": "P()", "x": "P('data')"})
    assert told(plan, there) == [
        ("parameter", "w", CHANGED, "P('data')", "P()"),
        ("optimizer state", "m", CHANGED, "P()", "P('data')"),
    ]


def test_a_mesh_of_other_sizes_changes_the_arguments_that_it_splits():
    wider = with_decisions(PLAN, replace(PLAN.decisions, mesh={"data": 8, "model": 2}))
    names = [name for group, name, *_ in told(PLAN, wider) if group == "arguments"]
    assert names == ["w", "x"]
    assert [d[1:] for d in told(PLAN, wider) if d[0] == "mesh"] == [
        ("data", CHANGED, "2", "8"),
        ("model", CHANGED, "8", "2"),
    ]


def test_stages_of_a_pipeline_are_added_to_one_program():
    one, stages = (Plan.load(FOLDER / f"{name}.json") for name in ("jit", "mpmd"))
    found = [d for d in differences(stages, one) if d.group == "stages"]
    assert [d.name for d in found] == [f"stage {n}" for n in range(len(stages.stages))]
    assert {d.kind for d in found} == {ADDED}
    assert {d.kind for d in differences(one, stages) if d.group == "stages"} == {REMOVED}
