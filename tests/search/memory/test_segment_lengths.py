"""Lengths of segments, against all there are, and the steps that they take, against REVOLVE's."""

import random
from collections.abc import Iterator
from math import comb

import pytest

from autoshard.search.memory.loop_segments import LoopSegments
from autoshard.search.memory.segment_lengths import LoopCut

pytestmark = pytest.mark.pure


def loop(length, carry_bytes):
    return LoopCut((0,), length, carry_bytes, 0.0, 1.0)


def held_bytes(length, carry, residual, lengths) -> float:
    """By hand: the carries of each level, its iterations left over, and the residuals of one innermost segment."""
    if not lengths:
        return length * residual
    first, *others = lengths
    return length // first * carry + length % first * residual + held_bytes(first, carry, residual, others)


def all_lengths(length, num_levels) -> Iterator[tuple[int, ...]]:
    yield ()
    for first in range(2, length) if num_levels else ():
        yield from ((first, *others) for others in all_lengths(first, num_levels - 1))


@pytest.mark.parametrize("seed", range(10))
def test_of_lengths_that_leave_nothing_over_the_best_ones_are_found(seed):
    rng = random.Random(seed)
    length, carry, residual = rng.choice((12, 24, 36)), rng.randint(1, 9), rng.randint(1, 9)
    for num_levels in (1, 2):
        cut = loop(length, carry)
        lengths = cut.shortest(num_levels, residual)
        found = held_bytes(length, carry, residual, lengths)
        assert not lengths or found == cut.held_bytes(LoopSegments(lengths), residual)
        divide = [
            lengths
            for lengths in all_lengths(length, num_levels)
            if all(n % m == 0 for n, m in zip((length, *lengths), lengths, strict=False))
        ]
        assert found <= min(held_bytes(length, carry, residual, lengths) for lengths in divide)


@pytest.mark.parametrize("length", [97, 4099, 65_537])
def test_a_prime_number_of_iterations_leaves_few_over(length):
    """About twice the square root is held, as of a number with divisors (Chen et al. 2016)."""
    cut = loop(length, 1.0)
    assert cut.held_bytes(LoopSegments(cut.shortest(1, 1.0)), 1.0) < 2.5 * length**0.5


def revolve_steps(num_steps: int, num_slots: int) -> int:
    """Griewank and Walther (2000), proposition 1: r l - C(s + r, r - 1), C(s + r - 1, s) < l <= C(s + r, s)."""
    r = next(r for r in range(num_steps) if num_steps <= comb(num_slots + r, num_slots))
    return r * num_steps - (comb(num_slots + r, r - 1) if r else 0)


def test_revolves_closed_form():
    assert (revolve_steps(16, 3), revolve_steps(32, 5)) == (33, 68)


@pytest.mark.parametrize("length", [256, 4096, 65_536])
@pytest.mark.parametrize(("num_levels", "ratio"), [(1, 1.25), (2, 1.5), (3, 1.75)])
def test_levels_take_few_more_steps_than_revolve(length, num_levels, ratio):
    """With as many slots as the levels hold carries and residuals, if these are of one size."""
    cut = loop(length, 1.0)
    lengths = cut.shortest(num_levels, 1.0)
    slots = int(cut.held_bytes(LoopSegments(lengths), 1.0))
    steps = (1 + len(lengths)) * length
    assert revolve_steps(length, slots) <= steps <= ratio * revolve_steps(length, slots)
