"""The types of plan files, by which these are read, checked and described.

A plan has one of three forms: one program (`PlanFile`), a program per stage (`PipelineFile`), or one program for all stages
(`SpmdFile`). Pydantic does all three tasks from these types: a message names the path of the wrong key, and editors complete
and check a plan by its JSON Schema (`autoshard schema plan`). Pydantic takes a while to import, so this module is imported
only where a plan is read.
"""

import json
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, NotRequired, TypedDict, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from autoshard.cost_model.errors import PlanError

Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Mesh = Annotated[dict[str, Size], Field(min_length=1)]
Shape = Annotated[tuple[Size, ...], Field(min_length=1, strict=False)]

_READ = ConfigDict(strict=True, use_attribute_docstrings=True)

WANTED = MappingProxyType(
    {
        "string_type": "text",
        "int_type": "a whole number",
        "float_type": "a number",
        "dict_type": "an object",
        "list_type": "a list",
        "tuple_type": "a list",
        "greater_than": "more than zero",
        "greater_than_equal": "at least zero",
        "finite_number": "finite",
        "too_short": "given for one axis at least",
    }
)
"""The wanted value, by Pydantic's name of the mistake."""


class CollectiveFile(TypedDict):
    """All collectives of one kind over the same mesh axes, in one step."""

    kind: str
    """XLA's name, such as all-reduce."""
    axes: Annotated[tuple[str, ...], Field(strict=False)]
    """Names of mesh axes."""
    count: Count
    """How many run in one step."""
    bytes: Count
    """Per device and step."""
    seconds: Number
    """Per step, predicted."""


class AxisUseFile(TypedDict):
    """What a mesh axis splits: shares between 0 and 1."""

    axis: str
    """Its name."""
    size: Size
    """Devices along it."""
    examples: Number
    """Of the FLOPs of the forward phase's products with weights: those in which it splits the examples of the batch."""
    positions: Number
    """Positions of a sequence or an image."""
    features: Number
    """Other loops that the weights do not have."""
    weights: Number
    """Loops of the weights."""
    experts: Number
    """A stack of weights, each of which meets its own part of the activations."""
    sums_scattered: Number
    """Of the sums over loops of the weights, those that are scattered along examples or positions."""
    parameters: Number
    """Of the bytes of parameters: those that it splits at rest."""
    gathered: Number
    """Those that it splits at rest and that are gathered where they are read."""
    regathered: Number
    """Of the gathered ones, those that the backward phase gathers once more."""
    tables: Number
    """Of the bytes of parameters: those that it splits at rest and that are looked up where they are."""
    optimizer_state: Number
    """Of the bytes of optimizer state: those that it splits at rest."""
    reductions_scattered: Number
    """Of the bytes of reductions over it: those of reduce-scatters."""


class WorkSharesFile(TypedDict):
    """How the mesh axes share the work, and how much work a step is."""

    axes: list[AxisUseFile]
    """The mesh axes with more than one device."""
    model_flops: dict[str, Number]
    """By dtype, FLOPs of the step's matrix products, convolutions and fused attention; recomputed ones are left out."""
    recomputed: Number
    """Of the forward phase's FLOPs, the share that is recomputed."""
    runs: dict[str, Count]
    """By name of an op in the decisions, its runs in a step."""


class EstimatesFile(TypedDict):
    """Predictions for the decisions; they are made anew whenever a step is given the plan."""

    step_s: Number
    """Seconds per step."""
    compute_s: Number
    """Seconds of computation."""
    recompute_s: Number
    """Seconds of recomputation."""
    transfer_s: NotRequired[Number]
    """Seconds of copies between the device and its host."""
    hidden_s: Number
    """Seconds of collectives and copies that run behind computation."""
    peak_bytes: Count
    """Device memory at its highest, per device."""
    host_bytes: Count
    """Pinned host memory, per device."""
    residents: dict[str, Count]
    """Bytes per device at the peak, by kind."""
    peak_at: str
    """The op at which the peak occurs, with its source line."""
    collectives: list[CollectiveFile]
    """Per kind and mesh axes."""
    shares: NotRequired[WorkSharesFile]
    """How the mesh axes share the work."""
    compiled_peak_bytes: NotRequired[Count]
    """Device memory at its highest in the compiled program, per device; missing if it was not compiled."""
    gap: Number | None
    """Certified: no plan takes less time by more than this share; null when decisions were edited since."""
    marks: NotRequired[str]
    """A fingerprint of the decisions that the estimates were made of; another one shows edits."""


