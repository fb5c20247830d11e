"""Deep models searched by few layers that stand for all, beside the search of all layers.

python -m benchmarks.deep_stacks [--models mixer resnet] [--clusters 64xH100-80GB]

Of both searches: processor seconds after tracing, the step's time and its peak. The plan that few layers found is then put
on the whole step: what it takes there, and holds, by the same model of costs. The models were written after the search was.
"""

import argparse
import os
from collections.abc import Callable, Mapping
from time import process_time
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autoshard.cost_model.errors import InfeasibleError, first_line
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import driver
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.result import SearchResult
from benchmarks import experts
from tests.zoo import Case, make_evoformer, make_gpt_linen, make_moe, make_resnet, make_t5

CLUSTERS = ("8xH100-80GB", "64xH100-80GB", "64xA100-80GB-Ethernet")

MODELS: Mapping[str, Callable[[int], Case]] = {
    "gpt": lambda n: make_gpt_linen(num_layers=48, hidden=1600, heads=16, vocab=50257, seq=1024, batch=2 * n),
    "mixer": experts.MODELS["mixer"],
    "moe": lambda n: make_moe(
        num_layers=24, hidden=1024, heads=16, num_experts=16, ffn=4096, vocab=32000, seq=512, batch=2 * n
    ),
    "resnet": lambda n: make_resnet(
        stage_features=(64, 128, 256, 512),
        blocks_per_stage=(3, 8, 36, 3),
        bottleneck=True,
        stem=(7, 2),
        image=224,
        num_classes=1000,
        batch=32 * n,
    ),
    "t5": lambda n: make_t5(
        num_layers=24,
        hidden=1024,
        heads=16,
        ffn=4096,
        vocab=32128,
        source_seq=512,
        target_seq=128,
        batch=4 * n,
    ),
    "evoformer": lambda n: make_evoformer(
        num_layers=24, msa_features=256, pair_features=128, sequences=128, residues=128, batch=n
    ),
}


def searched(step: Step, cluster: str) -> tuple[SearchResult, float]:
    """What is found, and the processor seconds that it took."""
    hardware, start_s = parse_cluster(cluster), process_time()
    return driver.find(step, hardware, Options(hardware.device_memory_limit())), process_time() - start_s


def said(step_s: float, peak_bytes: float) -> str:
    return f"{step_s * 1e3:.2f} ms, {peak_bytes / 2**30:.2f} GiB"


def compare(model: str, cluster: str) -> None:
    """Searches both ways, and prints a row."""
    case = MODELS[model](parse_cluster(cluster).num_devices)
    step = trace(case.step, *case.abstract_args())
    try:
        few, few_s = searched(step, cluster)
        with mock.patch.object(driver, "shortened", return_value=None):
            all_layers, all_s = searched(step, cluster)
    except InfeasibleError as e:
        print(f"| {model}, {cluster} | {first_line(e)} |", flush=True)
        return
    whole = few.whole
    predicted = whole.on_mesh.predicted(whole.chosen, few.plan.memory_bytes)
    as_whole = said(whole.on_mesh.problem.cost_s(whole.chosen), predicted.peak.num_bytes)
    ops = f"{len(few.problem.traced.graph.ops)} of {len(step.graph.ops)}"
    by = [said(found.plan.estimates.step_s, found.plan.estimates.peak_bytes) for found in (few, all_layers)]
    print(
        f"| {model}, {cluster} | {ops} | {few_s:.1f} s, {by[0]} | {as_whole} | {all_s:.1f} s, {by[1]} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    options = parser.parse_args()
    print("| model | ops | by few layers | that plan on all | by all layers |\n|---|---|---|---|---|")
    for model in options.models:
        for cluster in options.clusters:
            compare(model, cluster)


if __name__ == "__main__":
    main()
