"""The way from user options to a plan on its traced step, shared by `search`, `emit`, `verify` and `parallelize`."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from functools import partial
from math import isclose
from typing import Any

import jax

from autoshard.cost_model.cluster import Cluster, Device
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, from_json
from autoshard.cost_model.units import format_bytes, parse_bytes
from autoshard.cost_model.xla.gpu_targets import NEWEST, compute_capability
from autoshard.options import Options
from autoshard.pins import ANYWHERE, PinnedLayout, allowed, pinned
from autoshard.search import applying, driver, explanation
from autoshard.search.ir._jax_kernels import Target, cudnn_for
from autoshard.search.ir.factors.attention import RULES as ATTENTION
from autoshard.search.ir.graph import Op, Step, walk
from autoshard.search.ir.retyping import retypings
from autoshard.search.ir.trace import trace_call
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.options import RESIDUALS
from autoshard.search.options import Options as SearchOptions
from autoshard.search.plan.argument_paths import near
from autoshard.search.plan.explained import Explanation
from autoshard.search.plan.peak_band import compiled_as
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.text_table import few
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.op_rules import primitives_without_rule
from autoshard.search.result import SearchResult
from autoshard.search.space.host_arguments import HostArguments
from autoshard.user_warning import warn

LARGE_BYTES = 1 << 20
LARGE_SHARE = 0.05
"""Smallest size of possible state or of constants, as a share of all arguments' bytes and not below `LARGE_BYTES`, that is
worth a warning. Source: a choice of ours."""


def traced(
    step: Callable[..., Any],
    cluster: AnyCluster,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: str | Sequence[str] | None = None,
    devices: Sequence[Any] = (),
) -> Step:
    """Traces the step for a cluster's platform, to run on these devices if any are given.

    Warns:
      AutoshardWarning: an op has no factor rule, code names devices, state changes its type, a large result may be state, or
        large arrays are constants of the step.

    Raises:
      InputError: the step cannot be traced, returns nothing, or uses cuDNN's attention on CPUs.
    """
    named = (state,) if isinstance(state, str) else tuple(state or ())
    with kernels_of(cluster) as target:
        graph = trace_call(cluster.platform, step, args, kwargs, named)
        if (attention := _attention(graph)) is not None and not target.was_asked:
            graph = trace_call(
                cluster.platform, partial(step), args, kwargs, named
            )  # not JAX's trace for another target
    if not graph.graph.outputs:
        raise InputError(
            f"{graph.name} returns no array, so there is nothing to compute. A training step returns its new state, as in "
            "`return state, metrics`; perhaps its `return` is missing"
        )
    if attention is not None and "cpu" in (cluster.platform, *(device.platform for device in devices)):
        raise _no_attention(attention)
    for name, (count, where) in primitives_without_rule(graph).items():
        warn(
            f"{name} has no factor rule and is computed in full on every device ({count} in the step, first {where}). "
            "To say how it splits, wrap it in jax.experimental.custom_partitioning with a sharding_rule"
        )
    for warning in filter(None, (_left_out(graph), _retyped(graph), _doubts(graph), _closed_over(graph))):
        warn(warning)
    return graph


def kernels_of(cluster: AnyCluster) -> AbstractContextManager[Target]:
    """A context in which code is traced for a cluster's own kernels, those of the oldest GPUs if there are several. On CPUs
    it is traced for the newest GPU, and refused afterwards."""
    if cluster.platform == "cpu":
        return cudnn_for(compute_capability(NEWEST))
    known = [compute_capability(group.device.name) for group in cluster.groups]
    return cudnn_for(min((one for one in known if one is not None), default=None))


def _attention(step: Step) -> Op | None:
    """The first op that is cuDNN's attention."""
    return next((op for _, graph in walk(step.graph) for op in graph.ops if op.name in ATTENTION), None)


