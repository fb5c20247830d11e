"""Candidate meshes: complete where they matter, few everywhere."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.meshes import divisors, finer_shapes, mesh_shapes


@pytest.mark.parametrize(
    ("cluster", "shapes"),
    [
        ("1xCPU", ((1,),)),
        ("2xCPU", ((2,),)),
        ("6xCPU", ((6,), (2, 3))),
        ("7xCPU", ((7,),)),
        ("8xCPU", ((8,), (2, 4))),
        ("12xCPU", ((12,), (2, 6), (4, 3), (6, 2))),
        ("24xCPU", ((24,), (3, 8), (6, 4), (12, 2))),
        ("72xCPU", ((72,), (3, 24), (9, 8), (18, 4), (36, 2))),
        ("64xCPU", ((64,), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2))),
    ],
)
def test_two_axes(cluster, shapes):
    assert mesh_shapes(parse_cluster(cluster)) == shapes


def test_three_axes():
    assert mesh_shapes(parse_cluster("8xCPU"), max_axes=3) == ((8,), (2, 4), (2, 2, 2))
    assert (4, 2, 4) in mesh_shapes(parse_cluster("32xCPU"), max_axes=3)


@pytest.mark.parametrize(
    ("cluster", "shape", "finer"),
    [
        ("64xCPU", (8, 8), ((2, 4, 8), (8, 2, 4))),
        ("64xCPU", (4, 16), ((4, 2, 8), (2, 2, 16), (4, 4, 4), (4, 8, 2))),
        ("12xCPU", (2, 6), ((2, 2, 3),)),
        ("4xCPU", (2, 2), ()),
        ("8xCPU", (8,), ()),
    ],
)
def test_finer_meshes_split_one_axis_and_the_nodes_boundary_first(cluster, shape, finer):
    assert finer_shapes(parse_cluster(cluster), shape) == finer


def test_of_meshes_that_split_several_those_that_lie_alike_are_one():
    """The first: 4x2x8 lies as 2x4x8 does."""
    cluster = parse_cluster("64xH100-80GB")
    assert finer_shapes(cluster, (8, 8), (4, 16)) == ((2, 4, 8), (8, 2, 4), (2, 2, 16), (4, 4, 4), (4, 8, 2))
    assert finer_shapes(cluster, (4, 16), (8, 8))[:2] == ((4, 2, 8), (2, 2, 16))
    assert finer_shapes(cluster, (64,), (8, 8)) == finer_shapes(cluster, (8, 8))


@given(num_nodes=st.integers(1, 600), devices_per_node=st.integers(1, 72), max_axes=st.integers(1, 3))
def test_meshes_use_every_device_and_are_few(num_nodes, devices_per_node, max_axes):
    num_devices = num_nodes * devices_per_node
    cluster = replace(parse_cluster("8xCPU"), num_devices=num_devices, devices_per_node=devices_per_node)
    shapes = mesh_shapes(cluster, max_axes)
    assert all(prod(shape) == num_devices for shape in shapes)
    assert all(min(shape) > 1 and len(shape) <= max_axes for shape in shapes) or num_devices == 1
    assert len(set(shapes)) == len(shapes) <= (1, 8, 29)[max_axes - 1]
    assert shapes[0] == (num_devices,)
    if max_axes > 1 and num_nodes > 1 and devices_per_node > 1:
        assert (num_nodes, devices_per_node) in shapes


def test_the_number_of_meshes_does_not_grow_with_devices():
    assert len(mesh_shapes(parse_cluster("4096xH100-80GB"))) == len(
        mesh_shapes(parse_cluster("64xH100-80GB"))
    )


@pytest.mark.parametrize("max_axes", [0, 4, -1])
def test_other_numbers_of_axes_are_refused(max_axes):
    with pytest.raises(InputError, match="wanted at most 1, 2 or 3 mesh axes"):
        mesh_shapes(parse_cluster("8xCPU"), max_axes)


def test_divisors_are_all_numbers_that_divide():
    for number in range(200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
