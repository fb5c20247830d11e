"""The GPTs of the Megatron papers, as the search would train them and as they were trained, by the same cost model.

python -m benchmarks.pipelines [--models 1.7 39.1] [--networks InfiniBand] [--plans searched] [--out table.md]

Models, GPUs and batches are those of Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters
using Megatron-LM", table 1: sequences of 2048, a vocabulary of 51,200, nodes of 8 A100-80GB. Layers are unrolled. Parameters
and Adam's moments are float32, layers compute in bfloat16 (the paper: float16, with a float32 copy of parameters).

*Searched* is what `autoshard.search` finds where nothing is asked for: one program, or a pipeline. *Published* has the
paper's degrees of tensor, pipeline and data parallelism forced, as a mesh or as stages of a mesh, and the microbatches of
its scripts (Megatron-LM, `examples/sc21/run_table_1.sh`), or of one program others where nothing is found that fits with
those. What is recomputed is the best that is found; the scripts recompute all. Pipelines run 1F1B with one stage on each
worker, or interleaved with two, whichever is faster or fits: the scripts have one in two cases, two in two and three in two.

MFU are the model's FLOPs (6 per parameter and token, and attention's; recomputation does not count) of the peak. The paper
counts those of recomputation, a third more. *Measured* is the time that follows from the FLOP/s that it reports.

The table may be made in pieces: rows that stand in the file `--out` are not made again, and the digest is of them all.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

from autoshard import pipelines, planning
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_mesh
from autoshard.options import NEVER, Options
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from benchmarks.experts import head, line, standing
from tests.zoo.megatron import make_megatron

SEQUENCE, VOCABULARY = 2048, 51_200

PEAK_FLOPS_PER_S = 312e12
"""Of an A100. Source: NVIDIA's data sheet."""

INTERLEAVED = "interleaved-1f1b"


@dataclass(frozen=True, slots=True)
class Model:
    """A row of the paper's table 1.

    Attributes:
      layers: of the model, as `hidden` and `heads`.
      tensor: devices that share a layer.
      stages: of the pipeline.
      devices: GPUs.
      batch: examples.
      microbatch: of them, what a replica takes at a time. Source: the script.
      achieved: teraFLOP/s of a GPU, recomputation included.
    """

    layers: int
    hidden: int
    heads: int
    tensor: int
    stages: int
    devices: int
    batch: int
    microbatch: int
    achieved: float

    @property
    def flops(self) -> float:
        """Of a step, without recomputation."""
        block = 12 * self.hidden**2 * (1 + SEQUENCE / (6 * self.hidden))
        return 6 * self.batch * SEQUENCE * (self.layers * block + VOCABULARY * self.hidden)

    @property
    def measured_s(self) -> float:
        """Of a step, from what was achieved of FLOPs that count recomputation. Source: the paper, section 5.1."""
        block = 1 + SEQUENCE / (6 * self.hidden) + VOCABULARY / (16 * self.layers * self.hidden)
        flops = 96 * self.batch * SEQUENCE * self.layers * self.hidden**2 * block
        return flops / (self.devices * self.achieved * 1e12)

    @property
    def mesh(self) -> tuple[int, int]:
        """Of a stage: replicas, and the devices of each."""
        return self.devices // (self.tensor * self.stages), self.tensor

    @property
    def microbatches(self) -> int:
        """That a replica takes one after the other."""
        return self.batch // (self.mesh[0] * self.microbatch)

    @property
    def published(self) -> str:
        """Its degrees in a word."""
        return (
            f"{self.stages} stages of {format_mesh(self.mesh)}" if self.stages > 1 else format_mesh(self.mesh)
        )

    def traced(self) -> Step:
        """Its training step."""
        case = make_megatron(
            self.layers,
            self.hidden,
            self.heads,
            VOCABULARY,
            SEQUENCE,
            self.batch,
            compute_dtype=jnp.bfloat16,
        )
        return trace(case.step, *case.abstract_args())


MODELS = {
    "1.7": Model(24, 2304, 24, 1, 1, 32, 512, 16, 137),
    "3.6": Model(30, 3072, 32, 2, 1, 64, 512, 16, 138),
    "7.5": Model(36, 4096, 32, 4, 1, 128, 512, 16, 142),
    "18.4": Model(40, 6144, 48, 8, 1, 256, 1024, 8, 135),
    "39.1": Model(48, 8192, 64, 8, 2, 512, 1536, 4, 138),
    "76.1": Model(60, 10240, 80, 8, 4, 1024, 1792, 2, 140),
    "145.6": Model(80, 12288, 96, 8, 8, 1536, 2304, 2, 148),
    "310.1": Model(96, 16384, 128, 8, 16, 1920, 2160, 1, 155),
    "529.6": Model(105, 20480, 128, 8, 35, 2520, 2520, 1, 163),
    "1008": Model(128, 25600, 160, 8, 64, 3072, 3072, 1, 163),
}
"""By billions of parameters."""

