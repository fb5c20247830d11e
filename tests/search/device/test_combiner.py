"""Joined collectives: what is moved stays the same, nothing waits in a circle, and what can be joined is."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.device.combiner import JOINED, THRESHOLD_BYTES, combined
from autoshard.search.device.kernel_times import of_collective
from autoshard.search.device.lowering import Kernel, Lowered
from tests.search.device.programs import buffer, collective, kernel, needed

MESH = MeshModel(parse_cluster("16xH100-80GB"), (2, 8))


def program(*kernels: Kernel) -> Lowered:
    """Kernels, and the buffers that they name."""
    named = {b for k in kernels for b in (*k.reads, *k.makes)}
    made = {b for k in kernels for b in k.makes}
    return Lowered(
        kernels, tuple(buffer(8.0, is_argument=b not in made) for b in range(max(named, default=-1) + 1))
    )


def members(lowered: Lowered, found: Lowered) -> list[list[int]]:
    """Per kernel that was found: those that were joined in it. Every kernel of these tests makes one buffer of its own."""
    maker = {b: k for k, one in enumerate(lowered.kernels) for b in one.makes}
    return [[maker[b] for b in one.makes] for one in found.kernels]


def joined(*kernels: Kernel) -> list[list[int]]:
    """Which kernels became one."""
    lowered = program(*kernels)
    return sorted(found for found in members(lowered, combined(lowered, MESH)) if len(found) > 1)


def test_independent_collectives_of_a_kind_become_one_up_to_the_threshold():
    half, third = 15 * 2**20, 10 * 2**20  # of XLA's default, 30 MiB
    assert joined(*(collective(i, [3], [i], half) for i in range(3))) == [[0, 1]]
    assert joined(*(collective(i, [3], [i], half + 1) for i in range(3))) == []
    assert joined(*(collective(i, [7], [i], third) for i in range(7))) == [[0, 1, 2], [3, 4, 5]]
    assert joined(*(collective(i, [2], [i], num_bytes) for i, num_bytes in enumerate((half + 1, half)))) == []


def test_reduce_scatters_become_one_by_what_a_device_keeps_of_them():
    kept = 15 * 2**20 // 8  # of the option that programs carry, 30 MiB over eight
    for axes, size in (((0,), 2), ((1,), 8), ((0, 1), 16)):
        scatters = [collective(i, [3], [i], kept * size, kind="reduce-scatter", axes=axes) for i in range(3)]
        assert joined(*scatters) == [[0, 1]]


@pytest.mark.parametrize(
    ("other", "are_joined"),
    [
        ({}, True),
        ({"kind": "reduce-scatter"}, False),
        ({"axes": (1,)}, False),
        ({"dtype": "bfloat16"}, False),
        ({"loops": ((1, 2),)}, False),
    ],
)
def test_what_is_joined_is_of_one_kind_axes_dtype_and_loop(other, are_joined):
    assert joined(collective(0, [2], [0]), collective(1, [2], [1], **other)) == [[0, 1]] * are_joined


@pytest.mark.parametrize(
    ("kind", "are_joined"),
    [
        ("all-gather", True),
        ("all-reduce", True),
        ("reduce-scatter", True),
        ("all-to-all", False),
        ("collective-permute", False),
    ],
)
def test_which_kinds_are_joined(kind, are_joined):
    assert joined(*(collective(i, [2], [i], kind=kind) for i in range(2))) == [[0, 1]] * are_joined


def test_collectives_that_wait_for_one_another_stay_apart():
    assert joined(collective(0, [3], [0]), kernel(1, [0], [1]), collective(2, [1], [2])) == []
    assert joined(collective(0, [2], [0]), replace(collective(1, [2], [1]), after=(0,))) == []


def test_joined_collectives_do_not_wait_in_a_circle():
    # the second gather waits for the reduction, which waits for the first: the third may join either, not close a ring
    kernels = (
        collective(0, [4], [0]),
        collective(1, [0], [1], kind="all-reduce"),
        collective(2, [1], [2]),
        collective(3, [4], [3], kind="all-reduce"),
    )
    assert joined(*kernels) == [[1, 3]]


def test_a_joined_collective_is_one_launch_of_all_its_bytes():
    mesh, runs = MESH, 4
    sizes = (1e6, 3e6)
    kernels = [
        replace(
            collective(5 * i, [2], [i], size, axes=(1,)),
            time=of_collective(mesh, "all-gather", (1,), size) * runs,
        )
        for i, size in enumerate(sizes)
    ]
    (found,) = combined(program(*kernels), mesh).kernels
    want_s = runs * mesh.time_s("all-gather", (1,), 4e6)
    assert found.collective == replace(kernels[0].collective, num_bytes=4e6)
    assert found.time.seconds == pytest.approx(want_s)
    assert (found.position, found.reads, found.makes) == (5, (2,), (0, 1))


# --- against a graph in which everybody's waiting is followed


def groups(kernels: Sequence[Kernel]) -> list[list[int]]:
    """Each collective joins the last group of its like, unless it waits for it, itself or through whatever group."""
    found: list[list[int]] = []
    last: dict[tuple, int] = {}
    for k, one in enumerate(kernels):
        what = one.collective
        like = what and what.kind in JOINED and (what.kind, what.axes, what.dtype, one.loops)
        g = last.get(like) if like else None
        if (
            g is None
            or _waits_for(kernels, found, k, g)
            or _num_bytes(kernels, [*found[g], k]) > THRESHOLD_BYTES
        ):
            g = len(found)
            found.append([])
        found[g].append(k)
        if like:
            last[like] = g
    return found


def _waits_for(kernels: Sequence[Kernel], groups: list[list[int]], k: int, g: int) -> bool:
    of = {member: n for n, group in enumerate(groups) for member in group}
    seen, left = set(), [of[n] for n in needed(tuple(kernels), k)]
    while left:
        group = left.pop()
        if group not in seen:
            seen.add(group)
            left += [of[n] for member in groups[group] for n in needed(tuple(kernels), member)]
    return g in seen


def _num_bytes(kernels: Sequence[Kernel], group: list[int]) -> float:
    return sum(kernels[k].collective.num_bytes for k in group)


@st.composite
def collective_programs(draw):
    """Kernels of one buffer each that wait for earlier ones by their buffers or without."""
    kernels: list[Kernel] = []
    for k in range(draw(st.integers(2, 14))):
        earlier = st.lists(st.integers(0, k - 1), max_size=2, unique=True) if k else st.just([])
        reads, after = draw(earlier), tuple(draw(earlier))
        kind = draw(st.sampled_from((None, None, "all-reduce", "all-reduce", "all-gather")))
        if kind is None:
            one = kernel(k, reads, [k])
        else:
            num_bytes = draw(st.sampled_from((1.0, THRESHOLD_BYTES / 3)))
            one = collective(k, reads, [k], num_bytes, kind=kind)
        kernels.append(replace(one, after=after, position=draw(st.integers(0, 9))))
    return program(*kernels)


@given(collective_programs())
def test_what_can_be_joined_is_joined(lowered):
    assert sorted(members(lowered, combined(lowered, MESH))) == sorted(groups(lowered.kernels))


@given(collective_programs())
def test_what_is_moved_stays_the_same(lowered):
    found = combined(lowered, MESH)
    assert found.buffers == lowered.buffers
    for one, group in zip(found.kernels, members(lowered, found), strict=True):
        before = [lowered.kernels[k] for k in group]
        assert set(one.reads) == {b for k in before for b in k.reads}
        assert len(set(one.reads)) == len(one.reads)
        assert one.position == max(k.position for k in before)
        if one.collective is None:
            assert before == [replace(one, after=before[0].after)]
        else:
            assert one.collective.num_bytes == sum(k.collective.num_bytes for k in before)


def _all_needed(before: Sequence[set[int]], n: int) -> set[int]:
    """What a kernel waits for, directly or not."""
    return before[n].union(*(_all_needed(before, m) for m in before[n]))


def test_what_is_joined_for_a_later_layer_lets_nothing_pass_that_no_one_needs_yet():
    """Three layers, one after the other, gather weights; two in two steps, of which the first ones are joined."""
    first, middle, last = range(3)
    kernels = list[Kernel]()
    for layer in (first, middle, last):
        at, b = 3 * layer, 10 * layer
        if layer != middle:
            kernels.append(collective(at, [b], [b + 1], 1024, axes=(0,)))
        kernels.append(
            collective(at + 1, [b if layer == middle else b + 1], [b + 2], THRESHOLD_BYTES, axes=(1,))
        )
        kernels.append(kernel(at + 2, [b + 2, *[b - 7] * (layer > first)], [b + 3]))
    found = combined(program(*kernels), MESH).kernels
    assert [one.position for one in found] == [6, 1, 2, 4, 5, 7, 8]


@given(collective_programs())
def test_kernels_come_by_their_positions_each_ahead_of_the_first_that_needs_it(lowered):
    found = combined(lowered, MESH)
    groups = members(lowered, found)
    place = {k: at for at, group in enumerate(groups) for k in group}
    for one, group in zip(found.kernels, groups, strict=True):
        assert sorted(one.after) == sorted({place[n] for k in group for n in lowered.kernels[k].after})
    before = [needed(found.kernels, at) for at in range(len(groups))]
    assert before == [{place[n] for k in group for n in needed(lowered.kernels, k)} for group in groups]
    for at in range(len(groups)):
        assert max(before[at], default=-1) < at
        first = min(range(at, len(groups)), key=lambda n: (found.kernels[n].position, groups[n][0]))
        assert at == first or at in _all_needed(before, first)
