"""Plans under a memory cap for models that no rule was tuned on: how many are compiled to more than their cap.

    python -m benchmarks.compiled_caps --record FILE [--models gan rnn] [--percent 85 70 55 40] [--cluster 8xA100-40GB]

Each model of `benchmarks.unseen_models` is searched without a cap, and then under caps that are shares of that plan's
predicted peak, without pipelines: as with `verify="never"`, whose plan is compiled afterwards, and with `verify="auto"`.
A row that the file `--record` holds already is not made again, so that a run may be ended and resumed.

The table has the compiled peak over the cap for both, the predicted step times, and the seconds of both searches as a user
waits for them, tracing excluded; "compiler" is the part of it in `auto`. Below it: how many plans exceed their cap, the
range of the compiled peak over the predicted one (the source of `PEAK_BAND` in `search.plan.peak_band`), and the seconds
that `auto` adds.
"""

import argparse
import json
import os
import statistics
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autoshard
from autoshard import planning
from autoshard.compiled_peaks import CompilerJudge, Judgement, judge_of, kept
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.options import Options as UserOptions
from autoshard.progress import Progress
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace_call
from autoshard.search.options import Options
from autoshard.search.result import SearchResult
from benchmarks.unseen_models import UNSEEN


def _silent(line: str) -> None:
    del line


CLUSTER, PERCENT = "8xA100-40GB", (85, 70, 55, 40)


@dataclass(frozen=True, slots=True)
class Row:
    """A plan under a cap; without a mesh where nothing fits.

    Attributes:
      model: its name.
      cluster: the preset.
      percent: the cap, as a share of the peak without one.
      verify: the option that the search was given.
      cap_bytes: the cap.
      step_s: the predicted step time.
      predicted_bytes: the predicted peak.
      compiled_bytes: the compiled peak; 0 if the plan was not compiled.
      search_s: seconds of the search, tracing excluded.
      compiler_s: the compiler's part of them.
      said: the error where there is no plan.
    """

    model: str
    cluster: str
    percent: int
    verify: str
    cap_bytes: int
    step_s: float = 0.0
    predicted_bytes: int = 0
    compiled_bytes: int = 0
    search_s: float = 0.0
    compiler_s: float = 0.0
    said: str = ""

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What was asked."""
        return self.model, self.cluster, self.percent, self.verify

    @property
    def is_over(self) -> bool:
        """Whether the plan is compiled to more than its cap."""
        return self.compiled_bytes > self.cap_bytes


@dataclass(frozen=True, slots=True)
class Asker:
    """Searches one step for one cluster.

    Attributes:
      model: its name.
      step: the traced step.
      cluster: where it will run.
      judge: compiles its plans.
    """

    model: str
    step: Step
    cluster: Cluster
    judge: CompilerJudge

    @classmethod
    def of(cls, model: str, cluster: Cluster) -> "Asker":
        """Traces a model's step."""
        step, args = UNSEEN[model]()
        judge = judge_of(cluster, UserOptions(), _silent)
        assert judge is not None, "the compiler is not installed: autoshard[verify]"
        return cls(model, trace_call(cluster.platform, step, args, {}), cluster, judge)

    def found(self, limit_bytes: int, limit_s: float | None = None, said: Progress = _silent) -> SearchResult:
        """The plan under a limit, as predicted."""
        return planning.find(self.step, self.cluster, Options(limit_bytes, time_limit_s=limit_s), said)

    def rows(self, percent: int, cap_bytes: int) -> Iterator[Row]:
        """The rows of one cap. The first plan of `auto` is that of `never`: it is searched once, and compiled for both."""
        first = list[tuple[SearchResult, Judgement]]()

        def judged(found: SearchResult, timeout_s: float | None) -> Judgement:
            judgement = self.judge(found, timeout_s)
            first.append((found, judgement))
            return judgement

        what = (self.model, self.cluster.name, percent)
        try:
            auto = kept(self.found, judged, cap_bytes, _silent, is_asked=False)
        except InfeasibleError as e:
            row = Row(*what, "auto", cap_bytes, said=str(e))
        else:
            compiled_bytes = auto.plan.estimates.compiled_peak_bytes or judged(auto, None).compiled_bytes
            row = self._row((*what, "auto"), cap_bytes, auto, compiled_bytes)
        if first:
            found, judgement = first[0]
            yield self._row((*what, "never"), cap_bytes, found, judgement.compiled_bytes)
        else:
            yield replace(row, verify="never")
        yield row

    def _row(
        self, what: tuple[str, str, int, str], cap_bytes: int, found: SearchResult, compiled_bytes: int
    ) -> Row:
        estimates, search_s = found.plan.estimates, found.plan.search_s
        seconds = sum(s for part, s in search_s.items() if part != "trace")
        peaks = estimates.peak_bytes, compiled_bytes
        return Row(*what, cap_bytes, estimates.step_s, *peaks, seconds, search_s.get("compiler", 0.0))


