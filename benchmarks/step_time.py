"""Step time and peak memory on one device: predicted, by the preset and by a calibrated cluster, and measured.

    python -m benchmarks.step_time [--out step_time.json]      # on one GPU, under 8 minutes
    JAX_PLATFORMS=cpu python -m benchmarks.step_time --small   # tiny models, on a simulated device

First the device is calibrated. Then each model is planned for one device (the mesh is (1,)) with either cluster,
and the second plan's program is compiled and run. Each model gets a process of its own, so that the device's
highest memory use is that model's; it includes what initialisation and the compiler's autotuning took, and is no
number of XLA's on the CPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import autoshard
from autoshard.cost_model.attached import cluster_name
from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.plan.text_table import Row, aligned
from tests.zoo import Case, make_gpt_linen, make_gpt_scan, make_llama, make_moe, make_resnet, make_vit

BF16 = jnp.bfloat16

CASES: Mapping[str, Callable[[], Case]] = {
    "GPT-2 124M, f32": lambda: make_gpt_linen(12, 768, 12, vocab=50304, seq=1024, batch=8, dropout=0.0),
    "GPT 350M, scan, remat": lambda: make_gpt_scan(
        24, 1024, 16, vocab=50304, seq=1024, batch=16, remat=True, dtype=BF16
    ),
    "GPT 1.3B, scan": lambda: make_gpt_scan(24, 2048, 16, vocab=50304, seq=1024, batch=4, dtype=BF16),
    "ViT-B, 224": lambda: make_vit(12, 768, 12, image=224, patch=16, num_classes=1000, batch=128, dtype=BF16),
    "ResNet-50, 224": lambda: make_resnet(
        (64, 128, 256, 512), (3, 4, 6, 3), True, (7, 2), image=224, num_classes=1000, batch=128, dtype=BF16
    ),
    "MoE, 8 experts": lambda: make_moe(
        4, 1024, 16, num_experts=8, ffn=4096, vocab=32000, seq=1024, batch=8, dtype=BF16
    ),
    "Llama, 8192 tokens": lambda: make_llama(
        4, 1024, 16, 8, ffn=2816, vocab=32000, seq=8192, batch=1, compute_dtype=BF16
    ),
}
"""All fit 80 GB; without a dtype in the name, bfloat16."""

SMALL_CASES: Mapping[str, Callable[[], Case]] = {
    "GPT": lambda: make_gpt_linen(2, 256, 8, vocab=1024, seq=128, batch=8, dropout=0.0),
    "GPT, scan, remat": lambda: make_gpt_scan(4, 256, 8, vocab=1024, seq=128, batch=8, remat=True),
    "GPT, scan": lambda: make_gpt_scan(4, 384, 8, vocab=1024, seq=128, batch=4),
    "ViT": lambda: make_vit(2, 256, 8, image=64, patch=8, num_classes=100, batch=16),
    "ResNet": lambda: make_resnet((32, 64), (2, 2), True, (7, 2), image=64, num_classes=100, batch=16),
    "MoE": lambda: make_moe(2, 256, 8, num_experts=4, ffn=512, vocab=1024, seq=128, batch=8),
    "Llama, long": lambda: make_llama(2, 256, 8, 4, ffn=704, vocab=1024, seq=512, batch=1),
}

GROUPS = 5
"""Timed groups of steps, for the median."""

GROUP_S = 0.3
"""Seconds of a group, so that the host's part and the clock's do not count."""


def main() -> None:
    options = _options()
    if options.case:
        print(json.dumps(measured(options.case, options.small, options.cluster)))
        return
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "calibrated.json"
        quick = ["--quick"] if options.small else []
        _run("autoshard", "calibrate", "--devices", "1", "--out", str(cluster), *quick)
        results = [_child(name, options.small, cluster) for name in _cases(options.small)]
        data = {"cluster": json.loads(cluster.read_text()), "results": results}
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    print(table(results))
    print(f"{time.perf_counter() - start:.0f} s in all; saved {options.out}")


def measured(name: str, small: bool, calibrated: Path) -> dict[str, Any]:
    """Predictions and measurements of one model, JSON-ready."""
    case = _cases(small)[name]()
    abstract, device = case.abstract_args(), jax.devices()[0]
    preset = cluster_name([device])
    before = autoshard.search(case.step, *abstract, cluster=preset, mesh=(1,))
    plan = autoshard.search(case.step, *abstract, cluster=calibrated, mesh=(1,))
    program = autoshard.emit(case.step, *abstract, plan=plan, devices=[device])
    compiled = program.fn.lower(*program.args).compile()
    step_s = _step_s(compiled, program.shardings, case)
    memory = compiled.memory_analysis()
    at_rest = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "name": name,
        "device": device.device_kind,
        "measured_s": step_s,
        "preset_s": before.estimates.step_s,
        "calibrated_s": plan.estimates.step_s,
        "predicted_bytes": plan.estimates.peak_bytes,
        "compiled_bytes": at_rest + memory.temp_size_in_bytes,
        "device_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }


def table(results: list[dict[str, Any]]) -> str:
    """What came out, with the medians of the errors."""
    head = ("model", "step measured", "by preset", "error", "calibrated", "error")
    rows: list[Row] = [(*head, "peak predicted", "compiled", "error", "device")]
    errors: dict[str, list[float]] = {"preset_s": [], "calibrated_s": [], "predicted_bytes": []}
    for r in results:
        if "failed" in r:
            rows.append((r["name"], r["failed"], *[""] * 8))
            continue
        pairs = (
            ("preset_s", "measured_s"),
            ("calibrated_s", "measured_s"),
            ("predicted_bytes", "compiled_bytes"),
        )
        signed = [r[predicted] / r[true] - 1 for predicted, true in pairs]
        for (key, _), error in zip(pairs, signed, strict=True):
            errors[key].append(abs(error))
        preset, calibrated, peak = (f"{100 * error:+.1f}%" for error in signed)
        times = (format_seconds(r[key]) for key in ("measured_s", "preset_s", "calibrated_s"))
        step, by_preset, by_calibrated = times
        sizes = (format_bytes(r["predicted_bytes"]), format_bytes(r["compiled_bytes"]), peak)
        device = format_bytes(r["device_bytes"]) if r["device_bytes"] else "not told"
        rows.append((r["name"], step, by_preset, preset, by_calibrated, calibrated, *sizes, device))
    medians = (f"{100 * statistics.median(e):.1f}%" if e else "" for e in errors.values())
    preset, calibrated, peak = medians
    rows.append(("median of |error|", "", "", preset, "", calibrated, "", "", peak, ""))
    return "\n".join(aligned(rows, indent=0, right=tuple(range(1, 10))))


def _step_s(compiled: Any, shardings: tuple[Any, ...], case: Case) -> float:
    """Median seconds of a step, of groups in which each step waits for the last one's state."""
    state, *rest = jax.device_put((jax.jit(case.init)(), case.batch(0), *case.extra()), shardings)

    def group_s(num_steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for _ in range(num_steps):
            state, _ = compiled(state, *rest)
        jax.block_until_ready(state)
        return time.perf_counter() - start

    group_s(2)
    num_steps = max(1, round(GROUP_S / group_s(1)))
    return statistics.median(group_s(num_steps) for _ in range(GROUPS)) / num_steps


def _child(name: str, small: bool, cluster: Path) -> dict[str, Any]:
    """Measures a model in a process of its own."""
    print(name, file=sys.stderr, flush=True)
    flags = ["--small"] if small else []
    try:
        out = _run("benchmarks.step_time", "--case", name, "--cluster", str(cluster), *flags)
    except subprocess.CalledProcessError:
        return {"name": name, "failed": "failed"}
    return json.loads(out.splitlines()[-1])


def _run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        print("\n".join(done.stderr.strip().splitlines()[-5:]), file=sys.stderr)
        done.check_returncode()
    return done.stdout


def _cases(small: bool) -> Mapping[str, Callable[[], Case]]:
    return SMALL_CASES if small else CASES


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("step_time.json"))
    parser.add_argument("--small", action="store_true", help="tiny models, for CPU devices")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--cluster", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
