"""Every test sees the simulated devices, and a wide terminal."""

import pytest

from tests.simulated import simulate_devices

simulate_devices()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """One in which no line of what is printed is broken; tests of that say otherwise."""
    monkeypatch.setenv("COLUMNS", "1000")
