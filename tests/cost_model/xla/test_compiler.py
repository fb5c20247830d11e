"""What the compiler is told of a GPU, and what is said where it cannot be asked."""

import re
from dataclasses import replace

import pytest

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.presets import PRESETS
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla.gpu_targets import is_hopper_or_later, target_config


def test_a_cluster_of_cpus_cannot_be_asked_about():
    with pytest.raises(InputError, match="cannot be asked about 8xCPU: its devices are no GPUs"):
        compiler.check(parse_cluster("8xCPU"))


def of_another_gpu() -> Cluster:
    cluster = parse_cluster("8xL4")
    return replace(cluster, device=replace(cluster.device, name="L40"))


def test_a_gpu_that_is_not_known():
    what = "does not know 'L40'. Describe it with --target-config FILE (target_config=)"
    with pytest.raises(InputError, match=re.escape(what)):
        compiler.check(of_another_gpu())


@pytest.mark.parametrize("gpu", sorted(PRESETS.keys() - {"CPU"}))
def test_the_gpus_of_all_presets_are_known(gpu):
    compiler.check(parse_cluster(f"8x{gpu}"))


@pytest.mark.parametrize("gpu", sorted(PRESETS.keys() - {"CPU"}))
def test_the_compiler_hears_of_a_gpu_what_its_preset_says(gpu):
    device, config = parse_cluster(f"1x{gpu}").device, target_config(gpu)
    said = {key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", config)}
    assert said["core_count"] == device.num_cores
    assert said["memory_bandwidth"] == device.memory_bytes_per_s
    assert said["device_memory_size"] == pytest.approx(device.memory_bytes, rel=0.02)


def test_hoppers_are_known_by_their_capability():
    hoppers = {gpu for gpu in PRESETS if is_hopper_or_later(gpu)}
    assert {gpu for gpu in hoppers if not re.search(r"H100|H200|B200|B300", gpu)} == set()
    assert {gpu for gpu in PRESETS.keys() - hoppers if not re.search(r"V100|A10|L4|RTX|CPU", gpu)} == set()
    assert is_hopper_or_later("R100")
    assert not is_hopper_or_later("A100-SXM-64GB")


def test_a_gpu_that_is_described_need_not_be_known():
    compiler.check(of_another_gpu(), "gpu_device_info { cuda_compute_capability { major: 8 minor: 9 } }")


def test_the_memory_is_ours_to_say():
    described = "gpu_device_info {\n  core_count: 58\n  device_memory_size: 23000000000\n}"
    config = target_config("L40", 1 << 30, described)
    assert re.findall(r"device_memory_size: (\d+)", config) == [str(1 << 30)]
    assert "core_count: 58" in config
    assert target_config("H100-80GB", 5).count("device_memory_size: 5 ") == 1


def test_a_description_that_is_none():
    with pytest.raises(InputError, match=r"GpuTargetConfigProto in text.* got 'sm_89'"):
        target_config("L40", 1 << 30, "sm_89")


def test_arguments_that_exceed_the_cap_leave_nothing_for_temporaries():
    assert compiler.memory_for_cap(10, 800) == 1000


def test_half_of_the_overlap_leaves_half_of_the_budget():
    """XLA plans with 0.95 of what 0.8 of the device leaves beside arguments and results."""
    whole, half = (
        0.95 * (0.8 * compiler.memory_for_cap(10**9, 10**8, share) - 10**8) for share in (1.0, 0.5)
    )
    assert half == pytest.approx(whole / 2)
