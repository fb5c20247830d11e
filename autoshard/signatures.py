"""By what calls are told apart, and what tells which of the programs that have run a call wants.

As `jax.jit` keeps programs by the pytree of the arguments, their shapes and dtypes, and the static ones, so do we. To find
all that out takes longer than a small step, so nobody looks at a call that is probably like one before: its program runs.
JAX itself notices if it is not: it refuses arguments that do not split as the program's, the program refuses to be traced
again, and takes no other pytree, and no array twice that is given up. Only then are all leaves looked at (`is_for`). Among
several programs only those leaves are looked at by which they differ.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from autoshard.calls import Call
from autoshard.search.ir import _jax

PYTHON_NUMBERS = (bool, int, float, complex)


def signature(call: Call) -> Any:
    """What has a plan of its own."""
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    return static_of(call), tree, tuple(map(type_of, leaves)), call.form


def static_of(call: Call) -> tuple[Any, ...]:
    """The static arguments, by whose types and values programs differ."""
    return tuple((key, type(value), value) for key, value in call.static)


def type_of(leaf: Any) -> Any:
    """What `jax.jit` keeps programs apart by. A Python number is an array of a type that adapts to others."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, _jax.is_weak(leaf)
    if type(leaf) in PYTHON_NUMBERS:
        return (), _jax.narrowed(np.dtype(type(leaf))), type(leaf) is not bool
    if (dtype := getattr(leaf, "dtype", None)) is None:
        return type(leaf)
    return leaf.shape, _jax.narrowed(dtype), _jax.is_weak(leaf)


def format_type(told: Any) -> str:
    """What `type_of` told: `float32[64,16]`, `weak float32[]`."""
    if not isinstance(told, tuple):
        return told.__name__
    shape, dtype, is_weak = told
    return f"{'weak ' * is_weak}{dtype}[{','.join(map(str, shape))}]"


class Typed(Protocol):
    """What was made for arguments of a pytree and types."""

    @property
    def tree(self) -> Any: ...

    @property
    def types(self) -> tuple[Any, ...]: ...


def is_for(one: Typed, args: tuple[Any, ...]) -> bool:
    """Whether something was made for arguments of this pytree and these types."""
    leaves, tree = jax.tree.flatten(args)
    return tree == one.tree and tuple(map(type_of, leaves)) == one.types


@dataclass
class Known[T: Typed]:
    """What has been made for calls by position.

    Attributes:
      all: in the order in which they came.
    """

    all: list[T] = field(default_factory=list[T])
    _telling: tuple[int, ...] = ()

    def add(self, one: T) -> None:
        """One more."""
        self._keep([*self.all, one])

    def forget(self, one: T) -> None:
        """One less."""
        self._keep([other for other in self.all if other is not one])

    def _keep(self, all: list[T]) -> None:
        self.all, self._telling = all, _telling(all)

    def like(self, args: tuple[Any, ...]) -> T | None:
        """What these arguments probably want."""
        if len(self.all) < 2:
            return self.all[0] if self.all else None
        leaves, tree = jax.tree.flatten(args)
        return next((one for one in self.all if one.tree == tree and self._is_told(one, leaves)), None)

    def _is_told(self, one: T, leaves: Sequence[Any]) -> bool:
        return all(type_of(leaves[i]) == one.types[i] for i in self._telling)


def _telling(known: Sequence[Typed]) -> tuple[int, ...]:
    """The leaves that differ among those for the same pytree."""
    pairs = [(a, b) for a, b in itertools.combinations(known, 2) if a.tree == b.tree]
    differing = {i for a, b in pairs for i, (x, y) in enumerate(zip(a.types, b.types, strict=True)) if x != y}
    return tuple(sorted(differing))
