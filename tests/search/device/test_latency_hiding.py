"""What is put beside collectives: rule by rule, on programs small enough to reckon by hand, and laws of every order.

Kernels take a second each where nothing else is said, so that what the scheduler takes a launch for is nothing.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.device.kernel_order import program_order
from autoshard.search.device.kernel_times import KernelTime
from autoshard.search.device.latency_hiding import latency_hiding
from autoshard.search.device.lowering import TRANSFERS, Loops, Lowered
from autoshard.search.device.timeline import peak, seconds
from tests.search.device.programs import assert_all_run_once, buffer, collective, kernel, programs


def plain(*kernels) -> Lowered:
    """Kernels whose buffers take a byte each."""
    made = [b for k in kernels for b in (*k.reads, *k.makes)]
    return Lowered(kernels, tuple(buffer(1.0) for _ in range(max(made) + 1)))


def beside(order: tuple[int, ...], k: int) -> list[int]:
    """What stands between the start of a collective and its end."""
    return list(order[order.index(k) + 1 : order.index(~k)])


def test_a_weight_gradient_is_put_off_into_the_window_of_a_later_collective():
    # dy (0) is read by the weight gradient (1) and by the input's gradient (2), which is reduced (3) for the layer below
    lowered = plain(
        kernel(0, [], [0]),
        kernel(1, [0], [1]),
        kernel(2, [0], [2]),
        collective(3, [2], [3], kind="all-reduce"),
        kernel(4, [3], [4]),
    )
    assert latency_hiding(lowered) == (0, 2, 3, 1, ~3, 4)
    assert seconds(lowered, program_order(lowered)) == 5.0
    assert seconds(lowered, latency_hiding(lowered)) == 4.0


def test_a_window_is_as_long_as_its_collective_is_in_the_eyes_of_xla():
    kernels = [kernel(0, [], [0]), kernel(1, [], [1]), kernel(2, [], [2]), kernel(3, [9], [3])]
    first = collective(4, [], [9], time_s=1.0)
    for scheduled_s, num_beside in ((1.0, 1), (2.0, 2), (3.0, 3)):
        second = replace(collective(5, [3], [4]), time=KernelTime(1.0, scheduled_s))
        lowered = plain(first, *kernels, second, kernel(6, [0, 1, 2, 4], [5]))
        assert len(beside(latency_hiding(lowered), 5)) == num_beside


def test_the_start_of_what_waits_for_no_other_collective_goes_before_all_else():
    lowered = plain(
        *(kernel(i, [], [i]) for i in range(3)), collective(3, [], [3]), kernel(4, [0, 1, 2, 3], [4])
    )
    assert latency_hiding(lowered) == (3, 0, 1, 2, ~3, 4)


def test_but_not_if_the_end_of_another_wants_its_place():
    # the one that is listed first, which stands last (4), starts as soon as its time is over, and the other ends there
    lowered = plain(
        *(kernel(i, [], [i]) for i in range(3)),
        collective(3, [], [3]),
        collective(4, [], [4]),
        kernel(5, [0, 1, 2, 3, 4], [5]),
    )
    order = latency_hiding(lowered)
    assert beside(order, 4) == [2]
    assert order.index(~3) + 1 == order.index(4)


def test_a_copy_from_the_host_is_under_way_beside_collectives_and_beside_one_other_copy():
    # all are needed at the end, and each takes longer than the kernels: three copies would start before these
    copies = [collective(i, [], [i], kind="from host", time_s=9.0) for i in range(3)]
    gathered = collective(3, [], [3], time_s=9.0)
    kernels = [kernel(4 + i, [4 + i - 1] if i else [], [4 + i]) for i in range(3)]
    lowered = plain(*copies, gathered, *kernels, kernel(7, [0, 1, 2, 3, 6], [7]))
    order = latency_hiding(lowered)
    under_way = [k for k in range(4) if order.index(k) < order.index(4)]
    assert 3 in under_way
    assert most_under_way(lowered, order, "from host") == 2
    assert most_under_way(lowered, order, "all-gather") == 1


def most_under_way(lowered: Lowered, order, *kinds: str) -> int:
    """Largest number of communications of some kinds that an order has under way at a time inside of one loop."""
    most, now = 0, Counter[Loops]()
    for k in order:
        moved = lowered.kernels[k if k >= 0 else ~k]
        if moved.collective is not None and moved.collective.kind in kinds:
            now[moved.loops] += 1 if k >= 0 else -1
            most = max(most, now[moved.loops])
    return most


def test_what_a_longer_chain_of_collectives_leads_to_is_put_off_further():
    # 2 reads what takes 4 s to gather, 3 what takes 1 s: in the window of the last collective (5), the former comes last
    for gathered_s, expected in (((4.0, 1.0), [3, 2]), ((1.0, 4.0), [2, 3])):
        one, other = (collective(i, [], [i], time_s=s) for i, s in enumerate(gathered_s))
        lowered = plain(
            one,
            other,
            kernel(2, [0], [2]),
            kernel(3, [1], [3]),
            kernel(4, [0, 1], [4]),
            collective(5, [4], [5], time_s=2.0),
            kernel(6, [2, 3, 5], [6]),
        )
        assert beside(latency_hiding(lowered), 5) == expected


def test_of_what_is_equally_deep_that_is_put_into_a_window_that_fills_it_best():
    for window_s, expected in ((3.0, 1), (1.0, 2)):
        lowered = plain(
            collective(0, [], [0]),
            kernel(1, [0], [1], time_s=3.0),
            kernel(2, [0], [2], time_s=1.0),
            kernel(3, [0], [3]),
            collective(4, [3], [4], time_s=window_s),
            kernel(5, [1, 2, 4], [5]),
        )
        assert beside(latency_hiding(lowered), 4)[-1] == expected


def test_what_lets_a_collective_end_is_listed_before_what_does_not():
    # 2 reads all that 1 gathers; what 0 gathers is taken out of a tuple, so its end does not follow 3 at once
    lowered = plain(
        collective(0, [], [0, 1]),
        collective(1, [], [2]),
        kernel(2, [2], [3]),
        kernel(3, [0, 1], [4]),
        kernel(4, [3, 4], [5]),
    )
    order = latency_hiding(lowered)
    assert order.index(3) < order.index(2)


def test_where_there_is_no_collective_all_stays_as_it_was():
    # 1 is read late, but frees 0
    kernels = (
        kernel(0, [], [0]),
        kernel(1, [0], [1]),
        kernel(2, [], [2]),
        kernel(3, [2], [3]),
        kernel(4, [1, 3], [4]),
    )
    assert latency_hiding(plain(*kernels)) == (0, 1, 2, 3, 4)
    assert latency_hiding(plain(*kernels, collective(5, [4], [5]))) != (0, 1, 2, 3, 4, 5, ~5)


def test_a_loop_that_communicates_is_beside_no_collective():
    loop = ((0, 2),)
    for inner, is_beside in (
        (kernel(1, [], [1], loops=loop), True),
        (collective(1, [0], [1], loops=loop), False),
    ):
        lowered = plain(kernel(0, [], [0], loops=loop), inner, collective(2, [5], [2]), kernel(3, [2], [3]))
        assert bool(beside(latency_hiding(lowered), 2)) == is_beside


def test_no_more_is_put_off_than_the_budget_has_room_for():
    # as in the first case; dy is large, and held while the input's gradient is reduced
    kernels = (
        kernel(0, [], [0]),
        kernel(1, [0], [1]),
        kernel(2, [0], [2]),
        collective(3, [2], [3], kind="all-reduce"),
        kernel(4, [3], [4]),
    )
    sizes = (100.0, 1.0, 30.0, 40.0, 1.0)
    lowered = Lowered(kernels, tuple(map(buffer, sizes)))
    roomy, tight = latency_hiding(lowered, inf), latency_hiding(lowered, 132.0)
    assert roomy == (0, 2, 3, 1, ~3, 4)
    assert peak(lowered, roomy).num_bytes > 132.0 >= peak(lowered, tight).num_bytes


# --- laws of every order

BUDGETS = st.sampled_from((inf, 40.0, 0.0))


@given(programs(), BUDGETS)
def test_every_kernel_runs_once_after_all_that_it_waits_for(lowered, budget_bytes):
    assert_all_run_once(lowered, latency_hiding(lowered, budget_bytes))


@given(programs(), BUDGETS)
def test_loops_stay_whole_and_one_collective_is_under_way_at_a_time(lowered, budget_bytes):
    order = latency_hiding(lowered, budget_bytes)
    loops = [lowered.kernels[k if k >= 0 else ~k].loops for k in order]
    for loop in {loop for inside in loops for loop in inside}:
        at = [n for n, inside in enumerate(loops) if loop in inside]
        assert at == list(range(at[0], at[-1] + 1))
    moved = [(k, lowered.kernels[k if k >= 0 else ~k].collective) for k in order]
    borders = [k for k, what in moved if what is not None and what.kind not in TRANSFERS]
    assert all(end == ~start for start, end in list(pairwise(borders))[::2])
    assert most_under_way(lowered, order, *TRANSFERS) <= 2
