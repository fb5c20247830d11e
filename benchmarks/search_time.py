"""How long a search takes: a Llama-3-8B training step, unrolled, AdamW, for 64 H100s, by part and by depth.

python benchmarks/search_time.py [--layers 32 64] [--seq 2048] [--batch 64]
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autoshard
from cost_model.hardware import parse_cluster
from search import driver
from search.ir.trace import trace
from search.mesh_problem import Options
from tests.zoo.llama import make_llama


def measure(num_layers: int, seq: int, batch: int, cluster: str) -> float:
    """Searches, prints the split, and returns the seconds after tracing."""
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
    args = case.abstract_args()
    step = trace(case.step, *args)
    hardware = parse_cluster(cluster)
    found = driver.find(step, hardware, Options(hardware.device_memory_limit()))
    split = dict(found.plan.search_s)
    traced_s = split.pop("trace")
    after_s = sum(split.values())
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in split.items())
    estimates = found.plan.estimates
    print(
        f"{num_layers} layers, {len(step.graph.ops)} ops: trace {traced_s:.2f} s, then {after_s:.2f} s ({parts}); mesh "
        f"{dict(found.plan.decisions.mesh)}, step {estimates.step_s:.3f} s, peak {estimates.peak_bytes / 2**30:.1f} GiB, "
        f"gap {found.plan.gap:.4f}"
    )
    return after_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cluster", default="64xH100-80GB")
    options = parser.parse_args()
    seconds = [measure(n, options.seq, options.batch, options.cluster) for n in options.layers]
    if len(seconds) > 1:
        print(f"from {options.layers[0]} to {options.layers[-1]} layers: x{seconds[-1] / seconds[0]:.2f}")
    print(f"autoshard {autoshard.__version__}")


if __name__ == "__main__":
    main()
