"""Estimated prices of recomputation and host memory, and the worth of more memory.

Recomputation and host memory rewrite the step before it becomes a graph problem, so no label stands for them. To search
again with one of them changed takes as long as a search. Their prices are therefore estimates:

* The residuals of the traced step have seconds and bytes under strategies (`search.memory.residuals`). A class of ops
  is recomputed, or kept, and all other decisions stay.
* An array on the host is copied twice a step. The visible share of these copies is that of the plan's simulation, or
  that of the search's estimates if the plan has no copies (`search.recomputation`).

More memory helps in three ways: other shardings, for which the plan's problem is solved again; less recomputation; less
on the host. The best of the three is told.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.search.ir.graph import Site
from autoshard.search.ir.spec import read_partition_spec
from autoshard.search.memory.loop_segments import cut_loop
from autoshard.search.memory.offload import may_rest_on_host
from autoshard.search.memory.residuals import Residuals, residuals
from autoshard.search.mesh_problem import NO_CAP, RELATIVE_GAP, Known
from autoshard.search.plan.explained import (
    CHEAPER_ELSEWHERE,
    NOT_POSSIBLE,
    TIE,
    UNCERTAIN,
    Estimated,
    MoreMemory,
)
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.retention import RetentionCodec
from autoshard.search.result import SearchResult
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.space.rewrites import HIDING_SHARE, VISIBLE_SHARE
from autoshard.search.step_problem import StepProblem

LIMIT_S = 5.0
"""Nominal seconds for each problem that is solved. Source: a choice of ours; a user waits for it."""

MORE = 0.1
"""Share of the cap that the additional memory has."""


def pinned(plan: Plan) -> dict[str, Any]:
    """The pins of a plan's search: by pytree path, the spec of an argument."""
    return {name: read_partition_spec(text) for name, text in plan.options.get("pin", {}).items()}


