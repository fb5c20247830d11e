"""The table of executors."""

from autoshard.lowerings import LOWERINGS
from autoshard.search.plan.executors import EXECUTORS


def test_every_executor_has_a_lowering():
    assert [*LOWERINGS] == [*EXECUTORS]
