"""Where pipelines come: GPTs of the Megatron papers, as one program and as a pipeline, by the same cost model.

Sizes are those of Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
table 1, with sequences of 2048 and a vocabulary of 51,200, in bfloat16; nodes have 8 A100-80GB, joined by InfiniBand or by
Ethernet. FLOPs are the model's (6 per parameter and token, and attention's), recomputation not counted.

    .venv/bin/python -m benchmarks.pipelines 1.7 3.6      # sizes in billions of parameters, a row for each network
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import thread_time

import jax.numpy as jnp

import autoshard
from cost_model.errors import InfeasibleError
from cost_model.hardware import parse_cluster
from search.ir.trace import trace
from search.pipeline.planning import find
from search.pipeline.search import PipelineOptions
from search.plan.pipeline_plan import PipelinePlan
from search.plan.plan import Plan
from tests.zoo.megatron import make_megatron

SEQUENCE, VOCABULARY = 2048, 51_200

PEAK_FLOPS_PER_S = 312e12
"""Of an A100. Source: NVIDIA's data sheet."""


@dataclass(frozen=True, slots=True)
class Row:
    """A model of the table, and how it was trained: GPUs, and examples in a batch."""

    layers: int
    hidden: int
    heads: int
    devices: int
    batch: int
    published: str

    @property
    def flops(self) -> float:
        """Of a step."""
        block = 12 * self.hidden**2 * (1 + SEQUENCE / (6 * self.hidden))
        return 6 * self.batch * SEQUENCE * (self.layers * block + VOCABULARY * self.hidden)


MODELS = {
    "1.7": Row(24, 2304, 24, 32, 512, "tensor 1, stages 1"),
    "3.6": Row(30, 3072, 32, 64, 512, "tensor 2, stages 1"),
    "7.5": Row(36, 4096, 32, 128, 512, "tensor 4, stages 1"),
    "18.4": Row(40, 6144, 48, 256, 1024, "tensor 8, stages 1"),
    "39.1": Row(48, 8192, 64, 512, 1536, "tensor 8, stages 2"),
    "76.1": Row(60, 10240, 80, 1024, 1792, "tensor 8, stages 4"),
}


def rows(size: str, network: str) -> Iterator[str]:
    """What each kind of plan takes."""
    row = MODELS[size]
    case = make_megatron(
        row.layers, row.hidden, row.heads, VOCABULARY, SEQUENCE, row.batch, compute_dtype=jnp.bfloat16
    )
    cluster = parse_cluster(f"{row.devices}xA100-80GB{network}")
    start_s = thread_time()
    try:
        one = autoshard.search(case.step, *case.abstract_args(), cluster=cluster)
        assert isinstance(one, Plan)
        mesh = " x ".join(f"{name} {n}" for name, n in one.decisions.mesh.items())
        took = one.estimates.step_s
        yield said(size, cluster.name, f"one program, {mesh}", took, row, thread_time() - start_s)
    except InfeasibleError:
        yield f"{size}B  {cluster.name}  one program: does not fit"
    start_s = thread_time()
    step = trace(case.step, *case.abstract_args())
    plan = find(step, cluster, PipelineOptions(cluster.device_memory_limit())).plan
    yield said(size, cluster.name, of_pipeline(plan), plan.estimates.step_s, row, thread_time() - start_s)


def of_pipeline(plan: PipelinePlan) -> str:
    """A pipeline in a few words."""
    meshes = dict.fromkeys(" x ".join(map(str, stage.mesh.values())) for stage in plan.stages)
    return (
        f"{len(plan.stages)} stages of {', '.join(meshes)}, {plan.microbatches} microbatches, {plan.schedule}, "
        f"{plan.estimates.bubble:.0%} idle"
    )


def said(size: str, cluster: str, what: str, step_s: float, row: Row, took_s: float) -> str:
    """A line of the table."""
    share = row.flops / (step_s * row.devices * PEAK_FLOPS_PER_S)
    return (
        f"{size}B ({row.published})  {cluster}  {what}  {step_s:.2f} s, {share:.0%} of peak  ({took_s:.0f} s)"
    )


if __name__ == "__main__":
    for wanted in sys.argv[1:] or MODELS:
        for network in ("", "-Ethernet"):
            for line in rows(wanted, network):
                print(line, flush=True)
