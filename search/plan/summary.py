"""The summary of a plan, in the words of an expert: the text of `print(plan)`."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, from_json
from autoshard.cost_model.units import (
    format_bytes,
    format_count,
    format_flops,
    format_mesh,
    format_rate,
    format_seconds,
)
from autoshard.cost_model.xla.gpu_targets import attempts, scheduler_options
from autoshard.search.plan.argument_lines import argument_lines
from autoshard.search.plan.certificate import certificate, certified_gap
from autoshard.search.plan.edits import edited, is_edited, num_deleted
from autoshard.search.plan.executors import EXECUTORS, JIT, SPMD
from autoshard.search.plan.headline import HEAVY, headline
from autoshard.search.plan.metrics import metrics
from autoshard.search.plan.peak_lines import peak_lines
from autoshard.search.plan.text_table import (
    LINES_OF_A_LIST,
    Row,
    aligned,
    few,
    fitted,
    more_of,
    percent,
    plural,
    search_time,
)
from autoshard.search.plan.values import Collective, Estimates, PlanValues, StageEstimates
from autoshard.search.plan.work_shares import WorkShares

_LABEL_WIDTH = len("compiler")
"""Width of labels such as `step` and `mesh`; none is longer."""

_FORWARD = "forward "
"""The beginning of the name of a forward op."""
EDITED = "edited by hand, or made by an earlier version"
UNPRICED = "  no estimates: they were made before. To make new ones: autoshard show PLAN TARGET"


def summary(plan: PlanValues) -> str:
    """The plan in plain text. The answer comes first: the kind of plan, its time, its memory and its certificate. Then come
    the details, and last those that only files and compilers need.

    Returns:
      Lines that fit the terminal, the same for the same plan but for the search time, which only fresh plans have.

    Raises:
      PlanError: a loaded plan's cluster does not make sense, or has not as many devices as the mesh.
    """
    try:
        cluster = from_json(plan.cluster, "plan: cluster")
        rows = _head(plan, cluster)
    except InputError as e:
        raise PlanError(str(e)) from e
    parts = [
        _edits(plan) if is_edited(plan) else _answer(plan, cluster),
        rows,
        *([] if plan.is_pipeline else _one_program(plan)),
        *([] if is_edited(plan) else [_stages(plan)]),
        _recomputed(plan.retention),
        *([] if is_edited(plan) else _estimated(plan)),
        _origin(plan, cluster),
    ]
    return fitted("\n".join("\n".join(lines) for lines in parts if lines))


def _answer(plan: PlanValues, cluster: AnyCluster) -> list[str]:
    """The kind of plan, its time, its memory and its certificate."""
    numbers = metrics(plan)
    return [
        headline(plan),
        _time_line(numbers, cluster.caveat),
        *_rate_line(numbers),
        *peak_lines(plan, cluster),
        certified_gap(plan),
    ]


def _one_program(plan: PlanValues) -> list[list[str]]:
    """The arguments and the heavy ops of a plan of one program."""
    shares = None if is_edited(plan) else next(iter(plan.estimates.shares), None)
    return [argument_lines(plan.decisions.arguments), _ops(plan.decisions.ops, shares)]


def _estimated(plan: PlanValues) -> list[list[str]]:
    """The parts that hold only for the decisions that the estimates were made of."""
    return [
        _collectives(plan),
        _time(plan),
        _memory(plan.estimates),
        certificate(plan),
        search_time(plan.search_s),
    ]


def _time_line(numbers: Mapping[str, float], caveat: str) -> str:
    """The predicted step time, its MFU and, of a pipeline, its bubble; and the cluster's caveat."""
    sentences = [f"predicted step time: {format_seconds(numbers['predicted_step_s'])}"]
    if "predicted_mfu" in numbers:
        sentences.append(f"MFU {percent(numbers['predicted_mfu'], 1)}")
    if "predicted_bubble" in numbers:
        sentences.append(f"bubble {numbers['predicted_bubble']:.1%}")
    return ", ".join(sentences) + caveat


def _rate_line(numbers: Mapping[str, float]) -> list[str]:
    """The examples and tokens per second, and the model's work in a step."""
    done = [
        f"{format_count(numbers[rate])} {counted}/s"
        for counted in ("examples", "tokens")
        if (rate := f"predicted_{counted}_per_s") in numbers
    ]
    if "model_flops" in numbers:
        done.append(f"{format_flops(numbers['model_flops']).removesuffix('/s')} of the model a step")
    return [f"predicted throughput: {', '.join(done)}"] if done else []


