"""Recomputation, decided together with sharding under one cap.

The estimates begin with the best strategies without a cap. At rising prices of a kept byte, minimum cuts
(`search.memory.trade_offs`) select more and more ops to recompute. No step is built for an estimate. If a selection
saves n bytes, the estimate is the time of the recomputed ops and a lower bound on the baseline under a cap that is n bytes
higher (`search.solver.cap_curve`). Rewrites that promise a better plan are built as steps and searched like any other step,
with real prices, kernels and peaks (`search.space.queue`).

Residuals that stay may be offloaded to the host (`search.memory.offload`). For each selection of recomputed ops, as
many residuals are offloaded as exceed the device's memory.

Residuals are written and read. To recompute them may be faster, even if memory is plenty, so that the fastest strategies
of a step are always estimated.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from autoshard.search.ir.graph import Site
from autoshard.search.memory.fetches import WINDOW
from autoshard.search.memory.loop_offload import may_leave_loop
from autoshard.search.memory.loop_segments import cut_loop
from autoshard.search.memory.peak_left import PeakLeft
from autoshard.search.memory.residuals import residuals
from autoshard.search.memory.trade_offs import Choice, trade_offs
from autoshard.search.mesh_problem import NO_CAP, UNKNOWN, Known, MeshProblem
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.cap_curve import CapCurve
from autoshard.search.solver.clock import Deadline
from autoshard.search.solver.pbqp import Labels
from autoshard.search.step_problem import StepProblem

SHARES = (0.25, 0.5, 0.75)
"""Shares of the step at the higher one of two prices. Source: a choice of ours."""

FINEST = 16
"""Number of parts of the step in the search for the smallest share that saves enough. Source: a choice of ours."""

SPARE = 0.1
"""Share of the cap that recomputation should save besides the missing bytes; else loops are cut, too. Source: a choice of
ours."""

ESTIMATE_GAP = 0.01
"""Relative error of the bound on sharding in an estimate. Source: a choice of ours; the estimate's other errors are
larger."""

OP_S = 5e-5
"""Nominal seconds of a mesh's estimates for each op of the step. Source: `benchmarks/nominal_seconds.py`."""

HIDING_SHARE = 0.5
"""Share of the step that can hide copies in an estimate. Source: a choice of ours; a copy starts after its array
exists, and must end before the array is read."""

VISIBLE_SHARE = 0.25
"""Smallest share of the copies that makes the step longer. Source: 0.23 to 0.32 are predicted for GPTs of 12 to 64
layers on one H100, A100 or L4 and on two V100s, where copies take 0.1 to 0.5 of the step."""

LEAST_OFFLOADED_BYTES = 1 << 20
"""Smallest residual on a device that is offloaded. Source: a choice of ours; smaller copies are mostly latency."""


@dataclass(frozen=True, slots=True, eq=False)
class UncappedSolution:
    """The best strategies of the baseline on a mesh, without a cap or with one that makes no difference."""

    on_mesh: MeshProblem
    labels: Labels
    cost_s: float

    @property
    def computed_s(self) -> float:
        """The part of the cost that is computation."""
        return self.on_mesh.memory.costed.compute_s(self.labels)

    @property
    def peak_bytes(self) -> float:
        """The largest memory in program order."""
        return self.on_mesh.memory.peak(self.labels).num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """A choice of ops to recompute and residuals to offload.

    Attributes:
      uncapped: the strategies of the estimate.
      sites: the ops to recompute.
      cost_s: estimated seconds of computation and communication; infinite if nothing seemed to fit.
      more_s: seconds of recomputation in the estimate.
      saved_bytes: bytes that no longer stay on the device for the backward phase.
      relief_bytes: bytes by which the peak in program order falls, at most, under the strategies of the estimate.
      offloaded_sites: ops whose results are offloaded to the host.
    """

    uncapped: UncappedSolution
    sites: frozenset[Site]
    cost_s: float
    more_s: float
    saved_bytes: float
    relief_bytes: float = 0.0
    offloaded_sites: frozenset[Site] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """The mesh of the estimate."""
        return self.uncapped.on_mesh.shape

    @property
    def offloads(self) -> bool:
        """Whether residuals are offloaded."""
        return bool(self.offloaded_sites)

    def of_traced(self, step_problem: StepProblem) -> "Rewrite":
        """The rewrite with the sites of a step before it was rewritten."""
        before = step_problem.rewritten.before
        return replace(self, sites=before(self.sites), offloaded_sites=before(self.offloaded_sites))

    @property
    def relief_s(self) -> float:
        """Seconds that the saved bytes cost."""
        return self.cost_s - self.uncapped.cost_s if self.offloaded_sites else self.more_s


