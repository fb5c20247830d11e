"""Collectives: published closed forms, placements worked out by hand, and brute force over devices."""

from dataclasses import replace
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.collectives import DeviceGroup, MeshModel
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import Link, parse_cluster

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
GB = 1e9


def mesh(cluster, *shape):
    return MeshModel(parse_cluster(cluster), shape)


def bus_bytes_per_s(model, kind, axes, num_bytes):
    """As nccl-tests counts: for all-reduce twice the bytes of the other collectives."""
    size = model.group(axes).size
    rounds = 2 if kind == "all-reduce" else 1
    return rounds * (size - 1) / size * num_bytes / model.time_s(kind, axes, num_bytes)


def large(model, kind, axes):
    """Seconds per GB of messages so large that only bytes count."""
    return model.time_s(kind, axes, 1e15) / 1e6


def small(model, kind, axes):
    """Seconds without any bytes, less the launch."""
    return model.time_s(kind, axes, 0.0) - model.cluster.device.launch_s


@pytest.mark.parametrize("size", [2, 3, 6, 8])
def test_ring_all_reduce_moves_two_n_minus_one_over_n(size):
    """Patarasuk & Yuan 2009: 2 (n-1)/n B, here over 0.8 of A100's 300 GB/s."""
    model = mesh(f"{size}xA100-80GB", size)
    assert large(model, "all-reduce", (0,)) == pytest.approx(2 * (size - 1) / size / 240)


def test_half_a_ring_moves_n_minus_one_over_n():
    model = mesh("8xA100-80GB", 8)
    for kind in ("all-gather", "reduce-scatter"):
        assert large(model, kind, (0,)) == pytest.approx(7 / 8 / 240)


def test_small_collectives_are_all_hops():
    """NCCL's table for LL: 6.6 us to start a ring, 0.6 us a hop on NVLink, 2.7 us between nodes, 5 us in trees."""
    inside = mesh("8xH100-80GB", 8)
    assert small(inside, "all-gather", (0,)) == pytest.approx(6.6e-6 + 7 * 0.6e-6, rel=0.02)
    assert small(inside, "all-reduce", (0,)) == pytest.approx(6.6e-6 + 14 * 0.6e-6, rel=0.02)
    across = mesh("64xH100-80GB", 64)
    assert small(across, "all-gather", (0,)) == pytest.approx(6.6e-6 + 56 * 0.6e-6 + 7 * 2.7e-6, rel=0.02)
    assert small(across, "all-reduce", (0,)) == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 6 * 5e-6, rel=0.02)
    lone = mesh("64xH100-80GB", 8, 8)
    assert small(lone, "all-gather", (0,)) == pytest.approx(6.6e-6 + 7 * 5e-6, rel=0.02)


# NCCL 2, src/graph/tuning.cc, in microseconds and by protocol: LL, LL128, Simple
STARTS, ON_NVLINK, BETWEEN, ALONE_OR_IN_TREES = (6.6, 14, 8.4), (0.6, 1.9, 3.4), (2.7, 4.0, 14), (5, 8.5, 14)


