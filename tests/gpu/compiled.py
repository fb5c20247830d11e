"""Steps to plan for H100s that are not there, and what the compiler makes of the plans.

Planned and lowered here; only the compiler runs in a process of its own (`cost_model.oracle_process`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from autoshard import _jax
from autoshard.graph import Step
from autoshard.plan import Plan
from autoshard.trace import trace
from cost_model.cluster import Cluster
from cost_model.hardware import parse_cluster
from cost_model.numbers import Numbers
from cost_model.oracle_process import Compiler, compile_apart
from executors.jit import build
from search import driver
from search.ground import Ground, Options
from tests.zoo import Case, make_dlrm, make_gpt_scan, make_llama, make_megatron, make_mlp, make_moe

PLENTY_BYTES = 1 << 45
SEARCH_S = 4.0
HURRY = "--xla_llvm_disable_expensive_passes=true"
"""LLVM is told to hurry: that changes kernels, not the program that we read."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to plan and compile.

    Attributes:
      make: the step.
      mesh: sizes of the axes.
      slack: the cap, as a multiple of the smallest peak that the search can reach; None for no cap.
      pins: as `autoshard.search` takes them.
    """

    make: Callable[[], Case]
    mesh: tuple[int, ...]
    slack: float | None = None
    pins: dict[str, P] | None = None


def _megatron(**sizes) -> Callable[[], Case]:
    small = {"num_layers": 1, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 256}
    return lambda: make_megatron(**(small | sizes), compute_dtype=jnp.bfloat16)


def _llama(batch: int) -> Callable[[], Case]:
    sizes = {
        "num_layers": 1,
        "hidden": 512,
        "heads": 16,
        "kv_heads": 8,
        "ffn": 1536,
        "vocab": 4096,
        "seq": 256,
    }
    return lambda: make_llama(**sizes, batch=batch, compute_dtype=jnp.bfloat16)


def _moe() -> Case:
    return make_moe(num_layers=1, hidden=512, heads=8, num_experts=8, ffn=2048, vocab=1024, seq=256, batch=32)


def _scan(batch: int, remat: bool = False) -> Callable[[], Case]:
    sizes = {"num_layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 256}
    return lambda: make_gpt_scan(**sizes, batch=batch, remat=remat)


def _mlp(batch: int) -> Callable[[], Case]:
    return lambda: make_mlp(widths=(1024, 4096, 4096, 1024), batch=batch)


def _dlrm() -> Case:
    return make_dlrm(
        (1 << 20, 1 << 18), embed_dim=64, num_dense=64, bottom=(512,), top=(1024, 512), batch=8192
    )


_ROWS = {
    f"{holder}['tables'][{i}]": P("data")
    for holder in ("state['params']", "state['opt_state'][0].sum_of_squares")
    for i in range(2)
}

JOBS = {
    "mlp on 8": Job(_mlp(4096), (8,)),
    "mlp on 2x4": Job(_mlp(4096), (2, 4)),
    "mlp on 8x8": Job(_mlp(8192), (8, 8)),
    "tensor parallel": Job(_megatron(batch=8), (8,)),
    "sequence parallel": Job(_megatron(batch=4, seq=512), (8,), slack=1.15),
    "data parallel": Job(_megatron(batch=64), (8,)),
    "fsdp": Job(_megatron(batch=32), (8,), slack=1.1),
    "mixed on 2x4": Job(_megatron(batch=8), (2, 4)),
    "mixed on 8x8": Job(_megatron(batch=512), (8, 8)),
    "vocabulary parallel": Job(_megatron(batch=8, vocab=32768), (8,)),
    "grouped heads": Job(_llama(8), (8,)),
    "grouped heads on 2x4": Job(_llama(16), (2, 4)),
    "experts": Job(_moe, (8,)),
    "experts on 2x4": Job(_moe, (2, 4)),
    "scanned": Job(_scan(8), (8,)),
    "scanned, tight": Job(_scan(32), (8,), slack=1.15),
    "scanned with checkpoint on 2x4": Job(_scan(16, remat=True), (2, 4)),
    "tables by rows": Job(_dlrm, (8,), pins=_ROWS),
    "tables on 2x4": Job(_dlrm, (2, 4)),
}


def compiled(job: Job) -> tuple[Plan, Numbers]:
    """The plan, and its program as compiled."""
    case, cluster = job.make(), parse_cluster(f"{prod(job.mesh)}xH100-80GB")
    step = trace(case.step, *case.abstract_args())
    cap = PLENTY_BYTES if job.slack is None else int(_smallest_peak(step, cluster, job.mesh) * job.slack)
    found = driver.find(step, cluster, Options(cap, job.mesh, job.pins, SEARCH_S))
    program = build(step, found.layout, None)
    module = _jax.module_bytes(program.fn.trace(*program.args).lower(lowering_platforms=("cuda",)))
    answer = compile_apart(module, cluster, compiler=Compiler(flags=HURRY))
    return found.plan, Numbers.of(answer, found.plan.decisions.mesh)


def _smallest_peak(step: Step, cluster: Cluster, mesh: tuple[int, ...]) -> float:
    grounded = Ground.of(step, ["None"] * len(step.arguments)).on(cluster, mesh)
    labels = grounded.smallest_peak(grounded.pinned({}), 1, SEARCH_S)
    return grounded.memory.peak(labels).num_bytes