def _no_attention(op: Op) -> InputError:
    return InputError(
        f"cuDNN's attention at {op.source} runs on NVIDIA GPUs only, not on CPUs. Plan for a cluster of GPUs, such as "
        'search(..., cluster="8xH100-80GB"), or choose implementation="xla" where CPUs run the step'
    )


def _left_out(step: Step) -> str:
    """The warning about code that names devices; empty without such code."""
    if not step.placements:
        return ""
    first, *others = step.placements
    more = f" (and so does code at {len(others)} more places)" if others else ""
    return (
        f"{first} names devices{more} and is left out: the plan decides how values lie. To decide how an argument "
        f"rests, pin it: pin={{{step.arguments[0].name!r}: jax.P(...)}}"
    )


def _retyped(step: Step) -> str:
    """The warning about state that is returned in another type; empty without such state."""
    found = list(retypings(step))
    if not found:
        return ""
    num_bytes = format_bytes(sum(one.old.num_bytes + one.new.num_bytes for one in found))
    return (
        f"{step.name} returns {len(found)} arguments, which are its state, in another type: {few(list(map(str, found)))}. "
        f"Their memory cannot be reused: old and new take {num_bytes}; and the next call, with the new types, is planned "
        "and compiled again. To keep a type, convert the new value to it: new.astype(old.dtype)"
    )


def _doubts(step: Step) -> str:
    """The warning about large results that may replace arguments; empty without such results."""
    sizes = [step.graph.value(step.graph.outputs[o]).num_bytes for o, _ in step.doubtful]
    everything = sum(step.graph.values[v].num_bytes for v in step.graph.inputs)
    if sum(sizes) < max(LARGE_BYTES, LARGE_SHARE * everything):
        return ""
    result, arguments = step.doubtful[sizes.index(max(sizes))]
    names = [step.arguments[i].name for i in arguments]
    return (
        f"{format_bytes(sum(sizes))} of what {step.name} returns may replace arguments of it, but that is not certain: "
        f"{step.results[result]} may be the new {' or '.join(names[:3])}. Both are held, and may rest apart. If it is, "
        f"say so: state={names[0]!r}"
    )


def _closed_over(step: Step) -> str:
    """The warning about large arrays that are constants of the step; empty without such arrays."""
    held = [graph.values[v] for _, graph in walk(step.graph) for v, _ in graph.constants]
    everything = sum(step.graph.values[v].num_bytes for v in step.graph.inputs)
    num_bytes = sum(value.num_bytes for value in held)
    if num_bytes < max(LARGE_BYTES, LARGE_SHARE * everything):
        return ""
    largest = max(held, key=lambda value: value.num_bytes)
    return (
        f"{step.name} closes over {format_bytes(num_bytes)} of arrays, the largest of shape {largest.shape}: they are "
        "constants of its program, so that they cannot rest split or on the host. If they are frozen weights, pass them as "
        "an argument"
    )


def options(step: Step, cluster: Cluster, asked: Options, resting: PinnedLayout = ANYWHERE) -> SearchOptions:
    """The checked options of a search.

    Args:
      resting: the layout in which arguments rest already; a pin takes precedence.
    """
    offload = asked.offload
    kinds = offload if offload is None or isinstance(offload, str) else tuple(offload)
    rest = pinned(step, asked.pin or {}, cluster.num_devices).then(resting)
    return SearchOptions(
        limit_bytes(cluster, asked),
        tuple(asked.mesh) if asked.mesh else rest.mesh,
        rest.specs,
        asked.time_limit_s,
        asked.remat,
        asked.microbatches,
        rest.offload(kinds),
    )


def stage_resting(step: Step, asked: Options, cluster: AnyCluster) -> PinnedLayout:
    """How arguments rest on their stages.

    Raises:
      InputError: a pin is impossible, or is for one program.
    """
    if isinstance(asked.pin, Plan):
        raise InputError(
            "pin= has a plan, which fixes the mesh of one program, and stages have meshes of their own. Pin arguments by "
            "their pytree paths, or leave out the stages"
        )
    return pinned(step, asked.pin or {}, cluster.num_devices)


