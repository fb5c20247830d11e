"""The collector is held off within, and afterwards as it was."""

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from autoshard.search.garbage import uncollected


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the collector works beforehand."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_collector_is_held_off_and_then_as_before(enabled: bool) -> None:
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() == enabled


def test_errors_do_not_leave_it_off(enabled: bool) -> None:
    with suppress(KeyError), uncollected():
        raise KeyError
    assert gc.isenabled() == enabled


def test_functions_may_be_decorated(enabled: bool) -> None:
    assert not uncollected()(gc.isenabled)()
    assert gc.isenabled() == enabled
