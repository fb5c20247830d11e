"""What to recompute, decided with the sharding under one cap.

The search begins with the strategies that are best without a cap. At rising prices of a kept byte, minimum cuts
(`search.memory.trade_offs`) then say what to recompute, each a little more. How such a choice goes together with sharding is
estimated without building its step: under a cap that is higher by what is no longer kept, the plain step takes so long, and
what is recomputed comes on top. In the order of these estimates the steps that recompute are built, and searched like any
other: their prices, their kernels and their peaks are real ones. Those whose estimate is no better than the best plan so far
are passed over.

What is kept even so may wait in the host's memory (`search.memory.offload`). To every choice of what to recompute belongs
one of what waits: as much as is too much for the device.

Where memory is plenty, to recompute may be faster too: what a loop stacks up is written, and read, for that alone, which may
take longer than to compute it again. So of a step with loops the estimates are made in any case.

Otherwise a step that recomputes does all that the plain one does. So a mesh where the plain one is too slow without a cap is
done with.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from autoshard.search.ir.graph import Site
from autoshard.search.memory.fetches import WINDOW
from autoshard.search.memory.loop_offload import may_leave_loop
from autoshard.search.memory.residuals import residuals
from autoshard.search.memory.trade_offs import Choice, trade_offs
from autoshard.search.mesh_problem import (
    FREE_GAP,
    NO_CAP,
    RELATIVE_GAP,
    UNKNOWN,
    Known,
    MeshProblem,
    StepProblem,
)
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline
from autoshard.search.solver.pbqp import Labels

SHARES = (0.25, 0.5, 0.75)
"""Between two prices, how much of the step is at the higher one. Source: a choice of ours."""

FINEST = 16
"""Into how many parts the step is taken apart for the least share that will do. Source: a choice of ours."""

MAX_ENOUGH = 3
"""Choices that save enough and little more. Source: a choice of ours."""

SPARE = 0.1
"""Of the cap: what each of these saves more than the one before. Source: a choice of ours."""

MAX_MESHES = 2
"""For how many meshes, the fastest without a cap, estimates are made. Source: a choice of ours."""

ESTIMATE_SHARE = 0.1
"""Of the time left, what one estimate may take. Source: a choice of ours."""

ESTIMATE_GAP = 0.01
"""Certified of an estimate's sharding: finer than what the estimate leaves out. Source: a choice of ours."""

NEARLY = 0.02
"""Of the cap: where nothing was found under one, nothing is looked for under one that is hardly larger. Source: a choice of
ours; it is time that ended the first look as a rule."""

OP_S = 5e-5
"""Of a mesh's estimates, for an op of the step. Source: `benchmarks/nominal_seconds.py`."""

HIDING_SHARE = 0.5
"""Of the step, behind how much copies are taken to hide in an estimate. Source: a choice of ours; they have to wait for what
they copy, and to be there in time."""

VISIBLE_SHARE = 0.25
"""Of such copies, what a step takes longer for at least. Source: 0.23 to 0.32 are predicted for GPTs of 12 to 64 layers
on one H100, A100 or L4 and on two V100s, where copies take 0.1 to 0.5 of the step."""

WAITING_GAP = 0.02
"""By what share a choice of residuals that wait on the host has to promise more than there is. Source: a choice of ours; how
much of the copies hides is a guess, and its steps take long to search."""

MAX_WAITING = 2
"""How many choices of residuals that wait on the host are built in one go. Source: a choice of ours."""

LEAST_WAITING_BYTES = 1 << 20
"""Of a residual on a device that waits on the host. Source: a choice of ours; smaller copies are mostly latency."""


