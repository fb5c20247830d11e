"""Verdicts on made-up compiled programs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.gpu_targets import ATTEMPTS, UNHIDDEN
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.search.plan.plan import Collective
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


def test_a_target_config_is_text_or_a_file(tmp_path):
    path = tmp_path / "gpu.txtpb"
    path.write_text("gpu_device_info { }")
    assert judge.target_config_text(path) == judge.target_config_text("gpu_device_info { }")
    with pytest.raises(InputError, match=r"the target config /nowhere cannot be read"):
        judge.target_config_text("/nowhere")


@pytest.mark.parametrize(
    ("peaks_gib", "kept_gib", "num_compiled"),
    [((19, 1, 1), 19, 1), ((22, 18, 1), 18, 2), ((22, 25, 20), 20, 3), ((25, 22, 23), 22, 3)],
)
def test_of_programs_the_first_that_fits_is_kept_or_else_the_smallest(
    plan, peaks_gib, kept_gib, num_compiled
):
    asked = list[object]()

    def compiled(options):
        asked.append(options)
        return verdict(plan, peak_bytes=peaks_gib[len(asked) - 1] * GIB)

    kept = judge.first_fitting(compiled, lambda proof: proof, overlap=1.0)
    assert (kept.compiled.peak_bytes, asked) == (kept_gib * GIB, [*ATTEMPTS[:num_compiled]])


def test_a_plan_without_overlap_is_compiled_without_it_at_once(plan):
    asked = list[object]()

    def compiled(options):
        asked.append(options)
        return verdict(plan, peak_bytes=1)

    judge.first_fitting(compiled, lambda proof: proof, overlap=0.0)
    assert asked == [UNHIDDEN]