def rows(options: argparse.Namespace, known: dict[Any, Row]) -> Iterator[Row]:
    """All rows that are asked for and not known."""
    for model in options.models:
        wanted = [p for p in options.percent if (model, options.cluster, p, "auto") not in known]
        if wanted:
            asker = Asker.of(model, parse_cluster(options.cluster))
            free = asker.found(asker.cluster.device_memory_limit())
            for percent in wanted:
                yield from asker.rows(percent, free.plan.estimates.peak_bytes * percent // 100)


def table(found: Sequence[Row]) -> Iterator[str]:
    """The table in Markdown, and the lines below it."""
    of = {row.key: row for row in found}
    yield "| model | cap | compiled: never | auto | step: never | auto | search: never | auto | compiler |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for never in (row for row in found if row.verify == "never"):
        auto = of.get((never.model, never.cluster, never.percent, "auto"))
        cells = [(_share(one), _ms(one), f"{one.search_s:.1f} s") for one in (never, auto) if one is not None]
        between = [cell for pair in zip(*cells, strict=True) for cell in pair]
        compiler = f"{auto.compiler_s:.1f} s" if auto else ""
        yield f"| {never.model} | {never.percent}% | {' | '.join(between)} | {compiler} |"
    yield from _digest(found)


def _share(row: Row) -> str:
    return f"{row.compiled_bytes / row.cap_bytes:.1%}" if row.step_s else "no plan"


def _ms(row: Row) -> str:
    return f"{1e3 * row.step_s:.3g} ms" if row.step_s else ""


def _digest(found: Sequence[Row]) -> Iterator[str]:
    planned = [row for row in found if row.step_s]
    for verify in ("never", "auto"):
        here = [row for row in planned if row.verify == verify]
        over = [row.compiled_bytes / row.cap_bytes for row in here if row.is_over]
        most = f", by up to {max(over) - 1:.1%}" if over else ""
        yield f"\n{verify}: {len(over)} of {len(here)} plans are compiled to more than their cap{most}"
    ratios = [row.compiled_bytes / row.predicted_bytes for row in planned if row.verify == "never"]
    if ratios:
        yield f"\ncompiled over predicted, never: {min(ratios):.2f} to {max(ratios):.2f}"
    added = [row.compiler_s for row in planned if row.verify == "auto"]
    if added:
        yield f"\nseconds of the compiler, auto: median {statistics.median(added):.1f}, at most {max(added):.1f}"


def main() -> None:
    """Makes the rows that are missing, records each, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(UNSEEN), choices=list(UNSEEN))
    parser.add_argument("--percent", nargs="+", type=int, default=PERCENT)
    parser.add_argument("--cluster", default=CLUSTER)
    options = parser.parse_args()
    warnings.simplefilter("ignore", autoshard.AutoshardWarning)
    data = json.loads(options.record.read_text()) if options.record.exists() else []
    known = {row.key: row for row in (Row(**one) for one in data)}
    for row in rows(options, dict(known)):
        known[row.key] = row
        options.record.write_text(json.dumps([asdict(one) for one in known.values()], indent=1) + "\n")
        print(row, flush=True)
    print("\n".join(table(list(known.values()))))


if __name__ == "__main__":
    main()
