"""Prices that `explain` says, beside searches that force the alternative.

python -m benchmarks.explained [--models gpt resnet] [--cluster 8xH100-80GB] [--draws 5] [--telling] [--out table.md]

Decisions on arguments are drawn at random from the plans of some models, and explained: of the tests' models, or of larger
ones (`LARGE`), whose decisions have real prices. With --telling, decisions that are no tie come first, and of the larger
models only arrays of a MiB and more are drawn. Then the step is searched again on the plan's mesh with the runner-up pinned.
The price found is the difference of the two step times. Both searches recompute and offload nothing, as explained prices
keep that as it is.

A price *agrees* if it is within 2% of the price found. It is *within bounds* if the price found lies between the bounds that
the explanation says, the pinned search's own gap allowed for. Everything else is *wrong*.
"""

import argparse
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_seconds
from autoshard.search import applying, driver
from autoshard.search.explanation import explain
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import read_partition_spec
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.explained import PRECISE, TIE, Explanation
from autoshard.search.plan.plan import Plan
from tests.zoo import MAKERS, MOMENTUM, Case, make_gpt_linen, make_llama, make_mlp, make_vit

MODELS = ("gpt_linen", "resnet", "dlrm", "lstm")
LARGE: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {
        "gpt": partial(make_gpt_linen, 1, 1024, 16, 8192, 256, 32, optimizer=MOMENTUM),
        "llama": partial(make_llama, 1, 1024, 16, 8, 2816, 8192, 256, 32, optimizer=MOMENTUM),
        "vit": partial(make_vit, 1, 1024, 16, 64, 8, 1024, 256, optimizer=MOMENTUM),
        "perceptron": partial(make_mlp, (2048, 8192, 8192, 2048), 4096),
    }
)
"""Models of one layer and a real width, in which an array is a part of the step that counts."""

SEED = 0
MAX_EXPLAINED = 20
"""Decisions of a model that are drawn and explained, to find some that are no tie."""

LEAST_BYTES = 1 << 20
"""Of an array of a large model that is drawn to find decisions that are no tie: smaller ones cost next to nothing."""

HEADS = ("model", "argument", "is", "runner-up", "reason", "price said", "price found", "verdict")


@dataclass(frozen=True, slots=True)
class Row:
    """One decision: its explanation, and the price that a search finds."""

    model: str
    answer: Explanation
    found_s: float
    slack_s: float

    @property
    def verdict(self) -> str:
        """Whether the explanation is right."""
        runner_up = self.answer.runner_up
        assert runner_up is not None, "drawn decisions have one"
        if abs(runner_up.more_s - self.found_s) <= PRECISE * abs(self.found_s):
            return "agrees"
        is_within = runner_up.at_least_s <= self.found_s <= runner_up.more_s + self.slack_s
        return "within bounds" if is_within else "wrong"

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        runner_up = self.answer.runner_up
        assert runner_up is not None, "drawn decisions have one"
        said = f"{runner_up.more_s * 1e6:+.3g} us"
        if not runner_up.is_precise:
            said = f"{runner_up.at_least_s * 1e6:+.3g} to {said}"
        found = f"{self.found_s * 1e6:+.3g} us"
        name, choices = f"`{self.answer.name}`", (f"`{self.answer.choice}`", f"`{runner_up.choice}`")
        return (self.model, name, *choices, self.answer.reason, said, found, self.verdict)


def rows_of(model: str, cluster: Cluster, num_draws: int, is_telling: bool) -> Iterator[Row]:
    """Drawn decisions of a model's plan."""
    case = (LARGE.get(model) or MAKERS[model])()
    step = trace(case.step, *case.abstract_args())
    plan = _searched(step, cluster, None, {})
    applied = applying.apply(step, plan, cluster)
    names = applied.on_mesh.codec.names
    values = [step.graph.values[v] for v in step.graph.inputs]
    sizes = {one.name: v.num_bytes for one, v in zip(step.arguments, values, strict=True)}
    least_bytes = LEAST_BYTES if is_telling and model in LARGE else 0
    nodes = [n for n, own in enumerate(names) if sizes.get(own[0], -1) >= least_bytes]
    drawn = random.Random(SEED).sample(nodes, len(nodes))[: MAX_EXPLAINED if is_telling else None]
    answers = ((explain(applied, names[node][0]), names[node]) for node in drawn)
    known = ((answer, own, answer.runner_up) for answer, own in answers if answer.runner_up is not None)
    chosen = sorted(known, key=lambda one: one[0].reason == TIE) if is_telling else known
    for answer, own, runner_up in islice(chosen, num_draws):
        pins = dict.fromkeys(own, read_partition_spec(runner_up.choice))
        pinned = _searched(step, cluster, tuple(plan.decisions.mesh.values()), pins)
        found_s = pinned.estimates.step_s - plan.estimates.step_s
        yield Row(model, answer, found_s, (pinned.gap or 0.0) * pinned.estimates.step_s)


def _searched(step: Step, cluster: Cluster, mesh: tuple[int, ...] | None, pins: dict) -> Plan:
    options = Options(
        cluster.device_memory_limit(), mesh, pins or None, remat="never", microbatches=1, offload="never"
    )
    return driver.find(step, cluster, options).plan


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--cluster", default="8xH100-80GB")
    parser.add_argument("--draws", type=int, default=5, help="decisions of each model")
    parser.add_argument(
        "--telling", action="store_true", help="of 20 drawn decisions, those that are no tie first"
    )
    parser.add_argument("--out", type=Path, help="the table's file")
    options = parser.parse_args()
    cluster = parse_cluster(options.cluster)
    rows, table = list[Row](), [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    print(*table, sep="\n", flush=True)
    for model in options.models:
        for row in rows_of(model, cluster, options.draws, options.telling):
            rows.append(row)
            table.append(f"| {' | '.join(row.cells)} |")
            print(table[-1], flush=True)
    step_s = {row.model: format_seconds(row.answer.step_s) for row in rows}
    print(f"\nsteps: {step_s}")
    for verdict in ("agrees", "within bounds", "wrong"):
        print(f"{verdict}: {sum(row.verdict == verdict for row in rows)} of {len(rows)}")
    if options.out:
        options.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
