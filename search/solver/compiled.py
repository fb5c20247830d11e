"""The one door to Numba, which compiles the solver's innermost loops.

Message sweeps and descents are loops over thousands of tiny tables. In NumPy, each table costs some microseconds of calls
and a few nanoseconds of arithmetic. Compiled, a sweep takes about a tenth of the time. Numba keeps the machine code beside
the source, or in the user's cache folder, so that only the first search after an installation compiles.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from collections.abc import Callable
from typing import cast

import numba


def compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function in machine code, for arrays of numbers and named tuples of them. Sums keep their order."""
    try:
        return cast(Callable[P, R], numba.njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder for the machine code can be written
        return cast(Callable[P, R], numba.njit(error_model="numpy")(function))
