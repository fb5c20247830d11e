"""The search: from a traced step and a cluster to a plan.

Everything that does not depend on the mesh is done once (`Ground`): the flat program, its kinds, clusters, wires and
liveness. Then each mesh shape worth trying is priced and solved, and the fastest plan that fits wins; ties go to the
first. A plan that is loaded goes the same way, with its decisions as the only labels left.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autoshard.errors import InfeasibleError, InputError, PlanError
from autoshard.factors import has_rule
from autoshard.graph import Step
from autoshard.layout import Layout
from autoshard.plan import Decisions, Plan
from autoshard.spec import AXIS_NAMES, Spec
from cost_model.cluster import Cluster
from cost_model.collectives import MeshModel
from cost_model.meshes import mesh_shapes
from search import ilp
from search.clusters import clusters
from search.decisions import Words, allowed_by_pins
from search.estimate import estimate
from search.folding import fold
from search.kinds import folded
from search.liveness import Item, items
from search.memory import Memory
from search.pbqp import Problem
from search.pricing import Priced, price
from search.program import BOUNDARIES, Program, flatten
from search.reshard import Resharder
from search.sketch import Sketch, sketch
from search.spelling import spell

DEFAULT_TIME_LIMIT_S = 15.0
"""Seconds for all meshes together; what is not proven by then is stated as the plan's gap."""

RELATIVE_GAP = 5e-3
"""Plans within this of the optimum are taken for optimal: the cost model is not finer."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What a search is asked for.

    Attributes:
      memory_bytes: the cap per device.
      mesh: sizes of the mesh axes, outermost first; None to search it.
      pins: the spec in which an argument must rest, by pytree path, per axis name order of the mesh searched.
      time_limit_s: seconds for the solver.
    """

    memory_bytes: int
    mesh: tuple[int, ...] | None = None
    pins: Mapping[str, Any] | None = None
    time_limit_s: float = DEFAULT_TIME_LIMIT_S


@dataclass(frozen=True, eq=False)
class Found:
    """A plan, and its layout for the executor."""

    plan: Plan
    layout: Layout


@dataclass(frozen=True, eq=False)
class _Solved:
    memory: Memory
    solution: ilp.Solution


def find(step: Step, cluster: Cluster, options: Options, progress: Progress = lambda line: None) -> Found:
    """Searches for the fastest plan that fits.

    Args:
      step: the traced step.
      cluster: where it will run.
      options: the cap, and what is fixed beforehand.
      progress: called with one line per stage.

    Raises:
      InfeasibleError: nothing fits the cap.
      InputError: the mesh or a pin does not suit the cluster or the step.
    """
    clock = _Clock()
    pins = options.pins or {}
    ground, found = _Ground.of(step, [repr(pins.get(a.name)) for a in step.arguments]), []
    clock.lap("graph")
    shapes = _shapes(cluster, options)
    for i, shape in enumerate(shapes):
        progress(f"mesh {'x'.join(map(str, shape))} ({i + 1} of {len(shapes)})")
        memory, problem, words = ground.on(cluster, shape)
        kept = [np.arange(n) for n in problem.num_labels]
        for node, labels in allowed_by_pins(words, _pins_on(pins, words.axis_names)).items():
            kept[node] = labels
        clock.lap("strategies")
        left = max(options.time_limit_s - clock.seconds.get("solve", 0.0), 1.0) / (len(shapes) - i)
        try:
            found.append(_Solved(memory, _solve(memory, problem, kept, options.memory_bytes, left)))
        except ilp.NoFitError:
            progress("nothing fits on this mesh")
        clock.lap("solve")
    if not found:
        raise _infeasible(ground, cluster, shapes, options)
    best = min(found, key=lambda s: s.solution.cost_s)
    bound_s = min(s.solution.bound_s for s in found)
    gap = max(0.0, 1.0 - bound_s / best.solution.cost_s) if best.solution.cost_s > 0 else 0.0
    return _finished(best, step, cluster, options, gap, clock)


def apply(step: Step, plan: Plan, cluster: Cluster, place: str = "plan") -> Found:
    """A loaded plan against the step that it is for: its decisions honoured, re-priced and re-checked.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InfeasibleError: what it decides does not fit its memory cap.
    """
    clock = _Clock()
    if plan.fingerprint != fingerprint(step):
        raise PlanError(
            f"{place} was made for another step (its {plan.step!r} has fingerprint {plan.fingerprint}, this "
            f"{step.name!r} has {fingerprint(step)}). Search again for this one"
        )
    shape = tuple(plan.decisions.mesh.values())
    if tuple(plan.decisions.mesh) != AXIS_NAMES.get(len(shape)):
        raise PlanError(f"{place}: wanted mesh axes named {AXIS_NAMES}, got {tuple(plan.decisions.mesh)}")
    arguments = plan.decisions.arguments
    ground = _Ground.of(step, [arguments.get(a.name, "") for a in step.arguments])
    memory, problem, words = ground.on(cluster, shape)
    kept = words.allowed(plan.decisions, place)
    options = Options(plan.memory_bytes)
    try:
        solution = _solve(memory, problem, kept, plan.memory_bytes, DEFAULT_TIME_LIMIT_S)
    except ilp.NoFitError as e:
        raise InfeasibleError(f"what {place} decides does not fit its cap of {plan.memory_bytes} bytes a device") from e
    found = _finished(_Solved(memory, solution), step, cluster, options, plan.gap, clock)
    return replace(found, plan=replace(found.plan, options=plan.options, cluster=plan.cluster))


