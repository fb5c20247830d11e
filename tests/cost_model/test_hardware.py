"""Clusters: presets, files, and what is said when they make no sense."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.hardware import Cluster, Device, Link, parse_cluster
from autoshard.cost_model.presets import PRESETS, node_devices

GPUS = tuple(PRESETS)
OF_EIGHT = [gpu for gpu in GPUS if node_devices(gpu) == 8]


def toy_device(**changes):
    return replace(Device("toy", 2**30, 1e9, (("float32", 1e12),), reserve_bytes=2**20), **changes)


def toy_cluster(**changes):
    cluster = Cluster("toys", toy_device(), 4, 2, Link(1e9, 1e-6), Link(1e8, 1e-5), 2**32, Link(1e9, 1e-6))
    return replace(cluster, **changes)


def write_file(tmp_path, data):
    path = tmp_path / "cluster.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def preset_json():
    return parse_cluster("64xH100-80GB").to_json()


COUNTS_OF_EIGHTS = [
    (1, 1),
    (2, 1),
    (6, 1),
    (7, 1),
    (8, 1),
    (12, 2),
    (14, 2),
    (24, 3),
    (64, 8),
    (72, 9),
    (4096, 512),
]
COUNTS_OF_RACKS = [(1, 1), (8, 1), (71, 1), (72, 1), (128, 2), (144, 2), (576, 8)]
COUNTS_OF_FOURS = [(1, 1), (3, 1), (4, 1), (6, 2), (8, 2), (256, 64)]


@pytest.mark.parametrize(
    ("gpu", "num_devices", "num_nodes"),
    [
        (gpu, *counts)
        for gpus, known in (
            (OF_EIGHT, COUNTS_OF_EIGHTS),
            (("GB200-NVL72", "GB300-NVL72"), COUNTS_OF_RACKS),
            (("GH200",), COUNTS_OF_FOURS),
        )
        for gpu in gpus
        for counts in known
    ],
)
def test_presets_construct(gpu, num_devices, num_nodes):
    cluster = parse_cluster(f"{num_devices}x{gpu}")
    assert cluster.num_devices == num_devices
    assert cluster.num_nodes == num_nodes
    assert cluster.device.name == gpu
    assert 0 < cluster.device_memory_limit() <= cluster.device.memory_bytes
    assert cluster.intra.bytes_per_s >= cluster.inter.bytes_per_s


@pytest.mark.parametrize("gpu", GPUS)
def test_every_number_of_a_preset_has_a_source(gpu, tmp_path):
    cluster = parse_cluster(f"16x{gpu}")
    assert parse_cluster(write_file(tmp_path, cluster.to_json())) == cluster


def test_the_vendors_numbers():
    """Read off the datasheets, not off the presets."""
    h100, a100, v100 = (parse_cluster(f"8x{gpu}") for gpu in ("H100-80GB", "A100-80GB", "V100-16GB"))
    assert h100.device.peak_flops_per_s("bfloat16") == 989e12
    assert h100.device.peak_flops_per_s("float8_e4m3fn") == 1979e12
    assert a100.device.peak_flops_per_s("float32") == 156e12
    assert v100.device.peak_flops_per_s("float16") == 125e12
    assert [cluster.intra.bytes_per_s for cluster in (h100, a100, v100)] == [450e9, 300e9, 150e9]
    assert [cluster.inter.bytes_per_s for cluster in (h100, a100, v100)] == [50e9, 25e9, 6.25e9]
    assert [c.device.memory_bytes >> 30 for c in (h100, a100, v100)] == [79, 79, 15]


def test_the_vendors_numbers_of_grace_nodes():
    """Of NVLink-C2C, both directions together: 900 GB/s for a GH200, and 900 GB/s for two GPUs of a GB200."""
    gh200, gb200, gb300 = (parse_cluster(name) for name in ("4xGH200", "72xGB200-NVL72", "72xGB300-NVL72"))
    assert [cluster.host_link.bytes_per_s for cluster in (gh200, gb200, gb300)] == [450e9, 225e9, 225e9]
    assert [cluster.devices_per_node for cluster in (gh200, gb200, gb300)] == [4, 72, 72]
    assert [cluster.intra.bytes_per_s for cluster in (gh200, gb200, gb300)] == [450e9, 900e9, 900e9]
    assert [cluster.inter.bytes_per_s * 8 for cluster in (gh200, gb200, gb300)] == [200e9, 400e9, 800e9]
    assert gb300.device.peak_flops_per_s("float8_e4m3fn") * 72 * 2 == 720e15
    assert gb300.device.memory_bytes > 1.45 * gb200.device.memory_bytes
    assert gb200.host_bytes_per_node == 17_000_000_000_000


def test_the_vendors_numbers_of_pcie_cards():
    l40s, a10g, ada, rtx, pcie, nvl = (
        parse_cluster(f"8x{gpu}").device
        for gpu in ("L40S", "A10G", "RTX-6000-Ada", "RTX-4090", "H100-PCIe", "H100-NVL")
    )
    cards = (l40s, a10g, ada, rtx, pcie, nvl)
    assert [c.peak_flops_per_s("bfloat16") / 1e12 for c in cards] == [362.05, 70, 364.2, 165.2, 756, 835.5]
    assert [c.memory_bytes_per_s / 1e9 for c in cards] == [864, 600, 960, 1008, 2039.04, 3900]
    assert [round(c.memory_bytes / 2**30) for c in cards] == [45, 22, 47, 24, 79, 93]
    assert parse_cluster("8xB300").device.peak_flops_per_s("bfloat16") * 8 * 2 == 36e15


def test_a_presets_short_name():
    assert parse_cluster("72xgb300") == parse_cluster("72xGB300-NVL72")
    assert parse_cluster("8xGB200").name == "8xGB200-NVL72"


def test_networks():
    assert parse_cluster("16xH100-80GB-InfiniBand") == parse_cluster("16xH100-80GB")
    ethernet = parse_cluster("16xH100-80GB-Ethernet")
    assert ethernet.name == "16xH100-80GB-Ethernet"
    assert ethernet.inter.bytes_per_s * 8 == 100e9 / 8
    assert parse_cluster("16xL4").name == parse_cluster("16xL4-Ethernet").name == "16xL4"


def test_names_in_any_case():
    assert parse_cluster("8xh100-80gb") == parse_cluster("8XH100-80GB") == parse_cluster(" 8xH100-80GB ")


def test_a_cluster_is_itself():
    cluster = toy_cluster()
    assert parse_cluster(cluster) is cluster


def test_a_partial_node_has_its_share_of_host_memory():
    full, half = parse_cluster("8xA100-80GB"), parse_cluster("4xA100-80GB")
    assert half.host_bytes_per_node * 2 == full.host_bytes_per_node


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "8xH100",
            r"unknown preset 'H100' in '8xH100' \(did you mean 'H100-80GB' or .*'H100-PCIe' or 'H100-NVL'\?\)",
        ),
        ("8xH10-80GB", r"did you mean 'H100-80GB'\?"),
        ("8xTPU", r"unknown preset 'TPU'.*presets: V100-16GB,.*CPU"),
        ("8xL4-InfiniBand", r"unknown preset 'L4-InfiniBand' in '8xL4-InfiniBand'"),
        ("H100-80GB", r"wanted a cluster as '<count>x<GPU>' or a JSON file.*did you mean '8xH100-80GB'"),
        ("", r"wanted a cluster as '<count>x<GPU>'"),
        ("0xCPU", r"wanted a cluster as '<count>x<GPU>'"),
        ("-8xCPU", r"wanted a cluster as '<count>x<GPU>'"),
        ("99999999xCPU", r"wanted a cluster as '<count>x<GPU>'"),
        ("11xCPU", r"11 devices in '11xCPU' do not divide into equal nodes.*10, 12"),
        ("13xH200", r"12, 14"),
        ("73xGB200", r"equal nodes; the nearest counts that do: 72, 74"),
        ("missing.json", r"cannot read the cluster file 'missing.json': No such file"),
        (8, r"wanted a cluster as .* got 8"),
        (None, r"wanted a cluster as .* got None"),
    ],
)
def test_unknown_clusters_say_what_is_accepted(text, message):
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


def test_dtypes_that_a_device_lacks_run_in_the_wider_one():
    a100 = parse_cluster("8xA100-80GB").device
    assert a100.peak_flops_per_s("float8_e5m2") == a100.peak_flops_per_s("bfloat16")
    assert a100.peak_flops_per_s("float4_e2m1fn") == a100.peak_flops_per_s("bfloat16")
    assert a100.peak_flops_per_s("complex128") == a100.peak_flops_per_s("float64")
    assert a100.peak_flops_per_s("int32") == a100.peak_flops_per_s("float32")
    assert a100.vector_flops_per_s == 19.5e12
    assert toy_device().vector_flops_per_s == toy_device().peak_flops_per_s("float16") == 1e12


def test_dtypes_come_in_any_form():
    h100 = parse_cluster("8xH100-80GB").device
    for dtype in (jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16", np.float16, np.dtype("float16")):
        assert h100.peak_flops_per_s(dtype) == 989e12


finite = st.floats(min_value=1e-12, max_value=1e24)
shares = st.floats(min_value=1e-6, max_value=1.0)
times = st.floats(min_value=0, max_value=1e3)
links = st.builds(Link, finite, times, shares, st.booleans())
devices = st.builds(
    Device,
    name=st.text(min_size=1).filter(str.strip),
    memory_bytes=st.integers(2, 2**60),
    memory_bytes_per_s=finite,
    flops_per_s=st.tuples(st.tuples(st.just("float32"), finite), st.tuples(st.just("bfloat16"), finite)),
    reserve_bytes=st.integers(0, 1),
    num_cores=st.integers(1, 1000),
    matmul_efficiency=shares,
    vector_efficiency=shares,
    memory_efficiency=shares,
    launch_s=times,
)
clusters = st.builds(
    lambda num_nodes, devices_per_node, **rest: Cluster(
        "any", num_devices=num_nodes * devices_per_node, devices_per_node=devices_per_node, **rest
    ),
    num_nodes=st.integers(1, 1000),
    devices_per_node=st.integers(1, 72),
    device=devices,
    intra=links,
    inter=links,
    host_link=links,
    host_bytes_per_node=st.integers(1, 2**60),
)


@given(clusters)
def test_json_round_trip(cluster):
    text = json.dumps(cluster.to_json(), allow_nan=False)
    assert Cluster.from_json(json.loads(text)) == cluster


def changed(path, value):
    """The H100 file with one value replaced; a value of ... removes the key."""
    data = preset_json()
    *above, key = path.split(".")
    place = data
    for step in above:
        place = place[step]
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("device.memory", ..., r"cluster.json: device: missing 'memory'; wanted the keys 'name', 'memory'"),
        ("intra", ..., r"cluster.json: missing 'intra'"),
        ("device.memmory", "1GiB", r"device: unknown key 'memmory' \(did you mean 'memory'\?\)"),
        ("device.memory", 80, r"device.memory: wanted text that carries its unit, got 80"),
        ("device.memory", float("nan"), r"device.memory: wanted text that carries its unit, got nan"),
        ("device.memory", "80GB/s", r"device.memory: wanted a size such as '70GiB', got the unit 'GB/s'"),
        ("device.memory", "80", r"device.memory: .*without a unit"),
        ("device.memory", "nanGiB", r"device.memory: a size must be finite and not negative, got 'nanGiB'"),
        ("device.memory", "0GiB", r"device: device memory must be finite and positive, got 0 bytes"),
        ("device.reserve", "1TiB", r"device: the runtime's reserve must be less than the device memory"),
        ("device.flops.float32", "989TFLOPs", r"device.flops.float32: wanted a computing speed"),
        ("device.flops.float32", ..., r"device: wanted one speed per dtype, with one for 'float32'"),
        ("device.flops", [], r"device.flops: wanted a JSON object"),
        ("device.cores", 0, r"device: number of cores must be finite and positive, got 0 cores"),
        ("device.launch", "2", r"device.launch: .*without a unit"),
        (
            "device.matmul_efficiency",
            "70%",
            r"matmul_efficiency: wanted a number above 0 and at most 1, got '70%'",
        ),
        (
            "device.memory_efficiency",
            float("nan"),
            r"efficiency of device memory must be above 0 and at most 1",
        ),
        ("intra.efficiency", 1.5, r"intra: efficiency of a link must be above 0 and at most 1, got 1.5"),
        ("intra.sums_in_switch", 1, r"intra.sums_in_switch: wanted true or false, got 1"),
        ("intra.efficiency", 0, r"intra: efficiency of a link must be above 0 and at most 1, got 0"),
        ("device.name", "", r"device: device name must not be empty"),
        ("intra.bandwidth", "0GB/s", r"intra: link bandwidth must be finite and positive"),
        ("inter.latency", "-1us", r"inter.latency: a time must be finite and not negative, got '-1us'"),
        ("num_devices", "64", r"num_devices: wanted a whole number, got '64'"),
        ("num_devices", 64.0, r"num_devices: wanted a whole number, got 64.0"),
        ("num_devices", True, r"num_devices: wanted a whole number, got True"),
        ("num_devices", -8, r"number of devices must be finite and positive, got -8"),
        ("num_devices", 63, r"wanted full nodes, got 63 devices in nodes of 8"),
        ("devices_per_node", 0, r"devices per node must be finite and positive"),
        (
            "sources.intra",
            ...,
            r"sources: wanted one for each number, missing: intra.bandwidth, intra.latency, intra.efficiency, intra",
        ),
        ("sources.intra", " ", r"sources: 'intra' is empty"),
        ("sources.inta", "guess", r"sources: 'inta' is no number of the file \(did you mean 'intra'\?\)"),
        ("sources.intra", 3, r"sources.intra: wanted text, got 3"),
    ],
)
def test_a_file_that_makes_no_sense_names_file_and_key(tmp_path, path, value, message):
    with pytest.raises(ClusterError, match=message) as caught:
        parse_cluster(write_file(tmp_path, changed(path, value)))
    assert str(caught.value).startswith(str(tmp_path / "cluster.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not valid JSON"),
        ("[]", r"wanted a JSON object \{...\}, got \[\]"),
        ('{"name": "a", "name": "b"}', r"the key 'name' stands twice"),
        ("[" * 100_000, r"is not valid JSON"),
        ("null", r"wanted a JSON object"),
    ],
)
def test_a_file_that_is_no_cluster(tmp_path, text, message):
    with pytest.raises(ClusterError, match=message):
        parse_cluster(write_file(tmp_path, text))


def test_a_file_of_any_name_is_found(tmp_path):
    path = write_file(tmp_path, preset_json()).rename(tmp_path / "lab")
    assert parse_cluster(str(path)) == parse_cluster(path) == parse_cluster("64xH100-80GB")


def test_a_folder_is_no_cluster(tmp_path):
    with pytest.raises(ClusterError, match="cannot read the cluster file"):
        parse_cluster(tmp_path)


def test_a_source_covers_what_is_below_it(tmp_path):
    data = preset_json()
    host = (
        "host_link",
        "host_memory_per_node",
        "host_memory_bandwidth_per_node",
        "host_cores_per_node",
    )
    data["sources"] = dict.fromkeys(("device", "intra", "inter", *host), "measured")
    assert parse_cluster(write_file(tmp_path, data)).sources[0] == ("device", "measured")


def test_a_file_may_leave_out_what_has_a_default(tmp_path):
    data = preset_json()
    for key in ("reserve", "cores", "matmul_efficiency", "vector_efficiency", "memory_efficiency", "launch"):
        del data["device"][key], data["sources"][f"device.{key}"]
    for name in ("intra", "inter", "host_link"):
        del data[name]["efficiency"], data[name]["sums_in_switch"]
    cluster = parse_cluster(write_file(tmp_path, data))
    plain = Device("any", 2**30, 1e9, (("float32", 1e12),))
    shares = ("num_cores", "matmul_efficiency", "vector_efficiency", "memory_efficiency", "launch_s")
    assert [getattr(cluster.device, name) for name in shares] == [getattr(plain, name) for name in shares]
    assert cluster.intra == Link(450e9, 1.9e-6)
    assert cluster.intra.sustained_bytes_per_s == 0.8 * 450e9


def test_a_share_may_have_a_source_of_its_own(tmp_path):
    data = preset_json()
    data["device"]["matmul_efficiency"] = 1
    data["sources"]["device.matmul_efficiency"] = "measured"
    cluster = parse_cluster(write_file(tmp_path, data))
    assert cluster.device.matmul_efficiency == 1.0
    assert dict(cluster.sources)["device.matmul_efficiency"] == "measured"


def test_a_host_updates_at_the_rate_of_its_memory_or_of_its_cores():
    node = replace(toy_cluster(), devices_per_node=2, host_bytes_per_s=200e9, host_cores=100)
    assert node.host_update_bytes_per_s == pytest.approx(0.7 * 200e9 / 2)
    assert replace(node, host_cores=4).host_update_bytes_per_s == pytest.approx(4 * 15e9 / 2)
    assert replace(node, host_cores=0).host_update_bytes_per_s == 0.0


def test_a_file_that_knows_nothing_of_a_hosts_processors(tmp_path):
    """As those of earlier versions."""
    data = preset_json()
    for key in ("host_memory_bandwidth_per_node", "host_cores_per_node"):
        del data[key], data["sources"][key]
    cluster = parse_cluster(write_file(tmp_path, data))
    assert (cluster.host_bytes_per_s, cluster.host_cores, cluster.host_update_bytes_per_s) == (0.0, 0, 0.0)


@pytest.mark.parametrize("wrong", [{"host_bytes_per_s": -1.0}, {"host_cores": -1}])
def test_a_hosts_processors_are_not_negative(wrong):
    with pytest.raises(ClusterError, match=r"host (memory bandwidth|cores) per node must be .* not negative"):
        replace(toy_cluster(), **wrong)


def test_a_node_that_is_not_full_has_its_share_of_the_hosts_processors():
    full, half = parse_cluster("8xH100-80GB"), parse_cluster("4xH100-80GB")
    assert (half.host_bytes_per_s, half.host_cores) == (full.host_bytes_per_s / 2, full.host_cores / 2)


def test_fingerprint_follows_numbers_only():
    cluster = parse_cluster("16xH100-80GB")
    assert cluster.fingerprint() == replace(cluster, name="other", sources=()).fingerprint()
    assert cluster.fingerprint() != replace(cluster, intra=Link(1e9, 1e-6)).fingerprint()
    assert cluster.fingerprint() != parse_cluster("24xH100-80GB").fingerprint()


def test_fingerprint_is_stable_across_releases():
    assert toy_cluster().fingerprint() == "bb4d7b812fabac30"
