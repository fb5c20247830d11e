"""Steps to plan for H100s that are not there, and what the compiler makes of the plans.

Planned and lowered here; only the compiler runs in a process of its own (`cost_model.xla.process`).
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.process import Compiler, compile_apart
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.executors.jit import build
from autoshard.search import driver
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import WorkClock
from autoshard.search.step_problem import StepProblem
from tests.zoo import (
    Case,
    make_dlrm,
    make_gpt_linen,
    make_gpt_nnx,
    make_gpt_scan,
    make_llama,
    make_megatron,
    make_mixer,
    make_mlp,
    make_moe,
    make_resnet,
    make_t5,
    make_vit,
)

SEARCH_S = 2.0
"""Nominal seconds (`search.solver.clock`) for one such plan: the same on every machine."""

STEP_DOWN = 1 / 8
"""How much less memory each next plan gets, until none is found: the last one's is the smallest peak."""

COLLECTIVES_ALONE = "--xla_disable_hlo_passes=triton-softmax-rewriter"
"""For tests that read no peaks: softmaxes become ordinary fusions. XLA spends two thirds of its time on choosing tilings for
their Triton kernels."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to plan and compile.

    Attributes:
      make: the step.
      mesh: sizes of the axes.
      slack: the cap, as a multiple of the smallest peak that the search can reach without recomputing; None for what the
        device has.
      pins: as `autoshard.search` takes them.
      remat: likewise.
      microbatches: into how many the batch is split.
      cap_bytes: the cap, where it is known already.
    """

    make: Callable[[], Case]
    mesh: tuple[int, ...]
    slack: float | None = None
    pins: dict[str, P] | None = None
    remat: str | None = "never"
    microbatches: int = 1
    cap_bytes: int | None = None


def _megatron(**sizes) -> Callable[[], Case]:
    small = {"num_layers": 1, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 256}
    return lambda: make_megatron(**(small | sizes), compute_dtype=jnp.bfloat16)


def _llama(batch: int, num_layers: int = 1) -> Callable[[], Case]:
    sizes = {"hidden": 512, "heads": 16, "kv_heads": 8, "ffn": 1536, "vocab": 4096, "seq": 256}
    return lambda: make_llama(num_layers=num_layers, **sizes, batch=batch, compute_dtype=jnp.bfloat16)


def _moe(batch: int = 16) -> Callable[[], Case]:
    sizes = {
        "num_layers": 1,
        "hidden": 512,
        "heads": 8,
        "num_experts": 8,
        "ffn": 2048,
        "vocab": 1024,
        "seq": 256,
    }
    return lambda: make_moe(**sizes, batch=batch)


def _unrolled(make: Callable[..., Case], batch: int = 16) -> Callable[[], Case]:
    return lambda: make(num_layers=3, hidden=512, heads=8, vocab=4096, seq=256, batch=batch)


