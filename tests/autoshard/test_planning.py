"""From what a user asks to what the search is told."""

import pytest

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_cluster, parse_hardware
from autoshard.planning import Asked, limit_bytes

H100 = parse_cluster("8xH100-80GB").device.memory_bytes


@pytest.mark.parametrize(
    ("cluster", "memory", "num_bytes"),
    [
        ("8xH100-80GB", "50%", H100 // 2),
        ("8xH100-80GB", " 12.5 % ", H100 // 8),
        ("8xH100-80GB", "100%", H100),
        ("8xH100-80GB", "33.333%", H100 * 33333 // 100000),
        ("8xA100-40GB+8xH100-80GB", "50%", H100 // 2),
        ("8xH100-80GB", "40GiB", 40 << 30),
    ],
)
def test_a_cap_is_a_size_or_a_share_of_the_largest_device(cluster, memory, num_bytes):
    assert limit_bytes(parse_hardware(cluster), Asked(memory)) == num_bytes


@pytest.mark.parametrize("memory", ["%", "0%", "-1%", "nan%", "inf%", "half%", "90%%"])
def test_a_share_that_is_none(memory):
    with pytest.raises(InputError, match="wanted a share of a device's memory such as '90%', got"):
        limit_bytes(parse_hardware("8xH100-80GB"), Asked(memory))
