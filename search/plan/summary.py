"""A plan as an expert would sum it up: what `print(plan)` shows."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.units import format_bytes, format_mesh, format_rate, format_seconds
from autoshard.cost_model.xla.gpu_targets import AS_PLANNED, scheduler_options
from autoshard.search.plan.argument_lines import argument_lines
from autoshard.search.plan.edits import num_deleted
from autoshard.search.plan.headline import HEAVY, PlanShape, StageShape, headline, mfu
from autoshard.search.plan.peak_band import HasPeaks, band, is_known, may_exceed
from autoshard.search.plan.plan import Estimates, Plan
from autoshard.search.plan.text_table import aligned, fitted, more_of, plural, search_time
from autoshard.search.plan.work_shares import WorkShares

_MAX_OP_LINES = 8
"""Lines for matrix products and for other lists of ops: a Transformer's layer has six products."""

_MAX_EDITS = 4
"""Names of decisions in one line. Source: a choice of ours."""

_LABEL_WIDTH = len("compiler")
"""Of labels such as `step` and `mesh`; none is longer."""

_FORWARD = "forward "
"""The beginning of the name of a forward op."""
EDITED = "edited by hand, or made by an earlier version"
UNPRICED = "  no estimates: they were made before. To make new ones: autoshard show PLAN TARGET"


def summary(plan: Plan) -> str:
    """The plan in plain text. The answer comes first: the kind of plan, its time, its memory and its certificate. Then come
    the details, and last those that only files and compilers need.

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
    decisions = plan.decisions
    parts = [
        _edits(plan) if plan.is_edited else _answer(plan, cluster),
        _head(plan, cluster, model),
        argument_lines(decisions.arguments),
        _ops(decisions.ops, None if plan.is_edited else plan.estimates.shares),
        _recomputed(decisions.retention),
        *([] if plan.is_edited else _estimated(plan)),
        _origin(plan, cluster),
    ]
    return fitted("\n".join("\n".join(lines) for lines in parts if lines))


def _answer(plan: Plan, cluster: Cluster) -> list[str]:
    """The kind of plan, its time, its memory and its certificate."""
    estimates = plan.estimates
    utilization = mfu([estimates.shares], [cluster], estimates.step_s)
    return [
        headline(_shape(plan)),
        time_line(estimates.step_s, utilization, cluster.caveat),
        memory_line(estimates, plan.memory_bytes, cluster.platform),
        _gap(plan),
    ]


def _estimated(plan: Plan) -> list[list[str]]:
    """The parts that hold only for the decisions that the estimates were made of."""
    return [
        _collectives(plan.estimates),
        _time(plan.estimates),
        _memory(plan.estimates),
        _certificate(plan),
        search_time(plan.search_s),
    ]


def time_line(step_s: float, utilization: float | None, caveat: str, bubble: float | None = None) -> str:
    """The predicted step time, its MFU and, of a pipeline, its bubble; and the cluster's caveat."""
    said = [f"predicted step time: {format_seconds(step_s)}"]
    said += [] if utilization is None else [f"MFU {_percent(utilization, 1)}"]
    said += [] if bubble is None else [f"bubble {bubble:.1%}"]
    return ", ".join(said) + caveat


def memory_line(estimates: HasPeaks, cap_bytes: int, platform: str) -> str:
    """The compiled peak and its share of the cap; or the predicted one, with its error band if that is known."""
    predicted, compiled = estimates.peak_bytes, estimates.compiled_peak_bytes
    if compiled is None:
        return predicted_line(predicted, cap_bytes, is_known(platform))
    of_cap = _of_cap(compiled, cap_bytes)
    return (
        f"peak memory: {format_bytes(compiled)} (compiled) of {of_cap}, {format_bytes(predicted)} predicted"
    )