def _scan(batch: int, remat: bool = False) -> Callable[[], Case]:
    sizes = {"num_layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 256}
    return lambda: make_gpt_scan(**sizes, batch=batch, remat=remat)


def _mlp(batch: int) -> Callable[[], Case]:
    return lambda: make_mlp(widths=(1024, 4096, 4096, 1024), batch=batch)


def _dlrm() -> Case:
    return make_dlrm(
        (1 << 20, 1 << 18), embed_dim=64, num_dense=64, bottom=(512,), top=(1024, 512), batch=8192
    )


def _resnet(batch: int = 128) -> Callable[[], Case]:
    return lambda: make_resnet((64, 128, 256), (2, 2, 2), image=64, num_classes=1000, batch=batch)


def _vit(batch: int = 32) -> Callable[[], Case]:
    sizes = {"num_layers": 3, "hidden": 512, "heads": 8, "image": 128, "patch": 8, "num_classes": 1000}
    return lambda: make_vit(**sizes, batch=batch)


def _mixer(batch: int) -> Callable[[], Case]:
    sizes = {
        "num_layers": 2,
        "channels": 1024,
        "token_ffn": 512,
        "channel_ffn": 4096,
        "image": 112,
        "patch": 16,
    }
    return lambda: make_mixer(**sizes, num_classes=1000, batch=batch)


def _t5() -> Case:
    sizes = {"num_layers": 2, "hidden": 512, "heads": 8, "ffn": 2048, "vocab": 4096, "batch": 32}
    return make_t5(**sizes, source_seq=256, target_seq=128)


_ROWS = {
    f"{holder}['tables'][{i}]": P("data")
    for holder in ("state['params']", "state['opt_state'][0].sum_of_squares")
    for i in range(2)
}

_CHECKERED = {
    "state['params'][0]['w']": P("data", "model"),
    "state['params'][1]['w']": P("model", "data"),
    "state['params'][2]['w']": P("data", "model"),
}

_COLUMNS_THEN_ROWS = {
    f"{holder}['layers'][0]['{layer}']['w']": spec
    for holder in ("state['params']", "state['opt_state'][0].mu", "state['opt_state'][0].nu")
    for layer, spec in (
        ("qkv", P(None, "model")),
        ("out", P("model", None)),
        ("fc1", P(None, "model")),
        ("fc2", P("model", None)),
    )
}

_SHARDED_WEIGHTS = {
    f"state['params']['layers'][{i}]['{name}']": P("data")
    for i in range(4)
    for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")
}

JOBS = {
    "mlp on 8": Job(_mlp(4096), (8,)),
    "mlp on 8, tight": Job(_mlp(4096), (8,), slack=1.15),
    "mlp on 2x4": Job(_mlp(4096), (2, 4)),
    "mlp on 2x4 by hand": Job(_mlp(4096), (2, 4), pins=_CHECKERED),
    "mlp on 8x8": Job(_mlp(8192), (8, 8)),
    "mlp on 64x8": Job(_mlp(16384), (64, 8)),
    "tensor parallel": Job(_megatron(batch=8), (8,)),
    "sequence parallel": Job(_megatron(batch=4, seq=512), (8,), slack=1.15),
    "data parallel": Job(_megatron(batch=64), (8,)),
    "fsdp": Job(_megatron(batch=32), (8,), slack=1.1),
    "mixed on 2x4": Job(_megatron(batch=8), (2, 4)),
    "mixed on 2x4 by hand": Job(_megatron(batch=32), (2, 4), pins=_COLUMNS_THEN_ROWS),
    "mixed on 8x8": Job(_megatron(batch=512), (8, 8)),
    "vocabulary parallel": Job(_megatron(batch=8, vocab=32768), (8,)),
    "grouped heads": Job(_llama(8), (8,)),
    "grouped heads on 2x4": Job(_llama(16), (2, 4)),
    "grouped heads, 4 layers": Job(_llama(16, 4), (8,)),
    "grouped heads, 4 layers, by hand": Job(_llama(16, 4), (8,), pins=_SHARDED_WEIGHTS),
    "grouped heads, 4 layers, on 2x4, tight": Job(_llama(16, 4), (2, 4), slack=1.15),
    "grouped heads, 4 layers, on 8x8": Job(_llama(128, 4), (8, 8)),
    "experts": Job(_moe(), (8,)),
    "experts, tight": Job(_moe(), (8,), slack=1.15),
    "experts on 2x4": Job(_moe(), (2, 4)),
    "unrolled linen": Job(_unrolled(make_gpt_linen), (8,)),
    "unrolled linen, tight": Job(_unrolled(make_gpt_linen), (8,), slack=1.15),
    "unrolled nnx on 2x4": Job(_unrolled(make_gpt_nnx), (2, 4)),
    "scanned": Job(_scan(8), (8,)),
    "scanned, tight": Job(_scan(32), (8,), slack=1.15),
    "scanned with checkpoint on 2x4": Job(_scan(16, remat=True), (2, 4)),
    "tables by rows": Job(_dlrm, (8,), pins=_ROWS),
    "tables on 2x4": Job(_dlrm, (2, 4)),
    "convolutions": Job(_resnet(), (8,)),
    "convolutions on 2x4, tight": Job(_resnet(), (2, 4), slack=1.15),
    "patches": Job(_vit(), (8,)),
    "patches on 2x4, tight": Job(_vit(), (2, 4), slack=1.15),
    "encoder and decoder": Job(_t5, (8,)),
    "encoder and decoder on 2x4": Job(_t5, (2, 4)),
    "mlp on 3, tight": Job(_mlp(3072), (3,), slack=1.15),
    "mixer on 12": Job(_mixer(768), (12,)),
    "mixer on 4x3, tight": Job(_mixer(96), (4, 3), slack=1.15),
    "undivided vocabulary on 6": Job(_megatron(batch=12, vocab=32003), (6,)),
    "undivided vocabulary on 4x3, tight": Job(_megatron(batch=24, vocab=32003), (4, 3), slack=1.15),
    "grouped heads on 3x8": Job(_llama(48), (3, 8)),
    "experts on 4x3": Job(_moe(48), (4, 3)),
    "scanned on 8x3, tight": Job(_scan(48), (8, 3), slack=1.15),
    "convolutions on 5": Job(_resnet(120), (5,)),
    "patches on 3x2, tight": Job(_vit(30), (3, 2), slack=1.15),
    "microbatches": Job(_unrolled(make_gpt_linen, 64), (8,), microbatches=4),
    "microbatches on 2x4": Job(_unrolled(make_gpt_nnx, 64), (2, 4), microbatches=4),
    "microbatches of grouped heads": Job(_llama(64, 2), (8,), microbatches=4),
    "recomputed in microbatches": Job(
        _unrolled(make_gpt_linen, 256), (8,), slack=0.7, remat=None, microbatches=4
    ),
    "recomputed in microbatches on 2x4": Job(_llama(128, 3), (2, 4), slack=0.7, remat=None, microbatches=4),
    "recomputed": Job(_unrolled(make_gpt_linen, 128), (8,), slack=0.7, remat=None),
    "recomputed, scanned": Job(_scan(64), (8,), slack=0.7, remat=None),
    "recomputed, scanned on 2x4": Job(_scan(16), (2, 4), slack=0.7, remat=None),
}
"""What `benchmarks.truth` tabulates; the tests compile those that `test_collectives` names."""


def planned(job: Job) -> tuple[Step, Cluster, SearchResult]:
    """The step, for which cluster, and the plan."""
    case, cluster = job.make(), parse_cluster(f"{prod(job.mesh)}xH100-80GB")
    step = microbatched(trace(case.step, *case.abstract_args()), job.microbatches)
    cap_bytes = job.cap_bytes or cluster.device_memory_limit()
    if job.slack is not None and job.cap_bytes is None:
        cap_bytes = int(_smallest_peak(step, cluster, job.mesh) * job.slack)
    return (
        step,
        cluster,
        driver.find(step, cluster, Options(cap_bytes, job.mesh, job.pins, remat=job.remat)),
    )


def compiled(job: Job) -> tuple[Plan, CompiledStats]:
    """The plan, and the collectives of its program, as compiled for a device with all its memory."""
    _, cluster, found = planned(job)
    program = build(found.step, found.sharding, None)
    module = module_bytes(lower(program.fn, program.args))
    answer = compile_apart(module, cluster, compiler=Compiler(flags=COLLECTIVES_ALONE))
    return found.plan, CompiledStats.of(answer, found.plan.decisions.mesh)


def _smallest_peak(step: Step, cluster: Cluster, mesh: tuple[int, ...]) -> float:
    marks = ["None"] * len(step.arguments)
    on_mesh = StepProblem.of(step, marks, cluster.device, clock=WorkClock()).on(cluster, mesh)
    kept, smallest_bytes = on_mesh.pinned({}), float(cluster.device_memory_limit())
    with suppress(NoFitError):
        while True:
            cap_bytes = int(smallest_bytes * (1 - STEP_DOWN))
            smallest_bytes = on_mesh.fitting(kept, cap_bytes, SEARCH_S)[1].least.num_bytes
    return smallest_bytes