class DecisionsFile(TypedDict):
    """Every choice. Each may be edited, or deleted to be decided anew."""

    mesh: Mesh
    """Size of each mesh axis, outermost first."""
    microbatches: NotRequired[Size]
    """The number of parts in which a step goes through its batch."""
    arguments: dict[str, str]
    """By pytree path, the spec in which an argument rests: P('data', None), P('model') on host."""
    ops: dict[str, str]
    """By name, the specs that a class of ops reads and makes: P('data'), P() -> P('data')."""
    copies: dict[str, str]
    """By name, the spec of a value that is resharded for a phase, and its source."""
    retention: dict[str, str]
    """By name, the results of a class of forward ops that are not kept for the backward phase."""


class OutlineFile(TypedDict):
    """The traced step in outline, for the message that refuses the plan for another step."""

    arguments: dict[str, str]
    """By pytree path, the type and the role of each argument."""
    results: dict[str, str]
    """By pytree path, the type of each result that replaces no argument."""
    ops: dict[str, Count]
    """The number of ops by primitive."""


class OptionsFile(TypedDict):
    """The options that the search was given."""

    pin: NotRequired[dict[str, str]]
    """By pytree path, the spec in which an argument must rest."""


class PlanFile(TypedDict):
    """How to run a training step on a cluster."""

    schema: str
    """The form of this file."""
    step: str
    """The step function's name."""
    fingerprint: str
    """The fingerprint of the traced step."""
    jax: str
    """The JAX version that traced it."""
    cluster: dict[str, Any]
    """The cluster, in the form of a cluster file."""
    options: OptionsFile
    meshes: Annotated[tuple[Shape, ...], Field(strict=False)]
    """The meshes that were searched: sizes of their axes."""
    memory_bytes: Count
    """The cap per device."""
    decisions: DecisionsFile
    estimates: EstimatesFile
    outline: NotRequired[OutlineFile]
    seal: NotRequired[str]
    """Digest of the rest, by which an edit by hand is seen."""


class StageFile(TypedDict):
    """A stage of a pipeline."""

    first_op: Count
    """The position of its first op, of those that run for each microbatch in the forward phase."""
    mesh: Mesh
    """Size of each axis of its submesh: of replicas, then of each one's devices."""


class StageDecisionsFile(TypedDict):
    """The sharding of a stage on the devices of one replica, for all stages with this mesh."""

    mesh: Mesh
    """Size of each axis of a replica's devices, outermost first."""
    group: NotRequired[str]
    """The group of nodes that the decisions are for, in a cluster with several kinds of node."""
    arguments: dict[str, str]
    """By pytree path, the spec in which an argument rests: P('data', None)."""
    ops: dict[str, str]
    """By name, the specs that a class of ops reads and makes: P('data'), P() -> P('data')."""
    copies: dict[str, str]
    """By name, the spec of a value that is resharded for a phase, and its source."""


class StageEstimatesFile(TypedDict):
    """Predictions for a stage: seconds per microbatch, and bytes per device."""

    forward_s: Number
    """The forward pass."""
    backward_s: Number
    """The backward pass without weight gradients."""
    weight_gradient_s: Number
    """The weight gradients."""
    send_s: Number
    """The transfer of forward results to the next stage."""
    return_s: Number
    """The transfer of gradients to the previous stage."""
    update_s: Number
    """Seconds per step of the work that is done once."""
    residual_bytes: Count
    """Residuals of one microbatch in flight."""
    state_bytes: Count
    """State, which is always there."""
    workspace_bytes: Count
    """Temporary arrays while the stage runs."""
    peak_bytes: Count
    """The peak of the stage's worker, with all its stages."""
    collectives: NotRequired[list[CollectiveFile]]
    """By kind and mesh axes."""


class PipelineEstimatesFile(TypedDict):
    """Predictions for a pipeline; they are made anew whenever a step is given the plan."""

    step_s: Number
    """Seconds per step."""
    bubble: Number
    """The share of the step in which workers wait."""
    peak_bytes: Count
    """Device memory at its highest, per device."""
    stages: list[StageEstimatesFile]
    """The predictions for each stage."""
    shares: NotRequired[list[WorkSharesFile]]
    """For each of the decisions, how the mesh axes share the work."""
    compiled_peak_bytes: NotRequired[Count]
    """Device memory at its highest in the compiled program, per device; missing if it was not compiled."""


class PipelineFile(TypedDict):
    """How to run a training step as a pipeline."""

    schema: str
    """The form of this file."""
    step: str
    """The step function's name."""
    fingerprint: str
    """The fingerprint of the traced step."""
    jax: str
    """The JAX version that traced it."""
    cluster: dict[str, Any]
    """The cluster, in the form of a cluster file."""
    groups: NotRequired[Annotated[tuple[str, ...], Field(strict=False)]]
    """The groups of nodes of a cluster with several kinds of node, in the order of their stages."""
    schedule: str
    """The schedule's name, such as 1f1b."""
    memory_bytes: Count
    """The cap per device."""
    workers: Size
    """Groups of devices."""
    microbatches: Size
    """The number of parts in which a step goes through its batch."""
    stages: list[StageFile]
    """In the order of the forward phase."""
    retention: dict[str, str]
    """By name, the results of a class of forward ops that are not kept for the backward phase."""
    decisions: list[StageDecisionsFile]
    """The sharding within a replica, for each mesh that replicas have."""
    estimates: PipelineEstimatesFile
    outline: NotRequired[OutlineFile]
    seal: NotRequired[str]
    """Digest of the rest, by which an edit by hand is seen."""


