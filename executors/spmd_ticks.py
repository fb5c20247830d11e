"""A loop over layers that passes from stage to stage.

It becomes a loop over ticks: at each tick a stage runs its layers on another microbatch and sends the carry to the next
stage. With p stages of v runs of layers each, and m microbatches, each stage makes v m passes. The n-th pass of the stage
at rank r is at tick n + r. The first stage puts each carry that comes around into a buffer, where it waits for its next
round. In the end the buffer holds the results. A loop in reverse begins at the last stage, and its rounds run backwards.

A pass writes its stacked results into a slot. A pass of the forward loop and a pass of the backward loop have one slot,
if they run the same layers on the same microbatch. An idle stage writes into an additional slot that nobody reads. Sums
over microbatches are accumulated in each pass.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.executors.rewrite import evaluator
from autoshard.executors.spmd_layout import SpmdLayout
from autoshard.search.ir.sharding import OperandReshard, ReshardStep, StepSharding
from autoshard.search.plan.spmd_step import LOOP, LayerLoop, SpmdStep
from autoshard.search.plan.values import STAGE

NOTHING = StepSharding((), (), {}, {})

Arrays = dict[int, Any]
"""Arrays by value."""


@dataclass(frozen=True, eq=False)
class Ticks:
    """A loop over layers, as each stage runs it.

    Attributes:
      layout: the layout of values.
      part: the loop.
    """

    layout: SpmdLayout
    part: LayerLoop

    def run(self, layers: Arrays, once: Arrays, each: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Runs the loop and returns the last layer's results, the stacks, and the sums.

        Args:
          layers: the operands that the loop slices, for this stage: [rounds or slots, layers of a round, ...].
          once: all other operands that microbatches share.
          each: all other operands of each microbatch: [microbatches, ...].

        Returns:
          By value: results of each microbatch, zero but at the stage of rank 0; stacks, [slots, layers of a round, ...];
          and sums, [rounds, layers of a round, ...].
        """
        exported, added = self.part.exported, [v for v in self._stacked if v in self.part.sums]
        waiting = {v: self._zeros(v, self.count + 1) for v in self._carried}
        received = {v: self._zeros(v) for v in self._carried}
        stacks = {v: self._empty(v, self._num_passes + 1) for v in self._stacked if v in exported}
        sums = {v: self._empty(self.part.sums[v], self._rounds) for v in added}

        def tick(state: tuple[Arrays, Arrays, Arrays, Arrays], t: Any) -> tuple[Any, None]:
            waiting, received, stacks, sums = state
            now = self._pass(t)
            consts, first = self._operands(once, {v: x[now.microbatch] for v, x in each.items()})
            is_first = self._rank == 0
            carry = [
                jnp.where(is_first, jnp.where(now.begins, x, waiting[v][now.microbatch]), received[v])
                for v, x in zip(self._carried, first, strict=True)
            ]
            handed_on, stacks, sums = self._layers(now, layers, consts, carry, stacks, sums)
            received = {
                v: self.layout.held(jax.lax.ppermute(self.layout.held(x, v, 0), STAGE, self._ring), v, 0)
                for v, x in zip(self._carried, handed_on, strict=True)
            }
            arrived = t - (self.program.num_workers - 1)
            place = jnp.where(is_first & (arrived >= 0), arrived % self.count, self.count)
            waiting = {v: self.layout.held(_put(x, received[v], place), v) for v, x in waiting.items()}
            return (waiting, received, stacks, sums), None

        ticks = jnp.arange(self._num_passes + self.program.num_workers - 1)
        (waiting, _, stacks, sums), _ = jax.lax.scan(tick, (waiting, received, stacks, sums), ticks)
        handed_out = [v for v in self._carried if v in exported or v in self.part.sums]
        results = {v: waiting[v][: self.count] for v in handed_out}
        results = {v: jnp.where(self._rank == 0, x, jnp.zeros_like(x)) for v, x in results.items()}
        return {v: self.layout.held(x, v) for v, x in results.items()}, stacks, sums

    # --- sizes and positions

    @property
    def program(self) -> SpmdStep:
        """The step."""
        return self.layout.program

    @property
    def count(self) -> int:
        """Number of microbatches of a replica."""
        return self.layout.num_microbatches

    @property
    def _rounds(self) -> int:
        return self.program.stages_per_worker

    @property
    def _num_passes(self) -> int:
        """Number of passes of each stage."""
        return self._rounds * self.count

    @property
    def _num_layers(self) -> int:
        """Number of a stage's layers in a round."""
        return int(self.part.op.params["length"]) // (self.program.num_workers * self._rounds)

    @property
    def _is_reversed(self) -> bool:
        return bool(self.part.op.params["reverse"])

    @property
    def _rank(self) -> Any:
        """The stage's position in the order in which a microbatch passes through the stages."""
        stage = jax.lax.axis_index(STAGE)
        return self.program.num_workers - 1 - stage if self._is_reversed else stage

    @property
    def _ring(self) -> list[tuple[int, int]]:
        """Pairs of stages: the sender of a carry and its receiver."""
        num, step = self.program.num_workers, -1 if self._is_reversed else 1
        return [(i, (i + step) % num) for i in range(num)]

    @property
    def _carried(self) -> tuple[int, ...]:
        return self.part.op.carried

    @property
    def _stacked(self) -> tuple[int, ...]:
        return self.part.op.stacked

    @property
    def _xs(self) -> range:
        """The numbers of the operands that the loop slices."""
        return range(sum(self.part.op.loop_counts), len(self.part.op.inputs))

    @property
    def _sharding(self) -> StepSharding:
        return self.layout.sharding.of_part(self.part)

    def _empty(self, v: int, num: int) -> Any:
        return self.layout.zeros(v, (num, self._num_layers, *self.program.values[v].shape[1:]))

    def _zeros(self, v: int, *ahead: int) -> Any:
        return self.layout.zeros(v, (*ahead, *self.program.values[v].shape), len(ahead))

    # --- the work of a tick

    def _pass(self, t: Any) -> "_Pass":
        n = t - self._rank
        is_busy = (n >= 0) & (n < self._num_passes)
        nth, microbatch = jnp.divmod(jnp.clip(n, 0, self._num_passes - 1), self.count)
        round_ = self._rounds - 1 - nth if self._is_reversed else nth
        return _Pass(is_busy, nth == 0, microbatch, round_, round_ * self.count + microbatch)

    def _operands(self, once: Arrays, each: Arrays) -> tuple[list[Any], list[Any]]:
        """A microbatch's constants, and the carry of its first layer."""
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

    def _of_layer(self, now: "_Pass", layers: Arrays, n: int) -> Callable[[Any], Any]:
        """For a sliced operand, a function from a layer of the pass to the layer's part. An operand that needs a reshard
        is resharded for all layers of the pass at once."""
        atom = self.part.op.inputs[n]
        if not isinstance(atom, int):
            return lambda i: jnp.asarray(atom.val, atom.aval.dtype)
        stack, place = layers[atom], now.slot if atom in self.program.of_microbatch else now.round
        if self._path(n):
            brought = self._brought(stack[place], n)
            return lambda i: _at(brought, i)
        return lambda i: _at(stack, place, i)

    def _brought(self, x: Any, n: int) -> Any:
        """An operand in the spec in which the loop reads it."""
        for step in self._path(n):
            x = self.layout.constrained(x, step.after) if step.is_constrained else x
        return x

    def _path(self, n: int) -> tuple[ReshardStep, ...]:
        return self._sharding.reshards.get(("operand", LOOP, n), OperandReshard(())).path

    def _layers(
        self, now: "_Pass", layers: Arrays, consts: list[Any], carry: list[Any], stacks: Arrays, sums: Arrays
    ) -> tuple[list[Any], Arrays, Arrays]:
        """Runs a stage's layers of a round, one after another. Each layer reads and writes its parts of the stacks in
        place: no pass copies a stack."""
        (body,), num = self.part.op.bodies["jaxpr"], self._num_layers
        layer = evaluator(body, self._sharding, self.layout.own_mesh, (*LOOP, "jaxpr", 0))
        own = [self._of_layer(now, layers, n) for n in self._xs]
        place = jnp.where(now.is_busy, now.slot, self._num_passes)

        def one(n: Any, state: tuple[list[Any], Arrays, Arrays]) -> tuple[list[Any], Arrays, Arrays]:
            carry, stacks, sums = state
            i = num - 1 - n if self._is_reversed else n
            made = layer([*consts, *carry, *(of_layer(i) for of_layer in own)])
            of_value = dict(zip((*self._carried, *self._stacked), made, strict=True))
            stacks = {v: _put(x, of_value[v], place, i) for v, x in stacks.items()}
            more = {v: _added(_at(x, now.round, i), of_value[v], now.is_busy) for v, x in sums.items()}
            sums = {v: _put(x, more[v], now.round, i) for v, x in sums.items()}
            handed_on = [self.layout.held(of_value[v], v, 0) for v in self._carried]
            return handed_on, stacks, sums

        unroll = min(int(self.part.op.params["unroll"]), num)
        return jax.lax.fori_loop(0, num, one, (carry, stacks, sums), unroll=unroll)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The work of a stage at a tick.

    Attributes:
      is_busy: whether the stage works; if not, the other fields are those of an arbitrary pass.
      begins: whether the microbatch is in its first round.
      microbatch: the number of the microbatch.
      round: the number of the stage's run of layers.
      slot: the slot of the stacked results.
    """

    is_busy: Any
    begins: Any
    microbatch: Any
    round: Any
    slot: Any


def _at(x: Any, *place: Any) -> Any:
    """The part of an array at a position along its first dimensions."""
    shape = jnp.shape(x)[len(place) :]
    part = jax.lax.dynamic_slice(x, (*place, *(0 for _ in shape)), (*(1 for _ in place), *shape))
    return jnp.reshape(part, shape)


def _put(x: Any, part: Any, *place: Any) -> Any:
    """An array with a part written at a position along its first dimensions."""
    shape = jnp.shape(part)
    whole = jnp.reshape(part, (*(1 for _ in place), *shape))
    return jax.lax.dynamic_update_slice(x, whole, (*place, *(0 for _ in shape)))


def _added(total: Any, term: Any, is_busy: Any) -> Any:
    return total + jnp.where(is_busy, term, jnp.zeros_like(term)).astype(total.dtype)