def stage_hosted(
    step: Step, cluster: AnyCluster, memory_bytes: int, offload: tuple[str, ...] | str | None
) -> frozenset[int]:
    """The arguments that rest in the memory of their stage's host.

    Raises:
      InputError: there is no such state, a host has no such memory, or residuals are asked for.
    """
    if offload is not None and RESIDUALS in offload:
        raise InputError(
            f"offload={offload}: residuals wait on the host in one program only. With stages, name state, such as "
            'offload=("optimizer_state",), or ask for stages=1'
        )
    options = SearchOptions(memory_bytes, offload=offload)
    first, *_ = [HostArguments(step, group, options).asked_for for group in cluster.groups]
    return first


def suiting(step: Step, asked: Options, mesh: tuple[int, ...]) -> Options:
    """The options of a step's first call that also suit a later call. A smaller last batch may not be divisible by a pin's
    axes or by the number of microbatches; these options are then dropped, and searched.

    Args:
      mesh: the mesh of the first call's plan; of a pipeline, that of a replica of its first stage.

    Warns:
      AutoshardWarning: an option is dropped.
    """
    lost: tuple[str, ...] = ()
    if asked.pin:
        pin, lost = allowed(step, asked.pin, mesh)
        asked = replace(asked, pin=pin)
    if asked.microbatches is not None:
        try:
            microbatched(step, asked.microbatches)
        except InputError as e:
            lost, asked = (
                (*lost, f"it has no {asked.microbatches} microbatches: {e}"),
                replace(asked, microbatches=None),
            )
    if lost:
        warn(f"this call of {step.name} is planned without what it does not allow: {'; '.join(lost)}")
    return asked


def limit_bytes(cluster: AnyCluster, asked: Options) -> int:
    """The memory cap per device in bytes, from `memory=` or else from the cluster."""
    limit = cluster.device_memory_limit() if asked.memory is None else given_bytes(asked.memory, cluster)
    _check_cap(limit, cluster, f"memory={asked.memory!r}")
    return limit


def find(
    step: Step, cluster: Cluster, options: SearchOptions, progress: Callable[[str], None] = lambda line: None
) -> SearchResult:
    """Searches for the fastest plan that fits."""
    try:
        return driver.find(step, cluster, options, progress)
    except PlanError as e:  # there is no plan yet, so a pin is impossible
        raise InputError(str(e)) from e


def arguments_of(step: Step, donate: str | Sequence[str] | None) -> frozenset[int]:
    """The indices of the flat arguments that `donate=` names, each by its pytree path or by the path of a subtree.

    Raises:
      InputError: a name matches no argument.
    """
    found: set[int] = set()
    for name in (donate,) if isinstance(donate, str) else donate or ():
        inside = (f"{name}[", f"{name}.")
        hits = {i for i, a in enumerate(step.arguments) if a.name == name or a.name.startswith(inside)}
        if not hits:
            likely = near(name, [a.name for a in step.arguments])
            hint = f" (did you mean {' or '.join(likely)}?)" if likely else ""
            raise InputError(
                f"donate={name!r} is no argument of {step.name}{hint}; they are named like {step.arguments[0].name}",
                section="a-wrong-name",
            )
        found |= hits
    return frozenset(found)


def fingerprint_of(step: Step) -> str:
    """The fingerprint by which a plan recognises its computation."""
    return fingerprint(step)


def hardware(plan: Plan, place: str) -> AnyCluster:
    """The cluster that a plan is for.

    Raises:
      PlanError: the plan's description of its cluster is invalid.
    """
    try:
        return from_json(plan.cluster, f"{place}: cluster")
    except InputError as e:
        raise PlanError(str(e)) from e


def cluster(plan: Plan, place: str) -> Cluster:
    """The cluster, of one kind of node, that a plan of one program is for.

    Raises:
      PlanError: the plan's description of its cluster is invalid.
    """
    (found,) = hardware(plan, place).groups
    return found


