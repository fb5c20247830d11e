"""The loop of search and compiler, with a search and a compiler that are functions of a limit."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import autoshard
from autoshard import compiled_peaks
from autoshard.compiled_peaks import MAX_ROUNDS, Judgement, kept
from autoshard.cost_model.errors import CompilerError, InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.options import ALWAYS, IN_DOUBT, NEVER, Options
from autoshard.planning import applied
from autoshard.search import driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options as SearchOptions
from autoshard.search.plan.peak_band import PEAK_BAND
from autoshard.search.plan.plan import PlanOnStep
from autoshard.search.tightening import MARGIN

CAP = 20 << 30
GIB = 1 << 30
ROWS = jax.ShapeDtypeStruct((512, 1024), "float32")
warns_of_another_round = pytest.mark.filterwarnings("ignore:.*it was searched again")


@dataclass(frozen=True)
class Estimates:
    """As much of a plan's estimates as the loop reads."""

    peak_bytes: int
    step_s: float
    compiled_peak_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """As much of a plan as the loop reads."""

    memory_bytes: int
    estimates: Estimates
    search_s: Mapping[str, float] = field(default_factory=lambda: {"trace": 1.0, "solve": 2.0})
    gap: float | None = None
    is_pipeline: bool = False


@dataclass(frozen=True)
class Found(PlanOnStep):
    """As much of `SearchResult` as the loop reads."""

    bound_s: float = 0.0

    def bounded(self, bound_s):
        return self.with_plan(gap=1 - bound_s / 100.0)


