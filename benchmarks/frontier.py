"""What a memory cap costs: predicted time and memory of plans under falling caps, and what the compiler makes of them.

    python -m benchmarks.frontier [--only NAME ...] [--caps 100 85 ...] [--by-hand] [--predicted] [--json FILE]

Each model is planned for 8 H100s without a cap first. Caps then are shares of that plan's peak, and the last one is the
smallest under which the search says that it has a plan. Models are of real sizes, and their peaks without a cap near what
such a device has, or above. A row of the first table is a cap; it shows, per device unless said otherwise,

* the step's time, as predicted;
* its peak as predicted and as compiled with the cap as the device's memory; of deep unrolled models the compiled one is
  extrapolated from a shortened stack (`~`), unless that exceeds the cap. Where the search's first plan does, by `first over`
  of the cap, the search goes on together with the compiler, as with `--verify`, and the row is the plan that this ends with;
* the arithmetic of matrix products and convolutions that the step does more than the one without a cap, on all devices
  together, as a share of that one's: counted in the step's own jaxpr, with what is recomputed and loops' lengths;
* host memory, microbatches, and of how many classes of ops residuals are recomputed.

With `--by-hand`, models whose layers are one `scan` get a second table: the same step, its layers under what people write by
hand (`benchmarks.scanned_stacks`), sharded and split into microbatches by the search but with `remat="never"`. For each cap
it has their times, the best one's time over ours, and the share that we save of its time beyond a step without a cap. A plan
that keeps to a lower cap is not searched again, and what no plan was found for is not asked again under lower caps.

Listed below: plans whose compiled peaks were above their caps, and steps that get faster as the cap falls.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

import autoshard
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_bytes, format_seconds
from benchmarks.scanned_stacks import BY_HAND, Stack, make_scanned_gpt, make_scanned_llama
from benchmarks.under_caps import Planner, Point, faster_below, frontier, over_the_cap, saved_share, under
from tests.zoo import LLAMA_7B, Case, make_evoformer, make_megatron, make_moe, make_vit

CLUSTER = parse_cluster("8xH100-80GB")

CAPS_PERCENT = (100, 85, 70, 55, 40)

GIB = 1 << 30

_GPT: Mapping[str, Any] = {
    "num_layers": 24,
    "hidden": 2048,
    "heads": 16,
    "vocab": 51200,
    "seq": 2048,
    "compute_dtype": jnp.bfloat16,
}
_LLAMA: Mapping[str, Any] = {**LLAMA_7B, "seq": 2048, "batch": 16}

SCANNED: Mapping[str, Callable[[Stack], Case]] = {
    "GPT 1.3B, scanned": partial(make_scanned_gpt, **_GPT, batch=32),
    "Llama 7B, scanned": partial(make_scanned_llama, **_LLAMA),
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
    "first over",
    "more products",
    "host",
    "microbatches",
    "recomputed",
    "mesh",
    "searched, compiled in",
)


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
        f"{point.over_bytes / point.cap_bytes:.1%}" if point.over_bytes else "",
        f"{point.product_flops / free.product_flops - 1:.1%}",
        format_bytes(point.host_bytes),
        str(point.num_microbatches),
        str(point.num_recomputed),
        "x".join(map(str, point.mesh)),
        f"{point.search_s:.0f} s, {point.compile_s:.0f} s",
    )


def _compiled_text(point: Point) -> str:
    if point.compiled_bytes is None or point.failure:
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
        yield f"- {name}: under {_gib(p.cap_bytes)} GiB compiled {p.over_bytes / p.cap_bytes:.1%} above it{_then(p)}"
    for above, below in faster_below(points):
        yield (
            f"- {name}: {format_seconds(above.step_s)} under {_gib(above.cap_bytes)} GiB, but "
            f"{format_seconds(below.step_s)} under {_gib(below.cap_bytes)} GiB"
        )


def _then(point: Point) -> str:
    if point.first_bytes is None or point.failure:
        return ", and no other was found"
    return f" at first, then {_compiled_text(point)} GiB"


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
        planner = Planner.of(MODELS[name](), CLUSTER, is_compiled=not options.predicted)
        for point in frontier(planner, options.caps):
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
        by_hand[way] = list(under(Planner.of(SCANNED[name](stack), CLUSTER, remat="never"), caps_bytes))
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
