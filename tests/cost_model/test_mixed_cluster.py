"""Clusters of several kinds of node: devices' numbers, links, files and messages."""

import json
from dataclasses import replace

import pytest

from autoshard.cost_model.cluster import Link
from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.hardware import parse_cluster, parse_hardware
from autoshard.cost_model.mixed_cluster import MixedCluster, from_json

H100, A100 = parse_cluster("8xH100-80GB"), parse_cluster("16xA100-40GB")
SLOW = Link(12.5e9, 2e-5)
MIXED = MixedCluster("mine", (H100, A100), SLOW, (("between", "a wager"),))


def test_devices_are_numbered_group_by_group():
    assert MIXED.num_devices == 24
    assert [MIXED.locate(device) for device in (0, 7, 8, 23)] == [(H100, 0), (H100, 7), (A100, 0), (A100, 15)]
    nodes = [MIXED.node_of(device) for device in range(24)]
    assert [nodes.count(node) for node in dict.fromkeys(nodes)] == [8, 8, 8]


def test_links_are_those_of_a_group_inside_of_it_and_else_the_one_between():
    assert MIXED.link(0, 7) == H100.intra
    assert MIXED.link(7, 8) == MIXED.link(23, 0) == SLOW
    assert MIXED.link(8, 15) == A100.intra
    assert MIXED.link(15, 16) == A100.inter


def test_caps_are_no_more_than_a_group_s_devices_have():
    assert MIXED.device_memory_limit() == H100.device_memory_limit()
    assert MIXED.caps(60 << 30) == (60 << 30, A100.device_memory_limit())
    assert MIXED.caps(10 << 30) == (10 << 30, 10 << 30)


def test_another_order_has_the_same_devices_in_another_order():
    given, turned = MIXED.orders
    assert given == MIXED
    assert turned.groups == (A100, H100)
    assert MIXED.ordered((A100.name, H100.name)) == turned
    assert MIXED.in_order(range(24), (A100.name, H100.name)) == [*range(8, 24), *range(8)]


def test_it_is_read_as_it_is_written():
    assert from_json(json.loads(json.dumps(MIXED.to_json()))) == MIXED
    assert from_json(json.loads(json.dumps(H100.to_json()))) == H100


def test_presets_are_joined_by_the_slowest_of_their_networks():
    joined = parse_hardware("8xH100-80GB + 16xa100-40gb-ethernet")
    assert isinstance(joined, MixedCluster)
    slower = joined.groups[1].inter
    assert slower.bytes_per_s < joined.groups[0].inter.bytes_per_s
    assert (joined.between.bytes_per_s, joined.between.latency_s) == (slower.bytes_per_s, slower.latency_s)
    assert str(joined) == "1 node of 8 H100-80GB and 2 nodes of 8 A100-40GB"


def test_a_file_says_where_the_numbers_of_each_group_come_from(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(MIXED.to_json()))
    assert parse_hardware(path) == MIXED
    bare = replace(A100, sources=())
    path.write_text(json.dumps(replace(MIXED, groups=(H100, bare)).to_json()))
    with pytest.raises(
        ClusterError, match=r"mine.json: groups.1: sources: wanted one for each number, missing: device"
    ):
        parse_hardware(path)
    path.write_text(json.dumps(replace(MIXED, sources=()).to_json()))
    with pytest.raises(
        ClusterError, match=r"mine.json: sources: wanted one for each number, missing: between"
    ):
        parse_hardware(path)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((H100,), "wanted 2 to 4 groups of nodes, got 1"),
        ((H100, H100), "wanted a name of its own for each group of nodes, got 8xH100-80GB, 8xH100-80GB"),
        ((H100, parse_cluster("8xCPU")), "wanted groups of one platform, got cpu and cuda devices"),
    ],
)
def test_groups_that_make_no_cluster_are_refused(groups, said):
    with pytest.raises(ClusterError, match=said):
        MixedCluster("mine", groups, SLOW)


def test_a_mistake_in_a_group_is_named_with_its_path():
    data = MIXED.to_json()
    data["groups"][1]["device"]["memry"] = "1GiB"
    with pytest.raises(
        ClusterError, match=r"a.json: groups.1.device: unknown key 'memry' \(did you mean 'memory'"
    ):
        from_json(data, "a.json")


def test_what_needs_one_kind_of_node_refuses_several():
    with pytest.raises(
        ClusterError, match=r"wanted a cluster of one kind of node, got mine: 1 node of 8 H100-80GB and"
    ):
        parse_cluster(MIXED)
