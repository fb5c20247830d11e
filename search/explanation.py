"""The reason for one decision of a plan: the best plan with another choice there.

The plan solves a graph problem on its mesh. To explain a node, its label is forbidden and the problem is solved again
under the cap. The difference of the two costs is the price of the runner-up, and the solver's lower bound gives the
price a lower bound, too.

Only changes that belong to the explained one count. The other solution may also differ elsewhere, if two choices are
equally good or if the plan is not the best within its gap. Costs are pairwise. So changed nodes that no chain of
changed neighbours joins to the explained node add the same seconds with it and without it. They keep the plan's labels,
unless the cap needs them changed.

Recomputation and host memory are no labels: they rewrite the step before it becomes a problem. Their prices are
estimates (`search.explained_memory`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.units import format_bytes
from autoshard.search.explained_memory import MemoryPrices, pinned
from autoshard.search.mesh_problem import NO_CAP, RELATIVE_GAP, MeshProblem
from autoshard.search.plan.estimates import estimate
from autoshard.search.plan.explained import (
    CHEAPER_ELSEWHERE,
    IMPROVABLE,
    NOT_POSSIBLE,
    TIE,
    Alternative,
    Change,
    Explanation,
)
from autoshard.search.plan.values import Estimates
from autoshard.search.result import SearchResult
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.pbqp import Labels, Problem
from autoshard.search.space.found import Found

LIMIT_S = 10.0
"""Nominal seconds for each problem that is solved for an explanation. Source: a choice of ours; a user waits for it."""

FINE_GAP = 5e-4
"""Certified gap of a runner-up. Source: a tenth of the search's gap, so that a price is known better than a plan's
time."""

ROUNDING_SHARE = 1e-9
"""Relative error of sums of the same seconds in another order."""

Kept = tuple[np.ndarray, ...]
"""Per node, the labels that are left."""


def explain(found: SearchResult, name: str, place: str = "plan") -> Explanation:
    """Explains one decision of a plan that was applied to its step.

    Args:
      name: the path of an argument, or the name of an op, a copy or a class of recomputed ops in the plan.

    Raises:
      PlanError: nothing is decided under this name.
    """
    codec, memory = found.on_mesh.codec, MemoryPrices(found)
    node = next((n for n, names in enumerate(codec.names) if name in names), None)
    if node is None and not memory.knows(name):
        codec.choices(name, place)  # raises, and names what is near
        raise PlanError(f"{place}: {name!r} names no decision of this step")
    decision = None if node is None else _Decision(found, node)
    own_bytes = decision.own_bytes(found.chosen[decision.node]) if decision else None
    return Explanation(
        name=name,
        choice=decision.choice if decision else "",
        reason=decision.reason if decision else "",
        rules=decision.rules if decision else (),
        runner_up=decision.runner_up if decision else None,
        beyond_cap=decision.beyond_cap if decision else None,
        retention=memory.retention(name),
        host=None if own_bytes is None else memory.host(name, own_bytes),
        more_memory=memory.more(),
        step_s=found.plan.estimates.step_s,
        is_upper=bool(found.problem.sites or found.problem.offloaded_sites or found.problem.hosted),
    )


@dataclass(frozen=True, eq=False)
class _Solved:
    """Another solution of the plan's problem.

    Attributes:
      labels: its strategies.
      bound_s: a lower bound on all solutions with its choices.
      overlap: its share of the scheduler's budget.
    """

    labels: Labels
    bound_s: float
    overlap: float


@dataclass(frozen=True, eq=False)
class _Decision:
    """A node of an applied plan."""

    found: SearchResult
    node: int

    @property
    def on_mesh(self) -> MeshProblem:
        """The problem that the plan solves."""
        return self.found.on_mesh

    @property
    def problem(self) -> Problem:
        """Its costs."""
        return self.on_mesh.problem

    @property
    def choice(self) -> str:
        """The decision in words."""
        return self.on_mesh.codec.text(self.node, self.found.chosen[self.node])

    @cached_property
    def reason(self) -> str:
        """The reason why the decision is not the runner-up."""
        runner_up, step_s = self.runner_up, self.found.plan.estimates.step_s
        if self._is_pinned or runner_up is None:
            return NOT_POSSIBLE
        if abs(runner_up.more_s) <= max(self.found.plan.gap or 0.0, RELATIVE_GAP) * step_s:
            return TIE
        return CHEAPER_ELSEWHERE if runner_up.more_s > 0 else IMPROVABLE

    @cached_property
    def rules(self) -> tuple[str, ...]:
        """The rules that exclude other choices."""
        return (*self._pin_rule(), *self._indivisible(), *self._without_runner_up())

    def _pin_rule(self) -> Iterator[str]:
        if self._is_pinned:
            yield "it is pinned by the options of the search; without the pin:"

    def _indivisible(self) -> Iterator[str]:
        """Dimensions of an argument that a mesh axis cannot split."""
        if self._argument_shape is None:
            return
        for dim, size in enumerate(self._argument_shape):
            axes = [f"{axis}={n}" for axis, n in self.on_mesh.codec.mesh.items() if size % n]
            if axes:
                yield f"dimension {dim} of size {size} does not divide by {' or '.join(axes)}"

    def _without_runner_up(self) -> Iterator[str]:
        if not len(self._others):
            yield "it has one choice on this mesh: no axis divides what it computes, or no rule says how it splits"
        elif self.runner_up is None:
            cap = format_bytes(self.found.plan.memory_bytes)
            found = "no other choice fits" if self._is_proven else "no other choice was found that fits"
            yield f"{found} the cap of {cap} a device"

    @cached_property
    def runner_up(self) -> Alternative | None:
        """The best plan with another choice that fits."""
        return None if self._fitting is None else self._alternative(self._fitting)

    @cached_property
    def beyond_cap(self) -> Alternative | None:
        """The best plan with another choice that does not fit, if the cap decides: without a cap, all plans with the
        present choice would be slower."""
        cutoff_s = self.problem.cost_s(self._fitting.labels) if self._fitting else math.inf
        uncapped = self._without_cap(self._others, (1 - RELATIVE_GAP) * cutoff_s)
        if uncapped is None or self._fits(uncapped.labels, uncapped.overlap):
            return None
        own = np.array([self.found.chosen[self.node]])
        if self._fitting and self._without_cap(
            own, (1 + RELATIVE_GAP) * self.problem.cost_s(uncapped.labels)
        ):
            return None
        return self._alternative(uncapped)

    def _without_cap(self, labels: np.ndarray, cutoff_s: float) -> _Solved | None:
        """The best plan with one of the node's labels that is faster than the cutoff."""
        if not len(labels):
            return None
        try:
            uncapped = self.on_mesh.solve(
                self._with(labels), NO_CAP, LIMIT_S, cutoff_s, relative_gap=RELATIVE_GAP / 2
            )
        except NoFitError:
            return None
        return _Solved(uncapped.labels, uncapped.bound_s, self.found.plan.overlap)

    @cached_property
    def _fitting(self) -> _Solved | None:
        return self._solved[0]

    @property
    def _is_proven(self) -> bool:
        """True if it is proven that no other choice fits."""
        return self._solved[1]

    @cached_property
    def _solved(self) -> tuple[_Solved | None, bool]:
        """The runner-up; if there is none, whether that is proven."""
        if not len(self._others):
            return None, True
        limit_bytes = self.found.plan.memory_bytes
        try:
            kept = self._with(self._others)
            solution, device = self.on_mesh.fitting(kept, limit_bytes, LIMIT_S, relative_gap=FINE_GAP)
        except NoFitError as e:
            return None, e.is_proven
        labels = self._like_plan(solution.labels, device.overlap)
        return _Solved(labels, solution.bound_s, device.overlap), False

    def _with(self, labels: np.ndarray) -> Kept:
        """Per node, the labels to choose from: these for this node, and those that the pins allow for others."""
        own = set(self.on_mesh.codec.names[self.node])
        pins = {name: spec for name, spec in pinned(self.found.plan).items() if name not in own}
        kept = [*self.on_mesh.pinned(pins)]
        kept[self.node] = labels
        return tuple(kept)

    @cached_property
    def _others(self) -> np.ndarray:
        costs = self.problem.node_cost_s[self.node]
        return np.array(
            [n for n in np.flatnonzero(np.isfinite(costs)) if n != self.found.chosen[self.node]], int
        )

    @property
    def _is_pinned(self) -> bool:
        return not pinned(self.found.plan).keys().isdisjoint(self.on_mesh.codec.names[self.node])

    # --- what an alternative changes

    def _alternative(self, solved: _Solved) -> Alternative:
        limit_bytes, before = self.found.plan.memory_bytes, self.found.plan.estimates
        device = self.on_mesh.predicted(solved.labels, limit_bytes, overlap=solved.overlap)
        there = Found(self.found.problem, self.on_mesh, solved.labels, limit_bytes, device)
        costed = self.on_mesh.memory.costed
        after = estimate(costed, solved.labels, there.device, there.hidden_s, there.host_bytes)
        least_s = solved.bound_s - self.found.solved_s
        sizes = self.own_bytes(self.found.chosen[self.node]), self.own_bytes(solved.labels[self.node])
        more_s = after.step_s - before.step_s
        return Alternative(
            choice=self.on_mesh.codec.text(self.node, solved.labels[self.node]),
            more_s=more_s,
            at_least_s=-math.inf if self.found.problem.has_transfers else min(least_s, more_s),
            more_bytes=after.peak_bytes - before.peak_bytes,
            own_bytes=None if sizes[0] is None or sizes[1] is None else (sizes[0], sizes[1]),
            parts=_parts(before, after),
            changes=self._changes(solved.labels),
        )

    def _changes(self, labels: Labels) -> tuple[Change, ...]:
        """The other nodes whose labels change, with the seconds that each adds."""
        before, codec = self.found.chosen, self.on_mesh.codec
        more_s = [
            float(c[b] - c[a]) for c, a, b in zip(self.problem.node_cost_s, before, labels, strict=True)
        ]
        for edge in self.problem.edges:
            seconds = (
                edge.cost_s[labels[edge.u], labels[edge.v]] - edge.cost_s[before[edge.u], before[edge.v]]
            )
            ends = [n for n in (edge.u, edge.v) if before[n] != labels[n]]
            for node in ends:
                more_s[node] += float(seconds) / len(ends)
        changed = [n for n in _changed(before, labels) if n != self.node]
        return tuple(
            Change(_named(codec.names[n]), codec.text(n, before[n]), codec.text(n, labels[n]), more_s[n])
            for n in sorted(changed, key=lambda n: (-abs(more_s[n]), n))
        )

    def _fits(self, labels: Labels, overlap: float) -> bool:
        """True if a solution's kernels keep to the cap."""
        limit_bytes = self.found.plan.memory_bytes
        return self.on_mesh.predicted(labels, limit_bytes, overlap=overlap).needed_bytes <= limit_bytes

    def _like_plan(self, labels: Labels, overlap: float) -> Labels:
        """A solution that keeps the plan's labels in all changes that are not joined to this node; the solution itself
        if that does not fit."""
        joined = _joined(self.problem, self.node, _changed(self.found.chosen, labels))
        pairs = enumerate(zip(self.found.chosen, labels, strict=True))
        near = self._without_ties(tuple(b if n in joined else a for n, (a, b) in pairs))
        return near if self._fits(near, overlap) else labels

    def _without_ties(self, labels: Labels) -> Labels:
        """A solution whose other labels return to the plan's, one after another, if that is no slower."""
        around, now = self._around, list(labels)
        for node in _changed(self.found.chosen, labels):
            before = self.found.chosen[node]
            costs = self.problem.node_cost_s[node] + sum(edge[:, now[v]] for v, edge in around[node])
            if node != self.node and costs[before] <= costs[now[node]] * (1 + ROUNDING_SHARE):
                now[node] = before
        return tuple(now)

    @cached_property
    def _around(self) -> list[list[tuple[int, np.ndarray]]]:
        """Per node, its neighbours and the edge costs as this node sees them."""
        around: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.problem.node_cost_s]
        for edge in self.problem.edges:
            around[edge.u].append((edge.v, edge.cost_s))
            around[edge.v].append((edge.u, edge.cost_s.T))
        return around

    # --- arguments

    @cached_property
    def _argument_shape(self) -> tuple[int, ...] | None:
        """The shape of the argument that the node decides; None for other nodes."""
        graph = self.on_mesh.memory.costed.graph
        if self.node >= len(graph.groups):
            return None
        op = graph.folded.op(graph.groups[self.node].op_classes[0])
        return graph.folded.program.values[op.results[0]].shape if op.name == "input" else None

    def own_bytes(self, label: int) -> int | None:
        """Bytes of the argument on a device under a label; None for other nodes."""
        if self._argument_shape is None:
            return None
        costed = self.on_mesh.memory.costed
        op_class = costed.graph.groups[self.node].op_classes[0]
        value = costed.graph.folded.program.values[costed.graph.folded.op(op_class).results[0]]
        return round(value.num_bytes * float(costed.shares(costed.graph.ports[op_class, 0, True])[label]))