@dataclass(frozen=True, slots=True, eq=False)
class FreeSolution:
    """The best strategies of the plain step on a mesh, without a cap, or where it makes no difference."""

    on_mesh: MeshProblem
    labels: Labels
    cost_s: float

    @property
    def communication_share(self) -> float:
        """Of the cost, what is no computation."""
        computed_s = self.on_mesh.memory.costed.compute_s(self.labels)
        return 1 - computed_s / self.cost_s if self.cost_s else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """Something to recompute.

    Attributes:
      free: the strategies by which it was estimated.
      sites: what to recompute.
      cost_s: an estimate of computation and communication; infinite where even so nothing seemed to fit.
      more_s: of that, what is computed again.
      saved_bytes: what is no longer kept on the device.
      waiting: ops whose results wait in the host's memory.
    """

    free: FreeSolution
    sites: frozenset[Site]
    cost_s: float
    more_s: float
    saved_bytes: float
    waiting: frozenset[Site] = frozenset()

    @property
    def shape(self) -> tuple[int, ...]:
        """The mesh that it was estimated on."""
        return self.free.on_mesh.shape

    @property
    def margin(self) -> float:
        """By what share it has to be estimated faster than a plan, to be worth building."""
        return WAITING_GAP if self.waiting else RELATIVE_GAP


def without_cap(
    tried: Sequence[MeshProblem],
    pins: Mapping[str, Any],
    cutoff_s: float,
    deadline: Deadline,
    known: Known = UNKNOWN,
) -> tuple[list[FreeSolution], dict[tuple[int, ...], float]]:
    """The best strategies on each mesh where they are faster than the cutoff, fastest first, and a bound for every mesh."""
    found: list[FreeSolution] = []
    bounds_s: dict[tuple[int, ...], float] = {}
    for i, on_mesh in enumerate(tried):
        share_s = deadline.left_s / (len(tried) - i)
        try:
            solution = on_mesh.solve(on_mesh.pinned(pins), NO_CAP, share_s, cutoff_s, known=known)
            found.append(FreeSolution(on_mesh, solution.labels, solution.cost_s))
            bounds_s[on_mesh.shape] = solution.bound_s
        except NoFitError as e:
            bounds_s[on_mesh.shape] = e.bound_s
    return sorted(found, key=lambda free: free.cost_s), bounds_s


def in_order(found: Iterable[Candidate]) -> list[Candidate]:
    """The most promising first; then what waits on the host; last, of what nothing can be said of, the most frugal."""
    best_first = sorted(found, key=lambda c: (c.cost_s, -c.saved_bytes))
    again = [c for c in best_first if not c.waiting]
    known = sum(c.cost_s < np.inf for c in again)
    return [*again[:known], *[c for c in best_first if c.waiting][:MAX_WAITING], *again[known:]]


