"""Every test sees the simulated devices."""

from tests.simulated import simulate_devices

simulate_devices()