# --- the parts


def _head(plan: PlanValues, cluster: AnyCluster) -> list[str]:
    where = [("step", plan.step), ("cluster", f"{cluster.name}: {cluster}")]
    return _labelled([*where, *(_pipeline(plan) if plan.is_pipeline else _mesh(plan, cluster))])


def _mesh(plan: PlanValues, cluster: AnyCluster) -> list[tuple[str, str]]:
    """The mesh of one program."""
    mesh, (group,) = plan.decisions.mesh, cluster.groups
    model = MeshModel(group, tuple(mesh.values()))
    links = {name: axis_link(model, i) for i, (name, size) in enumerate(mesh.items()) if size > 1}
    axes = [f"{name} {place} ({rate})" for name, (place, rate) in links.items()]
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.items())
    return [("mesh", sizes + (f": {', '.join(axes)}" if axes else ""))]


def _pipeline(plan: PlanValues) -> list[tuple[str, str]]:
    """The executor of a pipeline, its stages, and how it goes through the batch."""
    stages, workers = plural(len(plan.stages), "stage"), plural(plan.workers, "worker")
    parts, replicas = plural(plan.microbatches, "microbatch", "es"), plural(plan.num_replicas, "replica")
    batch = f"{parts}, each split over {replicas} of a stage"
    return [
        ("executor", f"{plan.executor}: {EXECUTORS[plan.executor]}"),
        ("pipeline", f"{stages} on {workers}, schedule {plan.schedule}"),
        ("batch", f"{parts} on each replica of a stage" if plan.executor == SPMD else batch),
    ]


def _stages(plan: PlanValues) -> list[str]:
    """A line for each run of equal stages: their submesh, their times for a microbatch, and their peak."""
    if not plan.is_pipeline:
        return []
    groups = plan.stands_on or ("",) * len(plan.stages)
    has_cuts = any(stage.first_op for stage in plan.stages)
    columns = [
        _stage(taken, str(stage.first_op) if has_cuts else "", plan.mesh_of(stage), group)
        for stage, taken, group in zip(plan.stages, plan.estimates.stages, groups, strict=True)
    ]
    title = ("first op" * has_cuts, "mesh", "forward", "backward", "update", "peak", "on" * bool(plan.groups))
    rows: list[Row] = [("", *title)]
    for row, same in groupby(enumerate(columns), lambda one: one[1]):
        numbers = [n for n, _ in same]
        rows.append((str(numbers[0]) + f"-{numbers[-1]}" * (len(numbers) > 1), *row))
    kept = [n for n in range(len(rows[0])) if any(row[n] for row in rows)]
    axes = " x ".join(plan.mesh_of(plan.stages[0]))
    right = [i for i, n in enumerate(kept) if n in (1, 3, 4, 5, 6)]
    return [
        f"stages (mesh is {axes}; times are a microbatch's)",
        *aligned([tuple(row[n] for n in kept) for row in rows], right=right),
    ]


def _stage(taken: StageEstimates, first_op: str, mesh: Mapping[str, int], group: str) -> Row:
    return (
        first_op,
        format_mesh(tuple(mesh.values())),
        *stage_predictions(taken),
        group,
    )


def stage_predictions(taken: StageEstimates) -> tuple[str, str, str, str]:
    """A stage's seconds forward, backward and of the update, and its peak."""
    seconds = (taken.forward_s, taken.backward_s + taken.weight_gradient_s, taken.update_s)
    forward, backward, update = map(format_seconds, seconds)
    return forward, backward, update, format_bytes(taken.peak_bytes)


def _origin(plan: PlanValues, cluster: AnyCluster) -> list[str]:
    """The traced step, the options, and the compiler's."""
    given = ", ".join(f"{key} {value}" for key, value in plan.options.items())
    besides = attempts(plan.overlap)[0] if plan.executor == JIT else dict[str, str]()
    flags = dict.fromkeys(_compiler_options(group, besides) for group in cluster.groups)
    rows = [("given", given), *(("compiler", one) for one in flags)]
    traced = ("traced", f"fingerprint {plan.fingerprint}, JAX {plan.jax}")
    return _labelled([traced, *(row for row in rows if row[1])])


