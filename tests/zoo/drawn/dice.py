"""What is drawn: sizes, dims, constants, and one of several."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")

SIZES = (8, 12, 16, 24, 8, 12, 16, 24, 8, 12, 24, 1, 2, 3, 4, 5, 6, 7, 13, 47)
"""Sizes of new dimensions: most are what meshes of 8 or of 6 divide, the rest odd, prime and 1; 47 may be split padded."""


class Dice:
    """A generator of random choices; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._rng.integers(len(options)))]

    def flip(self, probability: float = 0.5) -> bool:
        return bool(self._rng.random() < probability)

    def below(self, bound: int) -> int:
        return int(self._rng.integers(bound))

    def between(self, least: int, most: int) -> int:
        """A whole number, both ends included."""
        return least + self.below(most + 1 - least)

    def size(self) -> int:
        return self.pick(SIZES)

    def order(self, count: int) -> tuple[int, ...]:
        """A permutation."""
        return tuple(int(i) for i in self._rng.permutation(count))

    def some(self, count: int) -> tuple[int, ...]:
        """Some of the first whole numbers, at least one, in order."""
        return tuple(sorted(self.order(count)[: self.between(1, count)]))

    def integers(self, bound: int, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.integers(bound, size=shape, dtype=np.int32)

    def numbers(self, shape: tuple[int, ...]) -> np.ndarray:
        """No two alike, all of about size 1."""
        return self._rng.uniform(0.5, 1.5, shape)
