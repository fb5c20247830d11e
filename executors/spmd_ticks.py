"""A loop over layers that goes from stage to stage.

It becomes a loop over ticks, in which each stage runs its layers on another microbatch and hands the carry on to the next
stage. With p stages of v runs of layers each, and m microbatches, the n-th of the v m passes of the stage at rank r is at
tick n + r. What comes around is put into a buffer at the first stage, where it waits for its next round, and where the
results lie in the end. A loop in reverse begins at the last stage, and its rounds run backwards.

What a pass stacks up is put into a slot; a pass of the forward loop and one of the backward loop have the same slot if they
run the same layers on the same microbatch. At ticks at which a stage has nothing to do, it writes into a slot more that
nobody reads. What is added up over microbatches is added up at once.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from executors.rewrite import evaluator
from executors.spmd_layout import STAGE, Layout
from search.ir.sharding import OperandReshard, StepSharding
from search.plan.spmd_step import LayerLoop, SpmdStep

LOOP = (0,)
"""Where the loop stands in its part."""

NOTHING = StepSharding((), (), {}, {})

Arrays = dict[int, Any]
"""By value."""


@dataclass(frozen=True, eq=False)
class Ticks:
    """A loop over layers, as each stage runs it.

    Attributes:
      layout: how values lie.
      part: the loop.
    """

    layout: Layout
    part: LayerLoop

    def run(self, layers: Arrays, once: Arrays, each: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """What comes out of the last layer, what is stacked up, and what is added up.

        Args:
          layers: what the loop slices, of this stage: [rounds or slots, layers of a round, ...].
          once: what else it reads.
          each: the same of each microbatch: [microbatches, ...].

        Returns:
          By value: of each microbatch, zero but at the first stage; [slots, layers of a round, ...]; and
          [rounds, layers of a round, ...].
        """
        wanted, added = self.part.wanted, [v for v in self._stacked if v in self.part.sums]
        waiting = {v: self._zeros(v, self.count + 1) for v in self._carried}
        received = {v: self._zeros(v) for v in self._carried}
        stacks = {v: self._empty(v, self._num_passes + 1) for v in self._stacked if v in wanted}
        sums = {v: self._empty(self.part.sums[v], self._rounds) for v in added}

        def tick(state: tuple[Arrays, Arrays, Arrays, Arrays], t: Any) -> tuple[Any, None]:
            waiting, received, stacks, sums = state
            n = t - self._rank
            is_busy = (n >= 0) & (n < self._num_passes)
            nth, microbatch = jnp.divmod(jnp.clip(n, 0, self._num_passes - 1), self.count)
            round_ = self._rounds - 1 - nth if self._is_reversed else nth
            slot = round_ * self.count + microbatch
            consts, first = self._operands(once, {v: x[microbatch] for v, x in each.items()})
            is_first, begins = self._rank == 0, nth == 0
            carry = [
                jnp.where(is_first, jnp.where(begins, x, waiting[v][microbatch]), received[v])
                for v, x in zip(self._carried, first, strict=True)
            ]
            handed_on, made = self._layers(
                consts, carry, [self._sliced(layers, n, slot, round_) for n in self._xs]
            )
            of_value = dict(zip(self._stacked, made, strict=True))
            place = jnp.where(is_busy, slot, self._num_passes)
            stacks = {v: _put(x, of_value[v], place) for v, x in stacks.items()}
            sums = {v: _put(x, _added(x[round_], of_value[v], is_busy), round_) for v, x in sums.items()}
            sent = (jax.lax.ppermute(x, STAGE, self._ring) for x in handed_on)
            received = dict(zip(self._carried, sent, strict=True))
            arrived = t - (self.program.num_workers - 1)
            place = jnp.where(is_first & (arrived >= 0), arrived % self.count, self.count)
            waiting = {v: _put(x, received[v], place) for v, x in waiting.items()}
            return (waiting, received, stacks, sums), None

        ticks = jnp.arange(self._num_passes + self.program.num_workers - 1)
        (waiting, _, stacks, sums), _ = jax.lax.scan(tick, (waiting, received, stacks, sums), ticks)
        handed_out = [v for v in self._carried if v in wanted or v in self.part.sums]
        results = {v: waiting[v][: self.count] for v in handed_out}
        return {v: jnp.where(self._rank == 0, x, jnp.zeros_like(x)) for v, x in results.items()}, stacks, sums

    # --- what is where

    @property
    def program(self) -> SpmdStep:
        """The step."""
        return self.layout.program

    @property
    def count(self) -> int:
        """Microbatches."""
        return self.layout.num_microbatches

    @property
    def _rounds(self) -> int:
        return self.program.stages_per_worker

    @property
    def _num_passes(self) -> int:
        """Of each stage."""
        return self._rounds * self.count

    @property
    def _num_layers(self) -> int:
        """Of a stage, in a round."""
        return int(self.part.op.params["length"]) // (self.program.num_workers * self._rounds)

    @property
    def _is_reversed(self) -> bool:
        return bool(self.part.op.params["reverse"])

    @property
    def _rank(self) -> Any:
        """The stage's place in the order in which a microbatch goes through them."""
        stage = jax.lax.axis_index(STAGE)
        return self.program.num_workers - 1 - stage if self._is_reversed else stage

    @property
    def _ring(self) -> list[tuple[int, int]]:
        """Who hands on to whom."""
        num, step = self.program.num_workers, -1 if self._is_reversed else 1
        return [(i, (i + step) % num) for i in range(num)]

    @property
    def _carried(self) -> tuple[int, ...]:
        return self.part.op.outputs[: self.part.op.loop_counts[1]]

    @property
    def _stacked(self) -> tuple[int, ...]:
        return self.part.op.outputs[self.part.op.loop_counts[1] :]

    @property
    def _xs(self) -> range:
        """The operands that it slices."""
        return range(sum(self.part.op.loop_counts), len(self.part.op.inputs))

    @property
    def _sharding(self) -> StepSharding:
        return self.layout.sharding.of_part(self.part)

    def _empty(self, v: int, num: int) -> Any:
        value = self.program.values[v]
        return self.layout.held(jnp.zeros((num, self._num_layers, *value.shape[1:]), value.dtype), v)

    def _zeros(self, v: int, *ahead: int) -> Any:
        value = self.program.values[v]
        return self.layout.held(jnp.zeros((*ahead, *value.shape), value.dtype), v, len(ahead))

    # --- what runs

    def _operands(self, once: Arrays, each: Arrays) -> tuple[list[Any], list[Any]]:
        """A microbatch's constants, and what its first layer begins with."""
        part, env = self.part, once | each
        made = evaluator(part.ahead, NOTHING, self.layout.own_mesh)([env[v] for v in part.reads])
        env |= dict(zip(part.makes, made, strict=True))
        num_consts, num_carry = part.op.loop_counts
        atoms = part.op.inputs[: num_consts + num_carry]
        read = [
            self._brought(env[a], n) if isinstance(a, int) else jnp.asarray(a.val, a.aval.dtype)
            for n, a in enumerate(atoms)
        ]
        return read[:num_consts], read[num_consts:]

    def _sliced(self, layers: Arrays, n: int, slot: Any, round_: Any) -> Any:
        atom = self.part.op.inputs[n]
        if not isinstance(atom, int):
            return jnp.full((self._num_layers,), atom.val, atom.aval.dtype)
        return self._brought(layers[atom][slot if atom in self.program.of_microbatch else round_], n)

    def _brought(self, x: Any, n: int) -> Any:
        """An operand of the loop as this reads it."""
        reshard = self._sharding.reshards.get(("operand", LOOP, n), OperandReshard(()))
        for step in reshard.path:
            x = self.layout.imposed(x, step.after) if step.is_imposed else x
        return x

    def _layers(self, consts: list[Any], carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        """A stage's layers of a round, one after another."""
        (body,), num_carry = self.part.op.bodies["jaxpr"], self.part.op.loop_counts[1]
        layer = evaluator(body, self._sharding, self.layout.own_mesh, (*LOOP, "jaxpr", 0))

        def one(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            made = layer([*consts, *carry, *xs])
            return made[:num_carry], made[num_carry:]

        unroll = min(int(self.part.op.params["unroll"]), self._num_layers)
        return jax.lax.scan(one, carry, xs, length=self._num_layers, reverse=self._is_reversed, unroll=unroll)


def _put(buffer: Any, x: Any, place: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(buffer, x, place, 0)


def _added(total: Any, term: Any, is_busy: Any) -> Any:
    """The sum, or the total as it was. (A zero as large would be the one that the layers' loop begins its stacks with, and
    the compiler would keep that until here.)"""
    return jnp.where(is_busy, total + term.astype(total.dtype), total)
