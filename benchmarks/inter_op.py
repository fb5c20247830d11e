"""How the inter-op dynamic programming's time grows with layers and devices, in seconds of one core.

Models are Transformers of equal layers between an embedding and a head, on nodes of 8 GPUs of 80 GB. A layer's time on a
submesh follows from its FLOPs and an efficiency that falls with the submesh, more so over nodes; layers are kept, recomputed
for a third more time, or kept with their state split further.

    .venv/bin/python benchmarks/inter_op.py            # layers at 1,024 GPUs, GPUs at 128 layers
    .venv/bin/python benchmarks/inter_op.py 128 1024   # one size
"""

import sys
from dataclasses import dataclass
from time import thread_time

import numpy as np

from autoshard.search.pipeline.inter_op import fastest_cut
from autoshard.search.pipeline.stage_costs import ClusterNode, StageOption, Submesh
from autoshard.search.pipeline.stage_plan import InterOpProblem
from tests.search.pipeline.cuts import submeshes

RELATIVE_GAP = 1e-3
DEVICES_PER_NODE = 8
CAP_BYTES = 80e9
FLOPS_PER_S = 150e12
STATE_BYTES_PER_PARAMETER = 16
VOCABULARY = 50_000
SEQUENCE = 2048


@dataclass(frozen=True, slots=True)
class Variant:
    """How layers are run: what it takes of time and of residuals, relative to keeping everything."""

    name: str
    time: float
    residuals: float
    state: float


VARIANTS = (
    Variant("keep", 1.0, 1.0, 1.0),
    Variant("remat", 4 / 3, 0.06, 1.0),
    Variant("keep, ZeRO", 1.1, 1.0, 0.4),
)


def problem(num_layers: int, num_devices: int, hidden: int = 12_288, microbatch: int = 1) -> InterOpProblem:
    """A model of so many layers on nodes of 8."""
    parameters = np.full(num_layers, 12.0 * hidden**2)
    parameters[[0, -1]] += VOCABULARY * hidden
    tokens = microbatch * SEQUENCE
    flops = 6 * parameters * tokens
    residual_bytes = np.full(num_layers, 34.0 * tokens * hidden)
    nodes = tuple(ClusterNode(DEVICES_PER_NODE, CAP_BYTES) for _ in range(num_devices // DEVICES_PER_NODE))

    def option(submesh: Submesh, variant: Variant) -> StageOption:
        size = submesh.size
        efficiency = 0.97 ** np.log2(size) * 0.9 ** np.log2(submesh.num_nodes)
        state_bytes = variant.state * STATE_BYTES_PER_PARAMETER * parameters / size
        return StageOption(
            submesh,
            variant.name,
            variant.time * flops / (size * FLOPS_PER_S * efficiency),
            variant.residuals * residual_bytes / size,
            state_bytes,
            np.full(num_layers, 2e9),
            state_bytes / 1e12,
        )

    num_microbatches = 512
    transfer_s = np.array([[1e-4], [1e-3]]) * np.ones(num_layers + 1)
    in_flight = tuple(range(1, num_microbatches + 1))
    options = tuple(option(submesh, variant) for submesh in submeshes(nodes) for variant in VARIANTS)
    return InterOpProblem(nodes, options, num_microbatches, in_flight, transfer_s)


def measure(num_layers: int, num_devices: int) -> str:
    """A row: sizes, seconds of one core, the plan and its gap."""
    instance = problem(num_layers, num_devices)
    start_s = thread_time()
    plan = fastest_cut(instance, RELATIVE_GAP)
    took_s = thread_time() - start_s
    row = f"{num_layers:6} layers  {num_devices:5} GPUs  {len(instance.options):4} options  {took_s:7.2f} s  "
    if plan is not None:
        return row + f"{len(plan.stages):3} stages  {plan.step_s:8.3f} s a step, gap {plan.gap:.2%}"
    return row + "no cut fits"


if __name__ == "__main__":
    sizes = [tuple(map(int, sys.argv[1:3]))] if len(sys.argv) == 3 else []
    for num_layers, num_devices in sizes or [(n, 1024) for n in (16, 32, 64, 128)] + [
        (128, n) for n in (64, 128, 256, 512)
    ]:
        print(measure(num_layers, num_devices), flush=True)
