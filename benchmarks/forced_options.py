"""Searches with a forced option against the search that decides by itself: nothing that a user can force should be faster.

    python -m benchmarks.forced_options --record FILE [--models unet lstm] [--clusters 16xL4] [--part 1 3]

The models and clusters are those of `benchmarks.caps`. The caps are shares of the recorded peak without a cap. Each search
is the public one on a traced step, pipelines included, without the compiler. These are forced: meshes of up to three axes,
a few of them, drawn by the case's name; the number of microbatches; no offloading; no recomputation; the number of stages. A
case that the file `--record` holds already is not searched again. `--part 2 3` is the second third of the cases.
"""

import argparse
import json
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autoshard.api import planned
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.meshes import mesh_shapes
from autoshard.cost_model.units import format_mesh
from autoshard.options import Options
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from benchmarks import caps
from benchmarks.experts import MODELS

PERCENT = (60, 35)
"""The caps, as shares of the peak without one."""

NUM_MESHES = 3
"""Number of meshes that are forced in each case."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"microbatches={n}": {"microbatches": n} for n in (1, 2, 4, 8)},
    'offload="never"': {"offload": "never"},
    'remat="never"': {"remat": "never"},
    **{f"stages={n}": {"stages": n} for n in (1, 2, 4)},
}
"""The other forced options."""

RECORDED = Path(__file__).parent / "recorded" / "caps.json"


@dataclass(frozen=True, slots=True)
class Row:
    """One case: seconds per step by forced option, "" for none; None where nothing fits."""

    name: str
    step_s: dict[str, float | None]
    cpu_s: float

    def ratios(self) -> Iterator[tuple[str, float]]:
        """By forced option, its time over that of the free search: 0 if only the forced search has a plan, infinite if only
        the free one has."""
        free_s = self.step_s[""]
        for forced, step_s in self.step_s.items():
            if forced and (step_s or free_s):
                yield forced, (step_s or math.inf) / free_s if free_s else 0.0


def _step_s(step: Step, cluster: Cluster, cap_bytes: int, forced: Mapping[str, Any]) -> float | None:
    """Seconds per step of the plan, None if there is none or the step has no such plans."""
    try:
        options = Options(memory=cap_bytes, verify="never", **forced)
        return planned(step, cluster, options).estimates.step_s
    except (InfeasibleError, InputError):
        return None


def row(name: str, step: Step, cluster: Cluster, cap_bytes: int) -> Row:
    """Searches one case, free and with each forced option."""
    start_s, found = process_time(), dict[str, float | None]()
    shapes = mesh_shapes(cluster, max_axes=3)
    meshes = random.Random(name).sample(shapes, min(NUM_MESHES, len(shapes)))
    every = {"": {}, **{f"mesh={format_mesh(one)}": {"mesh": one} for one in meshes}, **OPTIONS}
    for forced, options in every.items():
        found[forced] = _step_s(step, cluster, cap_bytes, options)
    return Row(name, found, process_time() - start_s)


def rows(options: argparse.Namespace, known: Mapping[str, Row]) -> Iterator[Row]:
    """All cases of a part."""
    peaks_bytes = {one.name: one.peak_bytes for one in caps.read(RECORDED).values()}
    part, parts = options.part
    every = [(preset, model) for preset in options.clusters for model in options.models]
    cases = [(*one, percent) for one in every for percent in PERCENT][part - 1 :: parts]
    for preset, model, percent in cases:
        name, cluster = f"{model} {preset} {percent}%", parse_cluster(preset)
        if name not in known:
            case = MODELS[model](cluster.num_devices)
            step = trace(case.step, *case.abstract_args())
            cap_bytes = int(peaks_bytes[f"{model} {preset} 100%"] * percent / 100)
            yield row(name, step, cluster, cap_bytes)


def digest(found: Sequence[Row]) -> Iterator[str]:
    """The lines below the table."""
    of_cases = {one.name: sorted(one.ratios(), key=lambda pair: pair[1]) for one in found}
    least = {name: pairs[0] for name, pairs in of_cases.items() if pairs}
    yield f"{len(found)} cases, {sum(map(len, of_cases.values()))} forced searches"
    for gain in (0.01, 0.03):
        faster = [name for name, (_, ratio) in least.items() if ratio < 1 - gain]
        yield f"cases in which a forced option is faster by more than {gain:.0%}: {len(faster)}"
    yield f"cases in which only a forced search has a plan: {sum(not ratio for _, ratio in least.values())}"
    for name, pairs in of_cases.items():
        if better := [f"{forced} {ratio:.3f}" for forced, ratio in pairs if ratio < 1]:
            yield f"| {name} | {', '.join(better)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=caps.MODELS_THERE, default=caps.MODELS_THERE)
    parser.add_argument("--clusters", nargs="+", default=caps.CLUSTERS)
    parser.add_argument("--part", nargs=2, type=int, default=(1, 1), metavar=("PART", "PARTS"))
    parser.add_argument("--record", type=Path, required=True, help="the file that cases are written to")
    options = parser.parse_args()
    record = json.loads(options.record.read_text()) if options.record.exists() else []
    kept = {one["name"]: Row(**one) for one in record}
    for one in rows(options, dict(kept)):
        kept[one.name] = one
        options.record.write_text(json.dumps([asdict(each) for each in kept.values()], indent=0) + "\n")
        times = ", ".join(
            f"{forced or 'free'} {'-' if s is None else f'{1e3 * s:.5g}'}" for forced, s in one.step_s.items()
        )
        print(f"| {one.name} | {times} | {one.cpu_s:.0f} CPU s |", flush=True)
    print(*digest([*kept.values()]), sep="\n")


if __name__ == "__main__":
    main()
