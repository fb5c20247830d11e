"""What is made of a device's orders: the least memory, the likely peak below the cap, and what is hidden."""

from math import inf

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.gpu_targets import budget_bytes
from autoshard.search.device.combiner import combined
from autoshard.search.device.kernel_order import memory_saving, program_order
from autoshard.search.device.kernel_sizes import sized
from autoshard.search.device.latency_hiding import latency_hiding
from autoshard.search.device.lowering import TRANSFERS, Lowered, lower
from autoshard.search.device.prediction import MARGIN, SMALL_PART, Prediction, in_least_order
from autoshard.search.device.siblings import merged
from autoshard.search.device.timeline import peak
from autoshard.search.ir.trace import trace
from autoshard.search.problem.live_ranges import Resident
from autoshard.search.step_problem import StepProblem
from tests.search.device.programs import buffer, collective, kernel, programs


def zeros(shape, dtype=np.float32):
    """As `jnp.zeros`, but no program makes them."""
    return np.zeros(shape, dtype)


FREED_FIRST = Lowered(
    (kernel(0, [], [0]), kernel(1, [], [1]), kernel(2, [0], [2]), kernel(3, [1], [3])),
    (buffer(10.0), buffer(10.0), buffer(1.0), buffer(1.0)),
)
"""As written, both large arrays are there at once; doing next what frees most, one of them."""

MISLED = Lowered(
    (kernel(0, [], [0]), kernel(1, [0], [1]), kernel(2, [], [2]), kernel(3, [1, 2], [3])),
    (buffer(10.0), buffer(1.0), buffer(5.0), buffer(0.0)),
)
"""As written, 10 and 1, then 1 and 5; what makes least goes first otherwise, and its 5 stay through the rest."""

HIDDEN = Lowered(
    (
        kernel(0, [4], [0]),
        kernel(1, [0], [1]),
        kernel(2, [0], [2]),
        collective(3, [2], [3], kind="all-reduce"),
        kernel(5, [1, 3], [5]),
    ),
    (*(buffer(num_bytes) for num_bytes in (8.0, 4.0, 2.0, 2.0)), buffer(100.0, (), True), buffer(0.0)),
)
"""Kernel 1 runs while what 2 makes is reduced: it saves a second, and what 0 makes is there for longer."""


@pytest.mark.parametrize(("lowered", "num_bytes"), [(FREED_FIRST, 11.0), (MISLED, 11.0)])
def test_the_least_is_that_of_the_better_order(lowered, num_bytes):
    assert Prediction(lowered, inf, True, lowered).least.num_bytes == pytest.approx(num_bytes * (1 + MARGIN))


def test_either_order_may_be_the_better_one():
    assert in_least_order(FREED_FIRST).kernels == memory_saving(FREED_FIRST).kernels
    assert in_least_order(MISLED).kernels == MISLED.kernels != memory_saving(MISLED).kernels


def test_a_margin_is_kept_for_what_a_step_makes_and_not_for_its_arguments():
    lowered = Lowered(
        (kernel(0, [0, 1], [2], workspace=7.0),),
        (
            buffer(1000.0, is_argument=True, resident=Resident.PARAMETERS),
            buffer(500.0, is_argument=True, resident=Resident.BATCH),
            buffer(100.0, resident=Resident.RESIDUALS),
        ),
    )
    least = Prediction(lowered, inf, False, lowered).least
    assert least.num_bytes == pytest.approx(1607 + 0.03 * 107)
    assert dict(least.residents) == pytest.approx(
        {
            Resident.PARAMETERS: 1000,
            Resident.BATCH: 500,
            Resident.RESIDUALS: 100,
            Resident.TEMPORARIES: 7 + 0.03 * 107,
        }
    )


@given(programs())
def test_the_peak_is_that_of_the_schedulers_order_and_its_margin_ends_at_the_cap(lowered):
    plain = in_least_order(lowered)
    resting_bytes = sum(buffer.num_bytes for buffer in lowered.buffers if buffer.is_argument)
    least = with_margin(plain, program_order(plain))
    for limit_bytes in (inf, 20.0, 0.0):
        found = Prediction(lowered, limit_bytes, True, lowered)
        order = latency_hiding(plain, budget_bytes(limit_bytes, resting_bytes))
        is_asked = limit_bytes / SMALL_PART < least <= limit_bytes
        needed = max(least, peak(plain, order).num_bytes) if is_asked else least
        hiding = min(with_margin(plain, order), max(needed, limit_bytes))
        assert found.least.num_bytes == pytest.approx(least)
        assert found.needed_bytes == pytest.approx(needed)
        moves_transfers = any(k.collective and k.collective.kind in TRANSFERS for k in lowered.kernels)
        expected = hiding if moves_transfers else max(least, hiding)
        assert found.peak.num_bytes == pytest.approx(expected)
        assert expected < least or found.peak.position == found.least.position
        assert sum(num_bytes for _, num_bytes in found.peak.residents) == pytest.approx(
            found.peak.num_bytes, abs=1e-9
        )
    assert Prediction(lowered, inf, False, lowered).peak == Prediction(lowered, inf, False, lowered).least


