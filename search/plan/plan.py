"""The plan: the search's answer, the JSON's content, the executor's input.

`decisions` are the contract: readable, one value per line, keyed by pytree paths and op names, in
PartitionSpec terms. They can be edited by hand and are honoured. `estimates` are the cost model's
predictions for them: they are recomputed whenever a plan is loaded against a step, never trusted. A fingerprint ties the
plan to the traced step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.edits import Decision, edited, num_deleted
from autoshard.search.plan.executors import JIT
from autoshard.search.plan.json_file import schema_of
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.peak_band import compiled_json
from autoshard.search.plan.saved import SavedPlan
from autoshard.search.plan.work_shares import WorkShares

if TYPE_CHECKING:
    from autoshard.search.plan.comparison import Comparison

SCHEMA = "autoshard.plan/1"


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind over the same mesh axes, in one step.

    Attributes:
      kind: XLA's name: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`.
      axes: names of mesh axes.
      count: how many run in one step.
      bytes: per device and step: of each, the larger of input and output.
      seconds: predicted, per step.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimates:
    """The cost model's predictions for a plan.

    Attributes:
      step_s: seconds per step: `compute_s`, the collectives' seconds and `transfer_s`, less `hidden_s`.
      compute_s: seconds of computation.
      recompute_s: seconds of computation and communication of recomputed ops.
      transfer_s: seconds of copies between the device and its host.
      hidden_s: seconds of collectives and copies that run behind computation.
      peak_bytes: device memory at its highest, per device.
      host_bytes: pinned host memory, per device.
      residents: bytes per device at the peak, by kind.
      peak_at: the op at which the peak occurs, with its source line.
      collectives: per kind and axes.
      shares: how the mesh axes share the work; None in files of earlier versions.
      compiled_peak_bytes: device memory at its highest in the compiled program; None if it was not compiled.
    """

    step_s: float
    compute_s: float
    recompute_s: float
    transfer_s: float
    hidden_s: float
    peak_bytes: int
    host_bytes: int
    residents: Mapping[str, int]
    peak_at: str
    collectives: tuple[Collective, ...]
    shares: WorkShares | None = None
    compiled_peak_bytes: int | None = None

    @property
    def unhidden_s(self) -> float:
        """Seconds per step if nothing of the communication were hidden."""
        return self.step_s + self.hidden_s


@dataclass(frozen=True, slots=True)
class Decisions:
    """Every choice of a plan.

    Attributes:
      mesh: size of each mesh axis by name, outermost first.
      arguments: per argument of the step, by pytree path: the spec it rests in.
      ops: per class of ops, by name: the specs that it reads and makes.
      copies: per value that is resharded for a phase, by its op's name: its spec there and how it comes by it.
      retention: per class of forward ops, by name, the results that are not kept for the backward phase: `remat` for all,
        or the numbers of the recomputed ones. The names of `ops` and `copies` are those of the step with recomputation.
      microbatches: the number of parts in which the step goes through its batch. All names are those of the step that does
        so.
      group: of a pipeline on several kinds of node: the group of nodes that they are for.
    """

    mesh: Mapping[str, int]
    arguments: Mapping[str, str]
    ops: Mapping[str, str]
    copies: Mapping[str, str]
    retention: Mapping[str, str] = field(default_factory=dict[str, str])
    microbatches: int = 1
    group: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Plan(SavedPlan):
    """How to run a training step on a cluster.

    Attributes:
      step: the step function's name.
      fingerprint: of the traced step.
      jax: the JAX version that traced it.
      cluster: the cluster, as its JSON file would say it.
      options: the options that the search was given. Pinned arguments are named apart in `decisions`.
      meshes: the meshes that were searched: sizes of their axes.
      memory_bytes: the cap per device.
      decisions: the choices.
      estimates: the predictions for these choices.
      gap: certified by the solver: by this cost model, no plan takes less time than this one by more than this share of
        it. The certificate covers plans on `meshes` and within the options, with the same microbatches, recomputation and
        offloading, that hold at most `memory_bytes` in program order. (The kernels' memory is simulated for the plan found
        only.) None if decisions were edited since.
      marks: digests of the decisions that the estimates are for (`search.plan.edits`); empty if unknown.
      search_s: seconds of the search, in all and by part; not saved.
      outline: the traced step's types and ops, to say how another step differs; None in a file without it.
      is_sealed: whether the estimates are those of the decisions; False after an edit by hand.

    Example:
      >>> plan = search(step, state, batch, cluster="64xH100-80GB")  # doctest: +SKIP
      >>> plan.save("plan.json")  # doctest: +SKIP
    """

    step: str
    fingerprint: str
    jax: str
    cluster: Mapping[str, Any]
    options: Mapping[str, Any]
    meshes: tuple[tuple[int, ...], ...]
    memory_bytes: int
    decisions: Decisions
    estimates: Estimates
    gap: float | None
    marks: str = ""
    search_s: Mapping[str, float] = field(default_factory=dict[str, float])
    outline: Outline | None = None
    is_sealed: bool = field(default=True, compare=False, repr=False)

    @property
    def executor(self) -> str:
        """The name of its executor: one program under `jax.jit`."""
        return JIT

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.decisions.mesh.values())

    @property
    def edited(self) -> tuple[Decision, ...]:
        """The decisions, by table and name, that were edited or added since the estimates were made."""
        return edited(self.decisions, self.marks)

    @property
    def is_edited(self) -> bool:
        """Whether the estimates are those of other decisions: some were edited, added or deleted since; or whether
        anything else in its file was edited."""
        return not self.is_sealed or bool(self.edited or num_deleted(self.decisions, self.marks))

    def _values(self) -> dict[str, Any]:
        d, e = self.decisions, self.estimates
        return {
            "schema": SCHEMA,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "jax": self.jax,
            "cluster": dict(self.cluster),
            "options": dict(self.options),
            "meshes": [list(mesh) for mesh in self.meshes],
            "memory_bytes": self.memory_bytes,
            "decisions": {
                "mesh": dict(d.mesh),
                "microbatches": d.microbatches,
                "arguments": dict(d.arguments),
                "ops": dict(d.ops),
                "copies": dict(d.copies),
                "retention": dict(d.retention),
            },
            "estimates": {
                "step_s": e.step_s,
                "compute_s": e.compute_s,
                "recompute_s": e.recompute_s,
                "transfer_s": e.transfer_s,
                "hidden_s": e.hidden_s,
                "peak_bytes": e.peak_bytes,
                "host_bytes": e.host_bytes,
                "residents": dict(e.residents),
                "peak_at": e.peak_at,
                "collectives": [
                    {
                        "kind": c.kind,
                        "axes": list(c.axes),
                        "count": c.count,
                        "bytes": c.bytes,
                        "seconds": c.seconds,
                    }
                    for c in e.collectives
                ],
                **({"shares": e.shares.to_json()} if e.shares else {}),
                **compiled_json(e),
                "gap": self.gap,
                "marks": self.marks,
            },
            **({} if self.outline is None else {"outline": self.outline.to_json()}),
        }

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "Plan":
        """A plan from JSON-ready values.

        Raises:
          PlanError: a key is missing or of the wrong type; names it.
        """
        from autoshard.search.plan.plan_file import PlanFile, read  # it takes a while to import

        if (schema := schema_of(data)) not in (None, SCHEMA):
            raise PlanError(
                f"{place} has schema {schema!r}; this autoshard reads {SCHEMA!r}. Search again to make one"
            )
        file = read(PlanFile, data, place)
        estimates: dict[str, Any] = {"transfer_s": 0.0, **file["estimates"]}
        gap, marks = estimates.pop("gap"), estimates.pop("marks", "")
        collectives = tuple(Collective(**one) for one in estimates.pop("collectives"))
        shares = WorkShares.from_json(estimates.pop("shares")) if "shares" in estimates else None
        plan = cls(
            file["step"],
            file["fingerprint"],
            file["jax"],
            file["cluster"],
            cast(dict[str, Any], data)["options"],  # in its own order
            file["meshes"],
            file["memory_bytes"],
            Decisions(**file["decisions"]),
            Estimates(**estimates, collectives=collectives, shares=shares),
            gap,
            marks,
            outline=Outline(**file["outline"]) if "outline" in file else None,
        )
        return plan._read_from(file)

    def compare(self, other: "Plan") -> "Comparison":
        """The differences from another plan: time, memory, collectives, and arguments that are sharded differently."""
        from autoshard.search.plan.comparison import Comparison  # it needs plans itself

        return Comparison.of(self, other)

    def __str__(self) -> str:
        from autoshard.search.plan.summary import summary  # it needs plans itself

        return summary(self)
