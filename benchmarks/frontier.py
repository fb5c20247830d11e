"""What a memory cap costs: predicted time and memory of plans under falling caps, and what the compiler makes of them.

    python -m benchmarks.frontier [--only NAME ...] [--caps 100 85 ...] [--by-hand] [--predicted] [--json FILE]

Each model is planned for 8 H100s without a cap first. Caps then are shares of that plan's peak, and the last one is the
smallest under which the search says that it has a plan. Models are of real sizes, and their peaks without a cap near what
such a device has, or above. A row of the first table is a cap; it shows, per device unless said otherwise,

* the step's time, as predicted;
* its peak as predicted and as compiled with the cap as the device's memory; of deep unrolled models the compiled one is
  extrapolated from a shortened stack (`~`). `over` is by how much the compiled peak exceeds the cap;
* the arithmetic of matrix products and convolutions that the step does more than the one without a cap, on all devices
  together, as a share of that one's: counted in the step's own jaxpr, with what is recomputed and loops' lengths;
* host memory, microbatches, and of how many classes of ops residuals are recomputed.

With `--by-hand`, models whose layers are one `scan` get a second table: the same step, its layers under what people write by
hand (`benchmarks.scanned_stacks`), sharded and split into microbatches by the search but with `remat="never"`. For each cap
it has their times, the best one's time over ours, and the share that we save of its time beyond a step without a cap. A plan
that keeps to a lower cap is not searched again, and what no plan was found for is not asked again under lower caps.

Violations are listed below: compiled peaks over their caps, and steps that get faster as the cap falls.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

import autoshard
from autoshard.verification.judge import CompilerVerifier
from benchmarks.scanned_stacks import BY_HAND, Stack, make_scanned_gpt, make_scanned_llama
from cost_model.errors import AutoshardError, InfeasibleError
from cost_model.hardware import parse_cluster
from cost_model.units import format_bytes, format_seconds, parse_bytes
from cost_model.xla.process import Compiler
from search import driver
from search.driver import SearchResult
from search.ir.graph import Step
from search.ir.trace import trace_for
from search.mesh_problem import Options
from search.problem.flat_program import flatten
from tests.gpu.compiled import HURRY
from tests.zoo import Case, make_evoformer, make_megatron, make_moe, make_vit

CLUSTER = parse_cluster("8xH100-80GB")

NO_CAP_BYTES = 1 << 42
TINY_CAP_BYTES = 1 << 10
"""Nothing fits it; what is said of it names the smallest cap that has a plan."""

CAPS_PERCENT = (100, 85, 70, 55, 40)

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""JAX's primitives that are counted as such."""

GIB = 1 << 30

SAME_TIME = 1e-3
"""Relative: by how much a step may get faster under a lower cap without being listed. Source: a choice of ours."""

_GPT: Mapping[str, Any] = {
    "num_layers": 24,
    "hidden": 2048,
    "heads": 16,
    "vocab": 51200,
    "seq": 2048,
    "compute_dtype": jnp.bfloat16,
}
_LLAMA: Mapping[str, Any] = {
    "num_layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 11008,
    "vocab": 32000,
    "seq": 2048,
    "compute_dtype": jnp.bfloat16,
}

SCANNED: Mapping[str, Callable[[Stack], Case]] = {
    "GPT 1.3B, scanned": partial(make_scanned_gpt, **_GPT, batch=32),
    "Llama 7B, scanned": partial(make_scanned_llama, **_LLAMA, batch=16),
}
"""Models with a way to keep what their layers make."""

MODELS: Mapping[str, Callable[[], Case]] = {
    **{name: partial(make, BY_HAND["everything_saveable"]) for name, make in SCANNED.items()},
    "GPT 1.3B": partial(make_megatron, **_GPT, batch=64),
    "MoE": partial(
        make_moe, 8, 2048, 16, num_experts=8, ffn=8192, vocab=32000, seq=1024, batch=256, dtype=jnp.bfloat16
    ),
    "ViT-L": partial(
        make_vit, 24, 1024, 16, image=224, patch=16, num_classes=1000, batch=2048, dtype=jnp.bfloat16
    ),
    "Evoformer": partial(
        make_evoformer, 12, 256, 128, sequences=128, residues=256, batch=32, dtype=jnp.bfloat16
    ),
}

