"""Functions that are alike are traced once, and what differs is told apart."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.search.ir.graph import Value
from autoshard.search.memory.written import Written

ROW = Value.of(jax.core.ShapedArray((4,), np.dtype(np.float32)))


def shifted(x, by=0, *, times=1):
    return times * x + by


def contents(written: Written) -> list[list[float]]:
    """The literals of each op."""
    return [[float(a.val) for a in op.inputs if not isinstance(a, int)] for op in written.ops]


def test_arguments_of_partial_functions_tell_them_apart():
    written = Written((ROW,))
    for function in (partial(shifted, by=2), partial(shifted, by=3), partial(shifted, by=2, times=5)):
        written.write(function, (0,), None)
    literals = [value for each in contents(written) for value in each]
    assert [value for value in literals if value in (2, 3, 5)] == [2, 3, 5, 2]


def test_alike_partial_functions_are_traced_once():
    traced = list[int]()

    def counted(shape, x):
        traced.append(len(traced))
        return jnp.zeros(shape, x.dtype)

    written = Written((ROW,))
    made = [written.write(partial(counted, (n,)), (0,), None) for n in (2, 3, 2, 3, 2)]
    assert len(traced) == 2
    assert len({*made}) == 5
    assert [written.values[v].shape for v in made if isinstance(v, int)] == [(2,), (3,), (2,), (3,), (2,)]


@pytest.mark.parametrize("operands", [(0,), (1,)])
def test_operands_of_another_type_are_traced_anew(operands):
    narrow = Value.of(jax.core.ShapedArray((4,), np.dtype(np.float16)))
    written = Written((ROW, narrow))
    written.write(partial(shifted, by=1), (0,), None)
    made = written.write(partial(shifted, by=1), operands, None)
    assert isinstance(made, int)
    assert written.values[made].dtype == written.values[operands[0]].dtype
