"""The page: its sections in their order, put into the template."""

import json
from importlib.resources import files
from string import Template

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, from_json
from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.report.answer import answer
from autoshard.report.argument_tree import argument_tree
from autoshard.report.cluster_map import cluster_map
from autoshard.report.markup import Html, bar, behind, element, joined, section, table
from autoshard.report.pipeline_memory import pipeline_memory
from autoshard.report.roofline import roofline
from autoshard.report.schedule_chart import schedule_chart
from autoshard.report.step_chart import residents_table, step_chart, time_table
from autoshard.search.pipeline.simulator import Simulation
from autoshard.search.pipeline.timeline import simulated
from autoshard.search.plan.certificate import certificate, certified_gap
from autoshard.search.plan.edits import is_edited
from autoshard.search.plan.headline import headline
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import Candidate, Collective, PlanValues

FRAME = "width:100%;height:640px;border:0"
"""Style of the frame in which a notebook shows a page: its styles stay inside."""

MAX_COLLECTIVES = 60
"""Lines of collectives: of a pipeline, each stage has its own."""

SAME = 1e-6
"""Relative difference of times that are one, as the solver adds them up in another order."""

EDITED = (
    "This plan was edited by hand, or made by an earlier version: its estimates are those of other decisions, and are left "
    "out. To make new ones: autoshard show PLAN TARGET."
)


def page(plan: PlanValues) -> str:
    """A plan as one HTML page that loads nothing.

    Raises:
      PlanError: a loaded plan's cluster does not make sense, or has not as many devices as the mesh.
    """
    try:
        cluster = from_json(plan.cluster, "plan: cluster")
        body = joined((_header(plan, cluster), *_sections(plan, cluster), _footer(plan)))
    except InputError as e:
        raise PlanError(str(e)) from e
    title = element("title", f"{plan.step} on {cluster.name}: {headline(plan)}")
    return Template(_part("page.html")).substitute(
        title=title, style=_part("page.css"), script=_part("page.js"), body=body
    )


def framed(text: str) -> str:
    """A page as a notebook's output."""
    return element("iframe", srcdoc=text, style=FRAME, title="autoshard plan", sandbox="allow-scripts")


def _part(name: str) -> str:
    return files("autoshard.report").joinpath(name).read_text(encoding="utf-8")


def _sections(plan: PlanValues, cluster: AnyCluster) -> list[Html]:
    if is_edited(plan):
        return [element("p", EDITED, class_="warning"), _where(plan, cluster, False), _arguments(plan)]
    found = [
        _answer(plan, cluster),
        _where(plan, cluster, True),
        _time(plan),
        _memory(plan),
        _arguments(plan),
        _heavy(plan, cluster),
        _collectives(plan),
        _certificate(plan),
        _sources(plan, cluster),
    ]
    return [one for one in found if one]


# --- sections


def _header(plan: PlanValues, cluster: AnyCluster) -> Html:
    where = f"{plan.step} on {cluster.name}: {cluster}{cluster.caveat}"
    return element("header", element("p", where, class_="where"), element("h1", headline(plan)))


def _answer(plan: PlanValues, cluster: AnyCluster) -> Html:
    return element(
        "section", answer(plan, cluster, certified_gap(plan)), aria_label="The answer", class_="answer"
    )


def _where(plan: PlanValues, cluster: AnyCluster, is_priced: bool) -> Html:
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.shardings[0].mesh.items())
    note = f"One program on the mesh {mesh}."
    if plan.is_pipeline:
        stages, workers = plural(len(plan.stages), "stage"), plural(plan.workers, "worker")
        parts = plural(plan.microbatches, "microbatch", "es")
        note = f"{stages} on {workers}, schedule {plan.schedule}, {parts}."
    return section("What runs where", cluster_map(plan, cluster, is_priced), note=note)


def _time(plan: PlanValues) -> Html:
    profile = plan.estimates.profile
    if plan.is_pipeline:
        simulation = simulated(plan)
        note = _schedule_note(plan, simulation)
        charts = schedule_chart(plan, simulation), pipeline_memory(plan, simulation)
        return section("The step in time", *charts, note=note)
    if profile is None:
        return section("The step in time", time_table(plan), note="The plan's file has no profile over time.")
    note = (
        f"One device, by the cost model's schedule of its kernels, which takes {format_seconds(profile.seconds)}; the step "
        "time above is the sum of its parts below. Lanes compute or move data side by side; under them, what fills the "
        "memory at that time. A loop's body is drawn once, with the time of all its runs."
    )
    return section("The step in time", step_chart(plan, profile), time_table(plan), note=note)


def _schedule_note(plan: PlanValues, simulation: Simulation) -> str:
    rest_s = plan.estimates.step_s - simulation.makespan_s
    has_rest = rest_s > SAME * plan.estimates.step_s
    rest = (
        f" The update and ops outside of the layers take {format_seconds(rest_s)} more." if has_rest else ""
    )
    return (
        f"A lane is a worker, a block a task, with the number of its microbatch. Gaps are the bubble.{rest}"
    )


def _memory(plan: PlanValues) -> Html | None:
    estimates = plan.estimates
    if not estimates.residents:
        return None
    host = (
        f" {format_bytes(estimates.host_bytes)} per device are on the host." if estimates.host_bytes else ""
    )
    note = f"At {estimates.peak_at}. The predicted peak has a margin over the profile for what the model does not see.{host}"
    return section(
        "Memory at the peak", residents_table(estimates.residents, estimates.peak_bytes), note=note
    )


