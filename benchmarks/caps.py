"""The yardstick of the search: what is found for 12 models on 4 clusters under 5 caps, recorded once and compared later.

    python -m benchmarks.caps --record benchmarks/recorded/caps.json [--models unet lstm] [--clusters 16xL4]
    python -m benchmarks.caps --against benchmarks/recorded/caps.json [--record new.json] [...]

The models and clusters are those of `benchmarks.experts`. The first cap is the device's memory. The others are shares of
the peak of the plan found under the first. A row that the file `--record` holds already is not made again, so that a run
may be ended and resumed. All times are predicted; searches take the default time, which is nominal and the same on every
machine.

`--against` searches under the recorded caps and prints each row beside the recorded one. In the end it prints the mean
change of the step time, the number of rows that are slower by more than 1% and by more than 3%, and the rows where a lower
cap gave a faster step.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import process_time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_mesh
from autoshard.search import driver
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from benchmarks.experts import MODELS

CLUSTERS = ("8xH100-80GB", "64xA100-80GB-Ethernet", "16xL4", "12xA100-40GB")

PERCENT = (100, 85, 65, 50, 35)
"""The caps; 100 stands for the device's memory."""

MODELS_THERE = (
    "llama",
    "gpt",
    "t5",
    "moe",
    "vit",
    "mixer",
    "resnet",
    "unet",
    "dlrm",
    "evoformer",
    "lstm",
    "messages",
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was found under one cap; infinite times and no mesh where nothing fits."""

    model: str
    cluster: str
    percent: int
    cap_bytes: int
    step_s: float
    peak_bytes: float = 0.0
    mesh: str = ""
    microbatches: int = 1
    num_recomputed: int = 0
    recompute_s: float = 0.0
    host_bytes: float = 0.0
    gap: float | None = None
    cpu_s: float = 0.0

    @property
    def name(self) -> str:
        """By which rows of two records are compared."""
        return f"{self.model} {self.cluster} {self.percent}%"


def searched(step: Step, cluster: Cluster, model: str, percent: int, cap_bytes: int) -> Row:
    """One search."""
    start_s, named = process_time(), (model, cluster.name, percent, cap_bytes)
    try:
        plan = driver.find(step, cluster, Options(cap_bytes)).plan
    except InfeasibleError:
        return Row(*named, math.inf, cpu_s=process_time() - start_s)
    decisions, estimates = plan.decisions, plan.estimates
    return Row(
        *named,
        estimates.step_s,
        estimates.peak_bytes,
        format_mesh(tuple(decisions.mesh.values())),
        decisions.microbatches,
        len(decisions.retention),
        estimates.recompute_s,
        estimates.host_bytes,
        plan.gap,
        process_time() - start_s,
    )


def rows(options: argparse.Namespace, known: Mapping[str, Row], before: Mapping[str, Row]) -> Iterator[Row]:
    """All rows, model by model. Those known already are not made again. Rows of another record say the caps."""
    for preset in options.clusters:
        cluster = parse_cluster(preset)
        for model in options.models:
            step, free_bytes = None, 0.0
            for percent in options.percent:
                cap_bytes = (
                    cluster.device_memory_limit() if percent == 100 else int(free_bytes * percent / 100)
                )
                name = f"{model} {preset} {percent}%"
                cap_bytes = before[name].cap_bytes if name in before else cap_bytes
                row = known.get(name)
                if row is None:
                    step = step or _traced(model, cluster)
                    row = searched(step, cluster, model, percent, cap_bytes)
                free_bytes = row.peak_bytes if percent == 100 else free_bytes
                yield row


def _traced(model: str, cluster: Cluster) -> Step:
    case = MODELS[model](cluster.num_devices)
    return trace(case.step, *case.abstract_args())


def line(row: Row, before: Row | None) -> str:
    """A row of the table."""
    cells = [
        row.model,
        row.cluster,
        f"{row.percent}%",
        f"{1e3 * row.step_s:.5g}",
        f"{row.peak_bytes / 2**20:.0f}",
        row.mesh,
        str(row.microbatches),
        f"{row.num_recomputed}, {1e3 * row.recompute_s:.4g}",
        f"{row.host_bytes / 2**20:.0f}",
        "-" if row.gap is None else f"{row.gap:.2%}",
        f"{row.cpu_s:.1f}",
    ]
    if before is not None:
        cells += [
            f"{1e3 * before.step_s:.5g}",
            before.mesh,
            f"{_change(row, before):+.2%}",
            f"{before.cpu_s:.1f}",
        ]
    return f"| {' | '.join(cells)} |"


HEAD = "| model | cluster | cap | step ms | peak MiB | mesh | microbatches | recomputed, ms | host MiB | gap | CPU s "
BESIDE = "| recorded ms | mesh | change | CPU s "


def _change(row: Row, before: Row) -> float:
    if row.step_s == before.step_s:
        return 0.0
    return row.step_s / before.step_s - 1


def digest(found: Sequence[Row], before: Mapping[str, Row]) -> Iterator[str]:
    """The lines below the table."""
    if changes := {row.name: _change(row, before[row.name]) for row in found if row.name in before}:
        finite = [c for c in changes.values() if c < math.inf]
        yield f"{len(changes)} rows, mean change {statistics.mean(finite):+.3%}"
        for most in (0.01, 0.03):
            slower = [name for name, change in changes.items() if change > most]
            yield f"slower by more than {most:.0%}: {len(slower)} ({', '.join(slower)})"
        new, old = (sum(r.cpu_s for r in some) for some in (found, [before[n] for n in changes]))
        yield f"CPU seconds: {new:.0f}, recorded {old:.0f}"
    for above, below in pairwise(found):
        is_lower = (above.model, above.cluster) == (
            below.model,
            below.cluster,
        ) and below.percent < above.percent
        if is_lower and below.step_s < above.step_s:
            yield f"faster under a lower cap: {above.name} {above.step_s:.5g} s, {below.name} {below.step_s:.5g} s"


def read(path: Path | None) -> dict[str, Row]:
    """The rows of a record, by name."""
    if path is None or not path.exists():
        return {}
    found = [Row(**row) for row in json.loads(path.read_text())]
    return {row.name: row for row in found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS_THERE, default=MODELS_THERE)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--percent", nargs="+", type=int, choices=PERCENT, default=PERCENT)
    parser.add_argument("--record", type=Path, help="the file that rows are written to")
    parser.add_argument("--against", type=Path, help="a record to compare with")
    options = parser.parse_args()
    before, kept, found = read(options.against), read(options.record), list[Row]()
    print(HEAD + (BESIDE if before else "") + "|", flush=True)
    for row in rows(options, kept, before):
        found.append(row)
        kept[row.name] = row
        if options.record:
            text = ",\n".join(json.dumps(asdict(one)) for one in kept.values())
            options.record.write_text(f"[\n{text}\n]\n")
        print(line(row, before.get(row.name)), flush=True)
    print(*digest(found, before), sep="\n")


if __name__ == "__main__":
    main()
