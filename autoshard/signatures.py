"""Signatures of calls, and the choice of a program that has run for a new call.

A signature is that of `jax.jit`: the arguments' pytree, their shapes and dtypes, and the static arguments. Computing it
takes longer than a small step. So a call that probably has a known signature runs that program unchecked. JAX detects a
wrong guess: a program refuses other shardings, another pytree, a new trace, and a donated array that is given twice. Only
then are all leaves compared (`is_for`). Among several programs, only the leaves in which their types differ are compared.
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
    """The key of a call's plan and program."""
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    return static_of(call), tree, tuple(map(type_of, leaves)), call.form


def static_of(call: Call) -> tuple[Any, ...]:
    """The static arguments as (position or name, type, value)."""
    return tuple((key, type(value), value) for key, value in call.static)


def type_of(leaf: Any) -> Any:
    """An array's shape, dtype and weak type, as in `jax.jit`'s signatures. A Python number is a weakly typed scalar."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, _jax.is_weak(leaf)
    if type(leaf) in PYTHON_NUMBERS:
        return (), _jax.narrowed(np.dtype(type(leaf))), type(leaf) is not bool
    if (dtype := getattr(leaf, "dtype", None)) is None:
        return type(leaf)
    return leaf.shape, _jax.narrowed(dtype), _jax.is_weak(leaf)


def format_type(told: Any) -> str:
    """The text of a result of `type_of`: `float32[64,16]`, `weak float32[]`."""
    if not isinstance(told, tuple):
        return told.__name__
    shape, dtype, is_weak = told
    return f"{'weak ' * is_weak}{dtype}[{','.join(map(str, shape))}]"


class Typed(Protocol):
    """A value that belongs to arguments with one pytree and one type per leaf."""

    @property
    def tree(self) -> Any: ...

    @property
    def types(self) -> tuple[Any, ...]: ...


def is_for(one: Typed, args: tuple[Any, ...]) -> bool:
    """True if a value belongs to arguments with this pytree and these types."""
    leaves, tree = jax.tree.flatten(args)
    return tree == one.tree and tuple(map(type_of, leaves)) == one.types


@dataclass
class BySignature[T: Typed]:
    """Values by signature, for calls with positional arguments alone.

    Attributes:
      all: the values, in order of insertion.
    """

    all: list[T] = field(default_factory=list[T])
    _telling: tuple[int, ...] = ()

    def add(self, one: T) -> None:
        """Adds a value."""
        self._keep([*self.all, one])

    def forget(self, one: T) -> None:
        """Removes a value."""
        self._keep([other for other in self.all if other is not one])

    def _keep(self, all: list[T]) -> None:
        self.all, self._telling = all, _telling(all)

    def like(self, args: tuple[Any, ...]) -> T | None:
        """The value that probably belongs to these arguments; None if there is none."""
        if len(self.all) < 2:
            return self.all[0] if self.all else None
        leaves, tree = jax.tree.flatten(args)
        return next((one for one in self.all if one.tree == tree and self._is_told(one, leaves)), None)

    def _is_told(self, one: T, leaves: Sequence[Any]) -> bool:
        return all(type_of(leaves[i]) == one.types[i] for i in self._telling)


def _telling(known: Sequence[Typed]) -> tuple[int, ...]:
    """The indices of leaves whose types differ between two values with one pytree, in ascending order."""
    pairs = [(a, b) for a, b in itertools.combinations(known, 2) if a.tree == b.tree]
    differing = {i for a, b in pairs for i, (x, y) in enumerate(zip(a.types, b.types, strict=True)) if x != y}
    return tuple(sorted(differing))
