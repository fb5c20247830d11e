"""Collectives: published closed forms, placements worked out by hand, and brute force over devices."""

from dataclasses import replace
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import InputError
from cost_model.collectives import MeshModel
from cost_model.hardware import Link, parse_cluster

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
GB = 1e9


def mesh(cluster, *shape):
    return MeshModel(parse_cluster(cluster), shape)


def without_latency(model):
    links = {name: replace(getattr(model.cluster, name), latency_s=0.0) for name in ("intra", "inter")}
    return replace(model, cluster=replace(model.cluster, **links))


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_ring_all_reduce_moves_two_n_minus_one_over_n(size):
    """Patarasuk & Yuan 2009: 2 (n-1)/n B, here over H100's 450 GB/s."""
    model = without_latency(mesh(f"{size}xH100-80GB", size))
    assert model.all_reduce_s(GB, (0,)) == pytest.approx(2 * (size - 1) / size * GB / 450e9)


def test_latency_is_the_shorter_of_ring_and_tree():
    """All-reduce: a ring of 2 has 2 steps, a tree of 8 has 2 log2 8. All-gather: a ring of 3 has 2 steps."""
    assert mesh("2xH100-80GB", 2).all_reduce_s(0.0, (0,)) == pytest.approx(2 * 1.9e-6)
    assert mesh("8xH100-80GB", 8).all_reduce_s(0.0, (0,)) == pytest.approx(6 * 1.9e-6)
    assert mesh("3xH100-80GB", 3).all_gather_s(0.0, (0,)) == pytest.approx(2 * 1.9e-6)
    assert mesh("4096xH100-80GB", 4096).all_gather_s(0.0, (0,)) == pytest.approx(24 * 4e-6)


@pytest.mark.parametrize(
    ("cluster", "shape", "axes", "bytes_per_s"),
    [
        ("16xH100-80GB", (2, 8), (1,), 450e9),  # in a node
        ("16xH100-80GB", (2, 8), (0,), 50e9),  # one member per node: its own port
        ("16xH100-80GB", (4, 4), (0,), 100e9),  # stride 4: two members per node, two ports
        ("16xH100-80GB", (8, 2), (0,), 200e9),  # stride 2: four ports
        ("16xH100-80GB", (16,), (0,), 400e9),  # eight ports, less than NVLink
        ("16xH100-80GB", (2, 2, 4), (0, 2), 200e9),  # four of each node, over two nodes
        ("16xH100-80GB", (2, 2, 4), (1, 2), 450e9),  # the node
        ("16xH100-80GB", (2, 2, 4), (0, 1), 100e9),  # stride 4 and stride 8: two per node
        ("8xH100-80GB", (4, 2), (0,), 450e9),
        ("64xA100-80GB", (8, 8), (0,), 25e9),
        ("64xA100-80GB", (2, 32), (1,), 200e9),
        ("64xH100-80GB-Ethernet", (8, 8), (0,), 1.5625e9),
        ("64xH100-80GB-Ethernet", (64,), (0,), 12.5e9),  # the whole node's one port
        ("12xH100-80GB", (2, 6), (0,), 50e9),
        ("12xH100-80GB", (12,), (0,), 300e9),
        ("12xH100-80GB", (3, 4), (1,), 100e9),  # devices 4 to 7 straddle nodes of six, two and two
        ("72xH100-80GB", (9, 8), (0,), 50e9),
        ("72xH100-80GB", (3, 24), (1,), 400e9),
        ("16xCPU", (4, 4), (0,), 5e9),  # equal links: placement does not matter
        ("16xCPU", (2, 8), (0,), 5e9),
    ],
)
def test_links_by_placement(cluster, shape, axes, bytes_per_s):
    assert mesh(cluster, *shape).link(axes)[0] == bytes_per_s


