"""The relation of a step's values to the batch: a value belongs to single examples, is a sum over examples, or neither.

Each value is one of:

* `Whole`: it depends on no example (parameters, keys), or on the inputs alone and is needed in one piece (a count of tokens,
  which divides each example's loss). The latter is computed before the microbatches, from the whole batch;
* `PerExample`: one of its dims carries the examples; each microbatch makes its part;
* `Partial`: a sum over examples, or a linear function of such sums: the contributions of microbatches add up (gradients,
  losses);
* `Reduced`: a maximum or a similar reduction over examples; a reduction over microbatches completes it;
* `PerMicrobatch`: one of its dims has an element for each microbatch, a statistic of its examples (`moments`);
* `Alike`: it depends on no example, but its op has other results that do; each microbatch makes it;
* `Finished`: a function of sums or reductions that is not linear; computed after the last microbatch.

A microbatch takes every count-th example. So a dim that carries examples is read as three, of which the middle one has the
size of that count; neighbouring examples are `stride` places apart. Dims that a reshape has merged or cut can therefore be
followed, and if a step cuts the batch itself, each of its parts is cut in turn.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.graph import Atom, Graph, Op, Value
from autoshard.search.memory.positions import Scope


class NotSplittableError(InputError):
    """A step whose examples depend on one another: in microbatches, its numbers would differ.

    Attributes:
      at: the op that is the reason, and its place; empty if no op is.
      other: another number of microbatches, into which the step can be split; zero if there is none.
    """

    section = "not-split-into-microbatches"

    def __init__(self, message: str = "", *, at: str = "", other: int = 0) -> None:
        super().__init__(message)
        self.at, self.other = at, other


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that depends on no example, or is computed before the microbatches."""


@dataclass(frozen=True, slots=True)
class Alike:
    """A value that is equal in every microbatch."""


@dataclass(frozen=True, slots=True)
class PerExample:
    """A value with a dim that carries the examples; neighbouring examples are `stride` places apart in it."""

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
    """A value with a dim that has one element for each microbatch, and the op that marks it."""

    dim: int
    cause: Op = field(compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """A value that needs all examples at once, and the op that causes this."""

    cause: Op = field(compare=False)


OF_MICROBATCH = "autoshard: statistic of a microbatch"
"""The label (`jax.ad_checkpoint.checkpoint_name`) of a value that has an element for each microbatch."""

State = Whole | Alike | PerExample | Partial | Reduced | PerMicrobatch | Finished
WHOLE, ALIKE = Whole(), Alike()


@dataclass(frozen=True, eq=False)
class BatchSplit:
    """The states of a graph's values.

    Attributes:
      scope: the graph, and its place.
      count: number of microbatches.
      states: by value.
      firsts: the values that depend on the batch and other inputs alone, not on learned parameters.
      zeros: the values that are zero.
      wanted: the state that each output must have: for a loop's carry that is a sum, a `Partial` even if it is `Whole`.
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
        """The states of the graph's inputs."""
        return [self.states[v] for v in self.graph.inputs]

    def state(self, atom: Atom) -> State:
        """The state of an operand."""
        return self.states[atom] if isinstance(atom, int) else WHOLE

    def read(self, op: Op) -> list[State]:
        """The states of an op's operands."""
        return [self.state(a) for a in op.inputs]

    def makes_finished(self, op: Op) -> bool:
        """True if a result of an op is `Finished`."""
        return any(isinstance(self.states[v], Finished) for v in op.outputs)

    def is_zero(self, atom: Atom) -> bool:
        """True if an operand is zero."""
        return atom in self.zeros if isinstance(atom, int) else not np.any(atom.val)


def is_unsplit(state: State) -> bool:
    """True if a value in this state depends on no example."""
    return isinstance(state, Whole | Alike)


def local_value(value: Value, state: State, count: int) -> Value:
    """The type of a microbatch's part of a value."""
    if not isinstance(state, PerExample | PerMicrobatch):
        return value
    shape = list(value.shape)
    shape[state.dim] //= count
    return replace(value, shape=tuple(shape))


def stacked(state: State) -> State:
    """The state of a loop's stack of values in this state."""
    return replace(state, dim=state.dim + 1) if isinstance(state, PerExample | PerMicrobatch) else state


_REMEDY = "Microbatches would change the numbers: leave such a step in one piece"


def needed(cause: Op, reader: Op) -> NotSplittableError:
    """The error for an op that reads, for each example, a value made of all examples."""
    return NotSplittableError(
        f"the step cannot be split into microbatches: {reader.name} {reader.where} needs, for each example, what "
        f"{cause.name} {cause.where} makes of all examples together. {_REMEDY}, or let each example do without the others",
        at=f"{reader.name} {reader.where}",
    )


def uncut(op: Op) -> NotSplittableError:
    """The error for an op that needs all examples at once."""
    return NotSplittableError(
        f"the step cannot be split into microbatches: {op.name} {op.where} takes all examples together, and no rule says "
        f"how to do it in parts. {_REMEDY}, or let it work on each example by itself",
        at=f"{op.name} {op.where}",
    )
