"""The compiler's last word on the memory of a plan.

A predicted peak may be wrong by a third (`search.plan.peak_band`), so a plan that keeps to its cap by prediction may not
fit. XLA's GPU compiler knows the true peak. `kept` asks it, in a process beside this one: for each plan whose error band
crosses the cap (`verify="auto"`), for each plan (`"always"`), or for none (`"never"`). If the compiled peak exceeds the cap,
the search goes on under a lower limit (`autoshard.limits`), until a compiled plan keeps to the cap or nothing does. Of the
plans that do, the fastest counts.

The searches know nothing of the compiler. A `Judge` is a function from a plan to its `Judgement`, and `kept` wraps any
search that takes a limit. One loop judges programs, pipelines, and programs that attached GPUs compile anyway.

All searches for one cap share one clock (`autoshard.time_share`). A user's time limit holds for searches and compiler
together. When it is over, a plan that was not compiled is returned as such: its estimates have no compiled peak. A plan that
was compiled to more than its cap is never returned.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from time import monotonic, perf_counter
from typing import Any, Protocol

from autoshard import planning
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import CompilerError, InfeasibleError
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla.compiler import can_compile_for
from autoshard.cost_model.xla.plugin import is_there
from autoshard.cost_model.xla.process import Compiler
from autoshard.limits import Trial, next_limit
from autoshard.options import ALWAYS, NEVER, Options
from autoshard.progress import Progress
from autoshard.search import driver
from autoshard.search.ir.graph import Step
from autoshard.search.options import Options as SearchOptions
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.plan.peak_band import compiled, may_exceed
from autoshard.search.result import SearchResult
from autoshard.time_share import MAX_ROUNDS, TimeShare
from autoshard.user_warning import warn
from autoshard.verification.extrapolation import is_long
from autoshard.verification.judge import CompilerVerifier, Proof, target_config_text

Verify = Callable[[CompilerVerifier, Any, bool], Proof]
"""Verifies a plan on its step."""

NEAR = 0.03
"""Share of the cap: with `verify="always"`, a plan whose extrapolated peak comes this close to the cap is compiled in full.
Source: a choice of ours; the extrapolated peak of a Megatron GPT of 24 layers was 0.2% below the full program's."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The compiled peak of a plan beside the predicted one, in bytes of the device that needs the largest share of its cap.

    Attributes:
      predicted_bytes: the predicted peak.
      compiled_bytes: the compiled peak.
      cap_bytes: the cap of the device.
      fits: whether the compiled program keeps to all caps, the host's included.
    """

    predicted_bytes: int
    compiled_bytes: int
    cap_bytes: int
    fits: bool

    @classmethod
    def of(cls, proof: Proof) -> "Judgement":
        """The judgement of a verification."""
        peaks = proof.predicted.peak_bytes, proof.compiled.peak_bytes
        return cls(*peaks, proof.compiled_cap_bytes, proof.fits)

    def __str__(self) -> str:
        if self.compiled_bytes <= self.cap_bytes:
            return "the compiled program needs more of the host's memory than there is"
        return (
            f"the plan predicted to need {format_bytes(self.predicted_bytes)} a device was compiled to "
            f"{format_bytes(self.compiled_bytes)}, above the cap of {format_bytes(self.cap_bytes)}"
        )


class Judge[F](Protocol):
    """Has the last word on a plan."""

    def __call__(self, found: F, timeout_s: float | None, /) -> Judgement:
        """Compiles a plan.

        Args:
          found: the plan on its step.
          timeout_s: seconds for the compiler; None for no limit.

        Raises:
          CompilerError: the compiler failed or took too long.
        """
        ...


@dataclass(frozen=True, slots=True)
class CompilerJudge:
    """Judges plans by XLA's GPU compiler, without a GPU.

    Attributes:
      verifier: asks the compiler.
      verify: verifies a plan by it; the flag asks for all of the equal blocks.
      is_thorough: whether a step is compiled in full if its extrapolated peak is near the cap.
    """

    verifier: CompilerVerifier
    verify: Verify
    is_thorough: bool

    def __call__(self, found: Any, timeout_s: float | None, /) -> Judgement:
        """Compiles a plan: equal blocks a few times, and a pipeline stage by stage."""
        until_s = None if timeout_s is None else monotonic() + timeout_s
        verifier = replace(self.verifier, compiler=replace(self.verifier.compiler, until_s=until_s))
        proof = self.verify(verifier, found, False)
        is_near = proof.compiled.peak_bytes > (1 - NEAR) * proof.cap_bytes
        if self.is_thorough and proof.fits and is_near and getattr(proof, "is_extrapolated", False):
            proof = self.verify(verifier, found, True)
        return Judgement.of(proof)


def judge_of(
    cluster: AnyCluster,
    asked: Options,
    progress: Progress,
    verify: Verify = CompilerVerifier.verified,
) -> CompilerJudge | None:
    """The judge that the user asks for; None if there is none to ask. Only `verify="always"` installs the compiler.

    Raises:
      InputError: the user asks for a compiler that cannot be installed, or that cannot compile for the cluster.
    """
    if asked.verify == NEVER:
        return None
    target, is_asked = target_config_text(asked.target_config), asked.verify == ALWAYS
    if not is_asked and not (is_there() and all(can_compile_for(one, target) for one in cluster.groups)):
        return None
    return CompilerJudge(CompilerVerifier(cluster, Compiler(target), progress), verify, is_asked)


def judge_of_pipelines(
    step: Step, cluster: AnyCluster, asked: Options, progress: Progress, verify: Verify
) -> CompilerJudge | None:
    """The judge of a step's pipelines. Stages are not shortened, so that it takes minutes to compile those of a long step:
    they are judged only if the user asks for that."""
    return None if asked.verify != ALWAYS and is_long(step) else judge_of(cluster, asked, progress, verify)


def one_program(
    step: Step,
    cluster: Cluster,
    options: SearchOptions,
    asked: Options,
    progress: Progress = lambda line: None,
) -> SearchResult:
    """Searches for the fastest program that fits, as compiled if the user's `verify=` says so.

    Args:
      asked: the user's options, of which `verify` and `target_config` count here.

    Raises:
      InfeasibleError: nothing fits, as predicted or as compiled.
      InputError: the compiler that was asked for is not there.
      CompilerError: the compiler that was asked for failed.
    """

    share, judge = TimeShare(options), judge_of(cluster, asked, progress)

    first: list[SearchResult] = []

    def search(limit_bytes: int, limit_s: float | None, report: Progress) -> SearchResult:
        options = share.options(limit_bytes, limit_s)
        if first:
            return driver.find_under(first[0], step, cluster, options, report)
        first.append(planning.find(step, cluster, options, report))
        return first[0]

    is_asked = asked.verify == ALWAYS
    found = kept(search, judge, options.memory_bytes, progress, is_asked, options.time_limit_s)
    return replace(found, under=None)  # all that the search has learned is large


def kept[F: Any](
    search: Callable[[int, float | None, Progress], F],
    judge: Judge[F] | None,
    cap_bytes: int,
    progress: Progress,
    is_asked: bool = True,
    time_limit_s: float | None = None,
) -> F:
    """The fastest plan found that keeps to the cap as compiled; or that need not be compiled, or cannot be.

    Args:
      search: the fastest plan under a limit in bytes, which may be lower than the cap, within a time limit.
      judge: compiles a plan; None if no plan is compiled.
      cap_bytes: the user's cap; the plan states this cap, whatever limit it was found under.
      progress: called with one line per stage of the search and the compilation.
      is_asked: whether every plan has to be compiled, whatever its error band, and without a time limit.
      time_limit_s: seconds for all searches and compilations.

    Raises:
      InfeasibleError: no plan fits, as predicted or as compiled; the message names the last compiled plan.
      CompilerError: the compiler failed, and every plan has to be compiled.

    Warns:
      AutoshardWarning: a plan before this one was found not to fit.
    """
    if judge is None:
        return search(cap_bytes, time_limit_s, progress)
    rounds = _Rounds(search, judge, cap_bytes, progress, is_asked, time_limit_s)
    while (limit_bytes := rounds.next_limit) is not None:
        rounds.all.append(rounds.under(limit_bytes))
    return rounds.fastest()


@dataclass(frozen=True, slots=True)
class _Round[F: Any]:
    """A search, and the judgement of its plan.

    Attributes:
      trial: the limit, and what became of the plan.
      found: the plan; None if nothing fits the limit.
      judgement: the compiler's; None if the plan was not compiled.
      is_final: whether the compiler cannot be asked about it, so that nothing more is learned.
    """

    trial: Trial
    found: F | None = None
    judgement: Judgement | None = None
    is_final: bool = False

    @property
    def search_s(self) -> Mapping[str, float]:
        """Seconds of the search by part; empty without a plan."""
        return {} if self.found is None else self.found.plan.search_s


class _Rounds[F: Any]:
    """The searches for one cap."""

    def __init__(
        self,
        search: Callable[[int, float | None, Progress], F],
        judge: Judge[F],
        cap_bytes: int,
        progress: Progress,
        is_asked: bool,
        time_limit_s: float | None,
    ) -> None:
        self.search, self.judge, self.cap_bytes = search, judge, cap_bytes
        self.progress, self.is_asked, self.time_limit_s = progress, is_asked, time_limit_s
        self.all: list[_Round[F]] = []
        self.refusals: list[InfeasibleError] = []
        self.compiler_s, self.start_s = 0.0, perf_counter()

    @property
    def left_s(self) -> float | None:
        """Seconds that are left; None without a time limit."""
        return None if self.time_limit_s is None else self.time_limit_s - (perf_counter() - self.start_s)

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.left_s is not None and self.left_s <= 0

    @property
    def misfits(self) -> list[Judgement]:
        """The judgements of plans that do not fit."""
        return [one.judgement for one in self.all if one.judgement is not None and not one.judgement.fits]

    @property
    def fitting(self) -> list[_Round[F]]:
        """The rounds whose plan fits, the fastest first."""
        return sorted((one for one in self.all if one.trial.fits), key=lambda one: one.trial.step_s)

    @property
    def next_limit(self) -> float | None:
        """The limit of the next search; None if there is none, or no time for it."""
        if self.all and (self.is_over or self.all[-1].is_final or len(self.all) == MAX_ROUNDS):
            return None
        return next_limit([one.trial for one in self.all], self.cap_bytes)

    def under(self, limit_bytes: float) -> _Round[F]:
        """A search, and the judgement of its plan.

        Raises:
          InfeasibleError: nothing fits the cap itself.
        """
        limit_s = self.left_s if self.all else self.time_limit_s
        nothing = _Round[F](Trial(limit_bytes))
        if any(limit_bytes < e.smallest_bytes < inf for e in self.refusals):
            return nothing
        try:
            found = self.search(int(limit_bytes), limit_s, self._telling())
        except InfeasibleError as e:
            if not self.all:
                raise
            self.refusals.append(e)
            return nothing
        return self._judged(limit_bytes, found.with_plan(memory_bytes=self.cap_bytes))

    def _judged(self, limit_bytes: float, found: F) -> _Round[F]:
        """A plan that was found, judged if it has to be."""
        estimates = found.plan.estimates
        gap = 0.0 if found.plan.is_pipeline else found.plan.gap or 0.0  # a pipeline's leaves out the bubble
        peaks_bytes = (estimates.peak_bytes, estimates.peak_bytes)
        trial = Trial(limit_bytes, not self.fitting, *peaks_bytes, estimates.step_s, gap)
        if not self._is_in_doubt(found):
            return _Round(trial, found)
        judgement = self._judgement(found)
        if judgement is None:
            return _Round(trial, found, is_final=True)
        scale = self.cap_bytes / judgement.cap_bytes  # some devices of a mixed cluster have less
        predicted_bytes, compiled_bytes = scale * judgement.predicted_bytes, scale * judgement.compiled_bytes
        sizes = {"predicted_bytes": predicted_bytes, "compiled_bytes": compiled_bytes}
        return _Round(replace(trial, fits=judgement.fits, **sizes), found, judgement)

    def _is_in_doubt(self, found: F) -> bool:
        """Whether a plan has to be compiled. It need not be if one that fits is as fast. After a plan that does not fit, the
        error band is not believed."""
        if self.fitting and self.fitting[0].trial.step_s <= found.plan.estimates.step_s:
            return False
        return self.is_asked or bool(self.misfits) or may_exceed(fullness(found), 1.0)

    def _judgement(self, found: F) -> Judgement | None:
        """The compiler's judgement of a plan; None if there is no time for it, or it failed unasked."""
        if not self.is_asked and self.is_over:
            self.progress("not compiled, as the time limit is over")
            return None
        start_s = perf_counter()
        try:
            return self.judge(found, None if self.is_asked else self.left_s)
        except CompilerError as e:
            if self.is_asked:
                raise
            self.progress(f"not compiled: {e}")
            return None
        finally:
            self.compiler_s += perf_counter() - start_s

    def _telling(self) -> Progress:
        """Progress lines that give the reason for another round."""
        if not self.misfits:
            return self.progress
        why = f"round {len(self.all) + 1}, as {self.misfits[-1]}"
        return lambda line: self.progress(f"{line} ({why})")

    def fastest(self) -> F:
        """The fastest plan that fits, with its compiled peak, the bound of the search under the cap itself, and all seconds.

        Raises:
          InfeasibleError: no plan fits as compiled.
        """
        if not self.fitting:
            raise self._nothing_fits()
        best = self.fitting[0]
        found: Any = best.found
        if self.misfits:
            warn(f"{self.misfits[-1]}: it was searched again, under a lower limit")
            found = _certified(_under_cap(found, self.cap_bytes), self.all[0].found)
        search_s = dict(found.plan.search_s)
        if self.compiler_s:
            search_s["compiler"] = self.compiler_s
        if len(self.all) > 1:
            search_s["other rounds"] = sum(_searched_s(one.search_s) for one in self.all if one is not best)
        plan = compiled(found.plan, None if best.judgement is None else best.judgement.compiled_bytes)
        return replace(found, plan=replace(plan, search_s=search_s))

    def _nothing_fits(self) -> InfeasibleError:
        """The error after the last round."""
        smallest = min(self.misfits, key=lambda one: one.compiled_bytes / one.cap_bytes)
        smallest_bytes = self.cap_bytes * smallest.compiled_bytes / smallest.cap_bytes
        remedies = [
            f"allow {format_bytes(1.01 * smallest_bytes)} a device",
            "use more devices or a smaller batch",
        ]
        remedies += ["give more than the time_limit_s, which is over"] * self.is_over
        remedies += [f"take the plan as predicted, with verify={NEVER!r}"] * (not self.is_asked)
        refusal = f"; under a lower limit {self.refusals[-1]}" if self.refusals else ""
        return InfeasibleError(
            f"{self.misfits[-1]}, and the smallest of {len(self.misfits)} was compiled to {format_bytes(smallest_bytes)}. "
            f"To go on: {', or '.join(remedies)}{refusal}",
            smallest_bytes,
            section="compiled-to-more-than-the-cap",
        )


def fullness(found: Any) -> float:
    """The predicted peak of a plan as a share of the cap, on the device where that share is largest."""
    if not isinstance(found, Pipeline):
        return found.plan.estimates.peak_bytes / found.plan.memory_bytes
    stages = zip(found.plan.estimates.stages, found.devices, strict=True)
    return max(stage.peak_bytes / there.cap_bytes for stage, there in stages)


def _under_cap[F: Any](found: F, cap_bytes: int) -> F:
    """The plan with the estimates for the cap, under which it is compiled, and not for the limit of its search."""
    return found.under_cap(cap_bytes) if hasattr(found, "under_cap") else found


def _certified[F: Any](found: F, first: F) -> F:
    """The plan with the bound of the first plan, which was searched under the cap itself."""
    are_bounded = hasattr(found, "bounded") and hasattr(first, "bounded")
    return found.bounded(first.bound_s) if are_bounded else found


def _searched_s(search_s: Mapping[str, float]) -> float:
    """Seconds of a search, without the trace that all rounds share."""
    return sum(s for part, s in search_s.items() if part != "trace")
