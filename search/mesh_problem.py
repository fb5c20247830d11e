"""The problem of a prepared step on one mesh, whose `fitting` finds the cheapest strategies that fit."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from autoshard.cost_model.errors import PlanError
from autoshard.search.device.prediction import Prediction, predict
from autoshard.search.ir.spec import Spec, from_partition_spec
from autoshard.search.plan.decisions import DecisionCodec, allowed_by_pins
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.live_ranges import LiveRanges
from autoshard.search.problem.memory_rows import Memory, Peak
from autoshard.search.problem.seeds import seeds
from autoshard.search.problem.streams import Hiding
from autoshard.search.solver import branch_and_bound
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.cap_curve import CapCurve
from autoshard.search.solver.clock import Deadline, SearchClock
from autoshard.search.solver.neighbourhoods import reoptimised
from autoshard.search.solver.pbqp import Labels, MemoryConstraint, Problem, merged, restricted_row
from autoshard.search.solver.separation import Violated, separation_oracle
from autoshard.search.tightening import Round, tightened

RELATIVE_GAP = 5e-3
"""Plans within this share of the optimum count as optimal, because the cost model is not finer."""

UNCAPPED_GAP = 2.5e-3
"""Certified gap of strategies without a cap. It is finer, because plans under a cap are compared with them, and they
are found quickly."""

NUM_STEPS = 30_000
"""Smallest number of steps of a training run. The solver takes no longer than such a run could gain from a better plan.
Source: a choice of ours; a step of 1 ms with 3% left to gain is searched for 0.9 s, a step of 1 s until time runs out."""

NO_CAP = 1 << 62
"""Bytes per device: more than any device has."""

ROUNDING = 1e-9
"""Relative error of sums of the same bytes in another order."""

FIRST_SHARE = 0.25
"""Share of the time that the solver gets under the cap itself, if kernels then need more. Source: of 231 steps under 40 or
65% of their memory (`benchmarks.unseen_models`, 2 s each), 112 have a plan; 109 with a share of 0.4, 100 with 0.75."""

ROUND_SHARE = 0.5
"""Share of the time left that the solver gets in a later round. Source: a choice of ours; there are three or four rounds."""

LEAST_ROUND_S = 0.25
"""Seconds that the solver may take in a round in any case."""

PEAK_SLACK = 1.01
"""Multiple of the smallest peak that strategies of a small peak may hold. Without slack they would be slow, too."""

WIDE_GAP = 0.2
"""Certified gap if any good plan is enough."""

FALLING = (0.7, 0.95)
"""Caps under which a smaller peak is looked for, as shares of the smallest peak so far. Source: a choice of ours."""

EDGE_S = 1.2e-4
"""Nominal seconds for a mesh's costs, per edge, besides its entries. Source: `benchmarks/nominal_seconds.py`, also for the
constants below."""

ENTRY_S = 6e-8
"""Nominal seconds for a mesh's costs, per entry of an edge."""

RULE_S = 1.5e-6
"""Nominal seconds for a plan by rule, per edge."""

KERNEL_S = 2e-4
"""Nominal seconds to simulate a device, per kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Knowledge about a problem before it is solved.

    Attributes:
      start: strategies for a warm start.
      bound_s: a lower bound on all strategies that fit.
    """

    start: Labels | None = None
    bound_s: float = -np.inf


UNKNOWN = Known()


class TooLargeError(NoFitError):
    """The strategies that were found need more than the limit.

    Attributes:
      labels: among them, the strategies whose kernels need the least memory.
      predicted: a device's step under these.
    """

    def __init__(self, labels: Labels, predicted: Prediction, limit_bytes: int, *, bound_s: float) -> None:
        super().__init__(f"nothing was found that fits {limit_bytes} bytes", bound_s=bound_s)
        self.labels, self.predicted = labels, predicted


