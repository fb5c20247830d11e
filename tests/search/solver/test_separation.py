"""Rows on demand: those that an assignment overflows, the worst first."""

import numpy as np

from autoshard.search.solver.pbqp import MemoryConstraint
from autoshard.search.solver.separation import NoFitError, separation_oracle


def row(name, num_bytes):
    """A row that holds so many bytes under label 0 of the only node, and none under label 1."""
    return MemoryConstraint(name, ((0, np.array([num_bytes, 0.0])),), 0.0)


SMALL, LARGE, SAME, HUGE = row("b", 11.0), row("c", 12.0), row("a", 12.0), row("z", 99.0)


def test_known_rows_and_those_made_on_demand_come_worst_first_then_by_name():
    overflowed = separation_oracle((SMALL, LARGE), lambda labels: (SAME, HUGE), 10.0)
    assert overflowed((0,)) == [HUGE, SAME, LARGE, SMALL]


def test_a_row_at_its_limit_is_not_overflowed():
    assert separation_oracle((SMALL, LARGE), None, 11.0)((0,)) == [LARGE]
    assert separation_oracle((SMALL, LARGE), None, 12.0)((0,)) == []
    assert separation_oracle((SMALL, LARGE), None, 0.0)((1,)) == []


def test_the_labels_are_handed_on():
    asked = []
    separation_oracle((), lambda labels: asked.append(labels) or (), 0.0)((1,))
    assert asked == [(1,)]


def test_an_infinite_bound_is_a_proof_that_nothing_fits():
    assert NoFitError("", bound_s=np.inf).is_proven
    assert not NoFitError("", bound_s=3.0).is_proven
    assert str(NoFitError("why", bound_s=0.0)) == "why"
