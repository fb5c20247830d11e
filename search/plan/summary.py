"""A plan as an expert would sum it up: what `print(plan)` shows."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.units import format_bytes, format_mesh, format_rate, format_seconds
from autoshard.cost_model.xla.gpu_targets import AS_PLANNED, scheduler_options
from autoshard.search.plan.argument_lines import argument_lines
from autoshard.search.plan.plan import Estimates, Plan
from autoshard.search.plan.text_table import aligned, fitted, more_of, plural, search_time

_MAX_OP_LINES = 6
"""Lines for the heavy ops, as they are many and much alike. Source: a choice of ours."""

_MAX_EDITS = 4
"""Names of decisions in one line. Source: a choice of ours."""

_HEAVY = re.compile(r"(?:^|[ /])(dot_general|conv_general_dilated|gather|scatter-add)(?: #\d+)?$")
"""Op names of a plan that end in a primitive which moves or multiplies much."""


def summary(plan: Plan) -> str:
    """The plan in plain text: how things lie, what is communicated, the time and the memory predicted.

    Args:
      plan: from `search`, or loaded.

    Returns:
      Lines that fit the terminal, the same for the same plan but for the search time, which only fresh plans have.

    Raises:
      PlanError: a loaded plan's cluster does not make sense, or has not as many devices as the mesh.
    """
    try:
        cluster = Cluster.from_json(plan.cluster, "plan: cluster")
        model = MeshModel(cluster, tuple(plan.decisions.mesh.values()))
    except InputError as e:
        raise PlanError(str(e)) from e
    parts = [
        _head(plan, cluster, model),
        _edits(plan),
        argument_lines(plan.decisions.arguments),
        _ops(plan.decisions.ops),
        _microbatches(plan.decisions.microbatches),
        _recomputed(plan.decisions.retention),
        _collectives(plan.estimates),
        _time(plan.estimates, cluster.caveat),
        _memory(plan.estimates, plan.memory_bytes),
        _search(plan),
    ]
    return fitted("\n".join("\n".join(lines) for lines in parts if lines))


# --- the parts


def _head(plan: Plan, cluster: Cluster, model: MeshModel) -> list[str]:
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    mesh = plan.decisions.mesh
    axes = [f"{name} {_lies(model, i)}" for i, (name, size) in enumerate(mesh.items()) if size > 1]
    rows = [
        ("step", f"{plan.step} (fingerprint {plan.fingerprint}, JAX {plan.jax})"),
        ("cluster", f"{cluster.name}: {nodes} of {cluster.devices_per_node} {cluster.device.name}"),
        (
            "mesh",
            " x ".join(f"{name}={size}" for name, size in mesh.items())
            + (f": {', '.join(axes)}" if axes else ""),
        ),
    ]
    given = ", ".join(f"{key} {value}" for key, value in plan.options.items())
    besides = (("compiler", compiler_options(cluster, AS_PLANNED)), ("given", given))
    return aligned([*rows, *(row for row in besides if row[1])], indent=0)


def compiler_options(cluster: Cluster, besides: Mapping[str, str] = MappingProxyType({})) -> str:
    """What programs ask the compiler for besides keeping to the cap; nothing where devices are simulated.

    Args:
      cluster: where they run.
      besides: what not all of them ask for.
    """
    asked = scheduler_options(cluster.device.name)
    said = {**asked, **besides} if asked else {}
    return ", ".join(f"{key}={value}" for key, value in said.items())


def _edits(plan: Plan) -> list[str]:
    """What was edited by hand, as no estimate speaks of it."""
    if not plan.is_edited:
        return []
    names = [name or table for table, name in plan.edited]
    shown = ", ".join(names[:_MAX_EDITS]) + ", ..." * (len(names) > _MAX_EDITS)
    what = (
        f"{plural(len(names), 'decision')} edited by hand: {shown}" if names else "decisions deleted by hand"
    )
    return [what, "  the estimates below are those from before; what runs the plan makes new ones"]


def _lies(model: MeshModel, axis: int) -> str:
    place = "across nodes" if model.group((axis,)).crosses_nodes else "inside a node"
    return f"{place} ({format_rate(model.axis_link(axis)[0])})"


def _ops(ops: Mapping[str, str]) -> list[str]:
    """How often each decision is taken for a kind of heavy op."""
    taken = Counter((found[1], text) for name, text in ops.items() if (found := _HEAVY.search(name)))
    rows = [(primitive, f"{count}x", text) for (primitive, text), count in taken.most_common()]
    if not rows:
        return []
    more = more_of(sum(n for _, n in taken.most_common()[_MAX_OP_LINES:]), "kind")
    return [
        f"heavy ops ({plural(taken.total(), 'kind')})",
        *aligned(rows[:_MAX_OP_LINES], right=(1,)),
        *more,
    ]


def _microbatches(count: int) -> list[str]:
    return [f"microbatches: {count}, their gradients added up before the update"] if count > 1 else []


def _recomputed(retention: Mapping[str, str]) -> list[str]:
    """Which of the heavy ops run again, what they are made of goes without saying; and what waits on the host."""
    again = {name: said for name, said in retention.items() if "remat" in said}
    rows = [(name.removeprefix("forward "), said) for name, said in again.items() if _HEAVY.search(name)]
    lines: list[str] = []
    if again:
        light = len(again) - len(rows)
        kinds = f"({plural(len(again), 'kind')} of ops, {light} of them light)"
        lines += [f"recomputed in the backward phase {kinds}", *_cut(rows)]
    rows = [(name.removeprefix("forward "), said) for name, said in retention.items() if "offload" in said]
    if rows:
        lines += [f"on the host until the backward phase ({plural(len(rows), 'kind')} of ops)", *_cut(rows)]
    return lines


def _cut(rows: list[tuple[str, str]]) -> list[str]:
    return [*aligned(rows[:_MAX_OP_LINES]), *more_of(len(rows[_MAX_OP_LINES:]), "kind")]


def _collectives(estimates: Estimates) -> list[str]:
    if not estimates.collectives:
        return ["collectives per step: none"]
    ordered = sorted(estimates.collectives, key=lambda c: -c.seconds)
    rows = [
        (c.kind, f"over {', '.join(c.axes)}", f"{c.count}x", format_bytes(c.bytes), format_seconds(c.seconds))
        for c in ordered
    ]
    count, num_bytes = sum(c.count for c in ordered), sum(c.bytes for c in ordered)
    total = (
        "total",
        "",
        f"{count}x",
        format_bytes(num_bytes),
        format_seconds(sum(c.seconds for c in ordered)),
    )
    return [
        "collectives per step (bytes per device)",
        *aligned([*rows, *[total] * (len(rows) > 1)], right=(2, 3, 4)),
    ]


def time_parts(estimates: Estimates) -> dict[str, float]:
    """Seconds of a step by kind; what is hidden counts less than nothing."""
    parts = {"computation": estimates.compute_s}
    if estimates.recompute_s:
        parts["of all, recomputed"] = estimates.recompute_s
    if estimates.transfer_s:
        parts["copies to and from the host"] = estimates.transfer_s
    for c in estimates.collectives:
        parts[c.kind] = parts.get(c.kind, 0.0) + c.seconds
    if estimates.hidden_s > 1e-6 * estimates.step_s:
        parts["hidden behind computation"] = -estimates.hidden_s
    return parts


def _time(estimates: Estimates, caveat: str) -> list[str]:
    rows = [
        (name, format_seconds(s), _percent(s, estimates.step_s)) for name, s in time_parts(estimates).items()
    ]
    said = f"predicted step time: {format_seconds(estimates.step_s)}{caveat}"
    return [said, *aligned(rows, right=(1, 2))]


def _memory(estimates: Estimates, cap_bytes: int) -> list[str]:
    peak = estimates.peak_bytes
    residents = sorted(estimates.residents.items(), key=lambda item: -item[1])
    rows = [(kind.replace("_", " "), format_bytes(b), _percent(b, peak)) for kind, b in residents]
    of_cap = f"{format_bytes(cap_bytes)} per device ({_percent(peak, cap_bytes)})"
    title = f"predicted peak memory: {format_bytes(peak)} of {of_cap}"
    lines = [title, *aligned(rows, right=(1, 2)), f"  at {estimates.peak_at}"]
    return (
        [*lines, f"  on the host: {format_bytes(estimates.host_bytes)} per device"]
        if estimates.host_bytes
        else lines
    )


def _gap(plan: Plan) -> list[str]:
    if plan.gap is None:
        return ["certified gap: none, as these decisions were edited by hand"]
    is_proven = plan.gap < 1e-9  # the solver's own rounding
    within = "it is the fastest" if is_proven else f"within {_rounded_up(100 * plan.gap)}% of the fastest"
    cap = format_bytes(plan.memory_bytes)
    meshes, own = ", ".join(map(format_mesh, plan.meshes)), tuple(plan.decisions.mesh.values())
    besides = (
        [] if own in plan.meshes else [f"  (on mesh {format_mesh(own)}, where it lies, nothing is proven)"]
    )
    decisions = plan.decisions
    alike = [
        *["go through as many microbatches"] * (decisions.microbatches > 1),
        *["recompute the same"] * any(said.startswith("remat") for said in decisions.retention.values()),
        *["have the same on the host"] * bool(plan.estimates.host_bytes),
    ]
    hold = f"hold at most {cap} in program order"
    return [
        f"certified gap: {within} plan of its search space",
        f"  among plans that {', '.join([*alike, hold])}, on mesh {meshes}",
        *besides,
    ]


def _rounded_up(percent: float) -> str:
    """Two digits, never less than the number, as it is certified."""
    unit = 10.0 ** (math.floor(math.log10(percent)) - 1)
    return f"{math.ceil(percent / unit - 1e-6) * unit:.10g}"


def _search(plan: Plan) -> list[str]:
    return [*_gap(plan), *search_time(plan.search_s)]


# --- text


def _percent(part: float, whole: float) -> str:
    if whole <= 0:
        return "-"
    return "<1%" if 0 < part < 0.005 * whole else f"{100 * part / whole:.0f}%"
