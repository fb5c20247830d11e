"""The compiler's last word on the memory of a plan.

A predicted peak may be wrong by a third (`search.plan.peak_band`), so a plan that keeps to its cap by prediction may not
fit. XLA's GPU compiler knows the true peak. `kept` asks it, in a process beside this one: for each plan whose error band
crosses the cap (`verify="auto"`), for each plan (`"always"`), or for none (`"never"`). If the compiled peak exceeds the cap,
the search goes on under a limit that is lower by the overshoot (`search.tightening`), until a compiled plan keeps to the
cap or nothing does.

The searches know nothing of the compiler. A `Judge` is a function from a plan to its `Judgement`, and `kept` wraps any
search that takes a limit. One loop judges programs, pipelines, and programs that attached GPUs compile anyway.

A user's time limit holds for searches and compiler together. When it is over, a plan that was not compiled is returned as
such: its estimates have no compiled peak. A plan that was compiled to more than its cap is never returned.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from autoshard.planning import ALWAYS, NEVER, Asked
from autoshard.progress import Progress
from autoshard.search.driver import SearchResult
from autoshard.search.ir.graph import Step
from autoshard.search.options import Options
from autoshard.search.pipeline.planning import Pipeline
from autoshard.search.plan.peak_band import compiled, may_exceed
from autoshard.search.tightening import Round, tightened
from autoshard.user_warning import warn
from autoshard.verification.extrapolation import is_long
from autoshard.verification.judge import CompilerVerifier, Proof, target_config_text

Verify = Callable[[CompilerVerifier, Any, bool], Proof]
"""Verifies a plan on its step."""

MAX_ROUNDS = 6
"""Largest number of limits for one cap. Source: docs/benchmarks.md, "Plans under a cap, with the compiler as judge": no cap
there needed more than two. Bisection between an overshoot of 36% and a limit that nothing fits takes five."""

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
    asked: Asked,
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
    step: Step, cluster: AnyCluster, asked: Asked, progress: Progress, verify: Verify
) -> CompilerJudge | None:
    """The judge of a step's pipelines. Stages are not shortened, so that it takes minutes to compile those of a long step:
    they are judged only if the user asks for that."""
    return None if asked.verify != ALWAYS and is_long(step) else judge_of(cluster, asked, progress, verify)


def one_program(
    step: Step, cluster: Cluster, options: Options, asked: Asked, progress: Progress = lambda line: None
) -> SearchResult:
    """Searches for the fastest program that fits, as compiled if the user's `verify=` says so.

    Args:
      step: the traced step.
      cluster: the cluster that it will run on.
      options: the options of the search.
      asked: the user's options, of which `verify` and `target_config` count here.
      progress: called with one line per stage of the work.

    Raises:
      InfeasibleError: nothing fits, as predicted or as compiled.
      InputError: the compiler that was asked for is not there.
      CompilerError: the compiler that was asked for failed.
    """

    def search(limit_bytes: int, limit_s: float | None, said: Progress) -> SearchResult:
        lower = replace(options, memory_bytes=limit_bytes, time_limit_s=limit_s)
        return planning.find(step, cluster, lower, said)

    judge = judge_of(cluster, asked, progress)
    is_asked = asked.verify == ALWAYS
    return kept(search, judge, options.memory_bytes, progress, is_asked, options.time_limit_s)


def kept[F: Any](
    search: Callable[[int, float | None, Progress], F],
    judge: Judge[F] | None,
    cap_bytes: int,
    progress: Progress,
    is_asked: bool = True,
    time_limit_s: float | None = None,
) -> F:
    """The first plan that keeps to the cap as compiled; or that need not be compiled, or cannot be.

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
    for latest in tightened(rounds.propose, cap_bytes, MAX_ROUNDS):
        found, judgement = latest.proposal
        if judgement is None or judgement.fits:
            return rounds.finished(found, judgement)
        rounds.misfits.append(judgement)
    raise rounds.nothing_fits()


class _Rounds[F: Any]:
    """The plans of a search that were judged so far."""

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
        self.found: list[F] = []
        self.misfits: list[Judgement] = []
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

    def propose(self, limit_bytes: float, _: object) -> Round[tuple[F, Judgement | None]] | None:
        """The fastest plan under a limit, judged; None if nothing fits the limit.

        Raises:
          InfeasibleError: nothing fits the cap itself, or no time is left to search under a lower limit.
        """
        if not self.misfits:
            limit_s = self.time_limit_s
        elif self.is_over:
            raise self.nothing_fits()
        else:
            limit_s = self.left_s
        if any(limit_bytes < e.smallest_bytes < float("inf") for e in self.refusals):
            return None
        try:
            found = self.search(int(limit_bytes), limit_s, self._telling())
        except InfeasibleError as e:
            if not self.misfits:
                raise
            self.refusals.append(e)
            return None
        found = replace(found, plan=replace(found.plan, memory_bytes=self.cap_bytes))
        self.found.append(found)
        judgement = self._judged(found)
        if judgement is None:
            return Round((found, None), limit_bytes, 0.0)
        scale = self.cap_bytes / judgement.cap_bytes  # some devices of a mixed cluster have less
        peaks_bytes = scale * judgement.predicted_bytes, scale * judgement.compiled_bytes
        return Round((found, judgement), *peaks_bytes)

    def _judged(self, found: F) -> Judgement | None:
        """The judgement of a plan that has to be compiled; None if it need not, or could not."""
        if not (self.is_asked or may_exceed(fullness(found), 1.0)):
            return None
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
        why = f"round {len(self.misfits) + 1}, as {self.misfits[-1]}"
        return lambda line: self.progress(f"{line} ({why})")

    def finished(self, found: F, judgement: Judgement | None) -> F:
        """The plan to return, with its compiled peak, the bound of the search under the cap itself, and all seconds."""
        if self.misfits:
            warn(f"{self.misfits[-1]}: it was searched again, under a lower limit")
            found = _certified(found, self.found[0])
        search_s = dict(found.plan.search_s)
        if self.compiler_s:
            search_s["compiler"] = self.compiler_s
        if len(self.found) > 1:
            search_s["rounds before"] = sum(_searched_s(one.plan.search_s) for one in self.found[:-1])
        plan = compiled(found.plan, None if judgement is None else judgement.compiled_bytes)
        return replace(found, plan=replace(plan, search_s=search_s))

    def nothing_fits(self) -> InfeasibleError:
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


def _certified[F: Any](found: F, first: F) -> F:
    """The plan with the bound of the first plan, which was searched under the cap itself."""
    are_bounded = hasattr(found, "bounded") and hasattr(first, "bounded")
    return found.bounded(first.bound_s) if are_bounded else found


def _searched_s(search_s: Mapping[str, float]) -> float:
    """Seconds of a search, without the trace that all rounds share."""
    return sum(s for part, s in search_s.items() if part != "trace")
