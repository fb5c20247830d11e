"""Several processes that run one program: they agree on the program before any of it is dispatched.

JAX connects the processes (`jax.distributed.initialize`); each runs the same Python program and traces the step. If their
programs differed, a process could wait for ever for a message that is never sent. So each process first publishes a
description of its program through JAX's coordination service, and all of them name the process that differs. The first
process searches; the others wait for its plan or its error.

Messages are stored in the service under numbered keys: the n-th meeting of one process is the n-th of the others. The
service counts the meetings, so this module has no state. If a process dies, the service ends the processes that wait.
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
from autoshard.search.plan.text_table import few

WAIT_MS = 1000
"""Longest wait before Python can handle Ctrl-C. Source: a user notices longer ones (`autoshard.progress.NOTICED_S`)."""

NUM_DIGITS = 16
"""Hexadecimal digits of a digest, as many as in a step's fingerprint."""


class HasJson(Protocol):
    """A plan that can be sent to other processes."""

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values."""
        ...


class HasPlan(Protocol):
    """The result of a search."""

    @property
    def plan(self) -> HasJson:
        """The plan."""
        ...


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes whose devices a step runs on.

    Attributes:
      ids: the process indices, ascending.
    """

    ids: tuple[int, ...]

    @classmethod
    def of(cls, devices: Sequence[Any]) -> "Processes":
        """The processes that own these devices."""
        return cls(tuple(sorted({d.process_index for d in devices})))

    @property
    def are_several(self) -> bool:
        """True if there is more than one process."""
        return len(self.ids) > 1

    def agree_on(self, step: Step, devices: Sequence[Any], plan: HasJson | None) -> None:
        """Checks that all processes run this step, on these devices, with this plan.

        Args:
          plan: the given plan; None if the step is searched.

        Raises:
          InputError: a process differs; the message names it.
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
        """Publishes the facts about this process and compares those of all; facts are ends of sentences, keyed by verb."""
        meeting = self._next_meeting()
        if jax.process_index() in self.ids:
            _jax.coordination().key_value_set(f"{meeting}/{jax.process_index()}", json.dumps(dict(running)))
        reports = {p: json.loads(_heard(f"{meeting}/{p}")) for p in self.ids}
        reports.setdefault(jax.process_index(), dict(running))
        first = reports[self.ids[0]]
        for verb, wanted in first.items():
            others = [p for p, one in reports.items() if one[verb] != wanted]
            if others:
                raise InputError(
                    f"the processes do not run the same: process {self.ids[0]} {verb} {wanted}, but not {_named(others)}: "
                    f"process {others[0]} {verb} {reports[others[0]][verb]}. Start all with the same program and plan, and "
                    "call the step with arguments of the same shapes"
                )

    def found_by_the_first[Found: HasPlan](
        self, find: Callable[[], Found], apply: Callable[[Any, str], Found]
    ) -> Found:
        """The result of a search that only the first of several processes runs.

        Args:
          find: runs the search.
          apply: rebuilds the result of a search from a plan's JSON-ready values and the plan's name in messages.

        Raises:
          AutoshardError: the search failed; every process raises an error of the kind that the search raised.
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
        """The key prefix of the next meeting of these processes."""
        group = f"autoshard/{'-'.join(map(str, self.ids))}"
        count = _jax.coordination().key_value_increment(f"{group}/met/{jax.process_index()}", 1)
        return f"{group}/{count}"


ALONE = Processes(())
"""No processes: for plans that are not run, which need no agreement."""


def _digest(data: Any) -> str:
    """A SHA-256 digest of JSON-ready values, shortened to `NUM_DIGITS`."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:NUM_DIGITS]


def _telling(key: str, find: Callable[[], HasPlan]) -> dict[str, Any]:
    """Searches, and publishes the plan or the error for the other processes."""
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
    """The value of a key; waits until another process publishes it."""
    while True:
        try:
            return _jax.coordination().blocking_key_value_get(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" not in str(e):
                raise


def _named(processes: Sequence[int]) -> str:
    return f"process{'es' * (len(processes) > 1)} {few([*map(str, processes)])}"
