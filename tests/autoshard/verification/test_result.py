"""Verdicts on made-up compiled programs, and the search that tightens until one fits."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.search.plan.plan import Collective, Plan
from autoshard.verification import judge
from autoshard.verification.records import Extent
from autoshard.verification.result import compared

CLUSTER = parse_cluster("8xH100-80GB")
GIB = 1 << 30
KEY = ("all-gather", ("data",))
WHOLE = Extent()


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


ARGS = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")


@pytest.fixture(scope="module")
def plan():
    """Predicted: a peak of 10 GiB, one GiB gathered."""
    found = autoshard.search(step, *ARGS, cluster=CLUSTER, memory="20GiB")
    gathered = Collective("all-gather", ("data",), 4, GIB, 0.1)
    estimates = replace(found.estimates, peak_bytes=10 * GIB, collectives=(gathered,))
    return replace(found, estimates=estimates)


def verdict(plan, peak_bytes=10 * GIB, gathered_bytes=GIB, more=(), extent=WHOLE, **others):
    fields = {"host_bytes": 0, "host_copies": {}} | others
    stats = CompiledStats(
        GIB, 0, peak_bytes - GIB, collectives={KEY: (1, gathered_bytes), **dict(more)}, **fields
    )
    return compared(plan, CLUSTER, stats, {"trace": 1.0, "compile": 2.0}, extent)


def test_a_program_as_predicted(plan):
    found = verdict(plan)
    assert (found.fits, found.differences, found.exit_status) == (True, (), 0)
    assert str(found).endswith("verification time: trace 1 s, compile 2 s\nverdict: fits, as predicted")


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        (
            {"gathered_bytes": GIB * 102 // 100},
            "all-gather over data: 1.02 GiB compiled, 1 GiB predicted (2% more)",
        ),
        ({"gathered_bytes": 0}, "all-gather over data: 1 GiB predicted, none compiled"),
        (
            {"more": {("all-to-all", ("data",)): (1, 1 << 20)}.items()},
            "all-to-all over data: 1 MiB compiled, none predicted",
        ),
        ({"peak_bytes": 11 * GIB}, "the compiled peak, 11 GiB, lies 10% above the predicted 10 GiB"),
        ({"peak_bytes": 8 * GIB}, "the compiled peak, 8 GiB, lies 20% below the predicted 10 GiB"),
        (
            {"host_copies": {"to host": (2, GIB)}},
            "1 GiB a device are copied to and from the host, and the plan keeps nothing there",
        ),
    ],
)
def test_what_differs_is_said_in_one_sentence(plan, compiled, said):
    found = verdict(plan, **compiled)
    assert (found.differences, found.fits, found.exit_status) == ((said,), True, 1)
    assert said in str(found)


@pytest.mark.parametrize(
    "compiled",
    [
        {"gathered_bytes": GIB * 1009 // 1000},
        {"more": {("all-reduce", ("data",)): (1, 65536)}.items()},
        {"peak_bytes": 10 * GIB * 102 // 100},
        {"peak_bytes": 9 * GIB},
    ],
)
def test_small_differences_do_not_count(plan, compiled):
    assert verdict(plan, **compiled).exit_status == 0


def test_what_does_not_fit_is_worse_than_what_differs(plan):
    found = verdict(plan, peak_bytes=21 * GIB)
    assert (found.fits, found.exit_status, found.overshoot_bytes) == (False, 3, GIB)
    assert found.differences[0] == (
        "the compiled program needs 21 GiB a device, 1 GiB more than the cap of 20 GiB"
    )
    assert verdict(plan, host_bytes=257 * GIB).exit_status == 3


def test_the_json_says_what_the_table_says(plan):
    data = verdict(plan, peak_bytes=21 * GIB).to_json()
    assert (data["fits"], data["exit_status"], len(data["differences"])) == (False, 3, 2)
    assert data["compiled"]["residents"] == {
        "arguments": GIB,
        "outputs not aliased": 0,
        "temporaries": 20 * GIB,
    }
    assert data["collectives"][0] == {
        "kind": "all-gather",
        "axes": ["data"],
        "predicted_count": 4,
        "predicted_bytes": GIB,
        "compiled_count": 1,
        "compiled_bytes": GIB,
    }


def test_the_table_fits_the_terminal(plan, monkeypatch):
    found = verdict(plan, extent=Extent(4, 48))
    assert max(map(len, str(found).splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(found).splitlines())) <= 80


def test_what_was_compiled_of_the_step_is_said(plan):
    found = verdict(plan, extent=Extent(5, 24))
    assert found.is_extrapolated
    said = (
        "compiled 5 of 24 repeated blocks; the rest is extrapolated, and the compiled peak an estimate (--full compiles "
        "them all)"
    )
    assert str(found).splitlines()[1] == said
    data = found.to_json()
    assert data["is_extrapolated"]
    assert data["extent"] == {"compiled_blocks": 5, "num_blocks": 24, "reason": ""}


def test_why_a_long_step_was_compiled_whole_is_said(plan):
    found = verdict(plan, extent=Extent(reason="no layer can be left out"))
    assert not found.is_extrapolated
    assert str(found).splitlines()[1] == "compiled whole: no layer can be left out"
    assert "compiled whole" not in str(verdict(plan))
    assert not verdict(plan).to_json()["is_extrapolated"]


# --- searching until it fits


@dataclass(frozen=True)
class SearchResult:
    """As much of `driver.SearchResult` as the loop looks at; every plan costs 100 s."""

    plan: Plan
    bound_s: float = 0.0

    def bounded(self, bound_s):
        return replace(self, plan=replace(self.plan, gap=1 - bound_s / 100.0))


class Compiler:
    """Stands in for the search and the compiler: plans use all of the limit, and compile to so many times as much."""

    def __init__(self, plan, times):
        self.plan, self.times, self.found = plan, times, SearchResult(plan)
        self.limits, self.lines = [], []

    def search(self, limit_bytes, progress):
        self.limits.append(limit_bytes)
        progress("mesh 8 (1 of 1)")
        estimates = replace(self.plan.estimates, peak_bytes=limit_bytes)
        plan = replace(self.plan, estimates=estimates, memory_bytes=limit_bytes)
        return replace(self.found, plan=plan, bound_s=90.0 + len(self.limits))

    def verified(self, found, full):
        return verdict(found.plan, peak_bytes=int(found.plan.estimates.peak_bytes * self.times))

    def fitting(self):
        return judge.fitting(self.search, self.verified, 20 * GIB, self.lines.append).plan


def test_a_plan_that_fits_is_returned_at_once(plan):
    compiler = Compiler(plan, 0.9)
    assert compiler.fitting().memory_bytes == 20 * GIB
    assert (compiler.limits, compiler.lines) == ([20 * GIB], ["mesh 8 (1 of 1)"])


def test_the_limit_is_lowered_by_the_overshoot_and_the_plan_keeps_the_cap(plan):
    compiler = Compiler(plan, 1.1)
    with pytest.warns(
        autoshard.AutoshardWarning, match="compiled to 22 GiB, above the cap of 20 GiB: it was searched again"
    ):
        found = compiler.fitting()
    assert found.memory_bytes == 20 * GIB
    assert len(compiler.limits) == 2
    assert compiler.limits[1] == int(18 * GIB - 0.005 * 20 * GIB)
    assert found.estimates.peak_bytes * 1.1 <= 20 * GIB
    assert found.search_s["verify"] == 4.0
    assert compiler.lines[1] == (
        "mesh 8 (1 of 1) (round 2, as the plan predicted to need 20 GiB a device was compiled to 22 GiB, above the "
        "cap of 20 GiB)"
    )


def test_the_gap_counts_what_fits_the_cap_and_not_only_the_lower_limit(plan):
    compiler = Compiler(plan, 1.1)
    with pytest.warns(autoshard.AutoshardWarning):
        found = compiler.fitting()
    assert found.gap == pytest.approx(1 - 91 / 100)


@pytest.mark.parametrize(("share", "asked"), [(0.9, [False]), (0.98, [False, True])])
def test_a_peak_near_the_cap_is_not_left_to_extrapolation(plan, share, asked):
    compiler, found = Compiler(plan, share), []

    def verified(plan, full):
        found.append(full)
        proof = compiler.verified(plan, full)
        return proof if full else replace(proof, extent=Extent(5, 24))

    judge.fitting(compiler.search, verified, 20 * GIB, compiler.lines.append)
    assert found == asked


def test_the_whole_program_has_the_last_word(plan):
    """Extrapolated, the first plan fits narrowly; in full it does not, and the second does."""
    compiler, peaks = Compiler(plan, 1.0), iter([19.5, 20.5, 18.0])

    def verified(found, full):
        proof = verdict(found.plan, peak_bytes=int(next(peaks) * GIB))
        return proof if full else replace(proof, extent=Extent(5, 24))

    with pytest.warns(autoshard.AutoshardWarning, match="above the cap of 20 GiB"):
        found = judge.fitting(compiler.search, verified, 20 * GIB, compiler.lines.append).plan
    assert len(compiler.limits) == 2
    assert found.search_s["verify"] == 6.0


@pytest.mark.parametrize(("times", "rounds"), [(1.9, 4), (3.0, 1)])
def test_it_gives_up_in_the_end_and_says_what_was_compiled_last(plan, times, rounds):
    compiler = Compiler(plan, times)
    compiler.verified = lambda found, full: verdict(found.plan, peak_bytes=int(20 * GIB * times))
    with pytest.raises(
        InfeasibleError, match=r"was compiled to .* above the cap of 20 GiB, .* Allow .* a device"
    ):
        compiler.fitting()
    assert len(compiler.limits) <= rounds


def test_nothing_under_the_lower_limit(plan):
    compiler = Compiler(plan, 1.1)

    def search(limit_bytes, progress):
        if compiler.limits:
            raise InfeasibleError("nothing fits 17.9 GiB a device")
        return Compiler.search(compiler, limit_bytes, progress)

    compiler.search = search
    with pytest.raises(
        InfeasibleError, match=r"was compiled to 22 GiB, above .*; under a lower limit nothing fits 17.9 GiB"
    ):
        compiler.fitting()


def test_a_target_config_is_text_or_a_file(tmp_path):
    path = tmp_path / "gpu.txtpb"
    path.write_text("gpu_device_info { }")
    assert judge.target_config_text(path) == judge.target_config_text("gpu_device_info { }")
    with pytest.raises(InputError, match=r"the target config /nowhere cannot be read"):
        judge.target_config_text("/nowhere")
