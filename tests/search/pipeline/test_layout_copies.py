"""What a part of a step copies into the orders that its products want: how much, how often, and when."""

from dataclasses import replace

from autoshard.search.device.handed_over import TurnedCopy
from autoshard.search.device.kernel_order import program_order
from autoshard.search.device.lowering import Lowered
from autoshard.search.device.timeline import peak
from autoshard.search.device.workspace import SLICED_WORKSPACE_BYTES, WORKSPACE_BYTES
from autoshard.search.pipeline.layout_copies import with_copies
from tests.search.device.programs import buffer, kernel

LAYERS, LAYER_BYTES = 4, 8.0
ROWS_FIRST, SUMS_FIRST = (0, 2, 1, 3), (0, 2, 3, 1)
LOOP = ((1, 3),)


def product(position, reads, makes, *wants, loops=(), workspace=0.0):
    """A product that wants orders of buffers: of parts of stacks inside of a loop, of arrays outside."""
    copies = tuple(
        TurnedCopy(b, order, LAYER_BYTES, bool(loops), LAYERS if loops else 1) for b, order in wants
    )
    made = kernel(position, reads, makes, workspace=workspace, loops=loops)
    sliced = tuple(b for b, _ in wants) if loops else ()
    return replace(made, turned=copies, sliced=sliced)


def peak_bytes(lowered: Lowered) -> float:
    return peak(lowered, program_order(lowered)).num_bytes


def test_what_a_part_is_handed_is_copied_once_for_all_products_that_want_one_order():
    part = Lowered(
        (
            product(0, [0], [1], (0, ROWS_FIRST)),
            product(1, [0], [2], (0, ROWS_FIRST)),
            kernel(2, [1, 2], []),
        ),
        (buffer(0.0), buffer(1.0), buffer(2.0)),
    )
    copied = with_copies(part, frozenset((0,)))
    assert len(copied.kernels) == 1 + len(part.kernels)
    assert peak_bytes(copied) == LAYER_BYTES + 1.0 + 2.0
    assert with_copies(part, frozenset()).kernels == part.kernels  # what it makes itself lies as it is wanted


def test_a_stack_is_copied_whole_before_its_loop_and_by_layers_for_another_order():
    part = Lowered(
        (
            kernel(0, [], [1]),
            product(1, [0], [2], (0, ROWS_FIRST), loops=LOOP, workspace=SLICED_WORKSPACE_BYTES),
            product(2, [0, 2], [3], (0, SUMS_FIRST), loops=LOOP, workspace=SLICED_WORKSPACE_BYTES),
            kernel(3, [1, 3], []),
        ),
        (buffer(0.0), buffer(1.0), buffer(2.0, LOOP), buffer(4.0)),
    )
    copied = with_copies(part, frozenset((0,)))
    before, _, first, by_layer, second, _ = copied.kernels
    assert [k.loops for k in (before, by_layer)] == [(), LOOP]
    sizes = [copied.buffers[b].num_bytes for k in (before, by_layer) for b in k.makes]
    assert sizes == [LAYERS * LAYER_BYTES, LAYER_BYTES]
    assert first.workspace_bytes == SLICED_WORKSPACE_BYTES  # it reads its layer of the copy where it is
    assert second.workspace_bytes == WORKSPACE_BYTES
    around = LAYERS * LAYER_BYTES + 1.0 + 4.0
    assert peak_bytes(copied) == around + 2.0 + SLICED_WORKSPACE_BYTES


def test_kernels_wait_for_the_same_ones_as_before():
    part = Lowered(
        (
            kernel(0, [], [1]),
            product(1, [0], [2], (0, ROWS_FIRST), loops=LOOP),
            replace(kernel(2, [2], [3]), after=(0, 1)),
        ),
        (buffer(0.0), buffer(1.0), buffer(2.0), buffer(3.0)),
    )
    copied = with_copies(part, frozenset((0,)))
    last = copied.kernels[-1]
    assert [copied.kernels[k].position for k in last.after] == [0, 1]
    assert all(copied.kernels[k].makes in ((1,), (2,)) for k in last.after)
