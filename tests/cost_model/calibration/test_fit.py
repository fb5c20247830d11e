"""Fits find the numbers that made the times; files say where each number is from; probes are timed as meant."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from autoshard.calibrate import Calibration
from autoshard.cost_model.calibration import measure, probes
from autoshard.cost_model.calibration.fit import NOT_MEASURED, calibrated, sourced
from autoshard.cost_model.calibration.machine import attached_mesh, described
from autoshard.cost_model.calibration.probes import (
    CollectiveProbe,
    HostCopyProbe,
    LaunchProbe,
    ProductProbe,
    StreamProbe,
    Timing,
    VectorProbe,
    ladder,
)
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.hardware import parse_cluster

SPEEDS = {"bfloat16": 610e12, "float32": 330e12, "float16": 590e12, "float64": 40e12, "float8": 1100e12}


def true_cluster(preset: Cluster) -> Cluster:
    """Hardware of that form as a calibrated file has it, whose rates no preset has."""
    speeds = tuple((SPEEDS | {"vector": 31e12}).items())
    device = replace(
        preset.device,
        flops_per_s=speeds,
        memory_bytes_per_s=2.9e12,
        launch_s=2.7e-6,
        matmul_efficiency=1.0,
        vector_efficiency=1.0,
        memory_efficiency=1.0,
    )
    links = {
        "intra": replace(preset.intra, bytes_per_s=310e9, latency_s=3.1e-6, efficiency=1.0),
        "inter": replace(preset.inter, bytes_per_s=38e9, latency_s=6.5e-6, efficiency=1.0),
        "host_link": replace(preset.host_link, bytes_per_s=41e9, latency_s=17e-6, efficiency=1.0),
    }
    return replace(preset, device=device, **links)


def timings_of(truth: Cluster, noise: float) -> list[Timing]:
    rng = np.random.default_rng(0)
    return [Timing(p, p.model_s(truth) * np.exp(noise * rng.normal())) for p in ladder(truth, quick=False)]


def relative(found: Cluster, truth: Cluster) -> dict[str, float]:
    """|found / true - 1| of every fitted number."""
    pairs = {
        "launch": (found.device.launch_s, truth.device.launch_s),
        "memory": (found.device.memory_bytes_per_s, truth.device.memory_bytes_per_s),
        "vector": (found.device.vector_flops_per_s, truth.device.vector_flops_per_s),
    }
    for dtype in SPEEDS:
        pairs[dtype] = (found.device.peak_flops_per_s(dtype), truth.device.peak_flops_per_s(dtype))
    for name in ("intra", "inter", "host_link"):
        link, true_link = getattr(found, name), getattr(truth, name)
        pairs[f"{name} bandwidth"] = link.sustained_bytes_per_s, true_link.sustained_bytes_per_s
        pairs[f"{name} latency"] = link.latency_s, true_link.latency_s
    return {name: abs(ours / true - 1) for name, (ours, true) in pairs.items()}


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("start", ["16xH100-80GB", "16xA100-80GB"])
def test_the_fits_find_what_made_the_times(start, noise):
    preset = parse_cluster(start)
    truth = true_cluster(preset)
    found, fits = calibrated(preset, timings_of(truth, noise))
    off = relative(found, truth)
    assert max(off.values()) < (0.01 if noise == 0 else 0.25), (
        off
    )  # a latency is but a part of a small message
    rates = {name: error for name, error in off.items() if "latency" not in name}
    assert max(rates.values()) < (0.01 if noise == 0 else 0.1), rates
    assert all(fit.median_error < 2 * noise + 0.01 for fit in fits)
    assert {fit.group for fit in fits} == {
        "launch",
        "memory",
        "vector",
        "intra",
        "inter",
        "host_link",
        *SPEEDS,
    }


def test_a_preset_that_is_far_off_does_no_harm():
    """Where a product is bound by memory, its arithmetic can be made faster a thousand times without effect."""
    truth = true_cluster(parse_cluster("16xH100-80GB"))
    device = truth.device
    slow = tuple((dtype, speed / 500) for dtype, speed in device.flops_per_s)
    truth = replace(truth, device=replace(device, flops_per_s=slow, memory_bytes_per_s=5e9))
    found, _ = calibrated(parse_cluster("16xH100-80GB"), timings_of(truth, 0.0))
    assert max(relative(found, truth).values()) < 0.01


def test_a_dtype_that_the_preset_lacks_gets_a_speed():
    cpu = parse_cluster("1xCPU")
    timings = [Timing(ProductProbe("bfloat16", 2048, 2048, 2048), 3.0)]
    found, (fit,) = calibrated(cpu, timings)
    assert dict(found.device.flops_per_s)["bfloat16"] == pytest.approx(2 * 2048**3 / 3.0, rel=0.01)
    assert fit.keys == ("device.flops.bfloat16",)


def test_what_was_not_measured_is_what_the_preset_sustains_and_says_so(tmp_path):
    preset = parse_cluster("1xH100-80GB")
    timings = [t for t in timings_of(true_cluster(preset), 0.0) if t.probe.group != "bfloat16"]
    found, fits = calibrated(preset, timings)
    found = sourced(found, preset, fits, {"device.memory": "told"}, "a test bench")
    sources = dict(found.sources)
    assert dict(found.device.flops_per_s)["bfloat16"] == pytest.approx(0.8 * 989e12)
    assert sources["device.flops.bfloat16"].startswith(NOT_MEASURED)
    assert "NVIDIA H100" in sources["device.flops.bfloat16"]
    assert sources["device.flops.float32"].startswith("measured on a test bench: fit residual median 0.")
    assert "over 11 sizes" in sources["device.flops.float32"]
    assert sources["intra.bandwidth"].startswith(NOT_MEASURED)  # one device has nobody to talk to
    assert found.intra == preset.intra
    assert sources["device.memory"] == "told"

    path = tmp_path / "node.json"
    Calibration(found, fits, 1.0).save(path)
    assert parse_cluster(path) == found


# --- measuring


@pytest.mark.devices
@pytest.mark.parametrize(
    "probe",
    [
        LaunchProbe(),
        StreamProbe("scale", 2**16),
        StreamProbe("triad", 2**16),
        StreamProbe("sum", 2**16),
        VectorProbe(2**14),
        ProductProbe("float64", 32, 16, 8, batch=2),
        ProductProbe("float8", 32, 16, 8),
        *[CollectiveProbe(kind, (0, 1), 2**12) for kind in probes._KINDS],
        HostCopyProbe(True, 2**16),
    ],
    ids=str,
)
def test_every_probe_runs(probe):
    mesh = attached_mesh(jax.devices()[:2])
    effort = measure.Effort(run_s=1e-4, round_s=1.0, repeats=3)
    assert measure.measure(probe, 1e-4, mesh, effort) > 0


@pytest.mark.parametrize("kind", probes._KINDS)
def test_a_collective_probe_moves_what_it_says(kind):
    """One of each round, of `num_bytes` per device, the larger of input and output."""
    mesh = attached_mesh(jax.devices()[:4])
    probe = CollectiveProbe(kind, (1,), 2**12)
    program = measure.program_of(probe, mesh)
    spec = jax.P(("node", "local"))
    step = jax.shard_map(program.step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    (operand,) = program.operands
    jaxpr = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((4 * operand.shape[0],), operand.dtype))
    inner = jaxpr.eqns[0].params["jaxpr"]
    names = {
        "all-reduce": "psum",
        "all-gather": "all_gather",
        "reduce-scatter": "reduce_scatter",
        "all-to-all": "all_to_all",
        "collective-permute": "ppermute",
    }
    (equation,) = [e for e in inner.eqns if e.primitive.name.startswith(names[kind])]
    largest = max(v.aval.size * v.aval.dtype.itemsize for v in (*equation.invars, *equation.outvars))
    assert largest == probe.num_bytes


def test_what_would_take_too_long_is_left_out(monkeypatch):
    """A device a hundred times slower than thought shows it on the small sizes."""
    cluster = parse_cluster("1xCPU")
    sizes = [ProductProbe("float32", n, n, n) for n in (128, 1024, 4096)]
    monkeypatch.setattr(measure, "measure", lambda probe, *rest: 100 * probe.model_s(cluster))
    effort = measure.Effort(run_s=1e-3, round_s=2.0, repeats=3)
    timings = measure.measure_all(sizes, cluster, attached_mesh(jax.devices()[:1]), effort)
    assert [t.probe for t in timings] == sizes[:2]


def test_what_fails_is_left_out_with_the_larger_ones_of_its_group(monkeypatch):
    def one_fails(probe, *rest):
        if probe.group == "float8":
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such type\nmore")
        return probe.model_s(cluster)

    cluster, mesh = parse_cluster("1xH100-80GB"), attached_mesh(jax.devices()[:1])
    monkeypatch.setattr(measure, "measure", one_fails)
    small, large, other = (
        ProductProbe(d, n, n, n) for d, n in (("float8", 64), ("float8", 128), ("float32", 64))
    )
    lines: list[str] = []
    timings = measure.measure_all((small, large, other), cluster, mesh, measure.FULL, lines.append)
    assert [t.probe for t in timings] == [other]
    assert len(lines) == 2
    with pytest.raises(ClusterError, match=r"nothing could be measured .* UNIMPLEMENTED: no such type"):
        measure.measure_all((small, large), cluster, mesh, measure.FULL)


def test_the_ladder_follows_the_cluster():
    groups = lambda name: {p.group for p in ladder(parse_cluster(name), quick=False)}  # noqa: E731
    assert not groups("1xH100-80GB") & {"intra", "inter"}
    assert "intra" in groups("8xH100-80GB")
    assert "inter" not in groups("8xH100-80GB")
    assert groups("16xH100-80GB") >= {"intra", "inter", "float8"}
    assert "float8" not in groups("8xA100-80GB")


def test_the_machine_is_described():
    mesh = attached_mesh(jax.devices()[:4])
    assert mesh.devices.shape == (1, 4)
    cluster, sources = described(mesh, parse_cluster("1xCPU"), "here")
    assert (cluster.name, cluster.num_devices, cluster.num_nodes) == ("here", 4, 1)
    assert 0 < cluster.device.memory_bytes * 8 <= cluster.host_bytes_per_node * 2
    assert "MemTotal" in sources["host_memory_per_node"]


def test_the_file_is_json_with_few_digits(tmp_path):
    preset = parse_cluster("8xH100-80GB")
    found, fits = calibrated(preset, timings_of(true_cluster(preset), 0.03))
    path = tmp_path / "node.json"
    Calibration(sourced(found, preset, fits, {}, "here"), fits, 1.0).save(path)
    bandwidth = json.loads(path.read_text())["intra"]["bandwidth"]
    assert len(bandwidth) < 12, bandwidth
