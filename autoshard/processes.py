"""Several processes that run one program: they agree on what it is before anything of it is dispatched.

JAX connects them (`jax.distributed.initialize`), each runs the same Python program, and each traces the step. Where they
differed, one would wait for ever for what another never sends. So they tell each other first, through the service that
connects them, what they are about to run, and whoever differs is named in all of them. The first process searches; the
others wait for its plan, or for the error that it ended with.

What they say stands in the service's store under numbered keys: the n-th meeting of one process is the n-th of the others.
The service counts them, so nothing is kept here. Should a process die, the service ends all that wait.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autoshard import planning
from autoshard.cost_model import errors
from autoshard.cost_model.errors import AutoshardError, InputError
from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Step

WAIT_MS = 1000
"""How long to wait before Python may look whether the user has interrupted it. Source: a choice of ours."""

NUM_DIGITS = 16
"""Of a digest: as many as of a step's fingerprint."""

MAX_NAMED = 4
"""Processes that a message names. Source: a choice of ours."""


class HasJson(Protocol):
    """A plan."""

    def to_json(self) -> dict[str, Any]:
        """As JSON-ready values."""
        ...


class HasPlan(Protocol):
    """What a search finds."""

    @property
    def plan(self) -> HasJson:
        """The plan."""
        ...


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes whose devices a step runs on.

    Attributes:
      ids: in ascending order.
    """

    ids: tuple[int, ...]

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Processes":
        """Those that have these devices."""
        return cls(tuple(sorted({d.process_index for d in devices})))

    @property
    def are_several(self) -> bool:
        """Whether there is somebody to agree with."""
        return len(self.ids) > 1

    def agree_on(self, step: Step, devices: Sequence[Any], plan: HasJson | None) -> None:
        """Makes sure that all are about to run the same.

        Args:
          step: what this process is about to run, traced.
          devices: where.
          plan: the one that it is given.

        Raises:
          InputError: a process is about to run something else; names it.
        """
        if self.are_several:
            self._compare(
                {
                    "runs": f"{step.name} with the fingerprint {planning.fingerprint_of(step)}",
                    "runs on": f"the devices {', '.join(str(d.id) for d in devices)}",
                    "has": "no plan" if plan is None else f"a plan with the digest {_digest(plan.to_json())}",
                }
            )

    def _compare(self, running: Mapping[str, str]) -> None:
        """Tells all what this process is about to run, as the ends of sentences by their verbs, and hears them."""
        meeting = self._next_meeting()
        if jax.process_index() in self.ids:
            _jax.coordination().key_value_set(f"{meeting}/{jax.process_index()}", json.dumps(dict(running)))
        said = {p: json.loads(_heard(f"{meeting}/{p}")) for p in self.ids}
        said.setdefault(jax.process_index(), dict(running))
        first = said[self.ids[0]]
        for verb, wanted in first.items():
            others = [p for p, one in said.items() if one[verb] != wanted]
            if others:
                raise InputError(
                    f"the processes do not run the same: process {self.ids[0]} {verb} {wanted}, but not {_named(others)}: "
                    f"process {others[0]} {verb} {said[others[0]][verb]}. Start all with the same program and plan, and "
                    "call the step with arguments of the same shapes"
                )

    def found_by_the_first[Found: HasPlan](
        self, find: Callable[[], Found], apply: Callable[[Any, str], Found]
    ) -> Found:
        """What a search finds; where there are several processes, the first one searches for all.

        Args:
          find: searches.
          apply: from a plan's JSON-ready values, and what messages call it, to what a search with that result finds.

        Raises:
          AutoshardError: what the search raised, in all processes.
        """
        if not self.are_several:
            return find()
        key, first = self._next_meeting(), self.ids[0]
        told = _telling(key, find) if jax.process_index() == first else json.loads(_heard(key))
        if "error" in told:
            kind = getattr(errors, told["error"], AutoshardError)
            raise kind(f"process {first}, which searches for all, found no plan: {told['said']}")
        return apply(told["plan"], f"the plan of process {first}")

    def _next_meeting(self) -> str:
        """The key of what is said at the next meeting of these processes."""
        group = f"autoshard/{'-'.join(map(str, self.ids))}"
        count = _jax.coordination().key_value_increment(f"{group}/met/{jax.process_index()}", 1)
        return f"{group}/{count}"


ALONE = Processes(())
"""For what is planned and not run: nobody to agree with."""


def _digest(data: Any) -> str:
    """What JSON-ready values are known by."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:NUM_DIGITS]


def _telling(key: str, find: Callable[[], HasPlan]) -> dict[str, Any]:
    """Searches, and tells the others what came of it."""
    told: dict[str, Any] = {"error": "AutoshardError", "said": "it was interrupted"}
    try:
        told = {"plan": find().plan.to_json()}
    except Exception as e:
        told = {"error": type(e).__name__, "said": str(e)}
        raise
    finally:
        _jax.coordination().key_value_set(key, json.dumps(told))
    return told


def _heard(key: str) -> str:
    """What another process says, once it does."""
    while True:
        try:
            return _jax.coordination().blocking_key_value_get(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise


def _named(processes: Sequence[int]) -> str:
    few = ", ".join(map(str, processes[:MAX_NAMED]))
    more = f" and {len(processes) - MAX_NAMED} more" * (len(processes) > MAX_NAMED)
    return f"process{'es' * (len(processes) > 1)} {few}{more}"