@dataclass(frozen=True, eq=False)
class MeshProblem:
    """The problem on one mesh.

    Attributes:
      memory: a device's memory.
      host: its share of host memory.
      live_ranges: the values that the step stores.
      hiding: the communication that computation hides.
      codec: the names of the decisions.
      clock: the clock of all limits.
    """

    memory: Memory
    host: Memory
    live_ranges: LiveRanges
    hiding: Hiding
    codec: DecisionCodec
    clock: SearchClock

    @cached_property
    def problem(self) -> Problem:
        """The costs. They are made on demand, because they take most of a mesh's time."""
        return self._priced(self.memory.costed, self.hiding)

    def _priced(self, costed: CostedGraph, hiding: Hiding) -> Problem:
        problem = costed.problem(hiding.seconds)
        num_entries = sum(edge.cost_s.size for edge in problem.edges)
        self.clock.spend(EDGE_S * len(problem.edges) + ENTRY_S * num_entries)
        return problem

    def cost_s(self, chosen: Labels, device: Prediction) -> float:
        """The cost of full strategies.

        Args:
          chosen: the strategies.
          device: a device's step under them; without overlap, all communication counts.
        """
        cost_s, costed = self.problem.cost_s(chosen), self.memory.costed
        if device.overlap:
            return cost_s + device.lost_overlap_s
        return cost_s + self.hiding.hidden_once_s(chosen) + costed.hidden_in_rings_s(chosen)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.memory.costed.resharder.mesh.shape

    @property
    def host_limit_bytes(self) -> int:
        """A device's share of its host's memory."""
        cluster = self.memory.costed.resharder.mesh.cluster
        return cluster.host_bytes_per_node // cluster.devices_per_node

    def least_transfer_s(self, kept: Sequence[np.ndarray]) -> float:
        """A lower bound on the seconds of copies to and from the host, one after another."""
        graph, costed = self.memory.costed.graph, self.memory.costed
        return sum(
            float(costed.node_seconds[node][0][kept[node]].min())
            for node, group in enumerate(graph.groups)
            if graph.folded.op(group.op_classes[0]).is_transfer and len(kept[node])
        )

    def pinned(self, pins: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        """Per node, the strategies that the pins allow."""
        kept = [np.arange(len(s)) for s in self.memory.costed.strategies]
        specs = {name: self._pinned_to(name, spec) for name, spec in pins.items()}
        for node, chosen in allowed_by_pins(self.codec, specs).items():
            kept[node] = chosen
        return tuple(kept)

    def _pinned_to(self, name: str, spec: Any) -> Spec:
        try:
            return from_partition_spec(spec, self.codec.axis_names)
        except PlanError as e:
            raise PlanError(f"pin {name!r}: {e}") from e

    def promised_s(self, kept: Sequence[np.ndarray], known: Known = UNKNOWN) -> float:
        """A lower bound on the cost of the kept strategies, for little work. Later searches among the same strategies
        reuse it."""
        return self._opening(kept, known).promised_s

    def fitting(
        self,
        kept: Sequence[np.ndarray],
        limit_bytes: int,
        time_limit_s: float,
        cutoff_s: float = np.inf,
        relative_gap: float = RELATIVE_GAP,
        known: Known = UNKNOWN,
    ) -> tuple[branch_and_bound.Solution, Prediction]:
        """The cheapest of the kept strategies whose kernels fit on a device. If kernels fit only with less overlap, or
        without any, the communication that is not hidden counts.

        No others are looked for if the first ones do not fit, and are faster than the cutoff by less than the gap.

        The bound of the solution or of the error is the first round's. It holds for all kept strategies that fit in
        program order (`Memory.profile`), whether or not their kernels fit.

        Args:
          kept: per node, the strategies to choose from.
          limit_bytes: the cap per device.
          time_limit_s: seconds for the solver.
          cutoff_s: the cost that a solution must beat.
          relative_gap: the gap to certify.
          known: a warm start and a bound.

        Raises:
          NoFitError: no strategies were found that fit and beat the cutoff.
          TooLargeError: strategies were found, but their kernels need more than the limit.
        """
        deadline = Deadline.after(time_limit_s, self.clock)

        def solved(
            under_bytes: float, rows: Sequence[MemoryConstraint], left_s: float, known: Known
        ) -> _Simulated:
            own = [row.under(limit_bytes, under_bytes) for row in rows]
            solution = self.solve(kept, int(under_bytes), left_s, cutoff_s, own, relative_gap, known)
            return self._round(solution, solution.labels, limit_bytes)

        def propose(under_bytes: float, rows: Sequence[MemoryConstraint]) -> _Simulated | None:
            if not rows and under_bytes == limit_bytes:
                return _under_cap(partial(solved, limit_bytes, ()), limit_bytes, deadline, known)
            try:
                return solved(under_bytes, rows, max(ROUND_SHARE * deadline.left_s, LEAST_ROUND_S), known)
            except NoFitError:
                if deadline.is_over:
                    raise
                return None

        rounds = tightened(propose, limit_bytes, self.memory.least_bytes(kept))
        nearest = first = next(rounds)
        bound_s = first.proposal[0].bound_s
        best, least_s = None, cutoff_s
        with suppress(NoFitError):
            for latest in chain((first,), rounds):
                solution, found = latest.proposal[0], self._within_limit(latest.proposal[1])
                cost_s = self.cost_s(solution.labels, found)
                if found.needed_bytes <= limit_bytes and cost_s < least_s:
                    best, least_s = (replace(solution, cost_s=cost_s, bound_s=bound_s), found), cost_s
                nearest = min(nearest, latest, key=lambda one: one.needed_bytes)
                if solution.cost_s >= (1 - RELATIVE_GAP) * least_s or deadline.is_over:
                    break
        if best:
            return best
        solution, found = nearest.proposal
        raise TooLargeError(solution.labels, found, limit_bytes, bound_s=bound_s)

    def smallest_peak(self, kept: Sequence[np.ndarray], time_limit_s: float) -> tuple[Labels, Peak]:
        """The kept strategies of the smallest peak that was found, and the peak: the larger one of program order and
        kernels.

        Raises:
          NoFitError: the kept strategies contradict one another, or none were found in time.
        """
        whole = Deadline.after(time_limit_s, self.clock)
        deadline, found = whole.share(1 / 2), [*self._smallest_by_rule(kept)]

        def propose(rows: Sequence[MemoryConstraint]) -> Round[tuple[Labels, Prediction]]:
            labels = self._near_smallest(kept, rows, deadline)
            return self._round(labels, labels, 0.0)

        rows, sees_all = (), False
        while not sees_all:
            latest = propose(rows)
            labels, predicted = latest.proposal
            found.append((labels, self.larger_peak(labels, predicted)))
            rows = (*rows, *latest.rows())
            sees_all = latest.needed_bytes <= PEAK_SLACK * latest.expected_bytes or deadline.is_over
        labels, peak = min(found, key=lambda one: one[1].num_bytes)
        return self._lowered(kept, labels, peak, whole)

    def _lowered(
        self, kept: Sequence[np.ndarray], labels: Labels, peak: Peak, deadline: Deadline
    ) -> tuple[Labels, Peak]:
        """Strategies that still fit as a cap falls, in large steps first. If kernels need far more than the rows know,
        strategies of a small peak in the rows may have a large peak in the kernels."""
        for share in FALLING:
            with suppress(NoFitError):
                while not deadline.is_over:
                    cap_bytes, left_s = int(share * peak.num_bytes), deadline.left_s / 2
                    solution, found = self.fitting(kept, cap_bytes, left_s, relative_gap=WIDE_GAP)
                    labels, peak = solution.labels, self.larger_peak(solution.labels, found)
        return labels, peak

    def larger_peak(self, labels: Labels, predicted: Prediction) -> Peak:
        """The larger of two peaks: in program order and in the kernels' order."""
        return max(self.memory.peak(labels), predicted.least, key=lambda peak: peak.num_bytes)

    def _smallest_by_rule(self, kept: Sequence[np.ndarray]) -> Iterator[tuple[Labels, Peak]]:
        """The plan by rule of the smallest peak among those that the kept strategies allow, if there is one."""
        rules = seeds(self.memory.costed, self.problem, kept)
        allowed = [labels for labels in rules if self.problem.cost_s(labels) < np.inf]
        if allowed:
            labels = min(allowed, key=lambda labels: self.memory.peak(labels).num_bytes)
            yield labels, self.larger_peak(labels, self.predicted(labels, 0.0))

    def _near_smallest(
        self, kept: Sequence[np.ndarray], rows: Sequence[MemoryConstraint], deadline: Deadline
    ) -> Labels:
        """The cheapest of the kept strategies that hold little more than the smallest peak.

        Costs count, because strategies chosen by their peak alone reshard so much that kernels need far more than the
        rows know.
        """

        def cheapest(limit_bytes: float) -> Labels:
            left_s = ROUND_SHARE * deadline.left_s
            return self.solve(kept, int(PEAK_SLACK * limit_bytes), left_s, np.inf, rows, WIDE_GAP).labels

        least_bytes = self.memory.least_bytes(kept)
        with suppress(NoFitError):
            return cheapest(least_bytes)
        smallest = branch_and_bound.minimise_peak(
            self._restricted(kept),
            limit_bytes=least_bytes,
            rows=[restricted_row(row, kept) for row in rows],
            violated=self._violated(kept, int(least_bytes)),
            deadline=deadline.share(ROUND_SHARE),
        )
        with suppress(NoFitError):
            return cheapest(smallest.peak_bytes)
        return _original(kept, smallest.labels)

    def predicted(
        self, chosen: Sequence[int], limit_bytes: float, is_one_program: bool = True, overlap: float = 1.0
    ) -> Prediction:
        """A device's step under full strategies.

        Args:
          chosen: the strategies.
          limit_bytes: the cap per device.
          is_one_program: whether one program runs the step, or one for each task of a pipeline's stages.
          overlap: the share of the scheduler's budget for running communication beside computation.
        """
        predicted = predict(self.memory.costed, self.live_ranges, chosen, limit_bytes, is_one_program)
        self.clock.spend(KERNEL_S * len(predicted.lowered.kernels))
        return predicted.with_overlap(overlap)

    def _within_limit(self, predicted: Prediction) -> Prediction:
        """A device's step with as much overlap as keeps to its cap. To find a share takes as long as to predict the step."""
        found = predicted.within_limit
        if 0 < found.overlap < 1:
            self.clock.spend(KERNEL_S * len(predicted.lowered.kernels))
        return found

    def solve(
        self,
        kept: Sequence[np.ndarray],
        limit_bytes: int,
        time_limit_s: float,
        cutoff_s: float = np.inf,
        rows: Sequence[MemoryConstraint] = (),
        relative_gap: float = UNCAPPED_GAP,
        known: Known = UNKNOWN,
    ) -> branch_and_bound.Solution:
        """The cheapest of the kept strategies that fit, in the original numbering.

        Raises:
          NoFitError: no strategies fit and beat the cutoff.
        """
        if self.memory.least_bytes(kept) > limit_bytes * (1 + ROUNDING):
            raise NoFitError(f"no strategies fit {limit_bytes} bytes", bound_s=np.inf)
        if self.host.least_bytes(kept) > self.host_limit_bytes:
            raise NoFitError(f"no strategies fit {self.host_limit_bytes} bytes of the host's", bound_s=np.inf)
        own_rows = [restricted_row(row, kept) for row in rows]
        if any(row.least_bytes > limit_bytes * (1 + ROUNDING) for row in own_rows):
            raise NoFitError(f"no strategies keep a row to {limit_bytes} bytes", bound_s=np.inf)
        search = self._search(kept, limit_bytes, own_rows, relative_gap, known)
        solution = search.run(time_limit_s, cutoff_s, known.bound_s)
        return replace(solution, labels=_original(kept, solution.labels))

    def _search(
        self,
        kept: Sequence[np.ndarray],
        limit_bytes: int,
        rows: Sequence[MemoryConstraint],
        relative_gap: float,
        known: Known,
    ) -> branch_and_bound.Search:
        """A search under a limit. The latest one without additional rows goes on if it is asked for again."""
        key = tuple(one.tobytes() for one in kept), limit_bytes, relative_gap
        if not rows and key in self._last_search:
            return self._last_search[key]
        violated = separation_oracle(rows, self._violated(kept, limit_bytes), limit_bytes)
        opening = self._opening(kept, known)
        search = branch_and_bound.Search(opening, float(limit_bytes), violated, relative_gap, NUM_STEPS)
        if not rows:
            self._last_search.clear()
            self._last_search[key] = search
        return search

    @cached_property
    def _last_search(self) -> dict[tuple[tuple[bytes, ...], int, float], branch_and_bound.Search]:
        """The latest search, by the kept strategies, the limit and the gap."""
        return {}

    def with_less_memory(self, kept: Sequence[np.ndarray], labels: Labels, deadline: Deadline) -> Labels:
        """Some of the kept strategies that are slower than the given ones by the gap at most, and hold less where these
        hold most."""
        rows = self.memory.rows_over(labels, 0.0)
        if not rows:
            return labels
        row = max(rows, key=lambda row: row.total_bytes(labels))
        price_s = RELATIVE_GAP * self.problem.cost_s(labels) / row.total_bytes(labels)
        restricted, own = self._restricted(kept), restricted_row(row, kept)
        costs = list(restricted.node_cost_s)
        for node, per_label in own.bytes:
            costs[node] = costs[node] + price_s * per_label
        problem = merged(Problem(tuple(costs), restricted.edges))
        found, _ = reoptimised(problem, _renumbered(kept, labels), deadline)
        return _original(kept, found)

    def cap_curve(self, kept: Sequence[np.ndarray], relative_gap: float) -> CapCurve:
        """Lower bounds on the cost of the kept strategies under every limit."""

        def violated(limit_bytes: float) -> Violated:
            return self._violated(kept, int(limit_bytes))

        return CapCurve(self._opening(kept), violated, self.memory.least_bytes(kept), relative_gap)

    def completed(self, kept: Sequence[np.ndarray]) -> Labels:
        """The cheapest of the kept strategies, if few are left. Only these are priced.

        Raises:
          NoFitError: they contradict one another.
        """
        costed = self.memory.costed.only(kept)
        return self._cheapest(kept, self._priced(costed, replace(self.hiding, costed=costed)))

    def suited(self, kept: Sequence[np.ndarray]) -> Labels:
        """The cheapest of the kept strategies. All strategies are priced.

        Raises:
          NoFitError: they contradict one another.
        """
        return self._cheapest(kept, self._restricted(kept))

    def _cheapest(self, kept: Sequence[np.ndarray], problem: Problem) -> Labels:
        """The cheapest of the kept strategies, by their costs."""
        opening = branch_and_bound.Opening(problem, clock=self.clock)
        return _original(kept, branch_and_bound.solve(opening, relative_gap=RELATIVE_GAP).labels)

    def _opening(self, kept: Sequence[np.ndarray], known: Known = UNKNOWN) -> branch_and_bound.Opening:
        """The start of searches for the cheapest of the kept strategies."""
        key = tuple(one.tobytes() for one in kept)
        if self._last_opening.get(key) is None:
            self._last_opening.clear()  # one is reused many times, others hardly ever
            start = () if known.start is None else (known.start,)
            rules = seeds(self.memory.costed, self.problem, kept)
            starts = partial(self._starts, tuple(kept), chain(start, rules))
            self._last_opening[key] = branch_and_bound.Opening(self._restricted(kept), starts, self.clock)
        return self._last_opening[key]

    @cached_property
    def _last_opening(self) -> dict[tuple[bytes, ...], branch_and_bound.Opening]:
        """The latest opening, by the kept strategies."""
        return {}

    def _starts(self, kept: Sequence[np.ndarray], given: Iterable[Labels]) -> Iterator[Labels]:
        """Strategies to start from, in the numbering of the kept ones."""
        is_any = self._are_all(kept)
        for labels in given:
            self.clock.spend(RULE_S * len(self.problem.edges))
            if is_any:
                yield labels
            elif all(label in k for k, label in zip(kept, labels, strict=True)):
                yield _renumbered(kept, labels)

    def _round[MilpResult](
        self, answer: MilpResult, labels: Labels, limit_bytes: float
    ) -> Round[tuple[MilpResult, Prediction]]:
        """An answer of the solver, with the memory that the rows and the kernels find for it."""
        predicted, expected_bytes = self.predicted(labels, limit_bytes), self.memory.peak(labels).num_bytes

        def rows() -> tuple[MemoryConstraint, ...]:
            highest = predicted.over(limit_bytes or expected_bytes)
            return tuple(self.memory.row_of(one, labels) for one in highest)

        return Round((answer, predicted), expected_bytes, predicted.needed_bytes, rows)

    def _restricted(self, kept: Sequence[np.ndarray]) -> Problem:
        if self._are_all(kept):
            return self.problem
        nodes = tuple(cost[k] for cost, k in zip(self.problem.node_cost_s, kept, strict=True))
        edges = tuple(
            branch_and_bound.Edge(e.u, e.v, e.cost_s[np.ix_(kept[e.u], kept[e.v])])
            for e in self.problem.edges
        )
        return Problem(nodes, edges)

    def _are_all(self, kept: Sequence[np.ndarray]) -> bool:
        """True if no strategy is left out."""
        return all(len(cost) == len(k) for cost, k in zip(self.problem.node_cost_s, kept, strict=True))

    def _violated(self, kept: Sequence[np.ndarray], limit_bytes: int):
        def violated(chosen: Sequence[int]) -> tuple[MemoryConstraint, ...]:
            labels = _original(kept, chosen)
            rows = self.memory.rows_over(labels, limit_bytes)
            on_host = self.host.rows_over(labels, self.host_limit_bytes)
            scaled = (row.scaled(limit_bytes / self.host_limit_bytes) for row in on_host)
            return tuple(restricted_row(row, kept) for row in (*rows, *scaled))

        return violated


type _Simulated = Round[tuple[branch_and_bound.Solution, Prediction]]
"""A solution, with the prediction of its kernels."""


def _under_cap(
    solve: Callable[[float, Known], _Simulated], limit_bytes: int, deadline: Deadline, known: Known
) -> _Simulated:
    """The solution under the cap itself, with a lower bound. It gets a share of the time, and the rest if it fits or if no
    row of memory was in its way.

    Args:
      solve: the best solution in so many seconds, from a warm start and a bound.
      limit_bytes: the cap per device.
      deadline: the end of the time.
      known: a warm start and a bound.

    Raises:
      NoFitError: no strategies were found.
    """
    early = deadline.share(FIRST_SHARE)
    try:
        first = solve(max(early.left_s, LEAST_ROUND_S), known)
    except NoFitError as e:
        if e.num_rows or not early.is_over:
            raise
        return solve(deadline.left_s, replace(known, bound_s=max(e.bound_s, known.bound_s)))
    solution, found = first.proposal
    if first.needed_bytes > limit_bytes or not early.is_over:
        return first
    with suppress(NoFitError):
        longer = solve(deadline.left_s, replace(known, bound_s=max(solution.bound_s, known.bound_s)))
        if longer.needed_bytes <= limit_bytes and longer.proposal[0].cost_s <= solution.cost_s:
            return longer
        bound_s = max(solution.bound_s, longer.proposal[0].bound_s)
        return replace(first, proposal=(replace(solution, bound_s=bound_s), found))
    return first


def _original(kept: Sequence[np.ndarray], chosen: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(k[label]) for k, label in zip(kept, chosen, strict=True))


def _renumbered(kept: Sequence[np.ndarray], labels: Labels) -> Labels:
    """Labels of the original numbering in the numbering of the kept strategies."""
    return tuple(int(np.searchsorted(k, label)) for k, label in zip(kept, labels, strict=True))
