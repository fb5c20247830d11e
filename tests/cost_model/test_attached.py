"""What attached GPUs are taken for; stand-ins say of themselves what JAX's devices would."""

from dataclasses import dataclass
from typing import Any

import jax
import pytest

from autoshard.cost_model.attached import attached_cluster, attached_hardware, cluster_name
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.mixed_cluster import MixedCluster

H100 = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30


@dataclass
class FakeDevice:
    device_kind: str = H100
    slice_index: int | None = None
    limit_bytes: int | None = None
    process_index: int = 0
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int] | None:
        assert self.process_index == jax.process_index(), "JAX raises an error"
        return None if self.limit_bytes is None else {"bytes_limit": self.limit_bytes}


def cluster_of(nodes: list[int], **told: Any) -> Cluster:
    """As many devices in each node."""
    return attached_cluster(
        [FakeDevice(slice_index=n, **told) for n, size in enumerate(nodes) for _ in range(size)]
    )


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        (H100, "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200-NVL72"),
        ("NVIDIA GB300", "GB300-NVL72"),
    ],
)
def test_gpus_by_the_name_that_the_driver_gives(kind, preset):
    assert cluster_name([FakeDevice(kind)] * 2) == f"2x{preset}"


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA L40", "NVIDIA A10", "NVIDIA GH200 144G HBM3e", "NVIDIA GeForce RTX 4090 D", "NVIDIA RTX 6000"],
)
def test_a_name_that_only_resembles_a_preset_is_none(kind):
    with pytest.raises(
        ClusterError, match=f"no preset describes the attached '{kind}' devices: pass cluster="
    ):
        attached_cluster([FakeDevice(kind)])


def test_nodes_are_those_that_the_devices_stand_in():
    preset = parse_cluster("16xH100-80GB")
    fours = cluster_of([4, 4, 4, 4])
    assert (fours.num_nodes, fours.devices_per_node) == (4, 4)
    assert fours.host_bytes_per_node == preset.host_bytes_per_node / 2
    assert cluster_of([8, 8]) == preset
    assert cluster_of([3, 3, 3]).num_nodes == 3  # no preset has as many


def test_unequal_nodes_and_nodes_that_nobody_tells_of_are_the_presets():
    preset = parse_cluster("12xH100-80GB")
    assert cluster_of([8, 4]) == preset
    assert attached_cluster([FakeDevice()] * 12) == preset


def test_the_cap_is_what_jax_may_use():
    default, preset = cluster_of([8], limit_bytes=59 * GIB), parse_cluster("8xH100-80GB")
    assert default.device_memory_limit() == 59 * GIB
    assert default.device.memory_bytes == preset.device.memory_bytes
    assert cluster_of([8], limit_bytes=79 * GIB) == preset
    elsewhere = attached_cluster(
        [FakeDevice(limit_bytes=n * GIB, process_index=p) for n, p in ((60, 0), (9, 1))]
    )
    assert elsewhere.device_memory_limit() == 60 * GIB


def test_simulated_devices_are_the_preset():
    assert attached_cluster(jax.devices()) == parse_cluster(f"{len(jax.devices())}xCPU")


def test_devices_of_several_kinds_are_groups_of_nodes():
    h100 = [FakeDevice(slice_index=0, limit_bytes=60 * GIB)] * 4
    a100 = [FakeDevice("NVIDIA A100-SXM4-40GB", slice_index=n, limit_bytes=30 * GIB) for n in (1, 1, 2, 2)]
    mixed = attached_hardware([*h100, *a100])
    assert isinstance(mixed, MixedCluster)
    assert str(mixed) == "1 node of 4 H100-80GB and 2 nodes of 2 A100-40GB"
    assert mixed.caps(80 * GIB) == (60 * GIB, 30 * GIB)
    assert attached_hardware(h100) == attached_cluster(h100)
    with pytest.raises(
        ClusterError, match=r"wanted devices of a kind side by side, got 4 NVIDIA H100 .*: pass devices="
    ):
        attached_hardware([*h100, *a100, *h100])