def predicted_line(peak_bytes: int, cap_bytes: int, has_band: bool, where: str = "") -> str:
    """The predicted peak and its share of the cap; with its error band, and a doubt if the band crosses the cap."""
    said = f"predicted peak memory{where}: {format_bytes(peak_bytes)} of {_of_cap(peak_bytes, cap_bytes)}"
    if not has_band:
        return said
    there = band(peak_bytes)
    doubt = "; it may not fit" if may_exceed(peak_bytes, cap_bytes) else ""
    return (
        f"{said}, not compiled: {format_bytes(there.least_bytes)} to {format_bytes(there.most_bytes)}{doubt}"
    )


def _of_cap(peak_bytes: int, cap_bytes: int) -> str:
    return f"{format_bytes(cap_bytes)} per device ({_percent(peak_bytes, cap_bytes)})"


# --- the parts


def _shape(plan: Plan) -> PlanShape:
    decisions = plan.decisions
    stage = StageShape(1, decisions.mesh, plan.estimates.shares)
    return PlanShape((stage,), "", decisions.microbatches, decisions.retention, decisions.arguments)


def _head(plan: Plan, cluster: Cluster, model: MeshModel) -> list[str]:
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    mesh = plan.decisions.mesh
    axes = [f"{name} {_place(model, i)}" for i, (name, size) in enumerate(mesh.items()) if size > 1]
    rows = [
        ("step", plan.step),
        ("cluster", f"{cluster.name}: {nodes} of {cluster.devices_per_node} {cluster.device.name}"),
        (
            "mesh",
            " x ".join(f"{name}={size}" for name, size in mesh.items())
            + (f": {', '.join(axes)}" if axes else ""),
        ),
    ]
    return labelled(rows)


def _origin(plan: Plan, cluster: Cluster) -> list[str]:
    """The traced step, the options, and the compiler's."""
    given = ", ".join(f"{key} {value}" for key, value in plan.options.items())
    rows = [("traced", f"fingerprint {plan.fingerprint}, JAX {plan.jax}")]
    besides = (("given", given), ("compiler", compiler_options(cluster, AS_PLANNED)))
    return labelled([*rows, *(row for row in besides if row[1])])


