"""When the search has the host update the state that rests there, and how its plan is read."""

from dataclasses import replace

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.applying import apply
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from tests.search.adamw import adamw_chain
from tests.search.memory.test_host_updates import with_products

SLOW_BUS = replace(parse_cluster("1xV100-16GB"), host_bytes_per_s=921.6e9, host_cores=192)
"""A GPU behind a PCIe 3.0 bus, on a host of two sockets with twelve channels of DDR5-4800 each."""
BUSY_HOST = parse_cluster("1xV100-16GB")
"""With an eighth of it."""
STEP = trace(*adamw_chain(num_layers=8, width=1024, rows=64))
STATE_BYTES = 8 * 1024 * 1024 * 4
"""Of the parameters, and of each of Adam's moments."""


def found(cluster, times_state=3.0, step=STEP, **options):
    options = {"remat": "never", "microbatches": 1} | options
    return find(step, cluster, Options(int(times_state * STATE_BYTES), **options))


def updated(plan):
    return [
        name for name, said in plan.decisions.arguments.items() if said.endswith(" on host, updated there")
    ]


@pytest.fixture(scope="module")
def plan():
    return found(SLOW_BUS).plan


def test_a_host_with_a_faster_memory_than_the_bus_updates_unasked(plan):
    assert sum(name.startswith("state") for name in updated(plan)) == 2 * 8
    assert "state on the host, updated there" in str(plan).splitlines()[0]


def test_its_step_is_faster_than_with_the_update_on_the_device(plan):
    """By the formula: four arrays less over the bus, seven through the host's memory; nothing hides behind 64 rows."""
    there = found(replace(SLOW_BUS, host_cores=0)).plan
    assert updated(there) == []
    host_s = 7 * STATE_BYTES / SLOW_BUS.host_update_bytes_per_s
    bus_s = STATE_BYTES / SLOW_BUS.host_link.sustained_bytes_per_s
    assert plan.estimates.step_s < there.estimates.step_s
    assert host_s < plan.estimates.step_s < host_s + 4 * bus_s


def test_a_host_that_is_shared_by_eight_leaves_the_update_to_the_device():
    assert updated(found(BUSY_HOST).plan) == []


def test_no_cluster_updates_faster_with_a_faster_bus(plan):
    bus = replace(SLOW_BUS.host_link, bytes_per_s=100 * SLOW_BUS.host_link.bytes_per_s)
    assert updated(found(replace(SLOW_BUS, host_link=bus)).plan) == []


def test_state_that_the_user_puts_on_the_host_is_updated_there_too():
    """The new state lies beside the old, and beside the gradients."""
    plan = found(SLOW_BUS, 20.0, offload=("optimizer_state", "parameters")).plan
    assert len(updated(plan)) == 3 * 8
    assert plan.estimates.host_bytes == pytest.approx((3 + 3 + 1) * STATE_BYTES, rel=0.1)


def test_products_of_state_stay_on_the_device():
    step = trace(*adamw_chain(num_layers=2, width=1024, rows=64, tx=with_products()))
    plan = found(SLOW_BUS, 20.0, step, offload=("optimizer_state",)).plan
    assert updated(plan) == []
    assert plan.estimates.host_bytes > 0


def test_a_plan_is_read_as_it_was_written(plan):
    again = apply(STEP, plan, SLOW_BUS).plan
    assert again.decisions == plan.decisions
    assert again.estimates.step_s == pytest.approx(plan.estimates.step_s, rel=1e-9)


def edited(plan, **texts):
    (one,) = plan.shardings
    return replace(plan, shardings=(replace(one, arguments={**one.arguments, **texts}),))


def test_an_edit_takes_the_update_back_to_the_device(plan):
    texts = {name: plan.decisions.arguments[name].removesuffix(", updated there") for name in updated(plan)}
    back = apply(STEP, edited(plan, **texts), SLOW_BUS)
    assert updated(back.plan) == []
    assert not any(op.is_host_update for op in back.step.graph.ops)


def test_a_cluster_that_does_not_say_how_fast_its_hosts_are(plan):
    with pytest.raises(
        PlanError, match=r"does not say how fast its hosts are.*host_memory_bandwidth_per_node"
    ):
        apply(STEP, plan, replace(SLOW_BUS, host_bytes_per_s=0.0))


def test_a_plan_cannot_have_the_host_update_what_it_cannot():
    step = trace(*adamw_chain(num_layers=2, width=1024, rows=64, tx=with_products()))
    plan = found(SLOW_BUS, 20.0, step, offload=("optimizer_state",)).plan
    name = next(name for name, said in plan.decisions.arguments.items() if said.endswith(" on host"))
    with pytest.raises(PlanError, match="more than elementwise ops"):
        apply(step, edited(plan, **{name: "P() on host, updated there"}), SLOW_BUS)
