"""Layouts to run: found by the search, of the smallest peak, or drawn at random among all that are possible."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cost_model.cluster import Cluster
from cost_model.hardware import parse_cluster
from search import driver
from search.ir.graph import Step
from search.ir.sharding import Layout
from search.mesh_problem import Ground, Options
from search.plan.shardings import spell
from search.problem.memory_rows import Memory
from search.problem.strategies import Way
from search.solver import branch_and_bound

PLENTY_BYTES = 1 << 40
"""No cap for a tiny model."""

SEARCH_S = 4.0
"""A good plan is enough, it need not be proven the best."""


def fastest(step: Step, mesh: tuple[int, ...]) -> Layout:
    """What the search finds where memory is plenty."""
    options = Options(PLENTY_BYTES, mesh, time_limit_s=SEARCH_S)
    return driver.find(step, cluster(mesh), options).layout


def smallest(step: Step, mesh: tuple[int, ...]) -> Layout:
    """The plan of the smallest peak, at any cost: all state sharded, little kept."""
    memory, problem = _priced(step, mesh)
    peak = branch_and_bound.minimise_peak(
        problem, limit_bytes=1.0, violated=lambda labels: memory.rows_over(labels, 1), time_limit_s=SEARCH_S
    )
    return spell(memory.priced, peak.labels)


def drawn(step: Step, mesh: tuple[int, ...], seed: int) -> Layout:
    """A plan that nobody would choose: each node's labels are ranked at random, and only the impossible is forbidden."""
    memory, problem = _priced(step, mesh)
    rng = np.random.default_rng(seed)
    nodes = tuple(np.where(np.isfinite(c), rng.random(c.shape), np.inf) for c in problem.node_cost_s)
    edges = tuple(replace(e, cost_s=np.where(np.isfinite(e.cost_s), 0.0, np.inf)) for e in problem.edges)
    solution = branch_and_bound.solve(
        branch_and_bound.Problem(nodes, edges), relative_gap=0.5, time_limit_s=SEARCH_S
    )
    return spell(memory.priced, solution.labels)


def with_copies(step: Step, pins: Mapping[str, Any], is_fresh: bool) -> Layout:
    """The fastest plan under these pins in which the backward phase's copies are all made anew, or all kept."""
    devices = cluster((8,))
    on_mesh = Ground.of(step, ["" for _ in step.arguments], devices.device).on(devices, (8,))
    kept = list(on_mesh.pinned(pins))
    for copy in on_mesh.memory.priced.sketch.copies:
        ways = on_mesh.memory.priced.choices[copy.node].ways
        if copy.kept_from:
            kept[copy.node] = np.array(
                [i for i, w in enumerate(ways) if w is (Way.FRESH if is_fresh else Way.KEPT)]
            )
    solution = on_mesh.solve(kept, PLENTY_BYTES, SEARCH_S)
    return spell(on_mesh.memory.priced, solution.labels)


def _priced(step: Step, mesh: tuple[int, ...]) -> tuple[Memory, branch_and_bound.Problem]:
    devices = cluster(mesh)
    on_mesh = Ground.of(step, (), devices.device).on(devices, mesh)
    return on_mesh.memory, on_mesh.problem


def cluster(mesh: tuple[int, ...]) -> Cluster:
    """Simulated devices, as many as the mesh has."""
    return parse_cluster(f"{int(np.prod(mesh))}xCPU")