def without_cap(
    on_mesh: MeshProblem, pins: Mapping[str, Any], cutoff_s: float, limit_s: float, known: Known = UNKNOWN
) -> UncappedSolution | None:
    """The fastest strategies on a mesh, found in so many seconds; None if they are no faster than the cutoff."""
    with suppress(NoFitError):
        solution = on_mesh.solve(on_mesh.pinned(pins), NO_CAP, limit_s, cutoff_s, known=known)
        return UncappedSolution(on_mesh, solution.labels, solution.cost_s)
    return None


class Estimates:
    """Estimates of recomputation and offloading on one mesh.

    If the fastest strategies do not fit, the estimates start from strategies that are nearly as fast and hold less,
    because all that they hold must be saved otherwise. Kernels are taken to exceed the peak in program order by a
    constant factor.
    """

    def __init__(
        self,
        step_problem: StepProblem,
        uncapped: UncappedSolution,
        pins: Mapping[str, Any],
        limit_bytes: int,
        curve: CapCurve,
        deadline: Deadline,
    ) -> None:
        self.on_mesh, self.deadline, self.limit_bytes = uncapped.on_mesh, deadline, limit_bytes
        self.curve = curve
        self.kept = self.on_mesh.pinned(pins)
        self.uncapped = self._with_less_memory(uncapped)
        in_order = self.on_mesh.memory.peak(self.uncapped.labels)
        of_kernels = self.on_mesh.predicted(self.uncapped.labels, limit_bytes).least
        self.in_order_bytes = in_order.num_bytes
        kernels_hold = max(1.0, of_kernels.num_bytes / max(in_order.num_bytes, 1.0))
        self.room_bytes = limit_bytes / kernels_hold
        self.missing_bytes = self.in_order_bytes - self.room_bytes
        self.parts = residuals(
            self.on_mesh.memory.costed, step_problem.live_ranges.fusion, self.uncapped.labels
        )
        self.left = PeakLeft(self.on_mesh.memory, step_problem.live_ranges.fusion, self.uncapped.labels)
        self.on_mesh.clock.spend(OP_S * len(step_problem.graph.folded.program.ops))
        self.all_bytes = self._with_margin(sum(part.all_bytes for part in self.parts))
        self.baseline_s = sum(part.seconds(frozenset()) for part in self.parts)
        self.seen: set[frozenset[Site]] = {frozenset()}
        self.may_be_cut = False

    def _with_less_memory(self, uncapped: UncappedSolution) -> UncappedSolution:
        """The solution itself if it fits, else a nearly equally fast one that holds less."""
        if self.on_mesh.memory.peak(uncapped.labels).num_bytes <= self.limit_bytes:
            return uncapped
        labels = self.on_mesh.with_less_memory(self.kept, uncapped.labels, self.deadline)
        return UncappedSolution(self.on_mesh, labels, self.on_mesh.problem.cost_s(labels))

    @cached_property
    def _choices(self) -> list[Choice]:
        """Choices of ops to recompute, from none to all. If all save too little, loops may also be cut into segments."""
        found = trade_offs(lambda price: self._chosen(price, price, 1.0), self.all_bytes)
        if self._saves_too_little(found[-1]) and any(part.cut for part in self.parts):
            self.may_be_cut = True
            found = trade_offs(lambda price: self._chosen(price, price, 1.0), self.all_bytes)
        return found

    def _saves_too_little(self, most: Choice) -> bool:
        """True if the choice that saves most saves less than is missing, or hardly more. Stacks may rest in smaller shards
        than they are made in: of all bytes that are held, no more is saved than the choice's share."""
        share = min(1.0, self.in_order_bytes / self.all_bytes) if self.all_bytes else 0.0
        wanted_bytes = self.missing_bytes + SPARE * self.limit_bytes
        return self.missing_bytes > 0 and share * self._saved_bytes(most) < wanted_bytes

    def rewrites(self, may_recompute: bool, may_offload: bool) -> list[Rewrite]:
        """Rewrites that recompute, and for each of them and for none, one that offloads the rest.

        Args:
          may_recompute: whether ops may be recomputed.
          may_offload: whether residuals may be offloaded.
        """
        again = self._sharded([*self.recomputing()]) if may_recompute else []
        choices = [(frozenset[Site](), 0.0, 0.0), *((c.sites, c.saved_bytes, c.more_s) for c in again)]
        found = [c for one in choices for c in self._offloading(*one)] if may_offload else []
        return [*again, *found]

    def _sharded(self, rewrites: Sequence[Rewrite]) -> list[Rewrite]:
        """Rewrites with the costs of strategies that save the rest of the missing bytes. Those that save most come
        first."""
        in_order = sorted(rewrites, key=lambda one: -one.saved_bytes)
        for n in _ends_first(len(in_order)):
            cap_bytes = self.room_bytes + in_order[n].saved_bytes
            if cap_bytes < self.in_order_bytes and not self.deadline.is_over:
                self.curve.refine(cap_bytes, self.deadline)
        return [replace(one, cost_s=one.more_s + self._sharding_s(one.saved_bytes)) for one in in_order]

    def recomputing(self) -> Iterator[Rewrite]:
        """Rewrites of all trade-offs; if memory is short, also one that saves just enough, and some that save less."""
        near = chain(self._just_enough(), self._hardly_enough()) if self.missing_bytes > 0 else ()
        for choice in chain(self._choices, near):
            if choice.sites not in self.seen:
                self.seen.add(choice.sites)
                saved_bytes, more_s = self._saved_bytes(choice), choice.seconds - self.baseline_s
                cost_s = self.uncapped.cost_s + more_s
                relief_bytes = self._relief_bytes(choice.sites, saved_bytes)
                yield Rewrite(self.uncapped, choice.sites, cost_s, more_s, saved_bytes, relief_bytes)

    def _hardly_enough(self) -> Iterator[Choice]:
        """Choices between the first trade-off that saves enough and the one before it. Other strategies save the rest."""
        enough = (n for n, one in enumerate(self._choices) if self._saved_bytes(one) >= self.missing_bytes)
        at = next(enough, len(self._choices) - 1)
        low, high = (self._choices[n].price_s_per_byte for n in (max(at - 1, 0), at))
        return (self._chosen(low, high, share) for share in SHARES)

    def _just_enough(self) -> Iterator[Choice]:
        """The choice that saves hardly more than is missing, if there is one. It lies between two neighbouring trade-offs:
        the smallest share of the step takes the higher price."""
        choices = self._choices
        at = next((n for n, one in enumerate(choices) if self._saved_bytes(one) >= self.missing_bytes), 0)
        if at > 0:
            low, high = (one.price_s_per_byte for one in choices[at - 1 : at + 1])
            saves = partial(self._chosen, low, high)
            parts = bisect_left(
                range(FINEST), self.missing_bytes, key=lambda n: self._saved_bytes(saves(n / FINEST))
            )
            yield saves(parts / FINEST)

    def _saved_bytes(self, choice: Choice) -> float:
        return self.all_bytes - choice.kept_bytes

    def _relief_bytes(self, sites: frozenset[Site], saved_bytes: float) -> float:
        """Bytes by which the peak falls, at most, if the results at these sites are not kept. If a loop is cut into
        segments, its iterations are not told apart, and all saved bytes count."""
        if any(segments for _, segments in map(cut_loop, sites)):
            return saved_bytes
        return min(saved_bytes, self.in_order_bytes - self.left.num_bytes(sites))

    def _with_margin(self, num_bytes: float) -> float:
        """Bytes of residuals, as the memory counts them."""
        return (1 + self.on_mesh.memory.margin) * num_bytes

    def _chosen(self, low: float, high: float, share: float) -> Choice:
        """The ops to recompute if a share of the step takes the higher price."""
        chosen = (part.chosen(low, high, share, self.may_be_cut) for part in self.parts)
        sites = frozenset[Site]().union(*chosen)
        kept_bytes = self._with_margin(sum(part.kept_bytes(sites) for part in self.parts))
        return Choice(high, sites, sum(part.seconds(sites) for part in self.parts), kept_bytes)

    def _offloading(
        self, sites: frozenset[Site], saved_bytes: float, recompute_s: float
    ) -> Iterator[Rewrite]:
        """A candidate that recomputes these sites and offloads as many residuals as still exceed the device's memory."""
        missing_bytes, worth = self.missing_bytes - saved_bytes, self._worth_offloading(sites)
        if missing_bytes <= 0 or not worth:
            return
        missing_bytes += self._with_margin(WINDOW * max(copied_bytes for _, _, copied_bytes in worth))
        offloaded_sites, moved_bytes = set[Site](), 0.0
        for site, num_bytes, _ in worth:
            if moved_bytes < missing_bytes:
                offloaded_sites.add(site)
                moved_bytes += self._with_margin(num_bytes)
        link = self.on_mesh.memory.costed.resharder.mesh.cluster.host_link
        hidden_s = HIDING_SHARE * self.uncapped.cost_s
        copied_s = 2 * float(link.copy_s(moved_bytes))
        visible_s = max(VISIBLE_SHARE * copied_s, copied_s - hidden_s)
        cost_s = self.uncapped.cost_s + recompute_s + visible_s
        again = frozenset[Site]().union(
            *(part.recomputed_with(sites, frozenset(offloaded_sites)) for part in self.parts)
        )
        fits_s = cost_s if moved_bytes >= missing_bytes else np.inf
        saved_bytes += moved_bytes
        relief_bytes = self._relief_bytes(again | offloaded_sites, saved_bytes)
        moved = frozenset(offloaded_sites)
        yield Rewrite(self.uncapped, again, fits_s, recompute_s, saved_bytes, relief_bytes, moved)

    def _worth_offloading(self, sites: frozenset[Site]) -> list[tuple[Site, float, float]]:
        """The kept residuals that may be offloaded, each with its bytes and those of one copy. Those from which no value is
        computed on the fly come first; among them, those made first, because they stay on the host longest."""
        graph = self.on_mesh.memory.costed.graph.folded.program.step.graph
        found = [
            (part.is_read_as_it_is(site), site, num_bytes, num_bytes / part.length)
            for part in self.parts
            for site, num_bytes in (part.kept(sites) if part.may_offload(sites) else ())
            if num_bytes / part.length >= LEAST_OFFLOADED_BYTES
            and (may_leave_loop(graph, site) if part.is_loop else len(site) == 1)
        ]
        return [one[1:] for one in sorted(found, key=lambda one: not one[0])]

    def _sharding_s(self, saved_bytes: float) -> float:
        """A lower bound on the seconds of the baseline under the cap plus the saved bytes; infinite if nothing can fit."""
        cap_bytes = self.room_bytes + saved_bytes
        least_s = self.uncapped.cost_s
        return least_s if self.in_order_bytes <= cap_bytes else max(least_s, self.curve.at(cap_bytes))


def _ends_first(num: int) -> Iterator[int]:
    """The positions in a list: both ends, the middle, the middles of the halves, and so on."""
    if not num:
        return
    yield from dict.fromkeys((0, num - 1))
    parts = deque([(0, num - 1)])
    while parts:
        first, last = parts.popleft()
        middle = (first + last) // 2
        if first < middle:
            yield middle
            parts += (first, middle), (middle, last)