FRONTIER_HEADER = (
    "model",
    "cap",
    "GiB",
    "step",
    "slower by",
    "peak predicted",
    "compiled",
    "over",
    "more products",
    "host",
    "microbatches",
    "recomputed",
    "mesh",
    "searched, compiled in",
)


@dataclass(frozen=True, slots=True)
class Point:
    """A plan under a cap, or that there is none.

    Attributes:
      cap_bytes: the cap.
      step_s: seconds of the step, predicted.
      peak_bytes: the device's memory at its highest, predicted.
      product_flops: of matrix products and convolutions, in one step on all devices.
      host_bytes: predicted.
      num_microbatches: of the step.
      num_recomputed: classes of ops whose results are recomputed.
      mesh: sizes of its axes.
      search_s: seconds of the search.
      compiled_bytes: the peak as compiled; None if that was not asked.
      is_extrapolated: whether from a shortened stack.
      compile_s: seconds of the verification.
      failure: why there is no plan, or no compiled program.
    """

    cap_bytes: int
    step_s: float = 0.0
    peak_bytes: int = 0
    product_flops: int = 0
    host_bytes: int = 0
    num_microbatches: int = 1
    num_recomputed: int = 0
    mesh: tuple[int, ...] = ()
    search_s: float = 0.0
    compiled_bytes: int | None = None
    is_extrapolated: bool = False
    compile_s: float = 0.0
    failure: str = ""

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan."""
        return self.step_s > 0

    @property
    def over_bytes(self) -> int:
        """By how much the compiled peak exceeds the cap."""
        return max(0, (self.compiled_bytes or 0) - self.cap_bytes)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans one step under any cap.

    Attributes:
      step: the traced step.
      remat: as `autoshard.search` takes it.
      is_compiled: whether the compiler is asked about each plan.
    """

    step: Step
    remat: str | None = None
    is_compiled: bool = False

    @classmethod
    def of(cls, case: Case, remat: str | None = None, is_compiled: bool = False) -> "Planner":
        """Traces a case's step."""
        return cls(trace_for(CLUSTER.device.platform, case.step, *case.abstract_args()), remat, is_compiled)

    def point(self, cap_bytes: int) -> Point:
        """The best plan under a cap."""
        start_s = time.perf_counter()
        try:
            found = driver.find(self.step, CLUSTER, Options(cap_bytes, remat=self.remat))
        except InfeasibleError as e:
            return Point(cap_bytes, search_s=time.perf_counter() - start_s, failure=str(e))
        planned = _planned(found, cap_bytes, time.perf_counter() - start_s)
        return _compiled(found, planned) if self.is_compiled else planned

    def smallest(self) -> Point | None:
        """The plan under the smallest cap that the search says has one."""
        said = replace(self, is_compiled=False).point(TINY_CAP_BYTES).failure
        cap_bytes = smallest_cap(said)
        return None if cap_bytes is None else self.point(cap_bytes)


def smallest_cap(said: str) -> int | None:
    """The cap that a search in vain says would do."""
    found = re.search(r"a cap of ([\d.,]+ [KMGT]iB)", said)
    return parse_bytes(found[1]) if found else None


def product_flops(step: Step) -> int:
    """Multiplications and additions of all matrix products and convolutions of a step, on all devices together."""
    products = (op for op in flatten(step).ops if op.name in PRODUCTS)
    return round(sum(op.count * op.rule.num_points * op.rule.flops_per_point for op in products))


def _planned(found: SearchResult, cap_bytes: int, search_s: float) -> Point:
    plan = found.plan
    return Point(
        cap_bytes,
        plan.estimates.step_s,
        plan.estimates.peak_bytes,
        product_flops(found.step),
        plan.estimates.host_bytes,
        plan.decisions.microbatches,
        len(plan.decisions.retention),
        tuple(plan.decisions.mesh.values()),
        search_s,
    )