def fixed(model, kind, axes=(0,)):
    """Microseconds of every line of a collective without any bytes, less the launch."""
    return [1e6 * (fixed_s - model.cluster.device.launch_s) for fixed_s, _ in model.lines(kind, axes)]


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
@pytest.mark.parametrize(("num_nodes", "lone"), [(1, False), (2, False), (3, False), (8, False), (8, True)])
def test_a_ring_has_a_hop_for_every_member_but_one(kind, num_nodes, lone):
    model = mesh(f"{8 * num_nodes}xH100-80GB", *((num_nodes, 8) if lone else (8 * num_nodes,)))
    num_intra, hops = (0, ALONE_OR_IN_TREES) if lone else (7 * num_nodes, BETWEEN)
    wanted = [
        s + num_intra * a + (num_nodes - 1) * b for s, a, b in zip(STARTS, ON_NVLINK, hops, strict=True)
    ]
    assert fixed(model, kind) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(("num_nodes", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_an_all_reduce_goes_round_twice_or_up_and_down_a_tree_or_to_the_switches(num_nodes, levels):
    """A tree of N nodes has ceil(log2 N) levels, above chains of eight (Sanders, Speck & Traeff 2009)."""
    model = mesh(f"{8 * num_nodes}xH100-80GB", 8 * num_nodes)
    tables = STARTS, ON_NVLINK, BETWEEN, ALONE_OR_IN_TREES
    rings = [s + 2 * (7 * num_nodes * a + (num_nodes - 1) * b) for s, a, b, _ in zip(*tables, strict=True)]
    trees = [s + 2 * 7 * a + 2 * levels * t for s, a, _, t in zip(*tables, strict=True)]
    assert fixed(model, "all-reduce") == pytest.approx([*rings, *trees, 25 + 2 * levels * 14], rel=0.02)


def test_every_member_sends_to_every_other():
    """Small parts go by LL, in their own hops: seven in the node, and eight to the next node."""
    assert fixed(mesh("8xH100-80GB", 8), "all-to-all") == pytest.approx([8.4 + 7 * 0.6], rel=0.02)
    assert fixed(mesh("16xH100-80GB", 16), "all-to-all") == pytest.approx([8.4 + 7 * 0.6 + 8 * 2.7], rel=0.02)
    assert fixed(mesh("64xH100-80GB", 8, 8), "all-to-all") == pytest.approx([8.4 + 7 * 2.7], rel=0.02)


def per_byte(model, kind, axes=(0,)):
    """Of every line of a collective: the bytes per second that it comes to, in GB."""
    return [1e-9 / s_per_byte for _, s_per_byte in model.lines(kind, axes)]


def test_protocols_trade_bandwidth_for_latency():
    """LL gets 0.33 to 0.39 of the links, 120 of 128 bytes are LL128's (0.92 in NCCL), and LL no more than 20 GB/s of a
    network; trees lose more: LL 1 / 3.8, LL128 7 / 9, at sizes between."""
    rate = 0.824 * 450
    inside = per_byte(mesh("8xH100-80GB", 8), "all-gather")
    assert inside == pytest.approx([8 / 7 * share * rate for share in (0.38, 0.92, 1.0)])
    across = per_byte(mesh("16xH100-80GB", 16), "all-gather")
    assert across == pytest.approx([16 / 15 * gb for gb in (20, 0.92 * rate, rate)])
    two, four = (per_byte(mesh(f"{8 * n}xV100-16GB", 8 * n), "all-reduce")[3:6] for n in (2, 4))
    of_v100 = 8 * 0.95 * 6.25
    assert two == pytest.approx([0.17 * of_v100, 0.6 * of_v100, 0.83 * of_v100])
    assert four == pytest.approx([share / 2 for share in two])
    assert 0.17 / 0.92 < 1 / 3.8
    assert 0.6 / 0.92 < 7 / 9


def test_a_tree_of_one_member_a_node_moves_its_bytes_through_that_member_s_port():
    """Nothing moves inside a node: all bytes go by the one port, to one other node once, to several twice."""
    two, four = (per_byte(mesh(f"{8 * n}xV100-16GB", n, 8), "all-reduce")[3:6] for n in (2, 4))
    assert two == pytest.approx([share * 0.95 * 6.25 for share in (0.17, 0.6, 0.83)])
    assert four == pytest.approx([share / 2 for share in two])


def test_between_nodes_the_switches_sums_go_through_the_ports():
    """To one other node once; to several twice, up and down (NVLink SHARP with double trees)."""
    in_node = 0.74 * 0.824 * 450
    assert per_byte(mesh("16xH100-80GB", 16), "all-reduce")[-1] == pytest.approx(in_node)
    assert per_byte(mesh("32xH100-80GB", 32), "all-reduce")[-1] == pytest.approx(8 * 0.95 * 50 / 2)
    assert per_byte(mesh("32xH100-80GB", 8, 4), "all-reduce", (0,))[-1] == pytest.approx(2 * 0.95 * 50 / 2)


def test_where_every_node_has_one_member_no_switch_sums():
    assert len(mesh("64xH100-80GB", 8, 8).lines("all-reduce", (0,))) == 6
    assert len(mesh("64xH100-80GB", 8, 8).lines("all-reduce", (1,))) == 4
    assert len(mesh("64xA100-80GB", 64).lines("all-reduce", (0,))) == 6
    assert len(mesh("8xA100-80GB", 8).lines("all-reduce", (0,))) == 3


def test_a_group_touches_at_least_as_many_nodes_as_its_least_members_make_up():
    assert (DeviceGroup(8, 8).num_nodes, DeviceGroup(8, 4).num_nodes, DeviceGroup(7, 3).num_nodes) == (
        1,
        2,
        3,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axes"), [((64,), (0,)), ((8, 8), (0,)), ((8, 8), (1,)), ((4, 16), (1,))])
def test_no_collective_is_over_before_it_is_launched_and_has_begun(kind, shape, axes):
    model = mesh("64xH100-80GB", *shape)
    assert small(model, kind, axes) > 6.5e-6
    assert model.time_s(kind, axes, 0.0) == pytest.approx(min(f for f, _ in model.lines(kind, axes)))


def test_a_switch_that_sums_moves_the_bytes_once():
    model = mesh("8xH100-80GB", 8)
    assert large(model, "all-reduce", (0,)) == pytest.approx(1 / 275, rel=0.01)
    plain = replace(model, cluster=replace(model.cluster, intra=Link(450e9, 1.9e-6, 0.824)))
    assert large(plain, "all-reduce", (0,)) == pytest.approx(14 / 8 / 370.8)
    assert large(plain, "all-gather", (0,)) == large(model, "all-gather", (0,))


def test_between_two_nodes_trees_move_half_of_what_rings_do():
    """Rings: 2 (n-1)/n of the bytes through eight ports; trees: all of them once (NVIDIA/nccl issue 812)."""
    model = mesh("16xV100-16GB", 16)
    assert large(model, "all-reduce", (0,)) == pytest.approx(1 / (0.83 * 8 * 0.95 * 6.25))
    assert large(mesh("32xV100-16GB", 32), "all-reduce", (0,)) == pytest.approx(62 / 32 / (8 * 0.95 * 6.25))


@pytest.mark.parametrize(
    ("cluster", "shape", "kind", "num_bytes", "measured_bytes_per_s"),
    [
        ("8xH100-80GB", (8,), "all-reduce", 2**33, 480e9),  # S. Jeaugey of NVIDIA, nccl-tests issue 212
        ("8xH100-80GB", (8,), "all-reduce", 2**33, 476e9),  # nccl-tests issue 290
        ("8xH100-80GB", (8,), "reduce-scatter", 2**33, 360e9),  # nccl issue 1281
        ("8xH100-80GB", (8,), "all-gather", 2**33, 350e9),  # nccl issue 1281
        ("8xA100-80GB", (8,), "all-reduce", 2**32, 232.5e9),  # nccl-tests issue 175
        ("16xA100-80GB", (16,), "all-reduce", 2**32, 192e9),  # two DGX A100, nccl issue 812
        (
            "32xV100-16GB",
            (32,),
            "all-reduce",
            2**32,
            48e9,
        ),  # DGX-1, S. Jeaugey of NVIDIA, nccl-tests issue 29
        ("48xH100-80GB", (48,), "all-to-all", 2**32, 50e9),  # one 400 Gb/s port each, nccl-tests issue 267
    ],
)
def test_published_bus_bandwidths(cluster, shape, kind, num_bytes, measured_bytes_per_s):
    model = mesh(cluster, *shape)
    assert bus_bytes_per_s(model, kind, (0,), num_bytes) == pytest.approx(measured_bytes_per_s, rel=0.1)


def test_published_latencies():
    """Eight GPUs on NVSwitch take 12.5 us for 4 bytes and 16.7 us for 4 KiB (deepseek-ai/DeepEP issue 303, H20)."""
    model = mesh("8xH100-80GB", 8)
    assert model.time_s("all-reduce", (0,), 4.0) == pytest.approx(12.5e-6, rel=0.4)
    assert model.time_s("all-reduce", (0,), 4096.0) == pytest.approx(16.7e-6, rel=0.1)


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather"])
def test_small_messages_get_less_of_the_bandwidth(kind):
    model = mesh("64xH100-80GB", 64)
    rates = [bus_bytes_per_s(model, kind, (0,), float(2**power)) for power in range(10, 34)]
    assert rates == sorted(rates)
    assert rates[0] < 0.001 * rates[-1]


def test_what_is_combined_costs_its_share_of_the_whole():
    model = mesh("8xH100-80GB", 8)
    sizes = np.array([0.0, 4.0, 1e6, 16e6, 64e6])
    alone = model.time_s("all-reduce", (0,), sizes)
    joined = model.time_s("all-reduce", (0,), sizes, 32e6)
    assert joined[2] == pytest.approx(model.time_s("all-reduce", (0,), 32e6) / 32)
    assert joined[3] == pytest.approx(model.time_s("all-reduce", (0,), 32e6) / 2)
    assert joined[0] == 0.0
    assert joined[-1] == alone[-1]
    assert (joined <= alone).all()


@pytest.mark.parametrize(
    ("cluster", "shape", "axes", "bytes_per_s"),
    [
        ("16xH100-80GB", (2, 8), (1,), 450e9),  # in a node
        ("16xH100-80GB", (2, 8), (0,), 50e9),  # one member per node: its own port
        ("16xH100-80GB", (4, 4), (0,), 100e9),  # stride 4: two members per node, two ports
        ("16xH100-80GB", (8, 2), (0,), 200e9),  # stride 2: four ports
        ("16xH100-80GB", (16,), (0,), 400e9),  # eight ports, less than NVLink
        ("16xH100-80GB", (6, 2), (0,), 100e9),  # four of eight in a node, two of four in the next
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


@pytest.mark.parametrize("shape", [(8,), (2, 4), (24,), (3, 8), (2, 2, 6)])
def test_a_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather(shape):
    model = mesh("24xL4", *shape)
    for axis in range(len(shape)):
        both = large(model, "reduce-scatter", (axis,)) + large(model, "all-gather", (axis,))
        assert large(model, "all-reduce", (axis,)) <= both * (1 + 1e-9)
        if not model.group((axis,)).crosses_nodes:
            assert large(model, "all-reduce", (axis,)) == pytest.approx(both)


def test_gathering_two_axes_in_turn_costs_their_product_on_equal_links():
    """(a-1)/a of B after (b-1)/b of B/a is (ab-1)/(ab) of B."""
    model = mesh("8xCPU", 2, 4)
    in_turn = large(model, "all-gather", (1,)) / 2 + large(model, "all-gather", (0,))
    assert large(model, "all-gather", (0, 1)) == pytest.approx(in_turn)


def test_all_to_all():
    """In a node 7/8 of the bytes go over NVLink; over two nodes 7/16 do, and 8/16 through each port."""
    intra, inter = 0.824 * 450, 0.95 * 50
    assert large(mesh("8xH100-80GB", 8), "all-to-all", (0,)) == pytest.approx(7 / 8 / intra)
    across = large(mesh("16xH100-80GB", 16), "all-to-all", (0,))
    assert across == pytest.approx(7 / 16 / intra + 8 / 16 / inter)


def test_permute_is_one_message_through_the_slowest_link():
    model = mesh("16xH100-80GB", 2, 8)
    assert large(model, "collective-permute", (1,)) == pytest.approx(1 / (0.824 * 450))
    assert large(model, "collective-permute", (0,)) == pytest.approx(1 / (0.95 * 50))
    assert small(model, "collective-permute", (1,)) == pytest.approx(6.6e-6 + 0.6e-6, rel=0.02)
    assert small(model, "collective-permute", (0,)) == pytest.approx(6.6e-6 + 5e-6, rel=0.02)


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
    assert times == sorted(set(times))
    assert times == [model.time_s(kind, frozenset({0, 2}), size) for size in (0.0, 1e3, 1e6, 1e9)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "axes"), [((8,), ()), ((1, 8), (0,)), ((8, 1), (1,))])
def test_nobody_to_talk_to_costs_nothing(kind, shape, axes):
    assert mesh("8xH100-80GB", *shape).time_s(kind, axes, GB) == 0.0
    assert mesh("8xH100-80GB", *shape).time_s(kind, axes, 0.0) == 0.0


def test_a_mesh_may_take_part_of_the_cluster():
    assert mesh("16xH100-80GB", 4).link((0,))[0] == 450e9


@pytest.mark.parametrize("shape", [(), (0,), (8, 0), (-2, -4), (9,), (4, 4)])
def test_meshes_that_do_not_fit_are_refused(shape):
    with pytest.raises(InputError, match="wanted a mesh of positive sizes on at most 8 devices"):
        mesh("8xCPU", *shape)


@pytest.mark.parametrize("axes", [(2,), (-1,), (0, 0)])
def test_axes_that_the_mesh_lacks_are_refused(axes):
    with pytest.raises(InputError, match="wanted distinct axes of the mesh"):
        mesh("8xCPU", 2, 4).time_s("all-reduce", axes, 1.0)


def test_an_unknown_collective_is_refused():
    with pytest.raises(InputError, match=r"wanted a collective among all-reduce, .* got 'allreduce'"):
        mesh("8xCPU", 8).time_s("allreduce", (0,), 1.0)


def test_a_slower_inside_is_the_limit():
    cluster = replace(parse_cluster("16xCPU"), intra=Link(1e9, 0.0), inter=Link(4e9, 0.0))
    assert MeshModel(cluster, (4, 4)).link((0,)) == (1e9, 0.0)
    assert MeshModel(cluster, (4, 4)).time_s("all-reduce", (0,), inf) == inf
