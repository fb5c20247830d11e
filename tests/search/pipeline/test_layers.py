"""Layers: where the forward phase may be cut."""

import numpy as np
import pytest

from autoshard.search.pipeline.layers import layer_starts


def blocks(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of two products, with more bytes between these than between blocks."""
    flops = np.tile([0.0, 4.0, 0.0, 4.0], num)
    crossing = np.array([*np.tile([1.0, 2.0, 8.0, 8.0], num), 0.0])
    return flops, crossing


def test_layers_begin_where_the_fewest_bytes_cross_between_two_products():
    assert layer_starts(*blocks(2), most=99) == (0, 2, 4, 6)


def test_borders_at_which_most_crosses_are_given_up_first():
    assert layer_starts(*blocks(4), most=4) == (0, 4, 8, 12)


@pytest.mark.parametrize("most", range(1, 9))
def test_there_are_as_many_as_asked_for_and_of_equal_blocks_none_does_much_more_than_another(most):
    flops, crossing = blocks(8)
    starts = layer_starts(flops, crossing, most)
    work = np.add.reduceat(flops, starts)
    assert len(starts) == most
    assert work.max() <= 2 * work.min() + 8


def test_what_computes_nothing_makes_one_layer():
    assert layer_starts(np.zeros(3), np.ones(4), most=4) == (0,)
