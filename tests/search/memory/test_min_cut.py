"""The cheapest choice of what to recompute, against all choices."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autoshard.search.memory.min_cut import Recomputation, cheapest


def drawn(seed: int) -> Recomputation:
    """A chain with skips: each op makes one or two values and reads some that were made before."""
    rng = np.random.default_rng(seed)
    maker, reads = [], []
    for op in range(7):
        reads.append(
            sorted(set(rng.choice(len(maker), rng.integers(0, min(3, len(maker)) + 1)).tolist()))
            if maker
            else []
        )
        maker += [op] * int(rng.integers(1, 3))
    op_s = rng.choice([0.0, 1.0, 2.0, 5.0, np.inf], 7, p=[0.15, 0.3, 0.25, 0.2, 0.1])
    num_bytes = rng.choice([1.0, 3.0, 8.0, np.inf], len(maker), p=[0.3, 0.3, 0.3, 0.1])
    num_bytes[np.isinf(op_s)[maker]] = 3.0  # there is always a choice
    needed = np.flatnonzero(rng.random(len(maker)) < 0.5).tolist()
    return Recomputation(op_s, reads, np.array(maker), num_bytes, needed)


def cost_s(problem: Recomputation, runs: np.ndarray, price: float) -> float:
    """What ops that run again cost, and what must then be kept: the needed values, and all that they read."""
    wanted = set(problem.needed) | {v for op in np.flatnonzero(runs) for v in problem.reads[op]}
    kept = [v for v in wanted if not runs[problem.maker[v]]]
    kept_bytes = problem.num_bytes[kept].sum()
    keep_s = np.broadcast_to(problem.keep_s, len(problem.maker))[kept].sum()
    kept_s = price * kept_bytes + keep_s if np.isfinite(kept_bytes) else np.inf
    return float(problem.op_s[runs].sum() + kept_s)


def slow_to_keep(seed: int) -> Recomputation:
    """Some values take time to keep, whatever a byte costs."""
    problem = drawn(seed)
    keep_s = np.random.default_rng(seed).choice([0.0, 0.5, 4.0], len(problem.maker))
    return replace(problem, keep_s=keep_s)


@pytest.mark.parametrize("make", [drawn, slow_to_keep])
@pytest.mark.parametrize("price", [0.0, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_cheaper(seed, price, make):
    problem = make(seed)
    choices = [np.array(bits) for bits in product([False, True], repeat=len(problem.op_s))]
    best_s = min(cost_s(problem, runs, price) for runs in choices)
    assert np.isfinite(best_s)
    found = cheapest(problem, price)
    assert cost_s(problem, found, price) == pytest.approx(best_s, rel=1e-9)


def test_ops_run_again_as_bytes_get_dearer():
    """A chain of three: the last value is needed, and only the first is at hand for nothing."""
    problem = Recomputation(
        np.array([3.0, 1.0, 4.0]), [[], [0], [1]], np.arange(3), np.array([4.0, 2.0, 6.0]), [2]
    )
    runs = {price: cheapest(problem, price).tolist() for price in (0.5, 1.1, 3.0)}
    assert runs == {0.5: [False, False, False], 1.1: [False, False, True], 3.0: [True, True, True]}


def test_prices_may_differ_by_value():
    problem = Recomputation(np.array([1.0, 1.0]), [[], []], np.arange(2), np.array([2.0, 2.0]), [0, 1])
    assert cheapest(problem, np.array([0.1, 1.0])).tolist() == [False, True]
