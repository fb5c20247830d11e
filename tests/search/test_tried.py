"""The candidates in a plan's file are those that were searched, and the certificate follows from them."""

import functools

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from tests.search.adamw import adamw_chain


@functools.cache
def searched(memory_bytes: int = 8 << 30) -> Plan:
    step, *shapes = adamw_chain(3, 1024, 8192)
    return driver.find(trace(step, *shapes), parse_cluster("8xH100-80GB"), Options(memory_bytes)).plan


def test_the_plan_is_the_best_of_its_candidates_and_no_bound_is_above_what_was_found():
    plan = searched()
    assert {one.mesh for one in plan.candidates if len(one.mesh) < 3} <= {*plan.meshes}
    found = [one for one in plan.candidates if one.step_s is not None]
    best = min(found, key=lambda one: one.step_s)
    assert best.mesh == tuple(plan.decisions.mesh.values())
    assert abs(best.step_s - plan.estimates.step_s) <= 1e-9 + 1e-6 * best.step_s
    assert all(one.bound_s <= one.step_s * (1 + 1e-9) for one in found)


def test_the_gap_follows_from_the_least_bound():
    plan = searched()
    least_s = min(one.bound_s for one in plan.candidates if one.mesh in plan.meshes and not one.is_ruled_out)
    assert plan.gap >= 1 - least_s / plan.estimates.step_s - 1e-6


def test_equal_plans_may_have_been_searched_otherwise():
    plan = searched()
    again = Plan.from_json({**plan.to_json(), "candidates": []})
    assert again == plan
    assert hash(again) == hash(plan)


def test_candidates_go_through_the_file():
    plan = searched()
    assert Plan.from_json(plan.to_json()).candidates == plan.candidates