def applied(step: Step, plan: Plan, place: str) -> SearchResult:
    """Applies a given plan to its step."""
    there = cluster(plan, place)
    with faults_of(plan, place):
        _check_cap(plan.memory_bytes, there, f"{place}: memory_bytes {plan.memory_bytes}")
        found = applying.apply(step, plan, there, place)
    if found.anew:
        warn(_change_of_estimates(plan, found, place))
    return replace(found, plan=compiled_as(found.plan, plan))


def as_planned[Found: Any](apply: Callable[[Step, Plan, str], Found]) -> Callable[[Step, Plan, str], Found]:
    """A function that applies a plan to its step, with the faults of `faults_of`, the plan's compiled peak and, if it was
    not edited, its gap."""

    def applied(step: Step, plan: Plan, place: str) -> Found:
        with faults_of(plan, place):
            found = apply(step, plan, place)
        is_alike = isclose(found.plan.estimates.step_s, plan.estimates.step_s, rel_tol=1e-6)
        gap = plan.gap if plan.is_sealed and is_alike else None
        return replace(found, plan=replace(compiled_as(found.plan, plan), gap=gap))

    return applied


@contextmanager
def faults_of(plan: Plan, place: str) -> Generator[None]:
    """A context that applies a given plan: the plan is at fault if its cluster or mesh is impossible.

    Warns:
      AutoshardWarning: the plan was made with another version of JAX, and could be applied.

    Raises:
      PlanError: the plan could not be applied; the message says if it was made with another version of JAX.
    """
    versions = f"JAX {plan.jax}, and this is JAX {jax.__version__}" if plan.jax != jax.__version__ else ""
    try:
        yield
    except (InputError, PlanError) as e:
        raise PlanError(f"{e}. It was made with {versions}" if versions else str(e)) from e
    if versions:
        warn(f"{place} was made with {versions}; the step is the same, so it is used")


def choices(step: Step, plan: Plan, name: str, place: str) -> tuple[str, ...]:
    """The possible values of the plan's decision with this name."""
    try:
        return applying.choices(step, plan, cluster(plan, place), name, place)
    except InputError as e:
        raise PlanError(str(e)) from e


def explained(step: Step, plan: Plan, name: str, place: str) -> Explanation:
    """Why the plan's decision with this name is as it is."""
    return explanation.explain(applied(step, plan, place), name, place)


def _change_of_estimates(plan: Plan, found: SearchResult, place: str) -> str:
    """The warning that names hand-made edits and the decisions that contradicted them."""
    edits = few([name for _, name in plan.edited]) or "its arguments"
    return f"{place}: what contradicts {edits}, as edited by hand, is decided anew: {few(found.anew)}"


def given_bytes(memory: str | int, cluster: AnyCluster) -> int:
    """A cap as users say it: a size, or a share of the memory of the device that has most."""
    if not (isinstance(memory, str) and memory.rstrip().endswith("%")):
        return parse_bytes(memory)
    try:
        percent = Decimal(memory.rstrip()[:-1].strip())
    except InvalidOperation:
        percent = Decimal("nan")
    if not (percent.is_finite() and percent > 0):
        raise InputError(f"wanted a share of a device's memory such as '90%', got {memory!r}")
    return int(percent * _largest(cluster).memory_bytes / 100)


def _largest(cluster: AnyCluster) -> Device:
    """The device that has most memory."""
    return max((group.device for group in cluster.groups), key=lambda one: one.memory_bytes)


def _check_cap(limit_bytes: int, cluster: AnyCluster, text: str) -> None:
    """Refuses a cap of nothing, and one above the memory of the largest device."""
    if limit_bytes <= 0:
        raise InputError(f"wanted a positive memory cap, got {text}")
    device = _largest(cluster)
    if limit_bytes > device.memory_bytes:
        raise InputError(
            f"{text} is more than the {format_bytes(device.memory_bytes)} that one {device.name} has, of which the runtime "
            f"leaves {format_bytes(cluster.device_memory_limit())}"
        )
