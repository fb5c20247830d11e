"""All choices that are cheapest at some price are found, and no others, against prices tried one by one."""

from itertools import pairwise, product

import numpy as np
import pytest

from autoshard.search.memory.min_cut import Recomputation, cheapest
from autoshard.search.memory.trade_offs import Choice, trade_offs
from tests.search.memory.test_min_cut import drawn

NANO = 1e-9
"""Seconds per unit of the drawn costs: as prices are, far below the highest."""


def lines(problem: Recomputation) -> list[tuple[float, float]]:
    """Seconds and bytes of all that may be chosen."""
    return [taken(problem, np.array(bits)) for bits in product([False, True], repeat=len(problem.op_s))]


def taken(problem: Recomputation, runs: np.ndarray) -> tuple[float, float]:
    wanted = set(problem.needed) | {v for op in np.flatnonzero(runs).tolist() for v in problem.reads[op]}
    kept = [v for v in wanted if not runs[problem.maker[v]]]
    return float(problem.op_s[runs].sum()), float(problem.num_bytes[kept].sum())


def envelope(options: list[tuple[float, float]]) -> list[float]:
    """The bytes of the corners of the lower envelope at prices above zero: of the convex hull, from above."""
    finite = sorted({option for option in options if np.isfinite(option).all()}, key=lambda o: (-o[1], o[0]))
    corners: list[tuple[float, float]] = []
    least_s = min(seconds for seconds, _ in finite)
    first = min(num_bytes for seconds, num_bytes in finite if seconds == least_s)
    for seconds, num_bytes in finite:
        if num_bytes > first or (corners and num_bytes == corners[-1][1]):
            continue
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(
            corners[-2], (seconds, num_bytes)
        ):
            corners.pop()
        corners.append((seconds, num_bytes))
    return [num_bytes for _, num_bytes in corners]


def slope(above: tuple[float, float], below: tuple[float, float]) -> float:
    """Seconds for a byte less."""
    return (below[0] - above[0]) / (above[1] - below[1])


def found(problem: Recomputation) -> list[Choice]:
    scaled = Recomputation(
        problem.op_s * NANO, problem.reads, problem.maker, problem.num_bytes, problem.needed
    )

    def chosen(price: float) -> Choice:
        runs = cheapest(scaled, price)
        seconds, num_bytes = taken(scaled, runs)
        return Choice(price, frozenset((op,) for op in np.flatnonzero(runs).tolist()), seconds, num_bytes)

    return trade_offs(chosen, 1.0)


@pytest.mark.parametrize("seed", range(24))
def test_the_corners_of_the_envelope_are_found(seed):
    problem = drawn(seed)
    choices, corners = found(problem), envelope(lines(problem))
    kept = [choice.kept_bytes for choice in choices]
    assert kept == sorted(set(kept), reverse=True)
    assert {kept[0], *corners} == set(kept)


@pytest.mark.parametrize("seed", range(24))
def test_prices_and_seconds_grow_as_bytes_fall(seed):
    for above, below in pairwise(found(drawn(seed))):
        assert above.price_s_per_byte < below.price_s_per_byte
        assert above.seconds <= below.seconds


def test_gaps_in_which_little_would_be_saved_are_left():
    """A line through a hundred corners: each saves a hundredth of all that is kept, and 20 cuts are made at most."""
    prices = []

    def chosen(price: float) -> Choice:
        prices.append(price)
        n = min(100, int(price / NANO))
        return Choice(price, frozenset((i,) for i in range(n)), NANO * n * (n + 1) / 2, 100.0 - n)

    choices = trade_offs(chosen, 100.0)
    assert len(prices) == 20
    kept = [choice.kept_bytes for choice in choices]
    assert max(a - b for a, b in pairwise(kept)) <= 12
    prices.clear()
    trade_offs(chosen, 1e5)
    assert len(prices) == 2
