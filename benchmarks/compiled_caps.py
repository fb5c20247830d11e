"""Plans under a memory cap for models that no rule was tuned on: how many are compiled to more than their cap.

    python -m benchmarks.compiled_caps --record FILE [--models gan rnn] [--percent 85 70 55 40] [--cluster 8xA100-40GB]

Each model of `benchmarks.unseen_models` is searched without a cap, and then under caps that are shares of that plan's
predicted peak: once with `verify="never"`, whose plan is then verified, and once with `verify="auto"`, as a user asks. A row
that the file `--record` holds already is not made again, so that a run may be ended and resumed.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autoshard
from autoshard.search.plan.plan import Plan
from benchmarks.unseen_models import UNSEEN, Unseen

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


def _searched_s(plan: Plan) -> float:
    return sum(s for part, s in plan.search_s.items() if part != "trace")


def made(one: Unseen, model: str, cluster: str, percent: int, verify: str, cap_bytes: int) -> Row:
    """Searches for one row, and compiles its plan if the search did not."""
    (step, args), what = one, (model, cluster, percent, verify, cap_bytes)
    try:
        plan: Any = autoshard.search(
            step, *args, cluster=cluster, memory=cap_bytes, stages=1, verify=verify, progress=_silent
        )
    except autoshard.InfeasibleError as e:
        return Row(*what, said=str(e))
    peak_bytes = plan.estimates.compiled_peak_bytes
    if peak_bytes is None:
        peak_bytes = autoshard.verify(step, *args, plan=plan, progress=_silent).compiled.peak_bytes
    estimates = plan.estimates
    seconds = _searched_s(plan), plan.search_s.get("compiler", 0.0)
    return Row(*what, estimates.step_s, estimates.peak_bytes, peak_bytes, *seconds)


def _silent(line: str) -> None:
    del line


def rows(options: argparse.Namespace, known: dict[Any, Row]) -> Iterator[Row]:
    """All rows that are asked for and not known."""
    for model in options.models:
        wanted = [(p, v) for p in options.percent for v in ("never", "auto")]
        if all((model, options.cluster, p, v) in known for p, v in wanted):
            continue
        step, args = one = UNSEEN[model]()
        free: Any = autoshard.search(
            step, *args, cluster=options.cluster, stages=1, verify="never", progress=_silent
        )
        for percent, verify in wanted:
            if (model, options.cluster, percent, verify) not in known:
                cap_bytes = free.estimates.peak_bytes * percent // 100
                yield made(one, model, options.cluster, percent, verify, cap_bytes)


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