@dataclass
class Trial:
    """A search whose plans take the limit whole, and a compiler that makes `times` of the prediction.

    Attributes:
      times: compiled bytes, as a multiple of the predicted ones, by the number of compiled plans so far.
      least_bytes: nothing fits lower limits.
      used: the share of the limit that a plan is predicted to hold.
      step_s: the step time of the plan under a limit.
    """

    times: Callable[[int], float]
    least_bytes: float = 0.0
    used: float = 1.0
    step_s: Callable[[float], float] = lambda limit_bytes: 100.0
    limits: list[float] = field(default_factory=list)
    limits_s: list[float | None] = field(default_factory=list)
    timeouts_s: list[float | None] = field(default_factory=list)
    compiled: dict[int, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def search(self, limit_bytes, limit_s, progress):
        self.limits.append(limit_bytes)
        self.limits_s.append(limit_s)
        progress("mesh 8 (1 of 1)")
        if limit_bytes < self.least_bytes:
            raise InfeasibleError(f"nothing fits {limit_bytes} bytes", self.least_bytes)
        plan = Plan(limit_bytes, Estimates(int(self.used * limit_bytes), self.step_s(limit_bytes)))
        return Found(plan, bound_s=90.0 + len(self.limits))

    def judge(self, found, timeout_s):
        self.timeouts_s.append(timeout_s)
        predicted = found.plan.estimates.peak_bytes
        peak = int(self.times(len(self.compiled)) * predicted)
        self.compiled[predicted] = peak
        return Judgement(predicted, peak, found.plan.memory_bytes, peak <= found.plan.memory_bytes)

    def kept(self, **options):
        return kept(self.search, self.judge, CAP, self.lines.append, **options).plan


def test_a_plan_that_fits_is_returned_at_once_with_its_compiled_peak():
    trial = Trial(lambda n: 0.9)
    plan = trial.kept()
    assert (trial.limits, trial.lines) == ([CAP], ["mesh 8 (1 of 1)"])
    assert plan.memory_bytes == CAP
    assert plan.estimates.compiled_peak_bytes == int(0.9 * CAP)


def test_the_limit_is_lowered_by_the_ratio_of_both_peaks_and_the_plan_keeps_the_cap():
    trial = Trial(lambda n: 1.1)
    with pytest.warns(
        autoshard.AutoshardWarning, match="compiled to 22 GiB, above the cap of 20 GiB: it was searched again"
    ):
        plan = trial.kept()
    assert trial.limits == [CAP, pytest.approx((1 - MARGIN) * CAP / 1.1, abs=1)]
    assert plan.memory_bytes == CAP
    assert plan.estimates.compiled_peak_bytes == int(1.1 * plan.estimates.peak_bytes) <= CAP
    assert trial.lines[1] == (
        "mesh 8 (1 of 1) (round 2, as the plan predicted to need 20 GiB a device was compiled to 22 GiB, above the "
        "cap of 20 GiB)"
    )
    assert (plan.search_s["solve"], plan.search_s["other rounds"]) == (2.0, 2.0)
    assert plan.search_s["compiler"] > 0


@warns_of_another_round
def test_the_gap_counts_what_fits_the_cap_and_not_only_the_lower_limit():
    assert Trial(lambda n: 1.1).kept().gap == pytest.approx(1 - 91 / 100)


def deep_step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@warns_of_another_round
def test_a_plan_of_a_lower_limit_is_predicted_as_its_file_is():
    """The scheduler of the compiler spends the memory of the cap, not that of the limit."""
    step = trace(deep_step, [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 6, ROWS)
    cluster, cap_bytes, lower_bytes = parse_cluster("8xH100-80GB"), 24_500_000, 20_400_000
    searched: list[int] = []

    def search(limit_bytes, *_):
        found = driver.find(
            step, cluster, SearchOptions(limit_bytes, mesh=(8,), remat="never", offload="never")
        )
        searched.append(found.plan.estimates.peak_bytes)
        return found

    def judge(found, _):
        predicted, fits = found.plan.estimates.peak_bytes, len(searched) > 1
        return Judgement(
            predicted, cap_bytes if fits else predicted * cap_bytes // lower_bytes, cap_bytes, fits
        )

    plan = kept(search, judge, cap_bytes, silent, is_asked=True).plan
    assert plan.estimates.peak_bytes == applied(step, plan, "plan").plan.estimates.peak_bytes != searched[-1]
    assert plan.estimates.compiled_peak_bytes == cap_bytes == plan.memory_bytes


@warns_of_another_round
@given(
    times=st.lists(st.floats(0.5, 2.5), min_size=8, max_size=8),
    least=st.floats(0.0, 1.0),
    always=st.booleans(),
)
def test_no_plan_is_returned_that_is_compiled_to_more_than_the_cap(times, least, always):
    trial = Trial(times.__getitem__, least * CAP)
    with suppress(InfeasibleError):
        plan = trial.kept(is_asked=always)
        peak = trial.compiled.get(plan.estimates.peak_bytes)
        assert plan.estimates.compiled_peak_bytes == peak
        assert peak is None or peak <= CAP
        assert peak is not None or not (always or plan.estimates.peak_bytes * PEAK_BAND[1] > CAP)
        return
    assert min(trial.compiled.values(), default=2 * CAP) > CAP


@warns_of_another_round
@given(times=st.lists(st.floats(1.0, 1.5), min_size=8, max_size=8))
def test_each_limit_is_below_the_one_before(times):
    trial = Trial(times.__getitem__)
    with suppress(InfeasibleError):
        trial.kept()
    assert all(lower < higher for higher, lower in pairwise(trial.limits))


def growing(n):
    """Errors that grow as fast as limits fall, so that each plan is compiled to more than the cap."""
    return 3.0 + n


def test_nothing_fits_as_compiled():
    trial = Trial(growing)
    with pytest.raises(
        InfeasibleError,
        match=r"was compiled to 22.7 GiB, above the cap of 20 GiB, and the smallest of 6 was compiled to 22.7 GiB. "
        r"To go on: allow 23 GiB a device",
    ) as raised:
        trial.kept()
    assert raised.value.smallest_bytes == min(trial.compiled.values()) > CAP
    assert len(trial.limits) == MAX_ROUNDS
    assert "verify='never'" not in str(raised.value)


def test_the_search_that_asks_unasked_says_how_it_leaves_that():
    with pytest.raises(InfeasibleError, match=r"take the plan as predicted, with verify='never'"):
        Trial(growing).kept(is_asked=False)


def test_nothing_fits_as_predicted():
    trial = Trial(lambda n: 1.0, least_bytes=2 * CAP)
    with pytest.raises(InfeasibleError, match=r"^nothing fits"):
        trial.kept()
    assert not trial.compiled


@dataclass
class Roomy(Trial):
    """The first plan is compiled to 5/4 of the cap, others to their predicted peaks; less memory takes more time."""

    times: Callable[[int], float] = lambda n: 1.25 if n == 0 else 1.0
    step_s: Callable[[float], float] = lambda limit_bytes: CAP / limit_bytes


@warns_of_another_round
def test_half_way_back_the_faster_plan_is_taken():
    trial = Roomy()
    plan = trial.kept()
    assert trial.limits == [pytest.approx(share * CAP, rel=0.01) for share in (1.0, 0.8, 0.9)]
    assert plan.estimates.peak_bytes == plan.estimates.compiled_peak_bytes == trial.limits[2]
    assert plan.search_s["other rounds"] == 4.0


@warns_of_another_round
def test_half_way_back_a_plan_that_is_not_faster_is_not_compiled():
    trial = Roomy(step_s=lambda limit_bytes: 1.0 if limit_bytes > 0.95 * CAP else 2.0)
    plan = trial.kept()
    assert (len(trial.limits), len(trial.compiled)) == (3, 2)
    assert plan.estimates.compiled_peak_bytes == trial.limits[1]


@warns_of_another_round
def test_half_way_back_a_plan_that_cannot_be_compiled_is_not_taken():
    trial = Roomy()

    def judge(found, timeout_s):
        if len(trial.compiled) == 2:
            raise CompilerError("the compiler was killed")
        return trial.judge(found, timeout_s)

    plan = kept(trial.search, judge, CAP, trial.lines.append, is_asked=False).plan
    assert (len(trial.limits), plan.estimates.compiled_peak_bytes) == (3, trial.limits[1])


@warns_of_another_round
def test_where_nothing_fits_a_lower_limit_a_limit_between_is_searched():
    """The overshoot is 40% and nothing fits 85% of the cap; but at 90% the plan compiles to what it is predicted to hold."""
    trial = Trial(lambda n: (1.4, 1.0)[n], least_bytes=0.85 * CAP)
    plan = trial.kept()
    assert 0.85 * CAP <= plan.estimates.compiled_peak_bytes <= CAP
    assert len(trial.limits) == 3, "limits below the smallest known peak are not searched"


def test_a_refusal_under_a_lower_limit_is_said_beside_the_compiled_peak():
    trial = Trial(lambda n: 1.4, least_bytes=0.999 * CAP)
    with pytest.raises(
        InfeasibleError, match=r"compiled to 28 GiB, .* allow 28.3 GiB .*; under a lower limit nothing fits"
    ):
        trial.kept()


@pytest.mark.parametrize(("used", "is_compiled"), [(0.7, False), (0.75, True), (1.0, True)])
def test_in_doubt_is_what_the_error_band_says(used, is_compiled):
    trial = Trial(lambda n: 1.0, used=used)
    plan = trial.kept(is_asked=False)
    assert bool(trial.compiled) == (plan.estimates.compiled_peak_bytes is not None) == is_compiled
    assert ("compiler" in plan.search_s) == is_compiled


@warns_of_another_round
def test_after_a_plan_that_does_not_fit_the_error_band_is_not_believed():
    trial = Trial(lambda n: 3.0 if n < 2 else 1.0)
    plan = trial.kept(is_asked=False)
    assert plan.estimates.peak_bytes * PEAK_BAND[1] < CAP
    assert plan.estimates.compiled_peak_bytes == trial.compiled[plan.estimates.peak_bytes]


def test_asked_for_every_plan_is_compiled():
    assert Trial(lambda n: 1.0, used=0.1).kept().estimates.compiled_peak_bytes == int(0.1 * CAP)


def test_without_a_judge_nothing_is_compiled():
    trial = Trial(lambda n: 3.0)
    plan = kept(trial.search, None, CAP, trial.lines.append, time_limit_s=7.0).plan
    assert (plan.estimates.compiled_peak_bytes, trial.limits, trial.limits_s) == (None, [CAP], [7.0])


def failing(found, timeout_s):
    raise CompilerError("the compiler was killed")


def test_a_compiler_that_fails_leaves_a_plan_that_was_not_compiled():
    trial = Trial(lambda n: 1.0)
    plan = kept(trial.search, failing, CAP, trial.lines.append, is_asked=False).plan
    assert plan.estimates.compiled_peak_bytes is None
    assert trial.lines[-1] == "not compiled: the compiler was killed"


def test_a_compiler_that_was_asked_for_may_not_fail():
    trial = Trial(lambda n: 1.0)
    with pytest.raises(CompilerError, match="killed"):
        kept(trial.search, failing, CAP, trial.lines.append)


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = [0.0]
    monkeypatch.setattr(compiled_peaks, "perf_counter", lambda: now[0])
    return now


def test_when_the_time_is_over_a_plan_is_not_compiled(clock):
    trial = Trial(lambda n: 1.0)

    def search(*args):
        clock[0] += 10.0
        return trial.search(*args)

    plan = kept(search, trial.judge, CAP, trial.lines.append, is_asked=False, time_limit_s=10.0).plan
    assert (plan.estimates.compiled_peak_bytes, trial.compiled) == (None, {})
    assert trial.lines[-1] == "not compiled, as the time limit is over"


@warns_of_another_round
def test_rounds_and_compiler_share_the_time_limit(clock):
    trial = Trial(lambda n: 1.1)

    def search(*args):
        clock[0] += 3.0
        return trial.search(*args)

    def judge(*args):
        clock[0] += 2.0
        return trial.judge(*args)

    kept(search, judge, CAP, trial.lines.append, is_asked=False, time_limit_s=20.0)
    assert (trial.limits_s, trial.timeouts_s) == ([20.0, 15.0], [17.0, 12.0])


@warns_of_another_round
def test_when_the_time_is_over_no_limit_half_way_back_is_tried(clock):
    trial = Roomy()

    def judge(*args):
        clock[0] += 6.0
        return trial.judge(*args)

    plan = kept(trial.search, judge, CAP, trial.lines.append, is_asked=False, time_limit_s=10.0).plan
    assert (len(trial.limits), plan.estimates.compiled_peak_bytes) == (2, trial.limits[1])


def test_a_plan_known_not_to_fit_is_not_returned_when_the_time_is_over(clock):
    trial = Trial(lambda n: 1.1)

    def judge(*args):
        clock[0] += 10.0
        return trial.judge(*args)

    with pytest.raises(
        InfeasibleError, match=r"compiled to 22 GiB, .* give more than the time_limit_s, which is over"
    ):
        kept(trial.search, judge, CAP, trial.lines.append, is_asked=False, time_limit_s=10.0)
    assert trial.limits == [CAP]


# --- whether there is a compiler to ask

GPUS, CPUS = parse_cluster("8xH100-80GB"), parse_cluster("8xCPU")


def silent(line):
    del line


@pytest.mark.parametrize(
    ("cluster", "verify", "is_there", "is_judged"),
    [
        (GPUS, NEVER, True, False),
        (GPUS, IN_DOUBT, False, False),
        (GPUS, IN_DOUBT, True, True),
        (CPUS, IN_DOUBT, True, False),
        (GPUS, None, True, True),
    ],
)
def test_unasked_the_compiler_is_neither_installed_nor_missed(
    monkeypatch, cluster, verify, is_there, is_judged
):
    monkeypatch.setattr(compiled_peaks, "is_there", lambda: is_there)
    monkeypatch.setattr("autoshard.verification.judge.provided", silent)
    judge = compiled_peaks.judge_of(cluster, Options.of({"verify": verify}), silent)
    assert (judge is not None) == is_judged


def test_a_compiler_that_is_asked_for_must_know_the_devices():
    with pytest.raises(autoshard.InputError, match="its devices are no GPUs"):
        compiled_peaks.judge_of(CPUS, Options(verify=ALWAYS), silent)
