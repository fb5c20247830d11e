"""Machine code: what it computes, and where it cannot be kept."""

import numpy as np

from autoshard.search.solver.compiled import compiled


def test_a_function_without_a_file_is_compiled_but_not_kept():
    """Numba keeps machine code beside a function's source, or in a folder of the user's. Here there is no source."""
    scope: dict = {}
    exec("def total(values):\n    return values[0] + values[1]", scope)
    assert compiled(scope["total"])(np.array([1.0, 2.0])) == 3.0
