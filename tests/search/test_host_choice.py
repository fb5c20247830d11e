"""When the search puts state in the host's memory by itself, and what it certifies of such a plan."""

from dataclasses import replace

import pytest

from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from tests.search.adamw import adamw_chain
from tests.search.lora import lora_chain

CLUSTER = parse_cluster("1xH100-80GB")
STEP = trace(*adamw_chain(num_layers=8, width=1024, rows=64))
STATE_BYTES = 8 * 1024 * 1024 * 4
"""Of the parameters, and of each of Adam's moments."""


def found(times_state, cluster=CLUSTER, step=STEP, **options):
    """Under a cap of so many times the parameters' bytes."""
    return find(
        step, cluster, Options(int(times_state * STATE_BYTES), remat="never", microbatches=1, **options)
    ).plan


def hosted(plan):
    return [name for name, said in plan.decisions.arguments.items() if said.endswith(" on host")]


def test_nothing_is_on_the_host_where_all_has_room():
    plan = found(10.0)
    assert (hosted(plan), plan.estimates.host_bytes, plan.estimates.transfer_s) == ([], 0, 0.0)


def test_an_optimizers_state_goes_first():
    plan = found(3.0)
    assert len(hosted(plan)) == 2 * 8
    assert not any(name.startswith("params") for name in hosted(plan))
    assert plan.estimates.host_bytes == 2 * STATE_BYTES
    assert plan.estimates.peak_bytes <= plan.memory_bytes


def test_then_the_parameters():
    plan = found(1.6)
    assert len(hosted(plan)) == 3 * 8
    assert plan.estimates.host_bytes == 3 * STATE_BYTES
    assert plan.estimates.peak_bytes <= plan.memory_bytes


def test_frozen_weights_go_before_what_is_trained():
    """The adapters and their moments take next to nothing, and stay."""
    step = trace(*lora_chain(num_layers=8, width=1024, rows=64))
    plan = found(0.8, step=step)
    assert sorted(hosted(plan)) == [f"base[{i}]" for i in range(8)]
    assert plan.estimates.host_bytes == STATE_BYTES
    assert plan.estimates.peak_bytes <= plan.memory_bytes
    copied_s = float(CLUSTER.host_link.copy_s(STATE_BYTES // 8))
    assert plan.estimates.transfer_s == pytest.approx((8 + 7) * copied_s)  # for each phase, none back
    assert hosted(found(10.0, step=step, offload=("frozen_weights",))) == hosted(plan)


@pytest.mark.slow
def test_what_is_certified_of_a_plan_on_the_host_holds_on_all_meshes():
    """The certificate is for plans with as much on the host; no other plan fits. In test_certificate.py,
    `test_no_plan_on_any_mesh_beats_the_certified_gap` shows it for the device's memory alone, against all plans."""
    four, asked = parse_cluster("4xH100-80GB"), ((4,), (2, 2))
    four_layers, times_state = trace(*adamw_chain(num_layers=4, width=1024, rows=64)), 3.0 / 4 * 4 / 8
    plan = found(times_state, four, four_layers)
    assert hosted(plan)
    assert set(plan.meshes) >= set(asked)
    assert plan.gap is not None
    for shape in asked:
        alone = found(times_state, four, four_layers, mesh=shape, offload=("optimizer_state",))
        assert alone.estimates.unhidden_s >= (1 - plan.gap) * plan.estimates.unhidden_s


@pytest.mark.parametrize(
    ("cluster", "offload"), [(replace(CLUSTER, host_bytes_per_node=0), None), (CLUSTER, "never")]
)
def test_without_the_host_nothing_fits(cluster, offload):
    with pytest.raises(InfeasibleError):
        found(3.0, cluster, offload=offload)


@pytest.mark.parametrize(
    ("path", "on_host"),
    [
        ("state[0].mu", [f"state[0].mu['w{i}']" for i in range(8)]),
        ("params['w1']", ["params['w1']"]),
    ],
)
def test_arguments_may_be_named_by_their_paths(path, on_host):
    """Whole, or by their beginnings."""
    plan = found(10.0, offload=(path,))
    assert sorted(hosted(plan)) == on_host
    assert plan.estimates.host_bytes == len(on_host) * STATE_BYTES // 8


@pytest.mark.parametrize("path", ["params['w", "state[0].count", "x", "mu"])
def test_a_path_that_leads_to_nothing_which_can_be_there(path):
    with pytest.raises(InputError, match=r"has no .* that can rest on the host.* such as params\['w0'\]"):
        found(10.0, offload=(path,))


def test_no_kinds_on_the_host_that_a_user_names_are_faster():
    step, cluster = trace(*adamw_chain(num_layers=8, width=1024, rows=8192)), parse_cluster("1xL4")
    roomy_bytes = find(step, cluster, Options(CLUSTER.device_memory_limit())).plan.estimates.peak_bytes
    cap_bytes = int(0.7 * roomy_bytes)
    chosen_s = find(step, cluster, Options(cap_bytes)).plan.estimates.step_s
    for kinds in (("optimizer_state",), ("optimizer_state", "parameters")):
        asked = find(step, cluster, Options(cap_bytes, microbatches=1, offload=kinds))
        assert chosen_s <= 1.001 * asked.plan.estimates.step_s
