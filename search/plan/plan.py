"""The plan: the search's answer, the JSON's content, the executor's input.

Its shardings, stages, schedule and retention are the contract: readable, one value per line, keyed by pytree paths and op
names, in PartitionSpec terms. They can be edited by hand and are honoured. `estimates` are the cost model's predictions for
them: they are recomputed whenever a plan is loaded against a step, never trusted. A fingerprint ties the plan to the traced
step.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self, cast, overload

from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.cost_model.whole_file import write_whole
from autoshard.report.page import framed, page
from autoshard.search.plan import edits, former_files
from autoshard.search.plan.comparison import Comparison
from autoshard.search.plan.executors import EXECUTORS, JIT
from autoshard.search.plan.headline import headline
from autoshard.search.plan.json_file import read_file, sealed, text_of
from autoshard.search.plan.metrics import metrics
from autoshard.search.plan.plan_file import SCHEMA, described, read, written
from autoshard.search.plan.summary import summary
from autoshard.search.plan.values import (
    Candidate,
    Collective,
    Decisions,
    Estimates,
    PlanValues,
    Sharding,
    Stage,
    StageEstimates,
)

__all__ = [
    "Candidate",
    "Collective",
    "Decisions",
    "Estimates",
    "Plan",
    "PlanOnStep",
    "Sharding",
    "Stage",
    "StageEstimates",
]

NO_DECISIONS = frozenset(
    {"step", "jax", "options", "meshes", "estimates", "gap", "candidates", "marks", "outline", "seal"}
)
"""Keys of a plan's file that two equal plans may have different values of."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Plan(PlanValues):
    """How to run a training step on a cluster: as one program, or as a pipeline of stages.

    Two plans are equal if they say to do the same: equal decisions (schedule and stages included) for the same traced step
    on an equal cluster under an equal memory cap. The rest does not count: the time of the search, its options and meshes,
    the estimates, the certified gap, and the version of JAX. Equal plans have equal hashes.

    Attributes:
      step: the step function's name.
      fingerprint: fingerprint of the traced step.
      jax: the JAX version that traced it.
      cluster: the cluster, as its JSON file would say it.
      groups: names of the cluster's groups of nodes, in the order in which stages stand on them; of several kinds alone.
      options: the options that the search was given. Pinned arguments are named apart in `shardings`.
      meshes: the meshes that were searched: sizes of their axes.
      memory_bytes: the cap per device.
      executor: `jit`, one program; `mpmd`, a program per stage; or `spmd`, one program for all stages.
      schedule: the schedule of a pipeline, such as `1f1b`; empty without one.
      workers: groups of devices of a pipeline; each may run several stages.
      microbatches: the number of parts in which the step goes through its batch, or each replica of one program for all
        stages through its share.
      stages: in the order of the forward phase; one program has one.
      retention: per class of forward ops, by name, the results that are not kept for the backward phase: `remat` for all,
        or the numbers of the recomputed ones; `offload` likewise; of a loop, `remat in segments of 64`.
      shardings: how devices share the work, for each mesh that replicas of a stage form, on nodes of each kind. Each of its
        decisions may be edited, or deleted to be decided anew.
      estimates: the predictions for these choices; they are made anew whenever a step is given the plan.
      gap: certified by the solver: by this cost model, no plan takes less time than this one by more than this share of
        it. The certificate covers plans on `meshes` and within the options, with the same microbatches, recomputation and
        offloading, that hold at most `memory_bytes` in program order. (The kernels' memory is simulated for the plan found
        only.) Of a pipeline: by this cost model, the work of a step of any pipeline within the options, shared evenly by all
        devices, takes less time than this plan by no more than this share. None if decisions were edited since, or the work
        is not known.
      candidates: those that were tried, with their bounds and times, on which the gap rests; of one program.
      attention: `blockwise` if attention that the step spells out is computed in blocks, whose sequence may be split over a
        ring of devices; empty if it stays as it is.
      overlap: the share of its budget that XLA's scheduler may spend to run communication beside computation, which takes
        memory. At 0 nothing runs beside computation. Always 1 for a pipeline.
      marks: digests of the decisions that the estimates are for (`search.plan.edits`); empty if unknown.
      outline: the traced step's types and ops, to say how another step differs; None in a file without it.
      search_s: seconds of the search, in all and by part; not saved.
      is_sealed: whether the estimates are those of the decisions; False after an edit by hand.

    Example:
      >>> plan = search(step, state, batch, cluster="64xH100-80GB")  # doctest: +SKIP
      >>> plan.save("plan.json")  # doctest: +SKIP
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"strict": True}

    @property
    def edited(self) -> tuple[edits.Decision, ...]:
        """The decisions, by table and name, that were edited or added since the estimates were made."""
        return edits.edited(self)

    @property
    def is_edited(self) -> bool:
        """Whether the estimates are those of other decisions: some were edited, added or deleted since; or whether
        anything else in its file was edited."""
        return edits.is_edited(self)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; the same plan gives the same values in the same order."""
        values = written(self)
        return sealed(values) if self.is_sealed else values

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "Plan":
        """A plan from JSON-ready values, in this form or in one of earlier versions.

        Raises:
          PlanError: a key is missing or of the wrong type; names it.
        """
        if not isinstance(data, dict):
            raise PlanError(f"{place} must be an object, got {json.dumps(data)[:60]}")
        values = cast(dict[str, Any], data)
        if str(values.get("schema")) in former_files.READERS:
            plan = _checked(read(former_files.in_new_form(values, place), cls, place), place)
            return replace(plan, is_sealed=former_files.is_sealed(values))
        _check_schema(values, place)
        plan = _checked(read(values, cls, place), place)
        return replace(plan, is_sealed=values.get("seal") == sealed(written(plan))["seal"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON: the file is whole or not there.

        Raises:
          InputError: the path cannot be written.
        """
        write_whole(Path(path), text_of(self.to_json()) + "\n", "the plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Reads a plan that `save` wrote.

        Raises:
          InputError: no such file, or it cannot be read.
          PlanError: not JSON, or not a plan of this schema; says where.
        """
        return cls.from_json(read_file(path), str(path))

    def metrics(self) -> dict[str, float]:
        """The plan's numbers for a logger, by names that stay: the numbers that `print(plan)` says.

        Always there are `devices` and `memory_cap_bytes`. `examples` and `tokens` of a step are there if the batch tells
        them: examples are the common first dimension of its arrays, tokens the size of its largest array of whole numbers
        with two dimensions. Predictions are left out if decisions were edited since they were made: `predicted_step_s`,
        `model_flops` (of a step, on all devices, recomputed ones left out) and `predicted_mfu` if the step has matrix
        products, `predicted_examples_per_s`, `predicted_tokens_per_s`, `predicted_peak_bytes` and `predicted_host_bytes`
        per device, `compiled_peak_bytes` if the plan was compiled, `predicted_bubble` of a pipeline, and `certified_gap`
        if there is a certificate. Shares are between 0 and 1.

        Raises:
          PlanError: a loaded plan's cluster does not make sense.

        Example:
          >>> wandb.log(train_step.plan.metrics())  # doctest: +SKIP
        """
        return metrics(self)

    @overload
    def report(self, path: None = None) -> str: ...

    @overload
    def report(self, path: str | os.PathLike[str]) -> None: ...

    def report(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """The plan as an HTML page for people: what limits the step, what fills the memory, what lies where. It is one file
        of at most 300 KB that loads nothing.

        Args:
          path: the file to write; without it, the page is returned as text.

        Raises:
          InputError: the path cannot be written.

        Example:
          >>> plan.report("plan.html")  # doctest: +SKIP
        """
        if path is None:
            return page(self)
        return write_whole(Path(path), page(self), "the report")

    def compare(self, other: "Plan") -> Comparison["Plan"]:
        """The differences from another plan: time, memory, collectives, and arguments that are sharded differently."""
        return Comparison[Plan].of(self, other)

    def __repr__(self) -> str:
        """One line: the kind of plan, its step and cluster, and its predictions unless it was edited."""
        title = f"{headline(self)}; step {self.step!r} on {self.cluster.get('name', 'a cluster')}"
        if self.is_edited:
            return f"<Plan: {title}; edited by hand>"
        taken = f"{format_seconds(self.estimates.step_s)}, {format_bytes(self.estimates.peak_bytes)}"
        return f"<Plan: {title}; {taken}>"

    def _repr_html_(self) -> str:
        """The report, as notebooks show it."""
        return framed(page(self))

    def __str__(self) -> str:
        return summary(self)

    def __eq__(self, other: object) -> bool:
        """Whether both plans say to do the same."""
        return self._decided == other._decided if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._decided)

    @property
    def _decided(self) -> str:
        """The part of the plan's file that the program depends on."""
        decided = {key: value for key, value in self.to_json().items() if key not in NO_DECISIONS}
        return json.dumps(decided, sort_keys=True)


@dataclass(frozen=True, eq=False)
class PlanOnStep:
    """A plan on its step: the common part of the results of searches, and of plans that were applied.

    Attributes:
      plan: the plan.
    """

    plan: Plan

    def with_plan(self, **fields: Any) -> Self:
        """A copy whose plan has other values of some fields."""
        return replace(self, plan=replace(self.plan, **fields))

    def waited(self, part: str, seconds: float) -> Self:
        """A copy whose search times also hold these seconds under the name `part`."""
        return self.with_plan(search_s={**self.plan.search_s, part: seconds})


def _check_schema(values: Mapping[str, Any], place: str) -> None:
    if "schema" not in values:
        raise PlanError(f"{place}: schema is missing")
    for key in ("schema", "seal"):
        if key in values and not isinstance(values[key], str):
            raise PlanError(f"{place}: {key} must be text, got {json.dumps(values[key])[:60]}")
    if values["schema"] != SCHEMA:
        known = ", ".join(map(repr, (SCHEMA, *former_files.READERS)))
        raise PlanError(
            f"{place} has schema {values['schema']!r}; this autoshard reads {known}. Search again to make one"
        )


def _checked(plan: Plan, place: str) -> Plan:
    """A plan whose parts go together.

    Raises:
      PlanError: its executor is unknown or is not for as many stages, a pipeline has less overlap, a pin is no text, or
        a stage has no sharding.
    """
    if plan.executor not in EXECUTORS:
        raise PlanError(
            f"{place}: executor must be one of {', '.join(map(repr, EXECUTORS))}, got {plan.executor!r}"
        )
    if (plan.executor == JIT) == plan.is_pipeline or (plan.executor == JIT and len(plan.stages) > 1):
        raise PlanError(
            f"{place}: executor {plan.executor!r} is {EXECUTORS[plan.executor]}, and there are {len(plan.stages)} stages "
            f"under the schedule {plan.schedule!r}. Name a pipeline's executor and its schedule, or neither"
        )
    if plan.is_pipeline and plan.overlap != 1:
        raise PlanError(f"{place}: overlap is {plan.overlap:g}, and must be 1 for a pipeline. Delete the key")
    _check_pins(plan.options.get("pin", {}), place)
    for n, stage in enumerate(plan.stages):
        if stage.sharding >= len(plan.shardings):
            raise PlanError(
                f"{place}: stages[{n}].sharding is {stage.sharding}, and the last of shardings is "
                f"{len(plan.shardings) - 1}"
            )
    return plan


def _check_pins(pins: Any, place: str) -> None:
    if not isinstance(pins, dict):
        raise PlanError(f"{place}: options.pin must be an object, got {json.dumps(pins)[:60]}")
    for name, spec in cast(dict[str, Any], pins).items():
        if not isinstance(spec, str):
            raise PlanError(f"{place}: options.pin.{name} must be text, got {json.dumps(spec)[:60]}")


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a plan's file."""
    return described(Plan)
