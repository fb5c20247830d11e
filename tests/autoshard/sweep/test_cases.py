"""The combinations of a sweep."""

import json

import pytest

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.sweep.cases import cases

GIB = 1 << 30


def names(*arguments, **options):
    return [case.name for case in cases(*arguments, **options)]


def test_each_cluster_under_each_cap():
    found = cases(["8xH100-80GB", "16xL4"], ["10GiB", "50%"])
    assert [(case.name, case.memory_bytes) for case in found] == [
        ("8xH100-80GB", 10 * GIB),
        ("8xH100-80GB", parse_cluster("8xH100-80GB").device.memory_bytes // 2),
        ("16xL4", 10 * GIB),
        ("16xL4", 11 * GIB),
    ]


def test_devices_replace_those_of_presets():
    assert names(["8xL4", "h200"], devices=[8, 32]) == ["8xL4", "32xL4", "8xH200", "32xH200"]
    assert names(["8xA100-80GB-Ethernet"], devices=[16]) == ["16xA100-80GB-Ethernet"]


def test_a_preset_alone_is_a_full_node():
    assert names(["L4", "GB300"]) == ["8xL4", "72xGB300-NVL72"]


def test_a_cap_above_a_devices_memory_is_that_memory_and_counts_once():
    (case,) = cases(["8xL4"], ["24GiB", "80GiB"])
    assert case.memory_bytes == parse_cluster("8xL4").device_memory_limit()
    assert cases(["8xL4"]) == (case,)


def test_files_and_clusters(tmp_path):
    cluster = parse_cluster("4xL4")
    file = tmp_path / "lab.json"
    file.write_text(json.dumps(cluster.to_json()))
    (of_file,), (of_cluster,) = cases([str(file)]), cases([cluster])
    assert of_file.cluster == of_cluster.cluster == cluster
    assert names(["8xH100-80GB+16xL4"]) == ["8xH100-80GB+16xL4"]


@pytest.mark.parametrize(
    ("clusters", "options", "message"),
    [
        ([], {}, "wanted at least one cluster"),
        (["8xH1000"], {}, "unknown preset 'H1000'"),
        (["8xL4"], {"memory": ["24"]}, "without a unit"),
        (["8xH100-80GB+16xL4"], {"devices": [8]}, "devices= wants presets of one kind of GPU"),
        ([parse_cluster("8xL4")], {"devices": [8]}, "devices= wants presets of one kind of GPU"),
    ],
)
def test_what_is_no_sweep(clusters, options, message):
    with pytest.raises(InputError, match=message):
        cases(clusters, **options)
