"""The public function `what_if`, and the way from its options to rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_hardware
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.progress import Progress, narrated
from autoshard.search.ir.trace import step_name
from autoshard.sweep.cases import Case, cases
from autoshard.sweep.rows import WhatIf, check_prices, cost, steps_for, with_front
from autoshard.sweep.searches import Answer, OfCall, Source, in_turn
from autoshard.tracebacks import boundary
from autoshard.user_warning import warn

DEFAULT_STEPS = 1000
"""Steps that GPU hours are for, if neither steps nor tokens are given."""


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The combinations to search for, and what their prices are for.

    Attributes:
      cases: the combinations.
      steps: number of steps.
      tokens: number of tokens, instead of steps.
      prices: of a GPU hour, by kind of GPU.
      time_limit_s: of each search.
    """

    cases: tuple[Case, ...]
    steps: int | None = None
    tokens: int | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise InputError("wanted steps or tokens, got both")
        for name, number in (("steps", self.steps), ("tokens", self.tokens)):
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise InputError(f"wanted {name} as a whole number, at least 1, got {number!r}")
        if self.prices:
            check_prices(
                self.prices, [parse_hardware(case.cluster) for case in self.cases if _is_known(case)]
            )

    def rows(self, source: Source, processes: int, progress: Progress) -> Iterator[tuple[int, WhatIf]]:
        """The rows as they are found, each with the number of its combination."""
        answers = self._answers(source, processes)
        warned = set[str]()
        progress(f"search 1 of {len(self.cases)}")
        for done, (number, answer) in enumerate(answers, start=2):
            if done <= len(self.cases):
                progress(f"search {done} of {len(self.cases)}")
            for warning in set(answer.warned) - warned:
                warn(warning)
            warned.update(answer.warned)
            yield number, self._row(self.cases[number], answer)

    def _answers(self, source: Source, processes: int) -> Iterator[tuple[int, Answer]]:
        if not processes:
            return in_turn(source, self.cases, self.time_limit_s)
        from autoshard.sweep.pool import at_once  # it takes a while to import

        return at_once(source, self.cases, self.time_limit_s, processes)

    def _row(self, case: Case, answer: Answer) -> WhatIf:
        row = WhatIf(
            cluster=case.name, memory_bytes=case.memory_bytes, plan=answer.plan, reason=answer.reason
        )
        if answer.plan is None:
            return row
        steps = self.steps or DEFAULT_STEPS if self.tokens is None else steps_for(self.tokens, answer.plan)
        price = cost(answer.plan, steps, self.prices)
        return replace(row, steps=steps, cost=price)


def _is_known(case: Case) -> bool:
    """Whether a combination has a cluster: a preset has not every number of devices."""
    try:
        parse_hardware(case.cluster)
    except InputError:
        return False
    return True


def in_order(numbered: Mapping[int, WhatIf]) -> tuple[WhatIf, ...]:
    """The rows found so far in the order of their combinations, with the Pareto front."""
    return with_front([numbered[number] for number in sorted(numbered)])


@boundary
def what_if(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    clusters: Sequence[str | AnyCluster],
    memory: Sequence[str | int] = (),
    devices: Sequence[int] = (),
    steps: int | None = None,
    tokens: int | None = None,
    prices: Mapping[str, float] | None = None,
    state: Any = None,
    time_limit_s: float | None = None,
    processes: int = 0,
    progress: Progress | None = None,
    **abstract_kwargs: Any,
) -> tuple[WhatIf, ...]:
    """Searches for a plan of a step on each of several clusters: which to book, and whether the step fits.

    The step and its global batch stay as they are on all clusters: more devices have fewer examples each.

    Args:
      step: a training step for one device, as for `search`.
      *abstract_args: the shapes of the step's arguments, as for `search`.
      clusters: each as for `search`; a preset's name alone is a full node.
      memory: caps per device, each as for `search`; by default, and at most, what each device has for programs.
      devices: numbers of devices, with which each preset is tried instead of its own.
      steps: the number of steps that GPU hours and costs are for; by default 1,000.
      tokens: the number of tokens instead.
      prices: the price of a GPU hour by kind of GPU, such as `{"h100": 2.5}`: the beginning of a preset's name up to a
        hyphen.
      state: as for `search`.
      time_limit_s: as for `search`, for each combination.
      processes: the number of processes that search; by default this one does, one search after another. For other
        processes the step must be a function of a module, and a script must call this function below
        `if __name__ == "__main__"`.
      progress: as for `search`.
      **abstract_kwargs: the shapes of arguments that are given by keyword.

    Returns:
      A row for each combination, in order: its plan, or the reason why there is none. `is_on_front` marks the rows that are
      best: no other is as fast and as cheap, and better in one of both.

    Raises:
      InputError: a cluster, an option or the step cannot be used.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> w, x = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")
      >>> [row.plan is not None for row in what_if(step, w, x, clusters=["8xL4"], memory=["1MiB", "20GiB"])]
      [False, True]
    """
    sweep = SweepRequest(cases(clusters, memory, devices), steps, tokens, prices or {}, time_limit_s)
    source = OfCall(step, abstract_args, abstract_kwargs, state)
    with narrated(step_name(step), "searching", progress) as tell:
        return in_order(dict(sweep.rows(source, processes, tell)))
