"""What the compiler is told of a GPU, and what is said where it cannot be asked."""

import re
from dataclasses import replace

import pytest

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.presets import PRESETS
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla.gpu_targets import target_config

SUITING = {
    "jaxlib": "0.12.0.1",
    "jax-cuda13-plugin": "0.12.0.1",
    "jax-cuda13-pjrt": "0.12.0.1",
}
OF_CUDA_12 = {"jaxlib": "0.12.0.1", "jax-cuda12-plugin": "0.12.1", "jax-cuda12-pjrt": "0.12.1"}


@pytest.fixture
def installed(monkeypatch):
    """Pretends that these distributions are installed, and no others."""
    return lambda versions: monkeypatch.setattr(compiler, "_version", versions.get)


@pytest.mark.parametrize(
    ("versions", "gpu", "message"),
    [
        ({"jaxlib": "0.12.0.1"}, "H100-80GB", "needs NVIDIA's JAX plugin: pip install 'autoshard[verify]'"),
        (
            SUITING | {"jax-cuda13-plugin": "0.11.2"},
            "H100-80GB",
            "jaxlib 0.12.0.1 needs jax-cuda13-plugin of the same version, and 0.11.2 is installed: pip install "
            "'jax-cuda13-plugin==0.12.0.1'",
        ),
        (
            {k: v for k, v in SUITING.items() if "pjrt" not in k},
            "H100-80GB",
            "needs jax-cuda13-pjrt of the same version, and none is installed",
        ),
        (SUITING, "CPU", "cannot be asked about 8xCPU: its devices are no GPUs"),
    ],
)
def test_who_cannot_be_asked(installed, versions, gpu, message):
    installed(versions)
    with pytest.raises(InputError, match=re.escape(message)):
        compiler.check(parse_cluster(f"8x{gpu}"))


def of_another_gpu() -> Cluster:
    cluster = parse_cluster("8xL4")
    return replace(cluster, device=replace(cluster.device, name="L40S"))


def test_a_gpu_that_is_not_known(installed):
    installed(SUITING)
    what = "does not know 'L40S'. Describe it with --target-config FILE (target_config=)"
    with pytest.raises(InputError, match=re.escape(what)):
        compiler.check(of_another_gpu())


@pytest.mark.parametrize("gpu", sorted(PRESETS.keys() - {"CPU"}))
def test_the_gpus_of_all_presets_are_known(installed, gpu):
    installed(SUITING)
    compiler.check(parse_cluster(f"8x{gpu}"))


@pytest.mark.parametrize("versions", [SUITING, OF_CUDA_12])
def test_either_plugin_will_do(installed, versions):
    installed(versions)
    compiler.check(parse_cluster("8xH100-80GB"))


def test_a_gpu_that_is_described_need_not_be_known(installed):
    installed(SUITING)
    compiler.check(of_another_gpu(), "gpu_device_info { cuda_compute_capability { major: 8 minor: 9 } }")


def test_the_memory_is_ours_to_say():
    described = "gpu_device_info {\n  core_count: 58\n  device_memory_size: 23000000000\n}"
    config = target_config("L40S", 1 << 30, described)
    assert re.findall(r"device_memory_size: (\d+)", config) == [str(1 << 30)]
    assert "core_count: 58" in config
    assert target_config("H100-80GB", 5).count("device_memory_size: 5 ") == 1


def test_a_description_that_is_none():
    with pytest.raises(InputError, match=r"GpuTargetConfigProto in text.* got 'sm_89'"):
        target_config("L40S", 1 << 30, "sm_89")


def test_arguments_that_exceed_the_cap_leave_nothing_for_temporaries():
    assert compiler.memory_for_cap(10, 800) == 1000
