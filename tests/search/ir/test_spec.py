"""Specs as text and in JAX's terms, and how they cut arrays, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.spec import (
    PARTIAL,
    WHOLE,
    divides,
    format_spec,
    from_partition_spec,
    may_split,
    parse_spec,
    partition_spec,
    shard_size,
)

AXES = ("replica", "data", "model")

WRITTEN = {
    (WHOLE, WHOLE, WHOLE): "P()",
    (WHOLE, 0, WHOLE): "P('data')",
    (WHOLE, 1, 0): "P('model', 'data')",
    (WHOLE, 2, WHOLE): "P(None, None, 'data')",
    (0, WHOLE, 0): "P(('replica', 'model'))",
    (WHOLE, PARTIAL, WHOLE): "P(unreduced={'data'})",
    (PARTIAL, 1, PARTIAL): "P(None, 'data', unreduced={'replica', 'model'})",
}


@pytest.mark.parametrize("spec", WRITTEN)
def test_a_spec_is_written_as_jax_writes_it(spec):
    assert format_spec(spec, AXES) == WRITTEN[spec]


@given(st.tuples(*[st.integers(PARTIAL, 3)] * 3))
def test_what_is_written_is_read_again(spec):
    assert parse_spec(format_spec(spec, AXES), AXES) == spec


def test_a_constraint_says_nothing_of_partial_axes():
    assert partition_spec((PARTIAL, 1, WHOLE), AXES) == P(None, "data")
    assert partition_spec((0, 0, 2), AXES) == P(("replica", "data"), None, "model")


def test_a_users_spec():
    assert from_partition_spec(P(), AXES) == (WHOLE, WHOLE, WHOLE)
    assert from_partition_spec(P(None, "model", ("replica", "data")), AXES) == (2, 2, 1)
    assert from_partition_spec(P((), "model"), AXES) == (WHOLE, WHOLE, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "wanted a spec such as"),
        ("P('rows')", r"'rows' is not in the mesh \('replica', 'data', 'model'\)"),
        ("P('data', 'data')", "an axis is used twice"),
        ("P('data', unreduced={'data'})", "an axis is used twice"),
        ("P(data)", r"wanted quoted axis names or None, got 'data' in the spec 'P\(data\)'"),
        ("P(unreduced={data})", "wanted quoted axis names or None, got 'data'"),
    ],
)
def test_what_is_no_spec_of_this_mesh(text, message):
    with pytest.raises(PlanError, match=message):
        parse_spec(text, AXES)


def test_each_device_holds_a_part_of_each_dimension_that_is_split():
    mesh = (2, 3, 4)
    assert shard_size((WHOLE, PARTIAL, WHOLE), (12, 24), mesh) == 12 * 24
    assert shard_size((0, WHOLE, 1), (12, 24), mesh) == 6 * 6
    assert shard_size((1, 1, PARTIAL), (12, 24), mesh) == 12 * 4
    assert shard_size((0, WHOLE, WHOLE), (5, 2), mesh) == 3 * 2  # padded


def test_a_dimension_splits_evenly_or_with_little_padding():
    assert divides((0, 0, WHOLE), (12, 5), (2, 3, 4))
    assert not divides((0, 0, WHOLE), (10, 6), (2, 3, 4))
    assert not divides((0, WHOLE, 1), (12, 6), (2, 3, 4))
    assert may_split(50257, 8)  # by 7 rows
    assert may_split(63, 64) is True
    assert may_split(62, 64) is False
