"""Methods that compute each result once, and keep it with their object.

`functools.cached_property` does so without arguments. `functools.cache` would keep objects alive as long as the module.
"""

from collections.abc import Callable
from functools import wraps


def memo[Owner, *Args, Result](method: Callable[[Owner, *Args], Result]) -> Callable[[Owner, *Args], Result]:
    """A method that computes once for equal arguments. Arguments are given by position."""
    name = f"{method.__name__} by arguments"

    @wraps(method)
    def recalled(self: Owner, *args: *Args) -> Result:
        known: dict[tuple[*Args], Result] | None = self.__dict__.get(name)
        if known is None:
            known = self.__dict__[name] = {}
        if args not in known:
            known[args] = method(self, *args)
        return known[args]

    return recalled