def _labelled(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Rows of a label and a text, all texts of a summary in one column."""
    return aligned([(label.ljust(_LABEL_WIDTH), text) for label, text in rows], indent=0)


def _compiler_options(cluster: Cluster, besides: Mapping[str, str]) -> str:
    """The compiler options of a plan's programs, but for the memory cap; none if devices are simulated."""
    asked = scheduler_options(cluster.device.name)
    options = {**asked, **besides} if asked else {}
    return ", ".join(f"{key}={value}" for key, value in options.items())


def _edits(plan: PlanValues) -> list[str]:
    """The decisions that were edited by hand. The estimates in the file are those of other decisions."""
    names = [name or table for table, name in edited(plan)]
    deleted = num_deleted(plan)
    edits = (
        f"{plural(len(names), 'decision')} edited by hand: {few(names)}"
        if names
        else "decisions deleted by hand"
    )
    return [edits if names or deleted else EDITED, UNPRICED]


def axis_link(model: MeshModel, axis: int) -> tuple[str, str]:
    """The place of a mesh axis on the cluster, and the rate of its links."""
    place = "across nodes" if model.group((axis,)).crosses_nodes else "inside a node"
    return place, format_rate(model.axis_link(axis)[0])


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
    more = more_of(len(rows[LINES_OF_A_LIST:]), "kind")
    others = plural(len(heavy) - len(forward), "kind")
    title = "matrix products and lookups, forward phase"
    return [
        f"{title} ({others} in other phases)" if len(forward) < len(heavy) else title,
        *aligned(rows[:LINES_OF_A_LIST], right=(1,)),
        *more,
    ]


def _recomputed(retention: Mapping[str, str]) -> list[str]:
    """The recomputed products and loops by name, the other recomputed ops by number; and the offloaded residuals."""
    again = {name: text for name, text in retention.items() if "remat" in text}
    heavy = {name: text for name, text in again.items() if HEAVY.search(name) or " in segments of " in text}
    rows = [(name.removeprefix(_FORWARD), text) for name, text in heavy.items()]
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
    return [*aligned(rows[:LINES_OF_A_LIST]), *more_of(len(rows[LINES_OF_A_LIST:]), "kind")]


def _collectives(plan: PlanValues) -> list[str]:
    estimates = plan.estimates
    if plan.is_pipeline and not estimates.collectives:
        return []  # each stage has its own
    if not estimates.collectives:
        return ["collectives per step: none"]
    ordered = sorted(filter(_moves, estimates.collectives), key=lambda c: -c.seconds)
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


def _moves(one: Collective) -> bool:
    return one.bytes > 0


def time_parts(plan: PlanValues) -> dict[str, float]:
    """Seconds of a step by kind; hidden communication counts negatively."""
    estimates = plan.estimates
    if plan.is_pipeline:
        waiting_s = estimates.bubble * estimates.step_s
        return {"work of a worker": estimates.step_s - waiting_s, "bubble": waiting_s}
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


def _time(plan: PlanValues) -> list[str]:
    step_s, between_s = plan.estimates.step_s, plan.estimates.between_s
    if plan.is_pipeline:
        return [f"between loops over layers: {format_seconds(between_s)} a step"] * (between_s > 0)
    rows = [(name, format_seconds(s), percent(s, step_s)) for name, s in time_parts(plan).items()]
    return ["time per step", *aligned(rows, right=(1, 2))]


def _memory(estimates: Estimates) -> list[str]:
    peak = estimates.peak_bytes
    if not estimates.residents:  # of a pipeline
        host_bytes = estimates.host_bytes
        return [f"memory on the host, per device: {format_bytes(host_bytes)}"] * bool(host_bytes)
    residents = sorted(estimates.residents.items(), key=lambda item: -item[1])
    rows = [(kind.replace("_", " "), format_bytes(b), percent(b, peak)) for kind, b in residents]
    lines = ["memory at the peak, per device", *aligned(rows, right=(1, 2)), f"  at {estimates.peak_at}"]
    return (
        [*lines, f"  on the host: {format_bytes(estimates.host_bytes)} per device"]
        if estimates.host_bytes
        else lines
    )
