"""Schedules and what they hold, on kernels small enough to reckon by hand."""

import random

import pytest

from cost_model.collectives import MeshModel
from cost_model.hardware import parse_cluster
from search.device.combiner import THRESHOLD_BYTES, combined
from search.device.kernel_order import Ties, latency_hiding, memory_saving, program_order
from search.device.kernel_times import UNKNOWN_S, KernelTime, of_collective
from search.device.lowering import Buffer, Communication, Kernel, Lowered
from search.device.timeline import peak, seconds
from search.problem.live_ranges import Resident

MESH = MeshModel(parse_cluster("8xH100-80GB"), (8,))


def buffer(num_bytes, loops=(), is_argument=False):
    return Buffer(num_bytes, Resident.TEMPORARIES, is_argument, loops)


def kernel(position, reads, makes, time_s=1.0, loops=(), workspace=0.0):
    return Kernel(
        position, tuple(reads), tuple(makes), (), None, workspace, KernelTime(time_s, time_s), loops
    )


def gather(position, reads, makes, num_bytes=8.0, time_s=1.0, kind="all-gather"):
    what = Communication(kind, (0,), num_bytes, "float32")
    return Kernel(position, tuple(reads), tuple(makes), (), what, 0.0, KernelTime(time_s, time_s), ())


def test_the_peak_counts_what_is_still_to_be_read():
    # a (4) is read again at the end; b (8) dies where c (2) is made
    lowered = Lowered(
        (kernel(0, [], [0]), kernel(1, [0], [1]), kernel(2, [1], [2]), kernel(3, [0, 2], [3])),
        (buffer(4.0), buffer(8.0), buffer(2.0), buffer(1.0)),
    )
    found = peak(lowered, program_order(lowered))
    assert (found.num_bytes, found.position) == (4 + 8 + 2, 2)


def test_workspace_and_arguments_count():
    lowered = Lowered(
        (kernel(0, [0], [1]), kernel(1, [1], [2], workspace=16.0)),
        (buffer(100.0, is_argument=True), buffer(8.0), buffer(2.0)),
    )
    assert peak(lowered, program_order(lowered)).num_bytes == 100 + 8 + 2 + 16


def test_what_a_loop_reads_from_outside_lives_to_its_end():
    loop = ((1, 3),)
    lowered = Lowered(
        (
            kernel(0, [], [0]),
            kernel(1, [0], [1], loops=loop),
            kernel(2, [1], [2], loops=loop),
            kernel(3, [3], []),
        ),
        (buffer(10.0), buffer(3.0, loop), buffer(4.0, loop), buffer(1.0, is_argument=True)),
    )
    assert peak(lowered, program_order(lowered)).num_bytes == 10 + 3 + 4 + 1


def test_memory_is_saved_by_doing_next_what_frees_most():
    # two large arrays (0, 1), each reduced to a small one (2, 3); as written, both are there at once
    kernels = (kernel(0, [], [0]), kernel(1, [], [1]), kernel(2, [0], [2]), kernel(3, [1], [3]))
    lowered = Lowered(kernels, (buffer(10.0), buffer(10.0), buffer(1.0), buffer(1.0)))
    saving = memory_saving(lowered)
    assert [k.position for k in saving.kernels] == [0, 2, 1, 3]
    assert peak(lowered, program_order(lowered)).num_bytes == 10 + 10 + 1
    assert peak(saving, program_order(saving)).num_bytes == 10 + 1


def test_an_all_reduce_is_done_in_place_but_joined_ones_in_a_flat_copy():
    arguments = (buffer(0.0, is_argument=True),)
    alone = Lowered(
        (kernel(0, [0], [1]), gather(1, [1], [2], kind="all-reduce")), (*arguments, buffer(8.0), buffer(8.0))
    )
    two = Lowered(
        (kernel(0, [0], [1]), kernel(1, [0], [2]), gather(2, [1, 2], [3, 4], kind="all-reduce")),
        (*arguments, *(buffer(4.0) for _ in range(4))),
    )
    assert peak(alone, program_order(alone)).num_bytes == 8
    assert peak(two, program_order(two)).num_bytes == 16


def test_a_collective_between_nodes_may_hide_behind_anything():
    mesh = MeshModel(parse_cluster("16xH100-80GB"), (2, 8))
    inside, between = (of_collective(mesh, "all-gather", (axis,), 1e6) for axis in (1, 0))
    assert inside.seconds < inside.scheduled_s < 2 * inside.seconds
    assert between.scheduled_s == UNKNOWN_S