@dataclass(frozen=True, eq=False)
class MemoryPrices:
    """The prices of one applied plan."""

    found: SearchResult

    def knows(self, name: str) -> bool:
        """Whether a class of ops that may be recomputed or offloaded has this name."""
        return name in self._sites

    def retention(self, name: str) -> Estimated | None:
        """The price of the contrary for a class of forward ops; None if it holds no residual."""
        sites = frozenset(self._sites.get(name, ()))
        if sites & self.found.problem.offloaded_sites:
            return self._kept_on_device(sites)
        if again := self._again(sites):
            return self._kept(name, again)
        return self._recomputed(sites)

    def host(self, name: str, own_bytes: int) -> Estimated | None:
        """The price of the contrary for an argument of so many bytes on a device; None if it cannot rest on the host."""
        step = self.found.problem.traced
        number = next((n for n, a in enumerate(step.arguments) if name in a.names), -1)
        if number in self.found.problem.hosted:
            return self._rested_on_device(own_bytes)
        if number not in may_rest_on_host(step) or not self._cluster.host_bytes_per_node:
            return None
        copied_s = 2 * float(self._cluster.host_link.copy_s(own_bytes))
        more_s = max(VISIBLE_SHARE * copied_s, copied_s - HIDING_SHARE * self._step_s)
        is_forbidden = self._options.get("offload") == "never"
        reason = NOT_POSSIBLE if is_forbidden else self._reason(more_s)
        other = "to rest on the host" + " (which offload='never' forbids)" * is_forbidden
        return Estimated("it rests on the device", other, more_s, -own_bytes, reason)

    def more(self) -> MoreMemory:
        """The worth of the next 10% of memory."""
        more_bytes = round(MORE * self.found.plan.memory_bytes)
        ways = (
            MoreMemory(more_bytes, self._resharded_s(more_bytes), "other shardings", False),
            MoreMemory(more_bytes, self._less_recomputed_s(more_bytes), "less recomputation", True),
            MoreMemory(more_bytes, self._less_copied_s(more_bytes), "less on the host", True),
        )
        best = max(ways, key=lambda one: one.less_s)
        is_worth_it = best.less_s > RELATIVE_GAP * self._step_s
        return best if is_worth_it else MoreMemory(more_bytes, 0.0, "", False)

    def _again(self, sites: Collection[Site]) -> frozenset[Site]:
        """The decisions that recompute these ops, or loops in segments."""
        return frozenset(site for site in self.found.problem.sites if cut_loop(site)[0] in sites)

    # --- the contrary

    def _kept(self, name: str, sites: frozenset[Site]) -> Estimated:
        again = self.found.problem.sites
        more_s, more_bytes = self._difference(again - sites)
        said = self.found.plan.retention.get(name, "remat").removeprefix("remat").strip()
        choice = "it is recomputed in the backward phase" + f" ({said})" * bool(said)
        return Estimated(choice, "to keep it", more_s, more_bytes, self._reason(more_s, more_bytes))

    def _recomputed(self, sites: frozenset[Site]) -> Estimated | None:
        more_s, more_bytes = self._difference(self.found.problem.sites | sites)
        if not np.isfinite(more_s) or more_bytes >= 0:
            return None  # it must stay, or nothing would be freed
        is_forbidden = self._options.get("remat") == "never"
        reason = NOT_POSSIBLE if is_forbidden else self._reason(more_s)
        other = "to recompute it" + " (which remat='never' forbids)" * is_forbidden
        return Estimated("it is kept for the backward phase", other, more_s, more_bytes, reason)

    def _kept_on_device(self, sites: frozenset[Site]) -> Estimated:
        own = (
            n for part in self._residuals for site, n in part.kept(self.found.problem.sites) if site in sites
        )
        more_bytes = round(sum(own))
        more_s = -self._visible_s(more_bytes)
        choice = "it waits on the host for the backward phase"
        return Estimated(
            choice, "to keep it on the device", more_s, more_bytes, self._reason(more_s, more_bytes)
        )

    def _rested_on_device(self, own_bytes: int) -> Estimated:
        more_s = -self._visible_s(own_bytes)
        return Estimated(
            "it rests on the host",
            "to rest on the device",
            more_s,
            own_bytes,
            self._reason(more_s, own_bytes),
        )

    def _reason(self, more_s: float, more_bytes: int = 0) -> str:
        plan = self.found.plan
        if more_bytes > plan.memory_bytes - plan.estimates.peak_bytes:
            return NOT_POSSIBLE
        if abs(more_s) <= RELATIVE_GAP * self._step_s:
            return TIE
        return CHEAPER_ELSEWHERE if more_s > 0 else UNCERTAIN

    def _difference(self, sites: frozenset[Site]) -> tuple[float, int]:
        """Seconds and bytes that other recomputed ops take besides."""
        before = self.found.problem.sites
        more_s = sum(part.seconds(sites) - part.seconds(before) for part in self._residuals)
        more_bytes = sum(part.kept_bytes(sites) - part.kept_bytes(before) for part in self._residuals)
        return float(more_s), round(more_bytes)

    def _visible_s(self, num_bytes: float) -> float:
        """Seconds that the device waits for an array of so many bytes to come from the host and go back."""
        copied_s = 2 * float(self._cluster.host_link.copy_s(num_bytes))
        return copied_s * self._waited_s / max(self.found.plan.estimates.transfer_s, copied_s)

    @cached_property
    def _waited_s(self) -> float:
        return self.found.found.device.waited_s

    # --- more memory

    def _resharded_s(self, more_bytes: int) -> float:
        """Seconds that other strategies of the plan's step save with so much more memory."""
        on_mesh, plan = self.found.on_mesh, self.found.plan
        kept, cost_s = on_mesh.pinned(pinned(plan)), self.found.solved_s
        cutoff_s, known = (1 - RELATIVE_GAP) * cost_s, Known(self.found.chosen)
        try:
            on_mesh.solve(kept, NO_CAP, LIMIT_S, cutoff_s, known=known)
            solution, _ = on_mesh.fitting(
                kept, plan.memory_bytes + more_bytes, LIMIT_S, cutoff_s, known=known
            )
        except NoFitError:
            return 0.0
        return cost_s - solution.cost_s

    def _less_recomputed_s(self, more_bytes: int) -> float:
        """Seconds that are saved if so many more bytes are kept: the most seconds per byte first, of the last class a
        part."""
        again = self.found.problem.sites
        classes = [self._again(sites) for sites in self._sites.values()] if again else []
        savings = [self._difference(again - sites) for sites in classes if sites]
        worth = [(-more_s, num_bytes) for more_s, num_bytes in savings if more_s < 0 < num_bytes]
        saved_s, left_bytes = (
            sum(-more_s for more_s, num_bytes in savings if num_bytes == 0 > more_s),
            more_bytes,
        )
        for less_s, num_bytes in sorted(worth, key=lambda one: -one[0] / one[1]):
            share = min(1.0, left_bytes / num_bytes)
            saved_s += share * less_s
            left_bytes -= round(share * num_bytes)
        return saved_s

    def _less_copied_s(self, more_bytes: int) -> float:
        """Seconds that are saved if so many more bytes are on the device instead of on the host."""
        host_bytes = self.found.plan.estimates.host_bytes
        return self._waited_s * min(1.0, more_bytes / host_bytes) if host_bytes else 0.0

    # --- the step as it was traced

    @cached_property
    def _sites(self) -> Mapping[str, tuple[Site, ...]]:
        return RetentionCodec(self.found.problem.traced_program).sites

    @cached_property
    def _residuals(self) -> tuple[Residuals, ...]:
        """The residuals of the traced step, under the plan's strategies; if the plan rewrites the step, under the fastest
        ones without a cap."""
        problem, on_mesh, labels = self.found.problem, self.found.on_mesh, self.found.chosen
        if problem.sites or problem.hosted or problem.offloaded_sites:
            resharder = on_mesh.memory.costed.resharder
            problem = StepProblem.of(
                problem.traced,
                problem.marks,
                self._cluster.device,
                known=problem.traced_program,
                clock=problem.clock,
            )
            on_mesh = problem.on(self._cluster, on_mesh.shape, resharder)
            labels = on_mesh.solve(on_mesh.pinned(pinned(self.found.plan)), NO_CAP, LIMIT_S).labels
        return residuals(on_mesh.memory.costed, problem.live_ranges.fusion, labels)

    @property
    def _cluster(self) -> Cluster:
        return self.found.on_mesh.memory.costed.resharder.mesh.cluster

    @property
    def _step_s(self) -> float:
        return self.found.plan.estimates.step_s

    @property
    def _options(self) -> Mapping[str, Any]:
        return self.found.plan.options