def _changed(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [n for n, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def _joined(problem: Problem, node: int, changed: Sequence[int]) -> set[int]:
    """The changed nodes that a chain of changed neighbours joins to a node."""
    around: dict[int, list[int]] = {n: [] for n in changed}
    for edge in problem.edges:
        if edge.u in around and edge.v in around:
            around[edge.u].append(edge.v)
            around[edge.v].append(edge.u)
    found, left = {node}, [node]
    while left:
        fresh = [n for n in around.get(left.pop(), ()) if n not in found]
        found.update(fresh)
        left += fresh
    return found


def _named(names: Sequence[str]) -> str:
    return names[0] + f" and {len(names) - 1} like it" * (len(names) > 1)


def _parts(before: Estimates, after: Estimates) -> tuple[tuple[str, float], ...]:
    """Differences of the seconds of each kind of computation and communication, the largest first."""
    this, other = _seconds(before), _seconds(after)
    more = {name: other.get(name, 0.0) - this.get(name, 0.0) for name in {**this, **other}}
    least_s = ROUNDING_SHARE * max(before.step_s, after.step_s)
    parts = [(name, seconds) for name, seconds in more.items() if abs(seconds) > least_s]
    return tuple(sorted(parts, key=lambda part: (-abs(part[1]), part[0])))


def _seconds(estimates: Estimates) -> dict[str, float]:
    found = {"computation": estimates.compute_s, "copies to and from the host": estimates.transfer_s}
    for one in estimates.collectives:
        found[f"{one.kind} over {', '.join(one.axes)}"] = one.seconds
    return {**found, "hidden behind computation": -estimates.hidden_s}
