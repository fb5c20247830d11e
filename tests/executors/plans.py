"""Plans to run: found by the search, of the smallest peak, or drawn at random among all that are possible."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import driver
from autoshard.search.ir.graph import Site, Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.options import Options
from autoshard.search.plan.estimates import estimate
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.strategies import CopySource
from autoshard.search.result import SearchResult
from autoshard.search.solver import branch_and_bound
from autoshard.search.solver.clock import Deadline, WorkClock
from autoshard.search.step_problem import StepProblem

PLENTY_BYTES = 1 << 40
"""No cap for a tiny model."""

SEARCH_S = 1.0
"""A good plan is enough, it need not be proven the best."""


def fastest(step: Step, mesh: tuple[int, ...]) -> SearchResult:
    """What the search finds where memory is plenty."""
    options = Options(PLENTY_BYTES, mesh, time_limit_s=SEARCH_S)
    return driver.find(step, cluster(mesh), options)


def smallest(step: Step, mesh: tuple[int, ...]) -> SearchResult:
    """The plan of the smallest peak, at any cost: all state sharded, little kept."""
    step_problem, on_mesh = _on(step, mesh)
    memory = on_mesh.memory
    peak = branch_and_bound.minimise_peak(
        on_mesh.problem,
        limit_bytes=1.0,
        violated=lambda labels: memory.rows_over(labels, 1),
        deadline=Deadline.after(SEARCH_S, WorkClock()),
    )
    return _result(step_problem, on_mesh, peak.labels)


def drawn(
    step: Step,
    mesh: tuple[int, ...],
    seed: int,
    hosted: frozenset[int] = frozenset(),
    offloaded_sites: frozenset[Site] = frozenset(),
    updated: frozenset[int] = frozenset(),
) -> SearchResult:
    """A plan that nobody would choose: each node's labels are ranked at random, and only the impossible is forbidden."""
    step_problem, on_mesh = _on(step, mesh, hosted, offloaded_sites, updated)
    rng, problem = np.random.default_rng(seed), on_mesh.problem
    nodes = tuple(np.where(np.isfinite(c), rng.random(c.shape), np.inf) for c in problem.node_cost_s)
    edges = tuple(replace(e, cost_s=np.where(np.isfinite(e.cost_s), 0.0, np.inf)) for e in problem.edges)
    solution = branch_and_bound.solve(
        branch_and_bound.Problem(nodes, edges), relative_gap=0.5, time_limit_s=SEARCH_S
    )
    return _result(step_problem, on_mesh, solution.labels)


def by_rows(step: Step, mesh: tuple[int, ...], beside_channels: bool = False) -> SearchResult:
    """The plan in which the first axis splits the first dimension along which windows slide, the second one the second, as
    far as they divide; or else the last axis splits rows, and the first one the channels of the results."""
    step_problem, on_mesh = _on(step, mesh)
    graph, strategies = on_mesh.memory.costed.graph, on_mesh.memory.costed.strategies
    nodes = [*on_mesh.problem.node_cost_s]
    for node, group in enumerate(graph.groups):
        rule = graph.folded.op(group.op_classes[0]).rule
        wanted = [window.factor for window in rule.windows][: len(mesh)]
        if wanted and beside_channels:
            wanted = [*rule.results[0][-1][:1], wanted[0]]
        own = [group.factor_of.get((group.op_classes[0], f), -1) for f in wanted]
        if len(own) == len(mesh):
            nodes[node] = nodes[node] + (strategies[node].assignment != own).sum(axis=1)
    solution = branch_and_bound.solve(
        branch_and_bound.Problem(tuple(nodes), on_mesh.problem.edges), relative_gap=0.5, time_limit_s=SEARCH_S
    )
    return _result(step_problem, on_mesh, solution.labels)


def with_copies(step: Step, pins: Mapping[str, Any], is_fresh: bool) -> StepSharding:
    """The fastest plan under these pins in which the backward phase's copies are all made anew, or all kept."""
    devices = cluster((8,))
    on_mesh = StepProblem.of(step, ["" for _ in step.arguments], devices.device).on(devices, (8,))
    kept = list(on_mesh.pinned(pins))
    for copy in on_mesh.memory.costed.graph.copies:
        copy_sources = on_mesh.memory.costed.strategies[copy.node].copy_sources
        if copy.kept_from:
            kept[copy.node] = np.array(
                [
                    i
                    for i, w in enumerate(copy_sources)
                    if w is (CopySource.FRESH if is_fresh else CopySource.KEPT)
                ]
            )
    solution = on_mesh.solve(kept, PLENTY_BYTES, SEARCH_S)
    return step_sharding(on_mesh.memory.costed, solution.labels)


def _on(
    step: Step,
    mesh: tuple[int, ...],
    hosted: frozenset[int] = frozenset(),
    offloaded_sites: frozenset[Site] = frozenset(),
    updated: frozenset[int] = frozenset(),
) -> tuple[StepProblem, MeshProblem]:
    devices = replace(cluster(mesh), host_bytes_per_s=1e12, host_cores=100)
    step_problem = StepProblem.of(
        step, (), devices.device, hosted=hosted, offloaded_sites=offloaded_sites, updated=updated
    )
    return step_problem, step_problem.on(devices, mesh)


def _result(step_problem: StepProblem, on_mesh: MeshProblem, chosen: Sequence[int]) -> SearchResult:
    """Strategies as the search would have handed them out."""
    device = on_mesh.predicted(chosen, PLENTY_BYTES)
    plan = Plan(
        step=step_problem.step.name,
        fingerprint=fingerprint(step_problem.traced_program.program.step),
        jax=jax.__version__,
        cluster=cluster(on_mesh.shape).to_json(),
        meshes=(on_mesh.shape,),
        memory_bytes=PLENTY_BYTES,
        executor="jit",
        microbatches=1,
        retention={},
        shardings=(on_mesh.codec.decisions(chosen).sharding,),
        estimates=estimate(on_mesh.memory.costed, chosen, device),
    )
    return SearchResult(plan, step_problem, on_mesh, tuple(chosen), on_mesh.cost_s(chosen, device))


def cluster(mesh: tuple[int, ...]) -> Cluster:
    """Simulated devices, as many as the mesh has."""
    return parse_cluster(f"{int(np.prod(mesh))}xCPU")