class Estimates:
    """What recomputation promises on one mesh, and where residuals may wait on the host, what that does.

    Where the fastest strategies do not fit, they begin with some that are nearly as fast and hold little: what is held has
    to be recomputed. Kernels are taken to hold as many times more than the program in its order as they do there.
    """

    def __init__(
        self,
        step_problem: StepProblem,
        free: FreeSolution,
        pins: Mapping[str, Any],
        limit_bytes: int,
        deadline: Deadline,
    ) -> None:
        self.on_mesh, self.deadline, self.limit_bytes = free.on_mesh, deadline, limit_bytes
        self.kept, self.cutoff_s = self.on_mesh.pinned(pins), math.inf
        self.free = self._light(free)
        in_order = self.on_mesh.memory.peak(self.free.labels)
        of_kernels = self.on_mesh.predicted(self.free.labels, limit_bytes).least
        self.in_order_bytes = in_order.num_bytes
        kernels_hold = max(1.0, of_kernels.num_bytes / max(in_order.num_bytes, 1.0))
        self.room_bytes = limit_bytes / kernels_hold
        self.missing_bytes = self.in_order_bytes - self.room_bytes
        self.parts = residuals(self.on_mesh.memory.costed, step_problem.live_ranges.fusion, self.free.labels)
        self.on_mesh.clock.spend(OP_S * len(step_problem.graph.folded.program.ops))
        self.all_bytes = sum(part.all_bytes for part in self.parts)
        self.plain_s = sum(part.seconds(frozenset()) for part in self.parts)
        self.seen: set[frozenset[Site]] = {frozenset()}
        self.too_little_bytes, self.may_be_cut = -math.inf, False

    def _light(self, free: FreeSolution) -> FreeSolution:
        """The same, or where it does not fit strategies that hold less."""
        if self.on_mesh.memory.peak(free.labels).num_bytes <= self.limit_bytes:
            return free
        labels = self.on_mesh.lightened(self.kept, free.labels, self.deadline)
        return FreeSolution(self.on_mesh, labels, self.on_mesh.problem.cost_s(labels))

    @cached_property
    def _choices(self) -> list[Choice]:
        """From nothing recomputed to all; where that saves too little, loops may be cut into segments besides."""
        found = trade_offs(lambda price: self._chosen(price, price, 1.0), self.all_bytes)
        if self._saves_too_little(found[-1]) and any(part.cut for part in self.parts):
            self.may_be_cut = True
            found = trade_offs(lambda price: self._chosen(price, price, 1.0), self.all_bytes)
        return found

    def _saves_too_little(self, most: Choice) -> bool:
        """True if what saves most saves less than is missing, or hardly more. Stacks may rest in smaller shards than they
        are made in: of all that is held, no more is saved than the choice's share."""
        share = min(1.0, self.in_order_bytes / self.all_bytes) if self.all_bytes else 0.0
        wanted_bytes = self.missing_bytes + SPARE * self.limit_bytes
        return self.missing_bytes > 0 and share * self._saved_bytes(most) < wanted_bytes

    def next_to_nothing(self) -> Iterator[Candidate]:
        """What saves enough where all is sharded as without a cap, and is computed again in less time than such sharding is
        certified to."""
        for choice in self._just_enough():
            if choice.seconds - self.plain_s > FREE_GAP * self.free.cost_s:
                return
            yield from self._estimated(choice)

    def candidates(
        self, cutoff_s: float = math.inf, may_recompute: bool = True, may_wait: bool = False
    ) -> list[Candidate]:
        """What may be recomputed, and, by each such choice and by none, what may wait on the host.

        Args:
          cutoff_s: what they should stay below.
          may_recompute: whether anything may be.
          may_wait: whether residuals may.
        """
        self.cutoff_s = cutoff_s
        again = [*self._recomputing()] if may_recompute else []
        waiting = [(frozenset[Site](), 0.0, 0.0), *((c.sites, c.saved_bytes, c.more_s) for c in again)]
        found = [c for one in waiting for c in self._waiting(*one)] if may_wait else []
        return [*again, *found]

    def _recomputing(self) -> Iterator[Candidate]:
        """Of all trade-offs, and where memory is short, what saves just enough or a little more, and some between the best
        trade-off and the next one."""
        choices, by_choice = self._choices, list[tuple[int, Candidate]]()
        for n, choice in reversed([*enumerate(choices)]):
            by_choice += [(n, one) for one in self._estimated(choice)]
        yield from (one for _, one in by_choice)
        if not by_choice or self.missing_bytes <= 0:
            return
        for choice in self._just_enough():
            yield from self._estimated(choice)
        at, _ = min(by_choice, key=lambda one: one[1].cost_s)
        low, high = choices[max(at - 1, 0)].price_s_per_byte, choices[at].price_s_per_byte
        for share in SHARES:
            yield from self._estimated(self._chosen(low, high, share))

    def _just_enough(self) -> Iterator[Choice]:
        """What saves hardly more than what is missing, and some that save more: kernels may hold more than is expected.

        It lies between two trade-offs, with the least share of the ops that will do at the price of the one that saves more.
        """
        wanted_bytes, choices = self.missing_bytes, self._choices
        for _ in range(MAX_ENOUGH):
            enough = [n for n, one in enumerate(choices) if self._saved_bytes(one) >= wanted_bytes]
            if not enough:
                return
            yield (choice := self._least_enough(enough[0], wanted_bytes))
            wanted_bytes = self._saved_bytes(choice) + SPARE * self.limit_bytes

    def _least_enough(self, at: int, wanted_bytes: float) -> Choice:
        """The choice nearest to the trade-off before the first one that saves so much."""
        if at == 0:
            return self._choices[at]
        low, high = (one.price_s_per_byte for one in self._choices[at - 1 : at + 1])
        saves = partial(self._chosen, low, high)
        parts = bisect_left(range(FINEST), wanted_bytes, key=lambda n: self._saved_bytes(saves(n / FINEST)))
        return saves(parts / FINEST)

    def _saved_bytes(self, choice: Choice) -> float:
        return self.all_bytes - choice.kept_bytes

    def _chosen(self, low: float, high: float, share: float) -> Choice:
        """What to recompute at some prices."""
        chosen = (part.chosen(low, high, share, self.may_be_cut) for part in self.parts)
        sites = frozenset[Site]().union(*chosen)
        kept_bytes = sum(part.kept_bytes(sites) for part in self.parts)
        return Choice(high, sites, sum(part.seconds(sites) for part in self.parts), kept_bytes)

    def _estimated(self, choice: Choice) -> Iterator[Candidate]:
        """What a choice promises, unless that was asked before."""
        if choice.sites not in self.seen:
            self.seen.add(choice.sites)
            saved_bytes = self._saved_bytes(choice)
            more_s = choice.seconds - self.plain_s
            cost_s = more_s + self._sharding_s(saved_bytes, self.cutoff_s - more_s)
            self.cutoff_s = min(self.cutoff_s, cost_s)
            yield Candidate(self.free, choice.sites, cost_s, more_s, saved_bytes)

    def _waiting(self, sites: frozenset[Site], saved_bytes: float, recompute_s: float) -> Iterator[Candidate]:
        """The same with as much of what is kept on the host as is too much for the device."""
        missing_bytes, worth = self.missing_bytes - saved_bytes, self._worth_waiting(sites)
        if missing_bytes <= 0 or not worth:
            return
        missing_bytes += WINDOW * max(copied_bytes for _, _, copied_bytes in worth)
        waiting, moved_bytes = set[Site](), 0.0
        for site, num_bytes, _ in worth:
            if moved_bytes < missing_bytes:
                waiting.add(site)
                moved_bytes += num_bytes
        link = self.on_mesh.memory.costed.resharder.mesh.cluster.host_link
        hidden_s = HIDING_SHARE * self.free.cost_s
        copied_s = 2 * float(link.copy_s(moved_bytes))
        visible_s = max(VISIBLE_SHARE * copied_s, copied_s - hidden_s)
        cost_s = self.free.cost_s + recompute_s + visible_s
        again = frozenset[Site]().union(*(part.made_again(sites, frozenset(waiting)) for part in self.parts))
        fits_s = cost_s if moved_bytes >= missing_bytes else np.inf
        yield Candidate(self.free, again, fits_s, recompute_s, saved_bytes + moved_bytes, frozenset(waiting))

    def _worth_waiting(self, sites: frozenset[Site]) -> list[tuple[Site, float, float]]:
        """What may wait of what is kept, with its bytes and those of one copy: first what nothing is computed from on the
        fly, of that what is made first, as it waits longest."""
        graph = self.on_mesh.memory.costed.graph.folded.program.step.graph
        found = [
            (part.is_read_as_it_is(site), site, num_bytes, num_bytes / part.length)
            for part in self.parts
            for site, num_bytes in (part.kept(sites) if part.may_wait(sites) else ())
            if num_bytes / part.length >= LEAST_WAITING_BYTES
            and (may_leave_loop(graph, site) if part.is_loop else len(site) == 1)
        ]
        return [one[1:] for one in sorted(found, key=lambda one: not one[0])]

    def _sharding_s(self, saved_bytes: float, cutoff_s: float) -> float:
        """What the plain step takes under the cap and what is saved; infinite where nothing fits even so, or did under a
        larger cap or nearly so large a one, or where it takes too long even without one."""
        cap_bytes = int(self.room_bytes + saved_bytes)
        if self.in_order_bytes <= cap_bytes:
            return self.free.cost_s
        is_too_little = cap_bytes <= self.too_little_bytes + NEARLY * self.limit_bytes
        if is_too_little or self.free.cost_s >= (1 - ESTIMATE_GAP) * cutoff_s:
            return np.inf
        try:
            left_s = ESTIMATE_SHARE * self.deadline.left_s
            return self.on_mesh.solve(
                self.kept, cap_bytes, left_s, cutoff_s, relative_gap=ESTIMATE_GAP
            ).cost_s
        except NoFitError:
            self.too_little_bytes = cap_bytes
            return np.inf