OVERSHOT = Lowered(
    (kernel(0, [], []), collective(1, [], [0], kind="all-reduce"), kernel(2, [], [], workspace=4.0)),
    (buffer(3.0),),
)
"""Kernel 2 hides the reduction, and its workspace, which the scheduler does not see, lies beside what that makes."""


@pytest.mark.parametrize(("limit_bytes", "needed_bytes"), [(6.0, 7.0), (8.0, 7.0), (80.0, 4 * (1 + MARGIN))])
def test_an_order_that_overshoots_the_schedulers_budget_has_to_fit(limit_bytes, needed_bytes):
    """Unless there is plenty of room."""
    found = Prediction(OVERSHOT, limit_bytes, True, OVERSHOT)
    assert found.least.num_bytes == pytest.approx(4 * (1 + MARGIN))
    assert found.needed_bytes == pytest.approx(needed_bytes)
    assert found.peak.num_bytes == pytest.approx(min(7 * (1 + MARGIN), max(limit_bytes, needed_bytes)))


@pytest.mark.parametrize(("limit_bytes", "overlap"), [(4.0, 0.0), (6.0, 0.0), (8.0, 1.0)])
def test_a_step_keeps_to_its_cap_without_overlap_if_that_is_the_only_way(limit_bytes, overlap):
    found = Prediction(OVERSHOT, limit_bytes, True, OVERSHOT).within_limit
    assert found.overlap == overlap
    assert (found.needed_bytes <= limit_bytes) == (limit_bytes > 4 * (1 + MARGIN))
    if not overlap:
        assert found.peak == found.least
        assert found.order == program_order(in_least_order(OVERSHOT))


@given(programs(), st.floats(1.0, 40.0))
def test_a_step_overlaps_as_far_as_the_cap_has_room_for_it(lowered, limit_bytes):
    whole = Prediction(lowered, limit_bytes, True, lowered)
    found = whole.within_limit
    assert (found.needed_bytes <= limit_bytes) == (whole.least.num_bytes <= limit_bytes)
    assert (found.overlap == 1) == (whole.needed_bytes <= limit_bytes)
    assert found.lost_overlap_s >= 0 == whole.lost_overlap_s


@given(programs())
def test_without_overlap_all_copies_to_and_from_the_host_are_waited_for(lowered):
    found = Prediction(lowered, inf, True, lowered)
    assert found.waited_s <= found.transfer_s * (1 + 1e-9)
    assert found.with_overlap(0.0).waited_s == found.transfer_s


def with_margin(lowered, order) -> float:
    found = peak(lowered, order)
    own = sum(n for resident, n in found.residents if resident in (Resident.TEMPORARIES, Resident.RESIDUALS))
    return found.num_bytes + MARGIN * own


@pytest.mark.parametrize(
    ("gpu", "has_scheduler", "seen"),
    [
        ("8xH100-80GB", True, lambda lowered: lowered),
        ("8xA100-80GB", True, sized),
        ("8xCPU", False, lambda lowered: lowered),
    ],
)
def test_a_step_is_lowered_and_joined_and_on_gpus_rescheduled(gpu, has_scheduler, seen):
    def step(weights, x):
        return [w - jnp.sum(x, 0) for w in weights]

    args = [zeros(64), zeros(64)], zeros((512, 64))
    cluster = parse_cluster(gpu)
    on_mesh = StepProblem.of(trace(step, *args), (), cluster.device).on(cluster, (8,))
    chosen = on_mesh.solve([np.arange(n) for n in on_mesh.problem.num_labels], 1 << 40, 5.0).labels
    found = on_mesh.predicted(chosen, 12345)
    apart = lower(on_mesh.memory.costed, on_mesh.live_ranges, chosen)
    want = seen(combined(merged(apart), on_mesh.memory.costed.resharder.mesh))
    assert (found.lowered.kernels, found.lowered.buffers) == (want.kernels, want.buffers)
    assert (found.limit_bytes, found.has_scheduler) == (12345, has_scheduler)
