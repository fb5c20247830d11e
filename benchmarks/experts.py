"""Searched plans beside the plans that experts write by rule, as a person asks for them: a mesh, and a pin for each array.

python -m benchmarks.experts [--models llama vit] [--clusters 64xA100-80GB-Ethernet] [--beside rules meshes] [--out table.md]

The rules know a model's paths and shapes and nothing of the search:

  * data parallel: everything replicated but the batch; ZeRO-1: optimizer state split by its largest dimension too;
  * FSDP, ZeRO-3: parameters and their state split over all devices, as one axis or two;
  * hybrid sharding: split inside the node, whole across nodes (Zhao et al. 2023, section 3.2.2);
  * Megatron: columns of what comes first, rows of what comes last in a block, vocabularies and experts over the node, with
    data parallelism or FSDP across nodes (Shoeybi et al. 2019).

What a rule does not say, the solver decides: an expert's plan is made as good as it can be. With `--beside rules meshes`,
each mesh that the search may try is asked for by itself, too. All times are predicted, by one model.

The search has its default time. The solver of a rule, or of an asked mesh, has `--others-limit` processor seconds: what it
does not find by then is not worth waiting for in ten searches a row. Rules do not recompute, offload or split the batch. The
table may be made in pieces: rows that stand in the file `--out` are not made again, and its digest is of them all.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.meshes import finer_shapes
from autoshard.cost_model.units import format_mesh
from autoshard.search import driver
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options, candidate_shapes
from tests.zoo import (
    LLAMA_7B,
    Case,
    make_dlrm,
    make_evoformer,
    make_gpt_scan,
    make_llama,
    make_lstm,
    make_message_passing,
    make_mixer,
    make_moe,
    make_resnet,
    make_t5,
    make_unet,
    make_vit,
)

CLUSTERS = (
    "8xH100-80GB",
    "64xH100-80GB",
    "512xH100-80GB",
    "64xA100-80GB-Ethernet",
    "16xL4",
    "12xA100-40GB",
    "2xV100-16GB",
    "1000xH100-80GB",
)

COLUMNS = re.compile(r"wq|wk|wv|gate|up|query|key|value|fc1|fc_in|wi|Dense_0|\['([qkv]|[ih][ifgo])'\]")
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
    "evoformer": lambda n: make_evoformer(
        num_layers=8, msa_features=256, pair_features=128, sequences=128, residues=128, batch=n
    ),
    "lstm": lambda n: make_lstm(num_layers=4, hidden=1024, vocab=32000, seq=256, batch=32 * n),
    "messages": lambda n: make_message_passing(
        num_layers=6, features=256, hidden=1024, num_nodes=128, num_edges=1024, batch=16 * n
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
    """A plan's predicted time in seconds, how far from the best it may be, and what it took to find it."""

    mesh: tuple[int, ...]
    step_s: float
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


def timed(step: Step, cluster: Cluster, **options: Any) -> Timed:
    """Searches, under a device's whole memory.

    Raises:
      InfeasibleError: nothing fits.
    """
    start_s = process_time()
    found = driver.find(step, cluster, Options(cluster.device_memory_limit(), **options))
    estimates, mesh = found.plan.estimates, tuple(found.plan.decisions.mesh.values())
    gap = found.plan.gap if found.plan.gap is not None else math.inf
    return Timed(mesh, estimates.step_s, gap, process_time() - start_s)


def by_rule(step: Step, cluster: Cluster, time_limit_s: float | None) -> dict[str, Timed]:
    """What each rule's plan is predicted to take, where it fits; as experts, these neither recompute nor offload."""
    values = step.graph.values
    shapes = {a.name: values[v].shape for a, v in zip(step.arguments, step.graph.inputs, strict=True)}
    fixed = {"remat": "never", "offload": "never", "microbatches": 1, "time_limit_s": time_limit_s}
    asked = {e.name: fixed | {"mesh": e.mesh, "pins": pins(shapes, e)} for e in experts(cluster)}
    return feasible(step, cluster, asked)


def by_mesh(step: Step, cluster: Cluster, time_limit_s: float | None) -> dict[str, Timed]:
    """What each mesh that the search may try gives where it is asked for."""
    two = candidate_shapes(cluster, Options(cluster.device_memory_limit()))
    shapes = dict.fromkeys((*two, *(three for shape in two for three in finer_shapes(cluster, shape))))
    asked = {format_mesh(shape): {"mesh": shape, "time_limit_s": time_limit_s} for shape in shapes}
    return feasible(step, cluster, asked)


