"""Plans of one step under falling memory caps: what they are predicted to cost, and what the compiler makes of them.

A cap is met by the best plan that the search finds, so a lower one cannot have a faster plan: where it does, the search has
missed that plan above (`faster_below`). And what a plan is compiled to may not exceed its cap. Where that of the first plan
does (`over_the_cap`), the search goes on until the compiler agrees, as with `--verify`: that plan counts, and the first
one's overshoot is kept.
"""

import re
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from autoshard.compiled_peaks import Judgement, kept
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import AutoshardError, InfeasibleError
from autoshard.cost_model.units import parse_bytes
from autoshard.cost_model.xla.process import Compiler
from autoshard.search import driver
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace_call
from autoshard.search.options import Options, Progress
from autoshard.search.problem.flat_program import flatten
from autoshard.search.result import SearchResult
from autoshard.user_warning import AutoshardWarning
from autoshard.verification.judge import CompilerVerifier
from tests.zoo import Case

NO_CAP_BYTES = 1 << 42
TINY_CAP_BYTES = 1 << 10
"""Nothing fits it; what is said of it names the smallest cap that has a plan."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""JAX's primitives that are counted as such."""

SAME_TIME = 1e-3
"""Relative: by how much a step may get faster under a lower cap without being listed. Source: a choice of ours."""

NO_OVERHEAD = 0.01
"""Of the step without a cap: time beyond it that is nothing to save. Source: a choice of ours."""


@dataclass(frozen=True, slots=True)
class Point:
    """A plan under a cap, or that there is none.

    Attributes:
      cap_bytes: the cap.
      step_s: seconds of the step, predicted.
      peak_bytes: the device's memory at its highest, predicted.
      product_flops: of matrix products and convolutions, in one step on all devices.
      host_bytes: predicted.
      num_microbatches: of the step.
      num_recomputed: classes of ops whose results are recomputed.
      mesh: sizes of its axes.
      search_s: seconds of the search.
      compiled_bytes: the peak as compiled; None if that was not asked.
      first_bytes: the compiled peak of the first plan, where another had to be found.
      is_extrapolated: whether from a shortened stack.
      compile_s: seconds of the verification.
      failure: why there is no plan, or no compiled program.
    """

    cap_bytes: int
    step_s: float = 0.0
    peak_bytes: int = 0
    product_flops: int = 0
    host_bytes: int = 0
    num_microbatches: int = 1
    num_recomputed: int = 0
    mesh: tuple[int, ...] = ()
    search_s: float = 0.0
    compiled_bytes: int | None = None
    first_bytes: int | None = None
    is_extrapolated: bool = False
    compile_s: float = 0.0
    failure: str = ""

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan."""
        return self.step_s > 0

    @property
    def over_bytes(self) -> int:
        """By how much the first plan's compiled peak exceeds the cap."""
        return max(0, (self.first_bytes or self.compiled_bytes or 0) - self.cap_bytes)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans one step for one cluster under any cap.

    Attributes:
      step: the traced step.
      cluster: what to plan and compile for.
      remat: as `autoshard.search` takes it.
      is_compiled: whether the compiler is asked about each plan.
    """

    step: Step
    cluster: Cluster
    remat: str | None = None
    is_compiled: bool = False

    @classmethod
    def of(
        cls, case: Case, cluster: Cluster, remat: str | None = None, is_compiled: bool = False
    ) -> "Planner":
        """Traces a case's step."""
        step = trace_call(cluster.device.platform, case.step, case.abstract_args(), {})
        return cls(step, cluster, remat, is_compiled)

    def point(self, cap_bytes: int) -> Point:
        """The best plan under a cap."""
        if self.is_compiled:
            return _Judged(self, cap_bytes).point()
        start_s = time.perf_counter()
        try:
            found = self.found(cap_bytes)
        except InfeasibleError as e:
            return Point(cap_bytes, search_s=time.perf_counter() - start_s, failure=str(e))
        return _planned(found, cap_bytes, time.perf_counter() - start_s)

    def found(self, limit_bytes: int) -> SearchResult:
        """The search's own answer."""
        return driver.find(self.step, self.cluster, Options(limit_bytes, remat=self.remat))

    def smallest(self) -> Point | None:
        """The plan under the smallest cap that the search says has one."""
        said = replace(self, is_compiled=False).point(TINY_CAP_BYTES).failure
        cap_bytes = smallest_cap(said)
        return None if cap_bytes is None else self.point(cap_bytes)


def smallest_cap(said: str) -> int | None:
    """The cap that a search in vain says would do."""
    found = re.search(r"a cap of ([\d.,]+ [KMGT]iB)", said)
    return parse_bytes(found[1]) if found else None