class SpmdEstimatesFile(TypedDict):
    """Predictions for a pipeline that is one program; they are made anew whenever a step is given the plan."""

    step_s: Number
    """Seconds per step."""
    bubble: Number
    """The share of the step in which stages compute results that nobody reads."""
    peak_bytes: Count
    """Device memory at its highest, per device."""
    forward_s: Number
    """Seconds of the forward pass of a stage's layers on one microbatch, and of the transfer to the next stage."""
    backward_s: Number
    """Seconds of the backward pass of a stage's layers on one microbatch, and of the transfer to the previous stage."""
    between_s: Number
    """Seconds per step of the ops between loops over layers."""
    update_s: Number
    """Seconds per step of the work that is done once."""
    residual_bytes: Count
    """Residuals of one microbatch on a stage."""
    state_bytes: Count
    """State, which is always there."""
    collectives: NotRequired[list[CollectiveFile]]
    """By kind and mesh axes."""
    shares: NotRequired[WorkSharesFile]
    """How the axes of a replica's mesh share the work."""
    compiled_peak_bytes: NotRequired[Count]
    """Device memory at its highest in the compiled program, per device; missing if it was not compiled."""


class SpmdFile(TypedDict):
    """How to run a training step as a pipeline that is one program."""

    schema: str
    """The form of this file."""
    step: str
    """The step function's name."""
    fingerprint: str
    """The fingerprint of the traced step."""
    jax: str
    """The JAX version that traced it."""
    cluster: dict[str, Any]
    """The cluster, in the form of a cluster file."""
    memory_bytes: Count
    """The cap per device."""
    executor: str
    """The executor: spmd, one program for all stages."""
    schedule: str
    """The schedule's name: gpipe or circular."""
    microbatches: Size
    """The number of parts in which each replica goes through its share of the batch."""
    stages: Size
    """The number of stages, each of equally many layers."""
    mesh: Mesh
    """Size of each axis: of groups of stages, and of the replicas of each."""
    retention: dict[str, str]
    """By name, the results of a class of forward ops that are not kept for the backward phase."""
    estimates: SpmdEstimatesFile
    decisions: NotRequired[StageDecisionsFile]
    """The sharding within a replica of several devices."""
    outline: NotRequired[OutlineFile]
    seal: NotRequired[str]
    """Digest of the rest, by which an edit by hand is seen."""


for _file in (
    CollectiveFile,
    AxisUseFile,
    WorkSharesFile,
    EstimatesFile,
    DecisionsFile,
    OutlineFile,
    PlanFile,
    StageFile,
    StageDecisionsFile,
    StageEstimatesFile,
    PipelineEstimatesFile,
    PipelineFile,
    SpmdEstimatesFile,
    SpmdFile,
):
    _file.__pydantic_config__ = _READ  # type: ignore[attr-defined]
OptionsFile.__pydantic_config__ = ConfigDict(**_READ, extra="allow")  # type: ignore[attr-defined]


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a plan's file, in any of its forms."""
    forms = TypeAdapter[Any](PlanFile | PipelineFile | SpmdFile)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **forms.json_schema()}


def read(kind: type, data: Any, place: str) -> dict[str, Any]:
    """JSON-ready values, checked as a file of a kind.

    Args:
      kind: one of the types above.
      data: the file's content.
      place: the file's name in messages.

    Raises:
      PlanError: a key is missing or of the wrong type; the message names the first.
    """
    try:
        return cast(dict[str, Any], _adapter(kind).validate_python(data))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise PlanError(_said(first["type"], first["loc"], first["input"], first["msg"], place)) from None


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _said(kind: str, path: Sequence[int | str], value: Any, message: str, place: str) -> str:
    where = f"{place}: {_joined(path)}" if path else place
    if kind == "missing":
        return f"{where} is missing"
    wanted = f"must be {WANTED[kind]}" if kind in WANTED else f"is not as it should be ({message})"
    return f"{where} {wanted}, got {json.dumps(value)[:60]}"


def _joined(path: Sequence[int | str]) -> str:
    """`estimates.collectives[0].kind`."""
    parts = [f"[{p}]" if isinstance(p, int) else f".{p}" for p in path]
    return "".join(parts).removeprefix(".")
