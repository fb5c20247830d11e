"""A pipeline's step as it runs: instructions over numbered slots.

The schedule was followed once, when the step was built. What is left for each call is a list: call this with what lies in
those slots, put the results there, let go of what nobody reads any more. Nothing waits here. JAX runs what it is handed as
soon as the operands are there, so the host runs ahead of the devices.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.search.ir._jax import narrowed
from autoshard.search.ir.graph import Step

Slot = int


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """A part of a step.

    Attributes:
      name: what it does, for traces: `forward 2`, `send`.
      function: of arrays, with several results.
      reads: where its operands lie.
      makes: where its results go.
      frees: what nobody reads behind it.
    """

    name: str
    function: Callable[..., Sequence[Any]]
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]
    frees: tuple[Slot, ...] = ()


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """What runs: the step as instructions over slots.

    Attributes:
      step: the traced step.
      args: `jax.ShapeDtypeStruct` pytrees with their shardings, each on the submesh where it rests.
      instructions: in the order in which they are handed out.
      slots: what lies in the slots beforehand.
      entering: the slot of each argument.
      leaving: the slot of each result.
      donated_leaves: which of the flat arguments' buffers may be reused.
      on_retrace: called where arguments of other shapes come; it should raise.
    """

    step: Step
    args: tuple[Any, ...]
    instructions: tuple[Instruction, ...]
    slots: tuple[Any, ...]
    entering: tuple[Slot, ...]
    leaving: tuple[Slot, ...]
    donated_leaves: frozenset[int]
    on_retrace: Callable[[], None]

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings of `args`, as pytrees."""
        return jax.tree.map(lambda s: s.sharding, self.args)

    def fn(self, *args: Any) -> Any:
        """Runs a step; takes the step's positional arguments, then its keyword arguments in alphabetical order."""
        slots = list(self.slots)
        for slot, x in zip(self.entering, self._placed(args), strict=True):
            slots[slot] = x
        for one in self.instructions:
            made = one.function(*[slots[slot] for slot in one.reads])
            for slot, x in zip(one.makes, made, strict=True):
                slots[slot] = x
            for slot in one.frees:
                slots[slot] = None
        return jax.tree.unflatten(self.step.out_tree, [slots[slot] for slot in self.leaving])

    @cached_property
    def _wanted(self) -> tuple[Any, tuple[Any, ...]]:
        leaves, tree = jax.tree.flatten(self.args)
        return tree, tuple((s.shape, s.dtype, s.sharding) for s in leaves)

    def _placed(self, args: tuple[Any, ...]) -> list[Any]:
        """The flat arguments, each where it rests."""
        leaves, tree = jax.tree.flatten(args)
        wanted_tree, wanted = self._wanted
        if tree != wanted_tree:
            self.on_retrace()
            raise TypeError(f"wanted arguments as {wanted_tree}, got {tree}")
        moved = [
            i
            for i, (x, (shape, dtype, sharding)) in enumerate(zip(leaves, wanted, strict=True))
            if not (
                isinstance(x, jax.Array) and x.sharding == sharding and x.shape == shape and x.dtype == dtype
            )
        ]
        return self._moved(leaves, wanted, moved) if moved else leaves

    def _moved(self, leaves: list[Any], wanted: Sequence[Any], moved: Sequence[int]) -> list[Any]:
        """The flat arguments when some have been put where they rest."""
        for i in moved:
            x, (shape, dtype, _) = leaves[i], wanted[i]
            got = np.shape(x), narrowed(getattr(x, "dtype", dtype))
            if got != (shape, dtype):
                self.on_retrace()
                raise TypeError(
                    f"wanted an argument of shape {shape} and type {dtype}, got {got[0]} and {got[1]}"
                )
            if i in self.donated_leaves and isinstance(x, jax.Array) and x.committed:
                raise ValueError("state that rests elsewhere is to be placed before")
        shardings = [wanted[i][2] for i in moved]
        # What is donated is copied: it may be its owner's array that would be given up.
        there = [jnp.asarray(leaves[i], wanted[i][1], copy=i in self.donated_leaves or None) for i in moved]
        for i, x in zip(moved, jax.device_put(there, shardings), strict=True):
            leaves[i] = x
        return leaves
