"""Searched plans beside the plans that experts write by rule, as a person asks for them: a mesh, and a pin for each array.

python -m benchmarks.experts [--models llama vit] [--clusters 64xA100-80GB-Ethernet] [--time-limit 15]

The rules know a model's paths and shapes and nothing of the search:

  * data parallel: everything replicated but the batch; ZeRO-1: optimizer state split by its largest dimension too;
  * FSDP, ZeRO-3: parameters and their state split over all devices, as one axis or two;
  * hybrid sharding: split inside the node, whole across nodes (Zhao et al. 2023, section 3.2.2);
  * Megatron: columns of what comes first, rows of what comes last in a block, vocabularies and experts over the node, with
    data parallelism or FSDP across nodes (Shoeybi et al. 2019).

What a rule does not say, the solver decides: an expert's plan is made as good as it can be. All times are predicted, by one
model. `step` is the step's time, `bare` what the solver minimises: computation and communication one after the other.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import process_time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec as P

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError
from cost_model.hardware import parse_cluster
from search import driver
from search.ir.trace import trace
from search.mesh_problem import Options
from tests.zoo import (
    LLAMA_7B,
    Case,
    make_dlrm,
    make_gpt_scan,
    make_llama,
    make_mixer,
    make_moe,
    make_resnet,
    make_t5,
    make_unet,
    make_vit,
)

CLUSTERS = ("16xL4", "64xA100-80GB-Ethernet", "512xH100-80GB", "12xA100-40GB")

COLUMNS = re.compile(r"wq|wk|wv|gate|up|query|key|value|fc1|fc_in|wi|Dense_0")
ROWS = re.compile(r"wo|down|out|fc2|fc_out|Dense_1")
"""How the models of `tests.zoo` call their kernels."""

MODELS: Mapping[str, Callable[[int], Case]] = {
    "llama": lambda n: make_llama(
        **LLAMA_7B | {"num_layers": 32 if n >= 64 else 8, "batch": 2 * n}, scanned=True
    ),
    "gpt": lambda n: make_gpt_scan(
        num_layers=24, hidden=2048, heads=16, vocab=50304, seq=1024, batch=4 * n, remat=True
    ),
    "t5": lambda n: make_t5(
        num_layers=8,
        hidden=1024,
        heads=16,
        ffn=4096,
        vocab=32128,
        source_seq=512,
        target_seq=128,
        batch=8 * n,
    ),
    "moe": lambda n: make_moe(
        num_layers=4, hidden=1024, heads=16, num_experts=16, ffn=4096, vocab=32000, seq=512, batch=2 * n
    ),
    "vit": lambda n: make_vit(num_layers=24, hidden=1024, heads=16, image=224, patch=16, batch=32 * n),
    "mixer": lambda n: make_mixer(
        num_layers=24, channels=1024, token_ffn=512, channel_ffn=4096, image=224, patch=16, batch=64 * n
    ),
    "resnet": lambda n: make_resnet(
        stage_features=(64, 128, 256, 512),
        blocks_per_stage=(3, 4, 6, 3),
        bottleneck=True,
        stem=(7, 2),
        image=224,
        num_classes=1000,
        batch=32 * n,
    ),
    "unet": lambda n: make_unet(stage_features=(128, 256, 512), blocks_per_stage=2, image=64, batch=4 * n),
    "dlrm": lambda n: make_dlrm(
        table_rows=(4_000_000, 1_000_000, 100_000), embed_dim=128, num_dense=13, batch=1024 * n
    ),
}


@dataclass(frozen=True, slots=True)
class Expert:
    """A rule: what it is called, its mesh, and where it wants an array of the step."""

    name: str
    mesh: tuple[int, ...]
    spec: Callable[[str, tuple[int, ...]], P | None]


@dataclass(frozen=True, slots=True)
class Timed:
    """A plan's predicted times in seconds, how far from the best it may be, and what it took to find it."""

    mesh: tuple[int, ...]
    step_s: float
    bare_s: float
    gap: float
    cpu_s: float