def fingerprint(step: Step) -> str:
    """16 hex digits that change with the traced step: its ops, shapes, dtypes and argument names."""
    digest = hashlib.sha256()
    for argument in step.arguments:
        digest.update(f"{argument.name} {argument.role}\n".encode())
    program = flatten(step)
    for op in program.ops:
        values = [(program.values[v].shape, str(program.values[v].dtype)) for v in op.results]
        digest.update(f"{op.name} {op.operands} {op.results} {values} {op.count} {op.phase}\n".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class _Ground:
    """All that does not depend on the mesh."""

    program: Program
    sketch: Sketch
    items: tuple[Item, ...]

    @classmethod
    def of(cls, step: Step, marks: Sequence[str]) -> "_Ground":
        program = flatten(step)
        whole = folded(program, fold(program, marks))
        drawn = sketch(whole, clusters(whole))
        return cls(program, drawn, items(drawn))

    def on(self, cluster: Cluster, shape: tuple[int, ...]) -> tuple[Memory, Problem, Words]:
        priced = price(self.sketch, Resharder(MeshModel(cluster, shape)))
        return Memory(priced, self.items), priced.problem(), Words(priced)


def _solve(
    memory: Memory, problem: Problem, kept: Sequence[np.ndarray], limit_bytes: int, time_limit_s: float
) -> ilp.Solution:
    """Solves on the labels that are kept, and answers in the original labels."""

    def original(labels: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(k[label]) for k, label in zip(kept, labels, strict=True))

    def violated(labels: Sequence[int]) -> tuple[ilp.Row, ...]:
        rows = memory.rows_over(original(labels), limit_bytes)
        return tuple(ilp.Row(r.name, tuple((n, b[kept[n]]) for n, b in r.bytes), r.fixed_bytes) for r in rows)

    nodes = tuple(cost[k] for cost, k in zip(problem.node_cost_s, kept, strict=True))
    edges = tuple(ilp.Edge(e.u, e.v, e.cost_s[np.ix_(kept[e.u], kept[e.v])]) for e in problem.edges)
    solution = ilp.solve(
        ilp.Problem(nodes, edges),
        limit_bytes=float(limit_bytes),
        violated=violated,
        time_limit_s=time_limit_s,
        relative_gap=RELATIVE_GAP,
    )
    return replace(solution, labels=original(solution.labels))


def _finished(best: _Solved, step: Step, cluster: Cluster, options: Options, gap: float, clock: "_Clock") -> Found:
    labels, memory = best.solution.labels, best.memory
    plan = Plan(
        step=step.name,
        fingerprint=fingerprint(step),
        jax=jax.__version__,
        cluster=cluster.to_json(),
        options=_said(options),
        memory_bytes=options.memory_bytes,
        decisions=Words(memory.priced).decisions(labels),
        estimates=estimate(memory, labels),
        gap=gap,
    )
    layout = spell(memory.priced, labels)
    clock.lap("plan")
    return Found(replace(plan, search_s=clock.seconds), layout)


def _said(options: Options) -> dict[str, Any]:
    """The options that were given, JSON-ready."""
    said: dict[str, Any] = {}
    if options.mesh is not None:
        said["mesh"] = list(options.mesh)
    if options.pins:
        said["pin"] = {name: str(spec) for name, spec in sorted(options.pins.items())}
    return said


def _shapes(cluster: Cluster, options: Options) -> tuple[tuple[int, ...], ...]:
    if options.mesh is None:
        shapes = mesh_shapes(cluster, max_axes=2)
        named = {a for spec in (options.pins or {}).values() for a in _axes_of(spec)}
        shapes = tuple(s for s in shapes if named <= set(AXIS_NAMES[len(s)]))
        if not shapes:
            raise InputError(f"no mesh has all the axes that the pins name: {sorted(named)}; axes are {AXIS_NAMES}")
        return shapes
    if len(options.mesh) not in AXIS_NAMES or min(options.mesh) < 1:
        raise InputError(f"wanted a mesh of 1 to 3 axes of positive size, got {options.mesh}")
    if int(np.prod(options.mesh)) != cluster.num_devices:
        raise InputError(
            f"the mesh {options.mesh} has {int(np.prod(options.mesh))} devices, the cluster {cluster.name} has "
            f"{cluster.num_devices}"
        )
    return (tuple(options.mesh),)


def _axes_of(spec: Any) -> set[str]:
    return {a for entry in spec if entry is not None for a in (entry if isinstance(entry, tuple) else (entry,))}


def _pins_on(pins: Mapping[str, Any], axis_names: tuple[str, ...]) -> dict[str, Spec]:
    from autoshard.spec import from_partition_spec  # noqa: PLC0415

    return {name: from_partition_spec(spec, axis_names) for name, spec in pins.items()}


def _infeasible(ground: _Ground, cluster: Cluster, shapes, options: Options) -> InfeasibleError:
    return InfeasibleError("nothing fits")


def primitives_without_rule(step: Step) -> dict[str, tuple[int, str]]:
    """Primitives that are replicated for want of a rule: how many ops, and the first one's source line."""
    found: dict[str, tuple[int, str]] = {}
    for op in flatten(step).ops:
        if op.op is not None and op.name not in BOUNDARIES and not has_rule(op.name):
            count, source = found.get(op.name, (0, op.op.source))
            found[op.name] = (count + 1, source)
    return found


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now


__all__ = ["Decisions", "Found", "Options", "Priced", "apply", "find", "fingerprint", "primitives_without_rule"]
