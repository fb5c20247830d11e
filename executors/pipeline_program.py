"""A pipeline's step as it runs: instructions over numbered slots.

The schedule is followed once, when the step is built. Each call then runs a list of instructions: call a function with
the arrays in some slots, store the results in other slots, clear the slots without a later reader. The host never waits.
JAX runs a computation as soon as its operands are there, so the host runs ahead of the devices.
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
class StepInstruction:
    """One instruction of a step.

    Attributes:
      name: the name in traces: `forward 2`, `send`.
      function: takes arrays and returns several.
      reads: the slots of its operands.
      makes: the slots of its results.
      frees: the slots that no later instruction reads.
    """

    name: str
    function: Callable[..., Sequence[Any]]
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]
    frees: tuple[Slot, ...] = ()


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """A step as instructions over slots.

    Attributes:
      step: the traced step.
      args: `jax.ShapeDtypeStruct` pytrees with their shardings, each on the submesh where it rests.
      instructions: in the order in which the host dispatches them.
      slots: the slots' contents before the step.
      entering: the slot of each argument.
      leaving: the slot of each result.
      donated_leaves: numbers of the flat arguments whose buffers may be reused.
      on_retrace: called when the arguments have another pytree, shape or dtype; it should raise.
    """

    step: Step
    args: tuple[Any, ...]
    instructions: tuple[StepInstruction, ...]
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
        """The flat arguments, each in its resting sharding."""
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
        """The flat arguments, after some of them are moved to their resting shardings."""
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
        # A donated argument is copied: otherwise the donation could delete the array of its owner.
        there = [jnp.asarray(leaves[i], wanted[i][1], copy=i in self.donated_leaves or None) for i in moved]
        for i, x in zip(moved, jax.device_put(there, shardings), strict=True):
            leaves[i] = x
        return leaves