def feasible(step: Step, cluster: Cluster, asked: Mapping[str, Mapping[str, Any]]) -> dict[str, Timed]:
    """The plans of several searches, by name; without those that find none."""
    found = dict[str, Timed]()
    for name, options in asked.items():
        with suppress(InfeasibleError):
            found[name] = timed(step, cluster, **options)
    return found


def row(model: str, preset: str, options: argparse.Namespace) -> tuple[str, ...]:
    """One line of the table."""
    cluster = parse_cluster(preset)
    case = MODELS[model](cluster.num_devices)
    step = trace(case.step, *case.abstract_args())
    try:
        ours = timed(step, cluster, time_limit_s=options.time_limit)
    except InfeasibleError:
        return (model, preset, "nothing fits", *["-"] * (len(HEAD) - 3))
    others = [
        by(step, cluster, options.others_limit) if name in options.beside else {}
        for name, by in (("rules", by_rule), ("meshes", by_mesh))
    ]
    mine = format_mesh(ours.mesh), ms(ours.step_s), f"{ours.gap:.2%}", f"{ours.cpu_s:.1f}"
    return model, preset, *mine, *beside(ours, others[0]), *beside(ours, others[1])


def beside(ours: Timed, others: Mapping[str, Timed]) -> tuple[str, str, str]:
    """The best of other plans, its time, and how much slower ours is."""
    if not others:
        return "-", "-", "-"
    name, best = min(others.items(), key=lambda item: item[1].step_s)
    return name, ms(best.step_s), f"{ours.step_s / best.step_s - 1:+.2%}"


HEAD = (
    "model",
    "cluster",
    "mesh",
    "step ms",
    "gap",
    "CPU s",
    "best rule",
    "step ms",
    "difference",
    "best asked mesh",
    "step ms",
    "difference",
)

GAP, CPU, OVER_RULE, OVER_MESH = 4, 5, 8, 11
"""Columns that are digested."""

DIGEST = ("cluster", "plans", "worst gap", "against the best rule", "against the best mesh", "median CPU s")


def digest(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """By cluster: the worst gap, how much slower than others' plans ours are at most, and the median time of a search."""
    for preset in dict.fromkeys(cells[1] for cells in rows):
        found = [cells for cells in rows if cells[1] == preset and cells[GAP] != "-"]
        worst = (
            max((float(cells[at].rstrip("%")) for cells in found if cells[at] != "-"), default=math.nan)
            for at in (GAP, OVER_RULE, OVER_MESH)
        )
        gap, *over = worst
        cpu_s = median(float(cells[CPU]) for cells in found)
        yield (
            preset,
            str(len(found)),
            f"{gap:.2f}%",
            *["-" if math.isnan(o) else f"{o:+.2f}%" for o in over],
            f"{cpu_s:.1f}",
        )


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.5g}"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head(cells: Sequence[str]) -> str:
    return f"{line(cells)}\n|{'---|' * len(cells)}"


def standing(out: Path | None) -> list[list[str]]:
    """The rows of a table that was begun."""
    lines = out.read_text().splitlines() if out and out.exists() else []
    return [[cell.strip() for cell in text.strip("|").split("|")] for text in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument(
        "--beside", nargs="*", default=["rules"], choices=["rules", "meshes"], help="what else is searched"
    )
    parser.add_argument("--out", type=Path, help="a file of rows, to begin or to go on with")
    parser.add_argument(
        "--time-limit",
        type=float,
        help="processor seconds for the solver; by default as much work as the search's",
    )
    parser.add_argument(
        "--others-limit", type=float, default=5.0, help="processor seconds for the solver of a rule or a mesh"
    )
    options = parser.parse_args()
    rows = standing(options.out)
    known = {(cells[0], cells[1]) for cells in rows}
    print(head(HEAD))
    for cells in rows:
        print(line(cells))
    for preset in options.clusters:
        for model in (m for m in options.models if (m, preset) not in known):
            rows.append(list(row(model, preset, options)))
            print(line(rows[-1]), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line(rows[-1]) + "\n")
    print(f"\n{head(DIGEST)}")
    for cells in digest(rows):
        print(line(cells))
    print(f"\nJAX {jax.__version__}")


if __name__ == "__main__":
    main()
