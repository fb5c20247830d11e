"""Profiles as XLA's profiler writes them for GPUs: planes are processes, streams are threads, times are in microseconds."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

FOLDER = "plugins/profile/2026_11_27_12_00_00"
COMPUTE, COLLECTIVES = "Stream #13(Compute,MemcpyD2D,MemcpyH2D)", "Stream #20(Compute)"
FLAT = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Event:
    """A kernel in a step: its stream, name, HLO instruction, start and length."""

    stream: str
    name: str
    hlo_op: str
    start: float
    length: float


STEP = (
    Event(COMPUTE, "MemcpyH2D", "copy-start.1", 0, 5),
    Event(COMPUTE, "nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "cublas-gemm.1", 5, 30),
    Event(COMPUTE, "loop_multiply_fusion", "loop_multiply_fusion", 35, 10),
    Event(COMPUTE, "nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "cublas-gemm.2", 45, 30),
    Event(
        COLLECTIVES,
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "all-gather-start",
        5,
        25,
    ),
    Event(COLLECTIVES, FLAT, "reduce-scatter.3", 65, 30),
)
"""100 us with the pause at its end: computation 70, its first copy 5, the second collective exposed for 20."""


def traced(
    folder: Path,
    starts=(0, 100, 200),
    devices=2,
    module="jit_train_step",
    step=STEP,
    in_graph=False,
    host="host0",
    extra=(),
) -> Path:
    """Writes a profile of steps that start at these times.

    Args:
      folder: as given to `jax.profiler.trace`.
      starts: of the steps.
      devices: number of GPUs.
      module: the HLO module of the kernels.
      step: the kernels of a step.
      in_graph: whether kernels are launched by a CUDA graph, and do not say their instruction.
      host: the host's name.
      extra: other events.
    """
    streams = {COMPUTE: 13, COLLECTIVES: 20}
    said = [_meta("process_name", 701, 0, "/host:CPU")]
    for gpu in range(devices):
        said.append(_meta("process_name", gpu + 1, 0, f"/device:GPU:{gpu}"))
        said += [_meta("thread_name", gpu + 1, tid, stream) for stream, tid in streams.items()]
        for start in starts:
            for one in step:
                args = {} if in_graph else {"hlo_op": one.hlo_op, "hlo_module": module}
                place = {
                    "pid": gpu + 1,
                    "tid": streams[one.stream],
                    "ts": start + one.start,
                    "dur": one.length,
                }
                said.append({"ph": "X", "name": one.name, **place, "args": {"correlation_id": "7", **args}})
    path = folder / FOLDER / f"{host}.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*said, *extra, {}]}).encode()))
    return folder


def _meta(name: str, pid: int, tid: int, value: str) -> dict:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}
