"""A search that goes on under a lower cap."""

from dataclasses import replace

import pytest

from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import applying, driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.result import SearchResult
from tests.zoo import make_gpt_linen

CLUSTER = parse_cluster("8xH100-80GB")
CASE = make_gpt_linen(num_layers=2, hidden=256, heads=4, seq=128, batch=64)
STEP = trace(CASE.step, *CASE.abstract_args())
PEAK = driver.find(STEP, CLUSTER, Options(1 << 36)).plan.estimates.peak_bytes


def searched(share: float, first: SearchResult | None = None):
    """A plan under a share of the uncapped peak, and the lines of progress."""
    options, lines = Options(int(share * PEAK)), list[str]()
    if first is None:
        return driver.find(STEP, CLUSTER, options, lines.append), lines
    options = replace(options, clock=first.on_mesh.clock)
    return driver.find_under(first, STEP, CLUSTER, options, lines.append), lines


@pytest.mark.parametrize(("higher", "lower"), [(2.0, 0.7), (0.7, 0.6)], ids=["uncapped", "capped"])
def test_under_a_lower_cap_what_is_solved_is_not_solved_again(higher, lower):
    first, _ = searched(higher)
    found, lines = searched(lower, first)
    anew, lines_anew = searched(lower)
    assert found.plan.memory_bytes == int(lower * PEAK)
    assert found.plan.estimates.peak_bytes <= found.plan.memory_bytes
    assert found.plan.estimates.step_s >= first.bound_s
    assert found.plan.estimates.step_s <= 1.1 * anew.plan.estimates.step_s
    assert any("mesh 8 (" in line for line in lines_anew)
    assert not any("mesh 8 (" in line for line in lines)


def test_the_first_search_is_as_it_was():
    """After a cap to which nothing keeps, too."""
    first, _ = searched(0.8)
    with pytest.raises(InfeasibleError):
        searched(0.01, first)
    once, _ = searched(0.7, first)
    again, _ = searched(0.7, first)
    assert once.plan.decisions == again.plan.decisions


def test_a_plan_under_a_lower_cap_is_taken_by_its_step():
    found, _ = searched(0.6, searched(0.8)[0])
    applied = applying.apply(STEP, found.plan, CLUSTER)
    assert applied.plan.estimates == found.plan.estimates