def product_flops(step: Step) -> int:
    """Multiplications and additions of all matrix products and convolutions of a step, on all devices together."""
    products = (op for op in flatten(step).ops if op.name in PRODUCTS)
    return round(sum(op.count * op.rule.num_points * op.rule.flops_per_point for op in products))


def _planned(found: SearchResult, cap_bytes: int, search_s: float) -> Point:
    plan = found.plan
    return Point(
        cap_bytes,
        plan.estimates.step_s,
        plan.estimates.peak_bytes,
        product_flops(found.step),
        plan.estimates.host_bytes,
        plan.decisions.microbatches,
        len(plan.decisions.retention),
        tuple(plan.decisions.mesh.values()),
        search_s,
    )


class _Judged:
    """A cap's plan, found together with the compiler."""

    def __init__(self, planner: Planner, cap_bytes: int) -> None:
        self.planner, self.cap_bytes = planner, cap_bytes
        self.verifier = CompilerVerifier(planner.cluster, Compiler(), lambda line: None)
        self.judged: list[tuple[SearchResult, Point]] = []
        """The plans that were compiled, in their order."""

    def point(self) -> Point:
        """The fastest plan found whose compiled peak keeps to the cap; the last one, if there is none, with the reason."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutoshardWarning)
            try:
                found = kept(self._found, self._judged, self.cap_bytes, lambda line: None)
            except AutoshardError as e:
                last = self.judged[-1][1] if self.judged else Point(self.cap_bytes)
                return self._beside_the_first(replace(last, failure=f"{type(e).__name__}: {e}"))
        (point,) = (point for judged, point in self.judged if judged.chosen is found.chosen)
        return self._beside_the_first(point)

    def _beside_the_first(self, point: Point) -> Point:
        """A plan with the compiled peak of the first one, and the seconds of all compilations."""
        points = [one for _, one in self.judged]
        first_bytes = points[0].compiled_bytes if len(points) > 1 else None
        return replace(point, first_bytes=first_bytes, compile_s=sum(one.compile_s for one in points))

    def _found(self, limit_bytes: int, _: float | None, said: Progress) -> SearchResult:
        return self.planner.found(limit_bytes)

    def _judged(self, found: SearchResult, _: float | None) -> Judgement:
        """An extrapolated peak above the cap is not taken at its word."""
        proof = self.verifier.verified(found)
        if proof.is_extrapolated and not proof.fits:
            proof = self.verifier.verified(found, full=True)
        point = replace(
            _planned(found, self.cap_bytes, sum(found.plan.search_s.values()) - found.plan.search_s["trace"]),
            compiled_bytes=proof.compiled.peak_bytes,
            is_extrapolated=proof.is_extrapolated,
            compile_s=proof.seconds["compile"],
        )
        self.judged.append((found, point))
        return Judgement.of(proof)


def frontier(planner: Planner, percents: Sequence[int]) -> Iterator[Point]:
    """The plan without a cap, and those under falling caps down to the smallest."""
    free = replace(planner, is_compiled=False).point(NO_CAP_BYTES)
    yield free
    for percent in percents:
        yield planner.point(free.peak_bytes * percent // 100)
    smallest = planner.smallest()
    if smallest is not None:
        yield smallest


class Asked(Protocol):
    """Who plans: a `Planner`."""

    def point(self, cap_bytes: int) -> Point: ...


def under(planner: Asked, caps_bytes: Sequence[int]) -> Iterator[Point]:
    """The plans under falling caps; those that keep to lower ones too, and caps that have none, are not asked again."""
    last = planner.point(NO_CAP_BYTES)
    for cap_bytes in caps_bytes:
        if last.is_planned and last.peak_bytes > cap_bytes:
            last = planner.point(cap_bytes)
        yield replace(last, cap_bytes=cap_bytes)


def over_the_cap(points: Sequence[Point]) -> list[Point]:
    """The plans that are compiled to more than they may hold."""
    return [p for p in points if p.over_bytes]


def faster_below(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Plans, each with the best one under a lower cap, where that is faster: it would have done for the first one too."""
    planned = sorted((p for p in points if p.is_planned), key=lambda p: -p.cap_bytes)
    return [
        (above, below) for above, below in pairwise(planned) if below.step_s < (1 - SAME_TIME) * above.step_s
    ]


def saved_share(free_s: float, ours_s: float, best_s: float) -> float | None:
    """Of the best other step's time beyond a step without a cap, what ours does without; None where it has hardly any."""
    overhead_s = best_s - free_s
    return (best_s - ours_s) / overhead_s if overhead_s > NO_OVERHEAD * free_s else None