def _compiled(found: SearchResult, planned: Point) -> Point:
    try:
        proof = CompilerVerifier(CLUSTER, Compiler(flags=HURRY), lambda line: None).verified(found)
    except AutoshardError as e:
        return replace(planned, failure=f"{type(e).__name__}: {e}")
    return replace(
        planned,
        compiled_bytes=proof.compiled.peak_bytes,
        is_extrapolated=proof.is_extrapolated,
        compile_s=proof.seconds["compile"],
    )


def frontier(planner: Planner, percents: Sequence[int]) -> Iterator[Point]:
    """The plan without a cap, and those under falling caps down to the smallest."""
    free = replace(planner, is_compiled=False).point(NO_CAP_BYTES)
    yield free
    for percent in percents:
        yield planner.point(free.peak_bytes * percent // 100)
    smallest = planner.smallest()
    if smallest is not None:
        yield smallest


def under(planner: Planner, caps_bytes: Sequence[int]) -> Iterator[Point]:
    """The plans under falling caps; those that keep to lower ones too, and caps that have none, are not asked again."""
    last = planner.point(NO_CAP_BYTES)
    for cap_bytes in caps_bytes:
        if last.is_planned and last.peak_bytes > cap_bytes:
            last = planner.point(cap_bytes)
        yield replace(last, cap_bytes=cap_bytes)


def over_the_cap(points: Iterable[Point]) -> list[Point]:
    """The plans that are compiled to more than they may hold."""
    return [p for p in points if p.over_bytes]


def faster_below(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Plans, each with the best one under a lower cap, where that is faster: it would have done for the first one too."""
    planned = sorted((p for p in points if p.is_planned), key=lambda p: -p.cap_bytes)
    return [
        (above, below) for above, below in pairwise(planned) if below.step_s < (1 - SAME_TIME) * above.step_s
    ]


def saved_share(free_s: float, ours_s: float, best_s: float) -> float | None:
    """Of the best other step's time beyond a step without a cap, what ours does without; None where it has none."""
    return (best_s - ours_s) / (best_s - free_s) if best_s > free_s else None


# --- tables


def frontier_row(name: str, free: Point, point: Point) -> tuple[str, ...]:
    """A cap's cells, as in `FRONTIER_HEADER`."""
    is_free = point is free
    cap = ("none", "") if is_free else (f"{point.cap_bytes / free.peak_bytes:.0%}", _gib(point.cap_bytes))
    if not point.is_planned:
        return name, *cap, _short(point.failure), *[""] * (len(FRONTIER_HEADER) - 4)
    return (
        name,
        *cap,
        format_seconds(point.step_s),
        f"{point.step_s / free.step_s - 1:+.1%}",
        _gib(point.peak_bytes),
        _compiled_text(point),
        f"**{point.over_bytes / point.cap_bytes:.1%}**" if point.over_bytes else "",
        f"{point.product_flops / free.product_flops - 1:.1%}",
        format_bytes(point.host_bytes),
        str(point.num_microbatches),
        str(point.num_recomputed),
        "x".join(map(str, point.mesh)),
        f"{point.search_s:.0f} s, {point.compile_s:.0f} s",
    )


def _compiled_text(point: Point) -> str:
    if point.compiled_bytes is None:
        return _short(point.failure)
    return f"{'~' * point.is_extrapolated}{_gib(point.compiled_bytes)}"


def by_hand_row(name: str, free: Point, ours: Point, by_hand: Mapping[str, Point]) -> tuple[str, ...]:
    """A cap's cells, as in `by_hand_header`."""
    cells = [_by_hand_text(ours, free), *(_by_hand_text(p, free) for p in by_hand.values())]
    fitting = {way: p for way, p in by_hand.items() if p.is_planned}
    cap = f"{ours.cap_bytes / free.peak_bytes:.0%}"
    if not fitting:
        return name, cap, *cells, "none", "", ""
    best = min(fitting, key=lambda way: fitting[way].step_s)
    if not ours.is_planned:
        return name, cap, *cells, best, "", ""
    best_s = fitting[best].step_s
    share = saved_share(free.step_s, ours.step_s, best_s)
    return (
        name,
        cap,
        *cells,
        best,
        f"{ours.step_s / best_s:.3f}",
        "no overhead" if share is None else f"{share:.0%}",
    )


def by_hand_header() -> tuple[str, ...]:
    """Of the second table; a way's cell has time, peak in GiB, and products beyond the step's without a cap."""
    return "model", "cap", "ours", *BY_HAND, "best by hand", "ours / best", "overhead saved"


def _by_hand_text(point: Point, free: Point) -> str:
    if not point.is_planned:
        return "no plan"
    more = point.product_flops / free.product_flops - 1
    split = f", {point.num_microbatches} microbatches" if point.num_microbatches > 1 else ""
    return f"{format_seconds(point.step_s)}, {_gib(point.peak_bytes)}, {more:+.0%}{split}"


def violations(name: str, points: Sequence[Point]) -> Iterator[str]:
    """What should not be, a line each."""
    for p in over_the_cap(points):
        yield (
            f"- {name}: under {_gib(p.cap_bytes)} GiB compiled to {_compiled_text(p)} ({p.over_bytes / p.cap_bytes:+.1%}), "
            f"predicted {_gib(p.peak_bytes)}"
        )
    for above, below in faster_below(points):
        yield (
            f"- {name}: {format_seconds(above.step_s)} under {_gib(above.cap_bytes)} GiB, but "
            f"{format_seconds(below.step_s)} under {_gib(below.cap_bytes)} GiB"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.4g}"


def _short(said: str) -> str:
    return " ".join(said.split()).replace("|", "\\|")[:160]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _begin(header: Sequence[str]) -> None:
    print("", _line(header), _line(["---"] * len(header)), sep="\n", flush=True)


# --- the run


@dataclass(slots=True)
class Record:
    """All numbers so far, and the file that they are kept in."""

    path: Path | None
    rows: list[dict[str, Any]]

    def add(self, table: str, name: str, point: Point, way: str = "ours") -> None:
        """A plan; the file is written anew, so that a run that is ended has its rows."""
        self.rows.append({"table": table, "model": name, "way": way, **asdict(point)})
        if self.path:
            self.path.write_text(json.dumps(self.rows, indent=1) + "\n")


def main() -> None:
    options = _options()
    record = Record(options.json, [])
    points = {name: list[Point]() for name in options.only}
    _begin(FRONTIER_HEADER)
    for name, found in points.items():
        for point in frontier(Planner.of(MODELS[name](), is_compiled=not options.predicted), options.caps):
            found.append(point)
            record.add("frontier", name, point)
            print(_line(frontier_row(name, found[0], point)), flush=True)
    print("", *(line for name, found in points.items() for line in violations(name, found)), sep="\n")
    if options.by_hand:
        _begin(by_hand_header())
        for name in (name for name in points if name in SCANNED):
            _compare(name, points[name], record)
    print(f"\nautoshard {autoshard.__version__}")


def _compare(name: str, points: Sequence[Point], record: Record) -> None:
    """The second table's rows of a model."""
    free, *capped = points
    caps_bytes = [p.cap_bytes for p in capped]
    by_hand: dict[str, list[Point]] = {}
    for way, stack in BY_HAND.items():
        by_hand[way] = list(under(Planner.of(SCANNED[name](stack), remat="never"), caps_bytes))
        for point in by_hand[way]:
            record.add("by hand", name, point, way)
    for n, ours in enumerate(capped):
        print(
            _line(by_hand_row(name, free, ours, {way: found[n] for way, found in by_hand.items()})),
            flush=True,
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--caps",
        nargs="*",
        type=int,
        default=CAPS_PERCENT,
        metavar="PERCENT",
        help="of the peak without a cap",
    )
    parser.add_argument("--by-hand", action="store_true", help="the second table too")
    parser.add_argument("--predicted", action="store_true", help="compile nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all numbers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
