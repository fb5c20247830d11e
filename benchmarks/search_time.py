"""How long a search takes, by part and by depth: a Llama-3-8B training step, unrolled, AdamW, on several clusters.

python -m benchmarks.search_time [--layers 32 64] [--seq 2048] [--batch 64] [--clusters 8xH100-80GB 64xA100-80GB-Ethernet]
python -m benchmarks.search_time --named

Times are the processor's, and those of the whole call that a user makes, `autoshard.search`: pipelines are considered where
they may be faster. The last rows say how many times as long as the shallowest model the deepest one takes, tracing
left out. With `--named`, models that people know beside what is aimed at: a Llama of 7B, scanned; 24 layers of BERT-large's
size and GPT-2 XL, unrolled.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from time import perf_counter, process_time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autoshard
from autoshard.cost_model.hardware import parse_cluster
from tests.zoo import LLAMA_7B, Case, make_gpt_linen, make_llama

CLUSTERS = ("8xH100-80GB", "64xH100-80GB", "512xH100-80GB", "64xA100-80GB-Ethernet")

NAMED: tuple[tuple[str, Callable[[int], Case], Mapping[str, float]], ...] = (
    (
        "Llama 7B, scanned",
        lambda n: make_llama(**LLAMA_7B | {"num_layers": 32, "batch": 2 * n}, scanned=True),
        {"64xH100-80GB": 2.0, "10000xH100-80GB": 6.0},
    ),
    (
        "BERT-large's size",
        lambda n: make_gpt_linen(num_layers=24, hidden=1024, heads=16, vocab=30522, seq=512, batch=16 * n),
        {"64xH100-80GB": 5.0, "1024xH100-80GB": 6.0},
    ),
    (
        "GPT-2 XL",
        lambda n: make_gpt_linen(num_layers=48, hidden=1600, heads=16, vocab=50257, seq=1024, batch=2 * n),
        {"64xH100-80GB": 8.0},
    ),
)
"""What it is called, its step for so many devices, and by cluster the processor seconds that are aimed at."""


def of_depth(num_layers: int, seq: int, batch: int) -> Case:
    """The step of a model so deep."""
    return make_llama(
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


def measure(case: Case, name: str, cluster: str) -> float:
    """Searches as a user does, prints a row, and returns the processor seconds after tracing."""
    search = autoshard.search  # imports what it needs, which is not timed
    start_s, waited_from_s = process_time(), perf_counter()
    plan = search(case.step, *case.abstract_args(), cluster=cluster)
    took_s, waited_s = process_time() - start_s, perf_counter() - waited_from_s
    after_s = took_s * (1 - plan.search_s["trace"] / waited_s)  # its parts are as one waits for them
    shares = {part: s for part, s in plan.search_s.items() if part != "trace"}
    parts = ", ".join(f"{part} {s / sum(shares.values()):.0%}" for part, s in shares.items())
    layout, gap, gib = "pipeline", "-", plan.estimates.peak_bytes / 2**30
    if isinstance(plan, autoshard.Plan):
        layout, gap = "x".join(map(str, plan.decisions.mesh.values())), f"{plan.gap:.2%}"
    found = f"{layout} | {plan.estimates.step_s:.3f} s | {gib:.1f} GiB | {gap}"
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
    parser.add_argument(
        "--named", action="store_true", help="models that people know, beside what is aimed at"
    )
    options = parser.parse_args()
    print("| layers | cluster | after tracing | mesh | step | peak | gap |\n|---|---|---|---|---|---|---|")
    if options.named:
        for name, make, aims_s in NAMED:
            for cluster, aim_s in aims_s.items():
                case = make(parse_cluster(cluster).num_devices)
                measure(case, f"{name} (aim {aim_s:g} s)", cluster)
        return
    seconds: dict[str, list[float]] = {cluster: [] for cluster in options.clusters}
    for num_layers in options.layers:
        case = of_depth(num_layers, options.seq, options.batch)
        for cluster, found in seconds.items():
            found.append(measure(case, str(num_layers), cluster))
    for cluster, found in seconds.items():
        ratio = f"x{found[-1] / found[0]:.2f}"
        print(f"| {options.layers[0]} to {options.layers[-1]} | {cluster} | {ratio} | | | | |")
    print(f"\nautoshard {autoshard.__version__}")


if __name__ == "__main__":
    main()