def test_axis_link():
    assert mesh("16xH100-80GB", 2, 8).axis_link(0) == (50e9, 4e-6)
    assert mesh("16xH100-80GB", 2, 8).axis_link(1) == (450e9, 1.9e-6)


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    devices_per_node=st.integers(1, 12),
    data=st.data(),
)
def test_placement_is_what_counting_devices_says(shape, devices_per_node, data):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    num_nodes = -(-prod(shape) // devices_per_node)
    cluster = replace(
        parse_cluster("8xCPU"), num_devices=num_nodes * devices_per_node, devices_per_node=devices_per_node
    )
    groups = {}
    for device, place in enumerate(np.ndindex(shape)):
        rest = tuple(index for axis, index in enumerate(place) if axis not in axes)
        nodes = groups.setdefault(rest, {})
        nodes[device // devices_per_node] = nodes.get(device // devices_per_node, 0) + 1
    group = MeshModel(cluster, shape).group(axes)
    assert group.size == sum(next(iter(groups.values())).values())
    assert group.members_per_node == min(count for nodes in groups.values() for count in nodes.values())


@given(
    shape=st.sampled_from([(8,), (2, 4), (16,), (4, 4), (2, 8), (3, 8), (2, 2, 6)]),
    num_bytes=st.floats(1.0, 1e12),
)
def test_all_reduce_is_a_reduce_scatter_and_an_all_gather(shape, num_bytes):
    model = without_latency(mesh("24xH100-80GB", *shape))
    for axis in range(len(shape)):
        both = model.reduce_scatter_s(num_bytes, (axis,)) + model.all_gather_s(num_bytes, (axis,))
        assert model.all_reduce_s(num_bytes, (axis,)) == pytest.approx(both)


@given(num_bytes=st.floats(0.0, 1e12))
def test_gathering_two_axes_in_turn_costs_their_product_on_equal_links(num_bytes):
    """(a-1)/a of B after (b-1)/b of B/a is (ab-1)/(ab) of B."""
    model = without_latency(mesh("16xCPU", 2, 8))
    in_turn = model.all_gather_s(num_bytes / 2, (1,)) + model.all_gather_s(num_bytes, (0,))
    assert model.all_gather_s(num_bytes, (0, 1)) == pytest.approx(in_turn)


def test_all_to_all():
    """In a node 7/8 of the bytes go over NVLink; over two nodes 7/16 do, and 8/16 through each port."""
    inside = without_latency(mesh("8xH100-80GB", 8))
    assert inside.all_to_all_s(GB, (0,)) == pytest.approx(7 / 8 * GB / 450e9)
    across = without_latency(mesh("16xH100-80GB", 16))
    assert across.all_to_all_s(GB, (0,)) == pytest.approx(7 / 16 * GB / 450e9 + 8 / 16 * GB / 50e9)
    equal = without_latency(mesh("16xCPU", 16))
    assert equal.all_to_all_s(GB, (0,)) == pytest.approx(15 / 16 * GB / 5e9)


def test_permute_is_one_message_through_the_slowest_link():
    model = mesh("16xH100-80GB", 2, 8)
    assert model.permute_s(GB, (1,)) == pytest.approx(1.9e-6 + GB / 450e9)
    assert model.permute_s(GB, (0,)) == pytest.approx(4e-6 + GB / 50e9)


@pytest.mark.parametrize("kind", KINDS)
def test_times_are_elementwise(kind):
    model = mesh("16xH100-80GB", 2, 8)
    num_bytes = np.array([[0.0, 1.0], [1e6, 1e9]])
    times = model.time_s(kind, (0, 1), num_bytes)
    assert times.shape == num_bytes.shape
    assert times.ravel().tolist() == [model.time_s(kind, (0, 1), float(size)) for size in num_bytes.ravel()]


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_axes_have_no_order(kind):
    model = mesh("72xH100-80GB", 9, 2, 4)
    times = [model.time_s(kind, (2, 0), size) for size in (0.0, 1e3, 1e6, 1e9)]
    assert times == sorted(times)
    assert times == [model.time_s(kind, frozenset({0, 2}), size) for size in (0.0, 1e3, 1e6, 1e9)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axes"), [((8,), ()), ((1, 8), (0,)), ((8, 1), (1,))])
def test_nobody_to_talk_to_costs_nothing(kind, shape, axes):
    assert mesh("8xH100-80GB", *shape).time_s(kind, axes, GB) == 0.0


def test_a_mesh_may_take_part_of_the_cluster():
    assert mesh("16xH100-80GB", 4).link((0,))[0] == 450e9


@pytest.mark.parametrize("shape", [(), (0,), (-2, -4), (9,), (4, 4)])
def test_meshes_that_do_not_fit_are_refused(shape):
    with pytest.raises(InputError, match="wanted a mesh of positive sizes on at most 8 devices"):
        mesh("8xCPU", *shape)


@pytest.mark.parametrize("axes", [(2,), (-1,), (0, 0)])
def test_axes_that_the_mesh_lacks_are_refused(axes):
    with pytest.raises(InputError, match="wanted distinct axes of the mesh"):
        mesh("8xCPU", 2, 4).all_reduce_s(1.0, axes)


def test_an_unknown_collective_is_refused():
    with pytest.raises(InputError, match=r"wanted a collective among all-reduce, .* got 'allreduce'"):
        mesh("8xCPU", 8).time_s("allreduce", (0,), 1.0)


def test_a_slower_inside_is_the_limit():
    cluster = replace(parse_cluster("16xCPU"), intra=Link(1e9, 0.0), inter=Link(4e9, 0.0))
    assert MeshModel(cluster, (4, 4)).link((0,)) == (1e9, 0.0)
    assert MeshModel(cluster, (4, 4)).all_reduce_s(inf, (0,)) == inf