def labelled(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of a label and a text, all texts of a summary in one column."""
    return aligned([(label.ljust(_LABEL_WIDTH), text) for label, text in rows], indent=0)


def compiler_options(cluster: Cluster, besides: Mapping[str, str] = MappingProxyType({})) -> str:
    """The compiler options of a plan's programs, but for the memory cap; none if devices are simulated.

    Args:
      cluster: the cluster that they run on.
      besides: options of some programs only.
    """
    asked = scheduler_options(cluster.device.name)
    options = {**asked, **besides} if asked else {}
    return ", ".join(f"{key}={value}" for key, value in options.items())


def _edits(plan: Plan) -> list[str]:
    """The decisions that were edited by hand. The estimates in the file are those of other decisions."""
    names = [name or table for table, name in plan.edited]
    shown = ", ".join(names[:_MAX_EDITS]) + ", ..." * (len(names) > _MAX_EDITS)
    deleted = num_deleted(plan.decisions, plan.marks)
    said = (
        f"{plural(len(names), 'decision')} edited by hand: {shown}" if names else "decisions deleted by hand"
    )
    return [said if names or deleted else EDITED, UNPRICED]


def _place(model: MeshModel, axis: int) -> str:
    place = "across nodes" if model.group((axis,)).crosses_nodes else "inside a node"
    return f"{place} ({format_rate(model.axis_link(axis)[0])})"


def _ops(ops: Mapping[str, str], shares: WorkShares | None) -> list[str]:
    """The forward phase's matrix products, convolutions and lookups: repeated layers once, with their runs."""
    heavy = {name: text for name, text in ops.items() if HEAVY.search(name)}
    forward = {name: text for name, text in heavy.items() if name.startswith(_FORWARD)} or heavy
    if not forward:
        return []
    runs = (shares or WorkShares()).runs
    rows = [
        (name.removeprefix(_FORWARD), f"{runs[name]}x" if name in runs else "", text)
        for name, text in forward.items()
    ]
    more = more_of(len(rows[_MAX_OP_LINES:]), "kind")
    others = plural(len(heavy) - len(forward), "kind")
    title = "matrix products and lookups, forward phase"
    return [
        f"{title} ({others} in other phases)" if len(forward) < len(heavy) else title,
        *aligned(rows[:_MAX_OP_LINES], right=(1,)),
        *more,
    ]


def _recomputed(retention: Mapping[str, str]) -> list[str]:
    """The recomputed products by name, the other recomputed ops by number; and the offloaded residuals."""
    again = {name: text for name, text in retention.items() if "remat" in text}
    rows = [(name.removeprefix(_FORWARD), text) for name, text in again.items() if HEAVY.search(name)]
    lines: list[str] = []
    if again:
        cheap = len(again) - len(rows)
        besides = f" ({plural(cheap, 'kind')} of cheap ops not listed)" * (cheap > 0)
        lines += [f"recomputed in the backward phase{besides}"]
        lines += _cut(rows)
    rows = [(name.removeprefix(_FORWARD), text) for name, text in retention.items() if "offload" in text]
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
    """Seconds of a step by kind; hidden communication counts negatively."""
    parts = {"computation": estimates.compute_s}
    if estimates.recompute_s:
        parts["incl. recomputation"] = estimates.recompute_s
    if estimates.transfer_s:
        parts["copies to and from the host"] = estimates.transfer_s
    for c in estimates.collectives:
        parts[c.kind] = parts.get(c.kind, 0.0) + c.seconds
    if estimates.hidden_s > 1e-6 * estimates.step_s:
        parts["hidden behind computation"] = -estimates.hidden_s
    return parts


def _time(estimates: Estimates) -> list[str]:
    rows = [
        (name, format_seconds(s), _percent(s, estimates.step_s)) for name, s in time_parts(estimates).items()
    ]
    return ["time per step", *aligned(rows, right=(1, 2))]


def _memory(estimates: Estimates) -> list[str]:
    peak = estimates.peak_bytes
    residents = sorted(estimates.residents.items(), key=lambda item: -item[1])
    rows = [(kind.replace("_", " "), format_bytes(b), _percent(b, peak)) for kind, b in residents]
    lines = ["memory at the peak, per device", *aligned(rows, right=(1, 2)), f"  at {estimates.peak_at}"]
    return (
        [*lines, f"  on the host: {format_bytes(estimates.host_bytes)} per device"]
        if estimates.host_bytes
        else lines
    )


def _gap(plan: Plan) -> str:
    if plan.gap is None:
        return "certified gap: none, as these decisions were edited by hand"
    is_proven = plan.gap < 1e-9  # the solver's own rounding
    within = "it is the fastest" if is_proven else f"within {_rounded_up(100 * plan.gap)}% of the fastest"
    return f"certified gap: {within} plan of its search space"


def _certificate(plan: Plan) -> list[str]:
    """The plans of which the certificate speaks."""
    if plan.gap is None:
        return []
    meshes, own = ", ".join(map(format_mesh, plan.meshes)), tuple(plan.decisions.mesh.values())
    besides = [] if own in plan.meshes else [f"  nothing is proven on its own mesh, {format_mesh(own)}"]
    decisions = plan.decisions
    equals = [
        *["number of microbatches"] * (decisions.microbatches > 1),
        *["recomputation"] * any(text.startswith("remat") for text in decisions.retention.values()),
        *["arrays on the host"] * bool(plan.estimates.host_bytes),
    ]
    rows = [
        f"  need at most {format_bytes(plan.memory_bytes)} in program order",
        f"  are on mesh {meshes}",
        *[f"  have its {' and '.join(equals)}"] * bool(equals),
    ]
    return ["the gap is certified among plans that", *rows, *besides]


def _rounded_up(percent: float) -> str:
    """Two digits, never less than the number, as it is certified."""
    unit = 10.0 ** (math.floor(math.log10(percent)) - 1)
    return f"{math.ceil(percent / unit - 1e-6) * unit:.10g}"


# --- text


def _percent(part: float, whole: float) -> str:
    if whole <= 0:
        return "-"
    return "<1%" if 0 < part < 0.005 * whole else f"{100 * part / whole:.0f}%"
