"""What pipelines' stages are predicted to hold against what XLA's GPU compiler makes of their programs, without a GPU: a
table of docs/benchmarks.md.

    python -m benchmarks.stage_peaks [--only NAME ...]

Each case is planned for 8 H100s and compiled as `autoshard verify` would: each different program of a stage, for the stage's
submesh; a stage's peak is that of its programs that needs most, with what the schedule holds beside it. `tight` is a cap of
80% of what the pipeline without one is predicted to hold. A row per stage: the program that has the peak, as compiled, and
the peak, MiB; the error is positive where the prediction lies above.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

from autoshard.cost_model.errors import AutoshardError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.planning import find
from autoshard.verification import pipeline_judge
from autoshard.verification.judge import CompilerVerifier
from autoshard.verification.pipeline_result import PipelineVerification
from tests.gpu.compiled import JOBS
from tests.zoo import (
    Case,
    make_gpt_linen,
    make_gpt_nnx,
    make_gpt_scan,
    make_llama,
    make_megatron,
    make_mixer,
    make_moe,
)

MIB = 1 << 20
TIGHT = 0.8
CLUSTER = parse_cluster("8xH100-80GB")
SIZES: dict[str, Any] = {"num_layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 256, "batch": 64}


@dataclass(frozen=True, slots=True)
class Pipe:
    """What to plan: a model in so many stages and microbatches, under a schedule."""

    model: str
    stages: int
    schedule: str
    microbatches: int
    is_tight: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        tight = ", tight" if self.is_tight else ""
        return f"{self.model}, {self.stages} stages, {self.schedule}{tight}"


def _model(name: str) -> Case:
    """A model of the table."""
    if name == "scanned":
        return make_gpt_scan(**SIZES)
    if name == "grouped heads":
        return make_llama(**SIZES, kv_heads=4, ffn=1536)
    if name == "megatron":
        return make_megatron(**SIZES, compute_dtype=jnp.bfloat16)
    if name == "experts":
        return make_moe(**SIZES, num_experts=8, ffn=2048)
    if name == "unrolled linen":
        return make_gpt_linen(**SIZES)
    if name == "unrolled nnx":
        return make_gpt_nnx(**SIZES)
    if name == "mixer":
        sizes: dict[str, Any] = {"num_layers": 4, "channels": 512, "token_ffn": 256, "channel_ffn": 2048}
        return make_mixer(**sizes, image=112, patch=8, num_classes=1000, batch=64)
    return JOBS[name].make()


PIPES = (
    Pipe("scanned", 2, "1f1b", 4),
    Pipe("scanned", 2, "1f1b", 8, is_tight=True),
    Pipe("scanned", 4, "zb-h1", 8),
    Pipe("scanned", 4, "gpipe", 4),
    Pipe("megatron", 2, "1f1b", 4),
    Pipe("megatron", 4, "zb-h1", 8),
    Pipe("megatron", 4, "1f1b", 8, is_tight=True),
    Pipe("grouped heads", 2, "gpipe", 4),
    Pipe("grouped heads", 4, "1f1b", 8),
    Pipe("encoder and decoder", 2, "1f1b", 4),
    Pipe("encoder and decoder", 2, "zb-h1", 8),
    Pipe("patches", 4, "gpipe", 4),
    Pipe("experts", 2, "1f1b", 4),
    Pipe("unrolled linen", 4, "zb-h1", 8),
)
LAST = (Pipe("mixer", 2, "1f1b", 4), Pipe("unrolled nnx", 4, "1f1b", 8))
"""Written last, and measured once."""


def main() -> None:
    options = _options()
    print("| case | stage | peak in | predicted | compiled | error |", "|---|---|---|---|---|---|", sep="\n")
    for pipes in (PIPES, LAST):
        errors: list[float] = []
        for pipe in pipes:
            if options.only and pipe.name not in options.only:
                continue
            try:
                proof = verified(pipe)
            except AutoshardError as e:
                print(f"| {pipe.name} | {type(e).__name__}: {e!s:.200} | | | | |", flush=True)
                continue
            for row, error in _rows(pipe, proof):
                print(row, flush=True)
                errors.append(error)
        if errors:
            print(
                f"\nmedian {statistics.median(map(abs, errors)):.1%}; {min(errors):+.1%} to {max(errors):+.1%} "
                f"({len(errors)} stages)\n",
                flush=True,
            )


def verified(pipe: Pipe) -> PipelineVerification:
    """One case, planned and compiled."""
    case = _model(pipe.model)
    step = trace(case.step, *case.abstract_args())
    options = PipelineOptions(CLUSTER.device_memory_limit(), pipe.stages, pipe.schedule, pipe.microbatches)
    found = find(step, CLUSTER, options)
    if pipe.is_tight:
        cap_bytes = int(TIGHT * found.plan.estimates.peak_bytes)
        found = find(step, CLUSTER, replace(options, memory_bytes=cap_bytes))
    verifier = CompilerVerifier(CLUSTER, Compiler(), progress=lambda line: None)
    return pipeline_judge.verified_per_stage(verifier, found, full=True)


def _rows(pipe: Pipe, proof: PipelineVerification) -> Iterator[tuple[str, float]]:
    for n, stage in enumerate(proof.stages):
        assert stage.predicted is not None
        predicted, compiled = stage.predicted.peak_bytes, stage.compiled.peak_bytes
        over = "" if compiled <= proof.cap_bytes else f" (cap {proof.cap_bytes / MIB:.4g})"
        cells = (
            pipe.name if n == 0 else "",
            str(n),
            stage.peak_at,
            f"{predicted / MIB:.4g}",
            f"{compiled / MIB:.4g}{over}",
            f"{predicted / compiled - 1:+.1%}",
        )
        yield f"| {' | '.join(cells)} |", predicted / compiled - 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [pipe.name for pipe in (*PIPES, *LAST)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    return parser.parse_args()


if __name__ == "__main__":
    main()
