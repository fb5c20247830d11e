"""Llama-3-8B on sequences longer than a device, and AlphaFold 2's Evoformer on a long protein: searched, and compiled by
XLA's GPU compiler.

python -m benchmarks.long_sequences [--cases 128k 1M evoformer] [--search-only]

Layers are scanned, with a checkpoint each. The Evoformer has 48 blocks, 512 sequences and 2,048 residues. A row has the
plan, its predicted step, the peak as predicted and as compiled, and whether all collectives agree.
"""

import argparse
import os
from functools import partial
from time import process_time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autoshard
from tests.zoo.evoformer import ALPHAFOLD_2, make_evoformer
from tests.zoo.llama import LLAMA_3_8B, make_llama

LLAMA = partial(make_llama, **LLAMA_3_8B | {"scanned": True})

CASES = {
    "128k": (partial(LLAMA, seq=2**17, batch=1), "8xH100-80GB"),
    "1M": (partial(LLAMA, seq=2**20, batch=8), "64xH100-80GB"),
    "evoformer": (partial(make_evoformer, **ALPHAFOLD_2 | {"residues": 2048, "batch": 1}), "8xH100-80GB"),
}

GIB = 2**30


def row(name: str, is_searched_only: bool) -> str:
    """A case as a row of a table in Markdown."""
    make, cluster = CASES[name]
    case = make()
    start = process_time()
    plan = autoshard.search(case.step, *case.abstract_args(), cluster=cluster, stages=1)
    took_s = process_time() - start
    estimates, title = plan.estimates, str(plan).splitlines()[0]
    said = f"| {name} | {cluster} | {title} | {took_s:.0f} | {estimates.step_s:.1f} | {estimates.peak_bytes / GIB:.1f} |"
    if is_searched_only:
        return said
    proof = autoshard.verify(case.step, *case.abstract_args(), plan=plan)
    differing = ", ".join(f"{m.kind} {m.compiled_bytes / m.predicted_bytes:.3f}" for m in proof.differing)
    return f"{said} {proof.compiled.peak_bytes / GIB:.1f} | {differing or '='} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--search-only", action="store_true")
    asked = parser.parse_args()
    print("| case | cluster | plan | search, s | step, s | peak predicted, GiB | compiled | collectives |")
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.cases:
        print(row(name, asked.search_only), flush=True)


if __name__ == "__main__":
    main()
