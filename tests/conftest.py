"""Every test sees the simulated devices, and a wide terminal; none has a time limit."""

import pytest
from hypothesis import HealthCheck, settings

from tests.simulated import simulate_devices

simulate_devices()
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """One in which no line of what is printed is broken; tests of that say otherwise."""
    monkeypatch.setenv("COLUMNS", "1000")