NETWORKS = {"InfiniBand": "", "Ethernet": "-Ethernet"}
"""How presets are called that have it."""


def searched(step: Step, cluster: Cluster) -> Plan:
    """What a search finds that is asked for nothing."""

    def alone(own: Options) -> SearchResult:
        return planning.find(step, cluster, planning.options(step, cluster, own))

    asked, quiet = Options(verify=NEVER), lambda line: None
    return pipelines.one_program_or_pipeline(step, cluster, asked, alone, quiet).plan


def published(step: Step, cluster: Cluster, model: Model) -> Plan:
    """The best plan of the published degrees.

    Raises:
      InfeasibleError: none fits.
    """
    asked = Options(mesh=model.mesh, microbatches=model.microbatches, verify=NEVER)
    refused = InfeasibleError()
    if model.stages == 1:
        for each in (asked, replace(asked, microbatches=None)):
            try:
                return planning.find(step, cluster, planning.options(step, cluster, each)).plan
            except InfeasibleError as e:
                refused = e
        raise refused
    found: list[Plan] = []
    for stages, schedule in ((2 * model.stages, INTERLEAVED), (model.stages, "1f1b")):
        try:
            staged = replace(asked, stages=stages, schedule=schedule)
            found.append(pipelines.PipelineSearches(step, cluster, staged).fastest().plan)
        except InfeasibleError as e:
            refused = e
    if not found:
        raise refused
    return min(found, key=lambda plan: plan.estimates.step_s)


HEAD = ("model", "network", "plan", "layout", "step s", "MFU", "peak GiB", "CPU s")

SIZE, NETWORK, KIND, LAYOUT, STEP = range(5)
"""Columns by which rows are found and digested."""


def row(size: str, network: str, kind: str, step: Step) -> tuple[str, ...]:
    """One line of the table."""
    model, start_s = MODELS[size], process_time()
    cluster = parse_cluster(f"{model.devices}xA100-80GB{NETWORKS[network]}")
    try:
        plan = searched(step, cluster) if kind == "searched" else published(step, cluster, model)
    except InfeasibleError:
        return (size, network, kind, "nothing fits", "-", "-", "-", f"{process_time() - start_s:.0f}")
    step_s, peak_bytes = plan.estimates.step_s, plan.estimates.peak_bytes
    share = model.flops / (step_s * model.devices * PEAK_FLOPS_PER_S)
    took = f"{peak_bytes / 2**30:.1f}", f"{process_time() - start_s:.0f}"
    return (size, network, kind, layout(plan), f"{step_s:.2f}", f"{share:.0%}", *took)


def layout(plan: Plan) -> str:
    """A plan in a few words."""
    again = ", recomputes" if plan.retention else ""
    if not plan.is_pipeline:
        parts = plan.microbatches
        return (
            format_mesh(tuple(plan.decisions.mesh.values())) + f", {parts} microbatches" * (parts > 1) + again
        )
    meshes = dict.fromkeys(format_mesh(tuple(plan.mesh_of(stage).values())) for stage in plan.stages)
    return (
        f"{len(plan.stages)} stages of {', '.join(meshes)}, {plan.microbatches} microbatches, {plan.schedule}, "
        f"{plan.estimates.bubble:.0%} idle{again}"
    )


DIGEST = (
    "model",
    "GPUs",
    "network",
    "searched",
    "step s",
    "MFU",
    "published",
    "step s",
    "difference",
    "measured",
)


def digest(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """By model and network: what was searched beside what was published."""
    found = {(cells[SIZE], cells[NETWORK], cells[KIND]): cells for cells in rows}
    for (size, network, kind), ours in found.items():
        theirs, model = found.get((size, network, "published")), MODELS[size]
        if kind != "searched" or theirs is None:
            continue
        is_there = "-" not in (ours[STEP], theirs[STEP])
        difference = f"{float(ours[STEP]) / float(theirs[STEP]) - 1:+.0%}" if is_there else "-"
        measured = f"{model.measured_s:.2f}" if network == "InfiniBand" else "-"
        beside = model.published, theirs[STEP], difference, measured
        yield (f"{size}B", str(model.devices), network, *ours[LAYOUT : STEP + 2], *beside)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ["searched", "published"]
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--plans", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--out", type=Path, help="a file of rows, to begin or to go on with")
    options = parser.parse_args()
    rows = standing(options.out)
    known = {tuple(cells[: KIND + 1]) for cells in rows}
    print(head(HEAD))
    for cells in rows:
        print(line(cells))
    for size in options.models:
        wanted = [(size, network, kind) for network in options.networks for kind in options.plans]
        wanted = [each for each in wanted if each not in known]
        step = MODELS[size].traced() if wanted else None
        for each in wanted:
            assert step is not None, "there is something to be searched for"
            rows.append(list(row(*each, step)))
            print(line(rows[-1]), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line(rows[-1]) + "\n")
    print(f"\n{head(DIGEST)}")
    for cells in digest(rows):
        print(line(cells))


if __name__ == "__main__":
    main()