def _arguments(plan: PlanValues) -> Html:
    stages = " Of a pipeline: if one stage held it all." if plan.is_pipeline else ""
    note = f"Where each array rests between steps. Bytes are those of one device.{stages} Equal layers are one line."
    return section("Arguments", argument_tree(plan), note=note)


def _heavy(plan: PlanValues, cluster: AnyCluster) -> Html | None:
    profile = plan.estimates.profile
    if profile is None or not profile.ops:
        return None
    (group,) = cluster.groups
    note = (
        "Names are those of the plan's ops. Other kernels, which only read and write memory, are not listed."
    )
    return section("Heavy ops", roofline(profile.ops, group.device, plan.estimates.step_s), note=note)


def _collectives(plan: PlanValues) -> Html:
    own = [("", one) for one in plan.estimates.collectives]
    per_stage = [(f"stage {n}", one) for n, s in enumerate(plan.estimates.stages) for one in s.collectives]
    found = [pair for pair in own + per_stage if pair[1].bytes]
    if not found:
        return section("Collectives", note="The plan has none.")
    ordered = sorted(found, key=lambda pair: -pair[1].seconds)
    left = len(ordered[MAX_COLLECTIVES:])
    more = element("p", f"and {left} more, each shorter", class_="note") if left else None
    longest = ordered[0][1].seconds or 1.0
    rows = [_collective(where, one, longest, bool(per_stage)) for where, one in ordered[:MAX_COLLECTIVES]]
    head = (*["stage"] * bool(per_stage), "kind", "over", "count", "bytes", "time", "")
    shift = len(head) - 6
    title = "Collectives per step by kind and axes; bytes are those of a device"
    return section("Collectives", table(title, head, rows, right=(2 + shift, 3 + shift, 4 + shift)), more)


def _collective(where: str, one: Collective, longest_s: float, has_stages: bool) -> tuple[str, ...]:
    return (
        *[where or "all"] * has_stages,
        one.kind,
        ", ".join(one.axes),
        f"{one.count}x",
        format_bytes(one.bytes),
        format_seconds(one.seconds),
        bar(one.seconds / longest_s),
    )


def _certificate(plan: PlanValues) -> Html | None:
    lines = certificate(plan)
    if not lines:
        return None
    gap = certified_gap(plan)
    among = element("p", f"{gap[:1].upper()}{gap[1:]}. It is certified among plans that")
    items = element("ul", *(element("li", line.strip()) for line in lines[1:]))
    return section("The certificate", among, items, _candidates(plan) if plan.candidates else None)


def _candidates(plan: PlanValues) -> Html:
    """The candidates that the search tried, by their bounds; the plan's own candidate is marked."""
    longest_s = max([plan.estimates.step_s, *(one.bound_s for one in plan.candidates)])
    rows = [
        (
            format_mesh(one.mesh),
            str(one.microbatches),
            str(one.recomputed or "-"),
            str(one.waiting + one.hosted or "-"),
            format_seconds(one.bound_s) if one.bound_s else "-",
            format_seconds(one.step_s) if one.step_s is not None else "-",
            _verdict(plan, one),
            bar(one.bound_s / longest_s),
        )
        for one in plan.candidates
    ]
    head = ("mesh", "microbatches", "ops recomputed", "on the host", "at least", "found", "", "")
    title = "Candidates that were tried. A candidate that takes at least as long as the plan cannot be better"
    return table(title, head, rows, right=(1, 2, 3, 4, 5))


def _verdict(plan: PlanValues, one: Candidate) -> str:
    """Why a candidate is not the plan, or that it is."""
    step_s = plan.estimates.step_s
    if one.step_s is not None and one.step_s <= step_s * (1 + SAME):
        return "the plan"
    if one.is_ruled_out:
        return "no faster one fits"
    return "slower" if one.bound_s >= step_s or one.step_s is not None else "not settled"


def _sources(plan: PlanValues, cluster: AnyCluster) -> Html:
    """The sources of the page's numbers: estimates, the compiler, measurements."""
    compiled = plan.estimates.compiled_peak_bytes
    named = {path: source for group in cluster.groups for path, source in group.sources}
    measured = sum(source.startswith("measured") for source in named.values())
    rows = [
        ("times, collectives, memory", "estimated", "by the cost model, from the decisions of the plan"),
        (
            "compiled peak",
            "not asked" if compiled is None else "compiled",
            "autoshard verify compiles the plan without a GPU"
            if compiled is None
            else f"{format_bytes(compiled)} by XLA",
        ),
        (
            "numbers of the cluster",
            "measured" if measured else "not measured",
            f"{measured} of {len(named)} on the machine itself"
            if measured
            else "data sheets and assumptions; autoshard calibrate measures them",
        ),
    ]
    numbers = table("Numbers of the cluster by source", ("number", "source"), [*named.items()])
    return section(
        "What is estimated, compiled, measured",
        table("Origin of the numbers on this page", ("number", "origin", "by"), rows),
        behind("Sources of the cluster's numbers", numbers),
    )


def _footer(plan: PlanValues) -> Html:
    options = ", ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in plan.options.items()
    )
    parts = [
        f"Fingerprint {plan.fingerprint}, JAX {plan.jax}.",
        f"Asked for: {options}." if options else "",
        f"Searched for {format_seconds(sum(plan.search_s.values()))}." if plan.search_s else "",
        "Made by autoshard report.",
    ]
    return element("footer", element("p", " ".join(filter(None, parts))))