def experts(cluster: Cluster) -> Iterator[Expert]:
    """The rules that suit a cluster."""
    num, node = cluster.num_devices, cluster.devices_per_node
    one, two = (num,), (num // node, node)

    def everywhere(axes: Any) -> Callable[[str, tuple[int, ...]], P]:
        size = math.prod({"data": two[0], "model": node}[a] for a in axes) if isinstance(axes, tuple) else num
        return lambda path, shape: split_largest(shape, axes, size)

    def batch(axes: Any, others: Callable[[str, tuple[int, ...]], P | None]):
        return lambda path, shape: P(axes) if is_batch(path) else others(path, shape)

    def replicated(path: str, shape: tuple[int, ...]) -> P:
        return P()

    def zero_1(path: str, shape: tuple[int, ...]) -> P:
        return P() if is_parameter(path) else split_largest(shape, "data", num)

    yield Expert("data parallel", one, batch("data", replicated))
    yield Expert("ZeRO-1", one, batch("data", zero_1))
    yield Expert("FSDP", one, batch("data", everywhere("data")))
    if min(two) > 1:
        both = ("data", "model")
        inside = lambda path, shape: split_largest(shape, "model", node)  # noqa: E731
        yield Expert("FSDP, two axes", two, batch(both, everywhere(both)))
        yield Expert("hybrid sharding", two, batch(both, inside))
        yield Expert("Megatron, data parallel", two, batch("data", lambda path, s: megatron(path, s, node)))
        yield Expert(
            "Megatron, FSDP", two, batch("data", lambda path, s: megatron(path, s, node, across=two[0]))
        )
        yield Expert(
            "expert parallel", two, batch(both, lambda p, s: P("model") if is_expert(p, s, node) else P())
        )


def is_batch(path: str) -> bool:
    return path.startswith("batch")


def is_parameter(path: str) -> bool:
    return "params" in path and not re.search(r"\bmu\b|\bnu\b|opt_state|ema", path)


def is_expert(path: str, shape: tuple[int, ...], node: int) -> bool:
    return len(shape) == 3 and shape[0] % node == 0 and "moe" in path


def split_largest(shape: tuple[int, ...], axes: Any, parts: int) -> P:
    """The largest dimension that divides goes over the axes; vectors stay whole."""
    dims = [d for d, size in enumerate(shape) if size % parts == 0]
    if len(shape) < 2 or not dims:
        return P()
    chosen = max(dims, key=lambda d: shape[d])
    return P(*[axes if d == chosen else None for d in range(chosen + 1)])


def megatron(path: str, shape: tuple[int, ...], node: int, across: int = 1) -> P:
    """Columns, rows, vocabularies over `model`; what is left of a kernel over `data` if it is FSDP."""
    if len(shape) < 2:
        return P()
    last = len(shape) - 1
    is_row, is_column = ROWS.search(path), COLUMNS.search(path)
    inner = last - 1 if is_row else last if is_column else max(range(len(shape)), key=lambda d: shape[d])
    outer = last if inner != last else last - 1
    spec: list[str | None] = [None] * len(shape)
    if shape[inner] % node == 0:
        spec[inner] = "model"
    if across > 1 and shape[outer] % across == 0:
        spec[outer] = "data"
    return P(*spec)


def pins(arguments: Mapping[str, tuple[int, ...]], expert: Expert) -> dict[str, P]:
    """A rule's pins for a step's arrays."""
    wanted = {path: expert.spec(path, shape) for path, shape in arguments.items() if shape}
    return {path: spec for path, spec in wanted.items() if spec is not None}


def timed(step, cluster: Cluster, **options: Any) -> Timed:
    """Searches, under a device's whole memory.

    Raises:
      InfeasibleError: nothing fits.
    """
    start_s = process_time()
    found = driver.find(step, cluster, Options(cluster.device_memory_limit(), **options))
    estimates, mesh = found.plan.estimates, tuple(found.plan.decisions.mesh.values())
    gap = found.plan.gap if found.plan.gap is not None else math.inf
    return Timed(
        mesh, estimates.step_s, found.on_mesh.problem.cost_s(found.chosen), gap, process_time() - start_s
    )


def by_rule(step, cluster: Cluster) -> dict[str, Timed]:
    """What each rule's plan is predicted to take, where it fits; as experts, these neither recompute nor offload."""
    values, found = step.graph.values, dict[str, Timed]()
    shapes = {a.name: values[v].shape for a, v in zip(step.arguments, step.graph.inputs, strict=True)}
    for expert in experts(cluster):
        try:
            asked = {"mesh": expert.mesh, "pins": pins(shapes, expert)}
            found[expert.name] = timed(step, cluster, remat="never", offload="never", microbatches=1, **asked)
        except InfeasibleError:
            continue
    return found


def row(model: str, preset: str, time_limit_s: float | None) -> tuple[str, ...]:
    """One line of the table."""
    cluster = parse_cluster(preset)
    case = MODELS[model](cluster.num_devices)
    step = trace(case.step, *case.abstract_args())
    try:
        ours = timed(step, cluster, time_limit_s=time_limit_s)
    except InfeasibleError:
        return (model, preset, *["nothing fits"], *["-"] * 8)
    theirs = by_rule(step, cluster)
    mine = (
        "x".join(map(str, ours.mesh)),
        ms(ours.step_s),
        ms(ours.bare_s),
        f"{ours.gap:.1%}",
        f"{ours.cpu_s:.1f}",
    )
    if not theirs:
        return model, preset, *mine, "none fits", *["-"] * 4
    name, best = min(theirs.items(), key=lambda item: item[1].step_s)
    bare_s = min(one.bare_s for one in theirs.values())
    ratios = (f"{ours.step_s / best.step_s - 1:+.1%}", f"{ours.bare_s / bare_s - 1:+.1%}")
    return model, preset, *mine, name, ms(best.step_s), ms(bare_s), *ratios


HEAD = (
    "model",
    "cluster",
    "mesh",
    "step ms",
    "bare ms",
    "gap",
    "CPU s",
    "best rule",
    "step ms",
    "bare ms",
    "step",
    "bare",
)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument(
        "--time-limit",
        type=float,
        help="processor seconds for the solver; by default as much work as the search's",
    )
    options = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for model in options.models:
        for preset in options.clusters:
            print(f"| {' | '.join(row(model, preset, options.time_limit))} |", flush=True)
    print(f"\nJAX {jax.__version__}")


if __name__ == "__main__":
    main()
