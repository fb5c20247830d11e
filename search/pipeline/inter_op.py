"""Inter-op parallelism: the layers, the submesh and the way of running of each stage, by dynamic programming, with a
proof.

A pipeline of stages with times t_i per microbatch, and m microbatches, takes about

    sum of t_i + (m - 1) x the slowest t_i,

the first to fill and drain it, the second while it is full. The slowest stage counts with its update, and transfers
between stages count where the pipeline fills, so in all

    sum of t_i + transfers + the largest (m - 1) t_i + update_i.

Stages stand in order along the devices of the cluster, all of which are used, on 1, 2, 4, ... devices of a node or on
whole nodes; they may be unequal. A stage holds the residuals of as many microbatches as its schedule keeps in flight,
which depends on the number of stages behind it. Nodes may be of several kinds; they are used in the order given.

For a limit on the slowest stage, the sweep (`search.pipeline.sweep`) finds the smallest sum. Alpa tries all limits in
turn. Here intervals of limits are bisected: all plans whose slowest stage takes between a and b take at least the
smallest sum under limit b, plus a. The interval with the least bound goes first. When this bound exceeds the best plan
so far, or is as near as asked for, the search ends, and its result carries the bound.

Each sweep is bounded, too. If no stage held more in flight than the last one, stages would not have to be counted; then
one sweep from the front gives the least latency of the layers in front of each cut. An entry is dropped if its sum with
that cannot beat the best plan.

Source: Zheng et al. 2022, "Alpa: automating inter- and intra-operator parallelism for distributed deep learning",
section 5.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from autoshard.cost_model.memo import memo
from autoshard.search.pipeline.stage_costs import TOLERANCE, Array, StageTable, prefix_sums
from autoshard.search.pipeline.stage_plan import InterOpPlan, InterOpProblem, NoCut, StagePlan
from autoshard.search.pipeline.sweep import Column, LatencySweep, Places, dominated

NARROW = 1.001
"""An interval whose ends differ by less than this factor is not bisected, but tried from its upper end. Derived: the plan
found there is slower than the best one of the interval by this factor at most, a tenth of the gap that drafts ask for."""

NEAREST = 0.01
"""Precision of the least additional memory in a message, as a share of the cap. Derived: messages print three digits, and a
digit less in the last one of 1.00 GiB is 1%."""


def fastest_cut(problem: InterOpProblem, relative_gap: float) -> InterOpPlan | None:
    """The fastest cut into stages that fits; None if none does.

    Args:
      relative_gap: largest share by which the plan may be slower than the best one; 0 for the best one.
    """
    return _LimitSearch(problem).run(relative_gap)


@dataclass(frozen=True, slots=True)
class _FoundCut:
    """A cut that was found under a limit."""

    stages: tuple[StagePlan, ...]
    latency_s: float
    bottleneck_s: float

    @property
    def step_s(self) -> float:
        return self.latency_s + self.bottleneck_s


@dataclass(frozen=True, slots=True, order=True)
class _Interval:
    """The plans whose slowest stage takes between two limits, with a lower bound on them."""

    bound_s: float
    above_s: float
    upto_s: float
    latency_s: float

    @classmethod
    def of(cls, above_s: float, upto_s: float, latency_s: float) -> "_Interval":
        return cls(latency_s + above_s, above_s, upto_s, latency_s)


@dataclass(eq=False)
class _LimitSearch:
    """Bisects limits on the slowest stage until the best plan is proved."""

    problem: InterOpProblem
    best: _FoundCut | None = None

    def run(self, relative_gap: float) -> InterOpPlan | None:
        """The best plan; None if none fits."""
        found = self._fastest(np.inf, np.inf)
        if found is None:
            return None
        intervals = self._below(found, self._even_share_s() * (1 - 2 * TOLERANCE))
        while intervals and intervals[0].bound_s < found.step_s * (1 - relative_gap):
            for part in self._parts(heapq.heappop(intervals)):
                heapq.heappush(intervals, part)
            found = self.best or found
        bound_s = intervals[0].bound_s if intervals else np.inf
        return InterOpPlan(found.stages, found.step_s, min(bound_s, found.step_s))

    def _parts(self, interval: _Interval) -> list[_Interval]:
        """The rest of an interval: it is bisected or, if it is narrow, tried from its upper end."""
        limit_s = (interval.above_s * interval.upto_s) ** 0.5
        upper = [_Interval.of(limit_s, interval.upto_s, interval.latency_s)]
        if interval.upto_s <= interval.above_s * NARROW or not limit_s:
            limit_s, upper = interval.upto_s, []
        found = self._fastest(limit_s, self._useful_s(interval))
        return upper + (self._below(found, interval.above_s) if found is not None else [])

    def _below(self, found: _FoundCut, above_s: float) -> list[_Interval]:
        """The plans up to a limit that may be better than the one of least latency."""
        if self.best is None or found.step_s < self.best.step_s:
            self.best = found
        below_s = found.bottleneck_s * (1 - 2 * TOLERANCE)
        return [_Interval.of(above_s, below_s, found.latency_s)] if below_s > above_s else []

    def _useful_s(self, interval: _Interval) -> float:
        """The latency below which a plan of an interval beats the best one."""
        return (self.best.step_s if self.best else np.inf) - interval.above_s

    def _even_share_s(self) -> float:
        """Lower bound on the slowest stage: the least work of all layers, spread over all devices."""
        work = [
            np.diff(row) * option.submesh.size
            for row, option in zip(self.table.bottleneck_s, self.problem.options, strict=True)
        ]
        return float(np.min(work, axis=0).sum()) / self.problem.num_devices

    @cached_property
    def table(self) -> StageTable:
        """Costs of runs of layers."""
        problem = self.problem
        time_s = prefix_sums([option.time_s for option in problem.options])
        update_s = prefix_sums([option.update_s for option in problem.options])
        caps = {node.kind: node.memory_bytes for node in problem.nodes}
        return StageTable(
            problem.options,
            np.array([caps[option.kind] for option in problem.options]),
            time_s,
            (problem.num_microbatches - 1) * time_s + update_s,
        )

    @cached_property
    def table_from_end(self) -> StageTable:
        """The table with the layers in reverse order."""
        return self.table.reversed()

    @cached_property
    def places(self) -> Places:
        """The devices at which options may begin."""
        return Places.of(self.problem.nodes, self.table)

    @cached_property
    def places_from_end(self) -> Places:
        """These places with the nodes in reverse order."""
        return Places.of(self.problem.nodes[::-1], self.table)

    @cached_property
    def transfer_s(self) -> Array:
        """[devices + 1, cut] to each device; nothing at the model's ends, nor behind the last device."""
        between_s = np.array(self.problem.transfer_s, float)
        between_s[:, [0, -1]] = 0.0
        return between_s[self.problem.links_to]

    @cached_property
    def max_stages(self) -> int:
        """Largest number of stages of a plan."""
        return self.problem.num_stages or min(self.problem.num_layers, self.problem.num_devices)

    @cached_property
    def lasts_from_end(self) -> Array:
        """[options, first layer] of the reversed layers: the end of the longest stage that fits if no stage is behind
        it."""
        return self.table_from_end.reach_in_memory(self.problem.in_flight[0])

    @memo
    def _lasts_in_memory(self, in_flight: int) -> Array:
        """[options, first layer]: the end of the longest stage that fits."""
        return self.table.reach_in_memory(in_flight)

    def _fastest(self, limit_s: float, most_s: float) -> _FoundCut | None:
        """The cut of least latency whose slowest stage stays within a limit, if that latency is less than `most_s`."""
        in_front = self._least_in_front(limit_s, most_s)
        if not len(in_front[-1].num_stages) or in_front[-1].latency_s[0, -1] >= most_s:
            return None

        def drop(p: int, column: Column) -> Array:
            if not len(in_front[p].num_stages):
                return np.ones(column.latency_s.shape, bool)
            hopeless = column.latency_s + self.transfer_s[p] + in_front[p].latency_s >= most_s
            return hopeless | dominated(column) if self.problem.num_stages is None else hopeless

        in_time = self.table.reach_in_time(limit_s)

        @cache
        def lasts(num_behind: int) -> Array:
            return np.minimum(in_time, self._lasts_in_memory(self.problem.held_with(num_behind)))

        columns = LatencySweep(self.table, self.places, self.transfer_s, lasts, self.max_stages).run(drop)
        return self._read(columns, lasts)

    def _least_in_front(self, limit_s: float, most_s: float) -> list[Column]:
        """Per device, and behind all: the least latency of the layers in front of each, one row."""
        lasts = np.minimum(self.table_from_end.reach_in_time(limit_s), self.lasts_from_end)
        transfer_s = self.transfer_s[::-1, ::-1]
        backwards = LatencySweep(self.table_from_end, self.places_from_end, transfer_s, lambda _: lasts, 0)
        columns = backwards.run(lambda _, column: column.latency_s >= most_s)
        return [Column(column.num_stages, column.latency_s[:, ::-1]) for column in reversed(columns)]

    def _read(self, columns: list[Column], lasts: Callable[[int], Array]) -> _FoundCut | None:
        """The stages of the best entry for all layers and devices."""
        counts, totals_s = columns[0].num_stages, columns[0].latency_s[:, 0]
        if self.problem.num_stages is not None:
            totals_s = np.where(counts == self.problem.num_stages, totals_s, np.inf)
        if not np.isfinite(totals_s).any():
            return None
        num_left, p, k = int(counts[np.argmin(totals_s)]), 0, 0
        bottleneck_s = 0.0
        stages: list[StagePlan] = []
        while num_left:
            num_left -= 1
            option, end, j = self._first_stage(columns, lasts(num_left), p, k, num_left)
            bottleneck_s = max(bottleneck_s, float(np.diff(self.table.bottleneck_s[option, [k, j]])[0]))
            stages.append(self._stage(option, p, k, j, num_left))
            p, k = end, j
        return _FoundCut(tuple(stages), float(totals_s.min()), bottleneck_s)

    def _first_stage(
        self, columns: list[Column], lasts: Array, p: int, k: int, num_left: int
    ) -> tuple[int, int, int]:
        """The first of the stages from a device and a layer: its option, and where it ends."""
        best = (np.inf, -1, -1, -1)
        for option, end in zip(self.places.options[p].tolist(), self.places.ends[p].tolist(), strict=True):
            row = columns[end].row(num_left)
            if row is None or lasts[option, k] <= k:
                continue
            inside = slice(k + 1, int(lasts[option, k]) + 1)
            behind_s = row + self.transfer_s[end]
            totals_s = (
                behind_s[inside] + self.table.latency_s[option, inside] - self.table.latency_s[option, k]
            )
            j = int(np.argmin(totals_s))
            best = min(best, (float(totals_s[j]), option, end, k + 1 + j))
        assert best[1] >= 0, f"no stage begins at device {p} and layer {k}"
        return best[1:]

    def _stage(self, index: int, p: int, first: int, end: int, num_behind: int) -> StagePlan:
        option, held = self.problem.options[index], self.problem.held_with(num_behind)
        return StagePlan(
            first,
            end,
            p,
            option.submesh,
            option.variant,
            held,
            float(option.time_s[first:end].sum()),
            float(option.update_s[first:end].sum()),
            option.memory_bytes(first, end, held),
            float(self.table.cap_bytes[index]),
            option.kind,
        )


def nearest_cut(problem: InterOpProblem) -> NoCut:
    """The cut that fits with about the least additional memory on every device, for a problem of which no cut fits."""
    most_bytes = max(o.memory_bytes(0, problem.num_layers, problem.in_flight[-1]) for o in problem.options)
    nearest, too_little = _with_more(problem, most_bytes), 0.0
    if nearest is None:
        return NoCut(())
    cap_bytes = min(node.memory_bytes for node in problem.nodes)
    while nearest.over_bytes - too_little > NEAREST * (cap_bytes + too_little):
        middle = (too_little + nearest.over_bytes) / 2
        found = _with_more(problem, middle)
        if found is None:
            too_little = middle
        else:
            nearest = found
    return nearest


def _with_more(problem: InterOpProblem, more_bytes: float) -> NoCut | None:
    """A cut that fits devices with more memory, with the caps as they are."""
    nodes = tuple(replace(node, memory_bytes=node.memory_bytes + more_bytes) for node in problem.nodes)
    found = _LimitSearch(replace(problem, nodes=nodes))._fastest(np.inf, np.inf)
    if found is None:
        return None
    return NoCut(tuple(replace(stage, cap_bytes=stage.cap_bytes - more_bytes) for stage in found.stages))
