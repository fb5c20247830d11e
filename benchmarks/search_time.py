"""How long a search takes, by part and by depth: a Llama-3-8B training step, unrolled, AdamW, on several clusters.

python -m benchmarks.search_time [--layers 32 64] [--seq 2048] [--batch 64] [--clusters 8xH100-80GB 64xA100-80GB-Ethernet]

Times are the processor's. The last rows say how many times as long as the shallowest model the deepest one takes, tracing
left out.
"""

import argparse
import os
from time import process_time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autoshard
from cost_model.hardware import parse_cluster
from search import driver
from search.ir.graph import Step
from search.ir.trace import trace
from search.options import Options
from tests.zoo.llama import make_llama

CLUSTERS = ("8xH100-80GB", "64xH100-80GB", "512xH100-80GB", "64xA100-80GB-Ethernet")


def traced(num_layers: int, seq: int, batch: int) -> Step:
    """The step of a model so deep."""
    case = make_llama(
        num_layers=num_layers,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        vocab=128256,
        seq=seq,
        batch=batch,
        compute_dtype="bfloat16",
    )
    return trace(case.step, *case.abstract_args())


def measure(step: Step, name: str, cluster: str) -> float:
    """Searches, prints a row, and returns the processor seconds after tracing."""
    hardware, start_s = parse_cluster(cluster), process_time()
    plan = driver.find(step, hardware, Options(hardware.device_memory_limit())).plan
    after_s = process_time() - start_s
    shares = {part: s for part, s in plan.search_s.items() if part != "trace"}
    parts = ", ".join(f"{part} {s / sum(shares.values()):.0%}" for part, s in shares.items())
    mesh, gib = "x".join(map(str, plan.decisions.mesh.values())), plan.estimates.peak_bytes / 2**30
    found = f"{mesh} | {plan.estimates.step_s:.3f} s | {gib:.1f} GiB | {plan.gap:.2%}"
    print(f"| {name} | {cluster} | {after_s:.2f} s ({parts}) | {found} |", flush=True)
    return after_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    options = parser.parse_args()
    print("| layers | cluster | after tracing | mesh | step | peak | gap |\n|---|---|---|---|---|---|---|")
    seconds: dict[str, list[float]] = {cluster: [] for cluster in options.clusters}
    for num_layers in options.layers:
        step = traced(num_layers, options.seq, options.batch)
        name = f"{num_layers} ({len(step.graph.ops)} ops, traced in {step.trace_s:.1f} s)"
        for cluster, found in seconds.items():
            found.append(measure(step, name, cluster))
    for cluster, found in seconds.items():
        ratio = f"x{found[-1] / found[0]:.2f}"
        print(f"| {options.layers[0]} to {options.layers[-1]} | {cluster} | {ratio} | | | | |")
    print(f"\nautoshard {autoshard.__version__}")


if __name__ == "__main__":
    main()
