"""Equinox modules among a step's arguments and results, and the step without their constants.

A leaf of an Equinox module may be a function, a number or a text that decides what is traced. `jax.jit` refuses it;
`eqx.filter_jit` makes it static. Here, `apart` turns each leaf of a module that is no array into a `StaticLeaf`, a node of
the pytree without leaves. The structure of the arguments then holds all constants, and a call with others is another
signature. `pure` is the step on such arguments, and `whole` gives the modules back.

Numbers outside of modules stay arguments, as under `jax.jit`. Equinox is only looked at if the user has imported it before.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class StaticLeaf:
    """A leaf that is no array, as a node of a pytree; `1` and `True` are two."""

    kind: type
    value: Any


def apart(tree: Any) -> Any:
    """A pytree with `StaticLeaf`s in its modules; the pytree itself if it needs none."""
    if "equinox" not in sys.modules:
        return tree
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_module)
    parts = [jax.tree.map(_apart, x) if _is_module(x) else x for x in leaves]
    return jax.tree.unflatten(structure, parts)


def pure(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step as a function of arguments with `StaticLeaf`s, to results with `StaticLeaf`s."""

    @functools.wraps(step, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = whole((args, kwargs))
        return apart(step(*args, **kwargs))

    return traced


def whole(tree: Any) -> Any:
    """A pytree with its modules' constants in their places."""
    if "equinox" not in sys.modules:
        return tree
    return jax.tree.map(lambda x: x.value if _is_constant(x) else x, tree, is_leaf=_is_constant)


def arrays(tree: Any) -> Any:
    """A pytree with None in the place of its modules' constants, as `eqx.filter` leaves it."""
    return jax.tree.map(lambda x: None if _is_constant(x) else x, tree, is_leaf=_is_constant)


def are_in(tree: Any) -> bool:
    """True if there are `StaticLeaf`s in a pytree."""
    return "equinox" in sys.modules and any(map(_is_constant, jax.tree.leaves(tree, is_leaf=_is_constant)))


def _is_module(x: Any) -> bool:
    return isinstance(x, sys.modules["equinox"].Module)


def _is_constant(x: Any) -> bool:
    return isinstance(x, StaticLeaf)


def _apart(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else StaticLeaf(type(leaf), leaf)