def test_a_weight_gradient_is_put_off_into_the_window_of_a_later_collective():
    # dy (0) is read by the weight gradient (1) and by the input's gradient (2), which is reduced (3) for the layer below
    kernels = (
        kernel(0, [], [0]),
        kernel(1, [0], [1]),
        kernel(2, [0], [2]),
        gather(3, [2], [3], kind="all-reduce"),
        kernel(4, [3], [4]),
    )
    lowered = Lowered(kernels, tuple(buffer(1.0) for _ in range(5)))
    assert latency_hiding(lowered, Ties.EARLIEST) == (0, 2, 3, 1, ~3, 4)
    assert seconds(lowered, program_order(lowered)) == 5.0
    assert seconds(lowered, latency_hiding(lowered, Ties.EARLIEST)) == 4.0


def test_a_window_is_no_longer_than_its_collective():
    kernels = (
        *(kernel(i, [], [i]) for i in range(4)),
        gather(4, [3], [4], time_s=2.0),
        kernel(5, [0, 1, 2, 4], [5]),
    )
    lowered = Lowered(kernels, tuple(buffer(1.0) for _ in range(6)))
    order = latency_hiding(lowered, Ties.LATEST)
    assert len(order[order.index(4) + 1 : order.index(~4)]) == 2
    assert sorted(k for k in order if k >= 0) == list(range(6))


def test_independent_collectives_of_a_kind_become_one_up_to_the_threshold():
    third = THRESHOLD_BYTES / 3
    kernels = (
        *(gather(i, [i], [i + 4], num_bytes=1.2 * third) for i in range(3)),
        gather(3, [3], [7], num_bytes=1.2 * third, kind="reduce-scatter"),
    )
    arguments = tuple(buffer(1.0, is_argument=True) for _ in range(4))
    found = combined(Lowered(kernels, (*arguments, *(buffer(8.0) for _ in range(4)))), MESH)
    assert sorted(len(k.makes) for k in found.kernels) == [1, 1, 2]


def test_collectives_that_wait_for_one_another_stay_apart():
    kernels = (gather(0, [0], [1]), kernel(1, [1], [2]), gather(2, [2], [3]))
    found = combined(
        Lowered(kernels, (buffer(1.0, is_argument=True), *(buffer(8.0) for _ in range(3)))), MESH
    )
    assert len(found.kernels) == 3


def test_joined_collectives_do_not_wait_in_a_circle():
    # the second gather waits for the reduction, which waits for the first: the third may join either, not close a ring
    kernels = (
        gather(0, [0], [1]),
        gather(1, [1], [2], kind="all-reduce"),
        gather(2, [2], [3]),
        gather(3, [0], [4], kind="all-reduce"),
    )
    found = combined(
        Lowered(kernels, (buffer(1.0, is_argument=True), *(buffer(8.0) for _ in range(4)))), MESH
    )
    made_by = {b: n for n, k in enumerate(found.kernels) for b in k.makes}
    assert all(made_by[b] < n for n, k in enumerate(found.kernels) for b in k.reads if b in made_by)


def test_one_stream_of_collectives():
    kernels = (
        gather(0, [0], [1], time_s=2.0),
        gather(1, [0], [2], time_s=2.0, kind="all-to-all"),
        kernel(2, [1, 2], [3]),
    )
    lowered = Lowered(kernels, (buffer(1.0, is_argument=True), *(buffer(1.0) for _ in range(3))))
    assert seconds(lowered, (0, 1, ~0, ~1, 2)) == pytest.approx(5.0)


@pytest.mark.parametrize("seed", range(100))
def test_joined_collectives_come_after_what_they_wait_for_whatever_the_program(seed):
    rng = random.Random(seed)
    kernels = []
    for k in range(rng.randint(5, 60)):
        reads = rng.sample(range(k), min(k, rng.randint(0, 2)))
        kinds = ("all-reduce", "all-gather", None, None)
        kind, num_bytes = rng.choice(kinds), rng.choice((1.0, THRESHOLD_BYTES / 3))
        kernels.append(gather(k, reads, [k], num_bytes, kind=kind) if kind else kernel(k, reads, [k]))
    found = combined(Lowered(tuple(kernels), tuple(buffer(1.0) for _ in kernels)), MESH).kernels
    made_by = {b: n for n, k in enumerate(found) for b in k.makes}
    assert sorted(made_by) == list(range(len(kernels)))
    assert all(made_by[b] < n for n, k in enumerate(found) for b in k.reads)
