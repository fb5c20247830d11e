"""A plan beside a trace in XLA's format: the parts of the median step, its kernels by class, and what is no trace of it."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.search.plan.plan import Collective, Plan
from autoshard.search.plan.profile import ClassTime, Profile
from tests.autoshard.report.plans import one_program, pipeline
from tests.autoshard.traces.profiles import FOLDER, STEP, Event, traced

US = 1e-6

ESTIMATED = {
    "step_s": 90 * US,
    "compute_s": 60 * US,
    "transfer_s": 5 * US,
    "hidden_s": 25 * US,
    "collectives": (
        Collective("all-gather", ("data",), 2, 8, 20 * US),
        Collective("all-gather", ("data", "model"), 1, 8, 10 * US),
        Collective("reduce-scatter", ("model",), 1, 8, 20 * US),
    ),
    "profile": Profile(
        90 * US, kernels={"products": ClassTime(52 * US, 2), "elementwise and fused": ClassTime(8 * US, 1)}
    ),
}


@pytest.fixture
def plan() -> Plan:
    return one_program(**ESTIMATED)


def in_us(rows, side):
    seconds = {one.name: getattr(one, f"{side}_s") for one in rows}
    return {name: None if s is None else round(s / US, 6) for name, s in seconds.items()}


def test_the_parts_add_up_to_the_step_and_kernels_are_told_apart(plan, tmp_path):
    found = autoshard.trace_compare(plan, traced(tmp_path))
    assert found.measured_s == pytest.approx(100 * US)
    assert (found.num_steps, found.num_devices, found.plan_devices) == (2, 2, 8)
    assert in_us(found.parts, "predicted") == {"computation": 60, "communication not hidden": 30, "idle": 0}
    assert in_us(found.parts, "measured") == {"computation": 70, "communication not hidden": 25, "idle": 5}
    assert in_us(found.kinds, "measured") == {
        "products": 60,
        "reduce-scatter": 30,
        "all-gather": 25,
        "elementwise and fused": 10,
        "copies to and from the host": 5,
    }
    assert in_us(found.kinds, "predicted") == {
        "products": 52,
        "reduce-scatter": 20,
        "all-gather": 30,
        "elementwise and fused": 8,
        "copies to and from the host": 5,
    }
    more = [abs(one.more_s) for one in found.kinds]
    assert more == sorted(more, reverse=True)
    gather = next(one for one in found.kinds if one.name == "all-gather")
    assert (gather.over, gather.predicted_runs, gather.measured_runs) == ("data; data, model", 3, 1)


def test_the_printed_table(plan, tmp_path):
    said = str(autoshard.trace_compare(plan, traced(tmp_path)))
    assert "predicted 90 us, measured 100 us (+11%)" in said
    assert "median of 2 steps, mean of 2 devices of 8" in said
    row = next(line for line in said.splitlines() if "all-gather over data; data, model" in line)
    assert row.split("  ")[-1] == "3 / 1"


def test_the_median_step_counts(plan, tmp_path):
    found = autoshard.trace_compare(plan, traced(tmp_path, starts=(0, 1000, 1100, 1210)))
    assert found.measured_s == pytest.approx(110 * US)
    assert in_us(found.parts, "measured")["idle"] == 15


def test_kernels_of_a_cuda_graph_do_not_say_their_instruction(plan, tmp_path):
    found = autoshard.trace_compare(plan, traced(tmp_path, in_graph=True))
    assert found.measured_s == pytest.approx(100 * US)
    assert in_us(found.kinds, "measured")["reduce-scatter"] == 30


def test_all_hosts_of_the_last_run_count(plan, tmp_path):
    for host in ("host0", "host1"):
        traced(tmp_path, devices=4, host=host)
    former = tmp_path / "plugins/profile/2025_01_01_00_00_00/host0.trace.json.gz"
    former.parent.mkdir()
    former.write_bytes(b"not read")
    assert autoshard.trace_compare(plan, tmp_path).num_devices == 8


def test_other_programs_in_a_step_are_a_row_of_their_own(plan, tmp_path):
    metric = {"hlo_op": "loop_add_fusion", "hlo_module": "jit_accuracy"}
    extra = [
        {"ph": "X", "name": "loop_add_fusion", "pid": gpu, "tid": 13, "ts": at + 96, "dur": 2, "args": metric}
        for gpu in (1, 2)
        for at in (0, 100, 200)
    ]
    found = autoshard.trace_compare(plan, traced(tmp_path, extra=extra))
    assert in_us(found.kinds, "measured")["other programs"] == 2
    assert in_us(found.kinds, "predicted")["other programs"] is None


def test_a_pipeline_has_its_bubble_beside_the_idle_time(tmp_path):
    given = pipeline()
    found = autoshard.trace_compare(given, traced(tmp_path, devices=1))
    bubble_s = given.estimates.bubble * given.estimates.step_s
    assert [(one.name, one.predicted_s) for one in found.parts] == [
        ("busy", given.estimates.step_s - bubble_s),
        ("idle", bubble_s),
    ]
    assert in_us(found.parts, "measured") == {"busy": 95, "idle": 5}


def test_json(plan, tmp_path, capsys):
    plan.save(tmp_path / "plan.json")
    from autoshard import cli

    assert cli.main(["trace-compare", str(tmp_path / "plan.json"), str(traced(tmp_path)), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["kinds"][0]["name"] == "reduce-scatter"
    assert said["measured_s"] == pytest.approx(100 * US)


# --- what is no trace of the plan's step


def refused(plan: Plan, path: Path, error: type[Exception] = InputError) -> str:
    with pytest.raises(error) as raised:
        autoshard.trace_compare(plan, path)
    return str(raised.value)


def test_a_missing_folder(plan, tmp_path):
    assert "there is no" in refused(plan, tmp_path / "profile")


def test_an_empty_folder(plan, tmp_path):
    assert "holds no profile: wanted *.xplane.pb or *.trace.json.gz" in refused(plan, tmp_path)


def test_a_trace_without_kernels_of_a_gpu(plan, tmp_path):
    assert "no kernels of a GPU" in refused(plan, traced(tmp_path, devices=0))


def test_a_trace_of_another_step(plan, tmp_path):
    said = refused(plan, traced(tmp_path, module="jit_evaluate"))
    assert "'train_step', which is jit_train_step: it has jit_evaluate" in said


def test_a_trace_of_more_devices(plan, tmp_path):
    assert "16 devices, and the plan has 8" in refused(plan, traced(tmp_path, devices=16))


@pytest.mark.parametrize(
    "content", [b"", b"{", gzip.compress(b"[1]", mtime=0), gzip.compress(b"{}", mtime=0)]
)
@pytest.mark.parametrize("ending", ["trace.json.gz", "xplane.pb"])
def test_a_file_that_cannot_be_read(plan, tmp_path, content, ending):
    path = tmp_path / FOLDER / f"host.{ending}"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    said = refused(plan, tmp_path)
    assert f"host.{ending}" in said


def test_an_edited_plan(plan, tmp_path):
    edited = replace(plan, microbatches=2)
    assert "edited by hand" in refused(edited, traced(tmp_path), PlanError)


# --- a real trace


@pytest.mark.devices
def test_a_real_trace_of_simulated_devices(plan, tmp_path):
    """Both files of a trace have the same kernels; there is no GPU to trace here."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    x = jax.device_put(jnp.ones((64, 32)), rows)

    @jax.jit
    def train_step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    w = jax.block_until_ready(
        train_step(jax.device_put(jnp.ones((32, 32)), jax.NamedSharding(mesh, jax.P())), x)
    )
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(4):
            w = jax.block_until_ready(train_step(w, x))
    found = autoshard.trace_compare(plan, tmp_path)
    assert (found.num_steps, found.num_devices) == (3, 8)
    assert sum(one.measured_s for one in found.parts) == pytest.approx(found.measured_s)
    kinds = {one.name: one for one in found.kinds}
    assert kinds["all-reduce"].measured_runs == 1
    (other,) = tmp_path.rglob("*.trace.json.gz")
    assert autoshard.trace_compare(plan, other).measured_s == pytest.approx(found.measured_s, rel=1e-3)


def test_kernels_of_one_stream_do_not_count_twice(plan, tmp_path):
    """A copy may lie over a kernel of the same line: streams of copies share it."""
    over = (*STEP, Event(STEP[0].stream, "MemcpyD2D", "copy.9", 10, 10))
    found = autoshard.trace_compare(plan, traced(tmp_path, step=over))
    assert in_us(found.parts, "measured")["computation"] == 70
