"""What a value of a step is to the batch: it belongs to single examples, is a sum over examples, or neither.

Each value is one of:

* `Whole`: it depends on no example (parameters, keys), or on the inputs alone and is needed in one piece (a count of tokens,
  which divides each example's loss): then it is computed before the microbatches, from the whole batch;
* `PerExample`: one of its dims carries the examples; each microbatch makes its part;
* `Partial`: a sum over examples, or something linear in such sums: a microbatch's contributions add up (gradients, losses);
* `Reduced`: a maximum or the like over examples; the reduction over microbatches ends it;
* `PerMicrobatch`: one of its dims has an element for each microbatch, a statistic of that one's examples (`moments`);
* `Alike`: it depends on no example, but an op makes it that also makes others that do; each microbatch makes it;
* `Finished`: made of sums or reductions in another way than linearly; computed after the last microbatch.

A microbatch takes every count-th example. So a dim that carries examples is read as three, of which the middle one has the
size of that count: places apart by `stride` belong to neighbouring examples. That says all: dims that a reshape has merged
or cut stay followed, and where a step cuts the batch itself, each of its parts is cut in turn.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.graph import Atom, Graph, Op, Value
from autoshard.search.memory.positions import Scope


class NotSplittableError(InputError):
    """A step whose examples depend on one another: in microbatches, its numbers would be others."""


@dataclass(frozen=True, slots=True)
class Whole:
    """It depends on no example, or is computed before the microbatches."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Every microbatch makes the same."""


@dataclass(frozen=True, slots=True)
class PerExample:
    """The dim that carries the examples, and how many places apart in it neighbouring examples are."""

    dim: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Partial:
    """A sum over examples, and the op that sums."""

    cause: Op = field(compare=False)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A maximum, a minimum, a product, or truth of all or any, over examples: the reduction, and the op that makes it."""

    name: str
    cause: Op = field(compare=False)


@dataclass(frozen=True, slots=True)
class PerMicrobatch:
    """The dim that has one element for each microbatch, and the op that says so."""

    dim: int
    cause: Op = field(compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """It takes all examples at once, because of an op."""

    cause: Op = field(compare=False)


OF_MICROBATCH = "autoshard: statistic of a microbatch"
"""The label (`jax.ad_checkpoint.checkpoint_name`) of a value that has an element for each microbatch."""

State = Whole | Alike | PerExample | Partial | Reduced | PerMicrobatch | Finished
WHOLE, ALIKE = Whole(), Alike()


@dataclass(frozen=True, eq=False)
class BatchSplit:
    """What each value of a graph is.

    Attributes:
      scope: the graph, and where it stands.
      count: of microbatches.
      states: by value.
      firsts: the values that depend on the batch and other inputs alone, not on what is learned.
      zeros: the values that are zero.
      wanted: what each output has to be: of a loop's carry that is a sum, a `Partial` also where it is `Whole`.
      inner: by op with bodies, their own splits.
    """

    scope: Scope
    count: int
    states: dict[int, State]
    firsts: set[int]
    zeros: set[int]
    wanted: tuple[State, ...]
    inner: dict[int, dict[str, tuple["BatchSplit", ...]]]

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.scope.graph

    @property
    def entering(self) -> list[State]:
        """What the graph's inputs are."""
        return [self.states[v] for v in self.graph.inputs]

    def state(self, atom: Atom) -> State:
        """What an operand is."""
        return self.states[atom] if isinstance(atom, int) else WHOLE

    def read(self, op: Op) -> list[State]:
        """What an op's operands are."""
        return [self.state(a) for a in op.inputs]

    def makes_finished(self, op: Op) -> bool:
        """Whether an op's results are made of sums or reductions otherwise than linearly."""
        return any(isinstance(self.states[v], Finished) for v in op.outputs)

    def is_zero(self, atom: Atom) -> bool:
        """Whether an operand is zero."""
        return atom in self.zeros if isinstance(atom, int) else not np.any(atom.val)


def is_unsplit(state: State) -> bool:
    """Whether it depends on no example."""
    return isinstance(state, Whole | Alike)


def local_value(value: Value, state: State, count: int) -> Value:
    """A microbatch's part of a value."""
    if not isinstance(state, PerExample | PerMicrobatch):
        return value
    shape = list(value.shape)
    shape[state.dim] //= count
    return replace(value, shape=tuple(shape))


def stacked(state: State) -> State:
    """What becomes of something for each iteration."""
    return replace(state, dim=state.dim + 1) if isinstance(state, PerExample | PerMicrobatch) else state


_REMEDY = "Microbatches would change the numbers: leave such a step in one piece"


def needed(cause: Op, reader: Op) -> NotSplittableError:
    """Something for each example reads what an op makes of all examples."""
    return NotSplittableError(
        f"the step cannot be split into microbatches: {reader.name} {reader.where} needs, for each example, what "
        f"{cause.name} {cause.where} makes of all examples together. {_REMEDY}, or let each example do without the others"
    )


def uncut(op: Op) -> NotSplittableError:
    """An op does with nothing less than all examples."""
    return NotSplittableError(
        f"the step cannot be split into microbatches: {op.name} {op.where} takes all examples together, and no rule says "
        f"how to do it in parts. {_REMEDY}, or let it work on each example by itself"
    )
