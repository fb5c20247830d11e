"""Numbers for things of which there are few, though they come often: the rules of ops, the types of values.

To compare two deep values takes long, and most of those that are equal are one object: that is told at once.
"""

from collections.abc import Hashable


class Numbering[Thing: Hashable]:
    """Equal things get one number, by the order in which they first come; mutable."""

    def __init__(self) -> None:
        self._numbers: dict[Thing, int] = {}
        self._known: dict[int, tuple[Thing, int]] = {}

    def of(self, thing: Thing) -> int:
        """Its number."""
        known = self._known.get(id(thing))
        if known is None:  # it is kept, so that no other object gets its id
            known = self._known[id(thing)] = thing, self._numbers.setdefault(thing, len(self._numbers))
        return known[1]
