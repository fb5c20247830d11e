"""Kernels that read one array over the same loops become one kernel, where none waits for the other."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.device.lowering import Copies, Lowered, Sums
from autoshard.search.device.siblings import LEAST_BYTES, merged
from tests.search.device.programs import buffer, kernel, needed, programs

LARGE = buffer(LEAST_BYTES)


def over(nest, *details, **more):
    return replace(kernel(*details, **more), nest=nest)


def lowered(*kernels, num_buffers=8):
    return Lowered(kernels, (LARGE,) * num_buffers)


def test_siblings_are_one_kernel_with_all_their_results_where_the_last_stood():
    found = merged(
        lowered(
            kernel(0, [], [0]),
            over("rows", 1, [0, 1], [2], time_s=2.0),
            kernel(2, [0], [3]),
            over("rows", 3, [0], [4]),
        )
    )
    assert [(k.position, k.reads, k.makes, k.time.seconds) for k in found.kernels] == [
        (0, (), (0,), 1.0),
        (2, (0,), (3,), 1.0),
        (3, (0, 1), (2, 4), 3.0),
    ]


def test_what_reads_the_first_goes_behind_both():
    found = merged(
        lowered(
            over("rows", 0, [0], [1]),
            kernel(1, [1], [2]),
            kernel(2, [2], [3], after=(1,)),
            over("rows", 3, [0], [4]),
        )
    )
    assert [k.position for k in found.kernels] == [3, 1, 2]
    assert found.kernels[2].after == (1,)


@pytest.mark.parametrize(
    "between", [kernel(1, [1], [2]), kernel(1, [], [2], after=(0,))], ids=["reads", "after"]
)
def test_a_kernel_that_waits_for_another_is_not_merged_with_it(between):
    program = lowered(over("rows", 0, [0], [1]), between, over("rows", 2, [0, 2], [3]))
    assert merged(program).kernels == program.kernels


@pytest.mark.parametrize(
    "other",
    [
        over("columns", 1, [0], [2]),
        over("rows", 1, [3], [2]),
        over(None, 1, [0], [2]),
        over("rows", 1, [0], [2], loops=((0, 2),)),
    ],
    ids=["other loops", "other arrays", "not fused", "inside a loop"],
)
def test_others_are_left_apart(other):
    program = lowered(over("rows", 0, [0], [1]), other)
    assert merged(program).kernels == program.kernels


@pytest.mark.parametrize("other", ["second half", "first half"])
def test_kernels_that_read_different_slices_of_an_array_stay_apart(other):
    first = replace(over("rows", 0, [0], [1]), parts=((0, "first half"),))
    program = lowered(first, replace(over("rows", 1, [0], [2]), parts=((0, other),)))
    assert len(merged(program).kernels) == (1 if other == "first half" else 2)


def test_a_small_array_makes_no_siblings():
    program = Lowered(
        (over("rows", 0, [0], [1]), over("rows", 1, [0], [2])), (buffer(LEAST_BYTES - 1), LARGE, LARGE)
    )
    assert merged(program).kernels == program.kernels


def summing(dims, *details):
    return replace(over("rows", *details), root=Sums(dims))


def test_sums_over_the_same_dimensions_of_what_both_read_are_one_kernel():
    for dims, num_kernels in (((0,), 1), ((1,), 2)):
        found = merged(lowered(summing((0,), 0, [0, 1], [2]), summing(dims, 1, [0], [3])))
        assert len(found.kernels) == num_kernels


def test_an_array_is_summed_by_the_kernel_that_makes_it():
    found = merged(
        lowered(
            over("rows", 0, [0], [1]), kernel(1, [1], [2]), summing((0,), 2, [1], [3]), kernel(3, [3], [4])
        )
    )
    assert [(k.reads, k.makes) for k in found.kernels] == [((0,), (1, 3)), ((1,), (2,)), ((3,), (4,))]


def test_a_sum_that_a_barrier_makes_wait_for_what_it_sums_up_is_a_kernel_of_its_own():
    program = lowered(over("rows", 0, [0], [1]), replace(summing((0,), 1, [0, 1], [2]), after=(0,)))
    assert merged(program).kernels == program.kernels


def test_an_array_is_written_in_another_order_by_the_kernel_that_makes_it_and_by_no_other():
    copy = replace(over("rows", 1, [1], [2]), root=Copies((1, 0)))
    made, read = over("rows", 0, [0], [1]), over("rows", 2, [1], [3])
    assert [k.makes for k in merged(lowered(made, copy, kernel(3, [2], [4]))).kernels] == [(1, 2), (4,)]
    assert [k.makes for k in merged(lowered(copy, read)).kernels] == [(2,), (3,)]


def test_what_reads_a_sum_is_not_one_kernel_with_it():
    program = lowered(summing((0,), 0, [0], [1]), over("rows", 1, [0, 1], [2]), summing((0,), 2, [2, 1], [3]))
    assert [k.makes for k in merged(program).kernels] == [(1,), (2, 3)]


@given(programs(), st.data())
def test_every_kernel_comes_after_what_it_needs(program, data):
    nests = [
        data.draw(st.sampled_from((None, "rows", "columns"))) if k.collective is None else None
        for k in program.kernels
    ]
    kernels = tuple(replace(k, nest=nest) for k, nest in zip(program.kernels, nests, strict=True))
    found = merged(Lowered(kernels, tuple(replace(b, num_bytes=LEAST_BYTES) for b in program.buffers)))
    made = [b for k in found.kernels for b in k.makes]
    assert sorted(made) == sorted(b for k in kernels for b in k.makes)
    for n in range(len(found.kernels)):
        assert all(before < n for before in needed(found.kernels, n))
