"""The best checkpoints of a chain, against REVOLVE's closed form and all schedules."""

import heapq
import random
from collections.abc import Iterator, Sequence
from math import comb

import pytest

from autoshard.search.memory.checkpoints import Sweep, checkpointed


def cost_of(sweeps: Sequence[Sweep], costs: Sequence[float], sizes: Sequence[int], budget: int) -> float:
    """What the sweeps cost, run one by one: each starts from a stored state, and every state is read, last to first."""
    stored, wanted, total = {0}, len(sizes) - 1, 0.0
    for sweep in sweeps:
        assert sweep.start in stored
        total += sum(costs[sweep.start + 1 : sweep.end + 1])
        if sweep.is_stored:
            stored.add(sweep.end)
        else:
            assert sweep.end == wanted
            stored.discard(wanted)
            wanted -= 1
        assert sum(sizes[v] for v in stored - {0}) <= budget
    assert wanted == -1
    return total


def moves(state, sizes, costs, budget) -> Iterator[tuple[float, tuple]]:
    """From what is next read, what is stored and where the sweep is: what may follow, with its cost."""
    wanted, stored, at = state
    if at == wanted:
        yield 0, (wanted - 1, stored, at)
    if at < wanted:
        yield costs[at + 1], (wanted, stored, at + 1)
    if sum(sizes[v] for v in stored - {0} | {at}) <= budget:
        yield 0, (wanted, stored | {at}, at)
    for v in stored:
        yield 0, (wanted, stored - {v}, at)
        yield 0, (wanted, stored, v)


def cheapest(costs: Sequence[float], sizes: Sequence[int], budget: int) -> float:
    """Dijkstra's algorithm over all schedules."""
    start = (len(sizes) - 1, frozenset({0}), 0)
    queue, best, count = [(0, 0, start)], {start: 0}, 0
    while True:
        cost, _, state = heapq.heappop(queue)
        if state[0] < 0:
            return cost
        for more, after in moves(state, sizes, costs, budget):
            if cost + more < best.get(after, float("inf")):
                best[after], count = cost + more, count + 1
                heapq.heappush(queue, (cost + more, count, after))


def forward_steps(num_steps: int, num_slots: int) -> int:
    """Griewank and Walther (2000), proposition 1: r l - C(s + r, r - 1), C(s + r - 1, s) < l <= C(s + r, s)."""
    r = next(r for r in range(num_steps) if num_steps <= comb(num_slots + r, num_slots))
    return r * num_steps - (comb(num_slots + r, r - 1) if r else 0)


@pytest.mark.parametrize("num_slots", range(1, 7))
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 8, 13, 16, 32])
def test_equal_states_are_reversed_in_as_few_steps_as_by_revolve(num_steps, num_slots):
    """The first of its slots holds the initial state."""
    chain = [1] * num_steps, [7] * num_steps, 7 * (num_slots - 1)
    assert cost_of(checkpointed(*chain), *chain) == forward_steps(num_steps, num_slots)


def test_sixteen_steps_with_three_slots_take_33():
    chain = [1] * 16, [1] * 16, 2
    assert cost_of(checkpointed(*chain), *chain) == 33


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_is_cheaper(seed):
    drawn = random.Random(seed)
    costs, sizes = ([drawn.randint(1, 5) for _ in range(6)] for _ in range(2))
    for budget in range(13):
        chain = costs, sizes, budget
        assert cost_of(checkpointed(*chain), *chain) == cheapest(*chain)


def test_large_sizes_are_rounded_up():
    """Bytes in the billions share no unit with the budget: the sweeps still keep to it."""
    drawn = random.Random(0)
    costs, sizes = [1] * 12, [drawn.randint(1, 2**30) for _ in range(12)]
    for share in (0.1, 0.3, 0.7):
        chain = costs, sizes, int(share * sum(sizes))
        assert cost_of(checkpointed(*chain), *chain) < cost_of(checkpointed(costs, sizes, 0), costs, sizes, 0)
