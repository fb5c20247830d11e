"""What plans predict against what XLA's GPU compiler makes of them, without a GPU: a table of docs/benchmarks.md.

    python -m benchmarks.truth [--only NAME ...] [--json FILE] [--jobs N]

Each case (`tests.gpu.compiled.JOBS`) is planned for H100s and compiled as `autoshard verify` would, with the plan's cap
as the device's memory. The plan is `loose` (the cap is what an H100 has), `tight` (little more than the smallest peak that
any plan reaches) or `by hand` (some arguments pinned). A row then shows:

* the collectives, MiB per device and step by kind and mesh axes; where predicted and compiled differ, both;
* by how much they differ at worst, as a share of the larger, of those with more than 64 KiB;
* the device's peak, MiB, predicted and compiled; the error is positive where the prediction lies above.

A case that cannot be planned or compiled is a row that says why.
"""

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autoshard
from autoshard.cost_model.units import format_seconds
from autoshard.cost_model.xla.process import Compiler
from autoshard.verification.judge import CompilerVerifier
from autoshard.verification.records import FLOOR_BYTES, TRAFFIC_SHARE, Moved
from autoshard.verification.result import Verification
from tests.gpu.compiled import JOBS, Job, planned

MIB = 1 << 20

HEADER = (
    "case",
    "mesh",
    "plan",
    "collectives",
    "differ by",
    "predicted peak",
    "compiled peak",
    "error",
    "compiled in",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One case: what came of it, or why nothing did."""

    name: str
    proof: Verification | None
    failure: str = ""

    @property
    def row(self) -> tuple[str, ...]:
        """Its cells, as in `HEADER`."""
        job = JOBS[self.name]
        what = (self.name, "x".join(map(str, job.mesh)), _kind_of_plan(job))
        if self.proof is None:
            return *what, self.failure, *[""] * (len(HEADER) - 4)
        moved = _counting(self.proof)
        return (
            *what,
            "; ".join(map(_said, moved)) or "none",
            f"{max(map(_difference, moved), default=0.0):.1%}",
            _mib(self.proof.predicted.peak_bytes),
            _mib(self.proof.compiled.peak_bytes),
            f"{_peak_error(self.proof):+.1%}",
            format_seconds(self.proof.seconds["compile"]),
        )

    def to_json(self) -> dict[str, Any]:
        """The row's numbers and all others, JSON-ready."""
        found = {"failure": self.failure} if self.proof is None else self.proof.to_json()
        return {"case": self.name, "plan": _kind_of_plan(JOBS[self.name]), **found}


def main() -> None:
    options = _options()
    results: list[Result] = []
    print(_line(HEADER), _line(["---"] * len(HEADER)), sep="\n")
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        asked = {name: pool.submit(verified, name) for name in options.only}
        for name, answer in asked.items():
            results.append(_result(name, answer))
            print(_line(results[-1].row), flush=True)
    print("", *_summary([r.proof for r in results if r.proof is not None]), sep="\n")
    print(f"autoshard {autoshard.__version__}")
    if options.json:
        options.json.write_text(json.dumps([r.to_json() for r in results], indent=1) + "\n")


def verified(name: str) -> Verification:
    """One case, planned and compiled."""
    _, cluster, found = planned(JOBS[name])
    return CompilerVerifier(cluster, Compiler(), progress=lambda line: None).verified(found)


def _result(name: str, answer: "Future[Verification]") -> Result:
    failure = answer.exception()
    if failure is not None:
        said = " ".join(str(failure).split()).replace("|", "\\|")
        return Result(name, None, f"{type(failure).__name__}: {said:.300}")
    return Result(name, answer.result())


def _kind_of_plan(job: Job) -> str:
    if job.pins:
        return "by hand"
    return "loose" if job.slack is None else "tight"


def _counting(proof: Verification) -> list[Moved]:
    return [c for c in proof.collectives if max(c.predicted_bytes, c.compiled_bytes) > FLOOR_BYTES]


def _difference(moved: Moved) -> float:
    largest = max(moved.predicted_bytes, moved.compiled_bytes)
    return abs(moved.predicted_bytes - moved.compiled_bytes) / largest


def _said(moved: Moved) -> str:
    what = f"{moved.kind} {'+'.join(moved.axes)}"
    if _difference(moved) <= TRAFFIC_SHARE:
        return f"{what} {_mib(moved.compiled_bytes)}"
    return f"**{what} {_mib(moved.predicted_bytes)} predicted, {_mib(moved.compiled_bytes)} compiled**"


def _peak_error(proof: Verification) -> float:
    return proof.predicted.peak_bytes / proof.compiled.peak_bytes - 1


def _summary(proofs: Sequence[Verification]) -> Iterator[str]:
    differences = [_difference(moved) for proof in proofs for moved in _counting(proof)]
    if differences:
        close = sum(d <= TRAFFIC_SHARE for d in differences)
        yield f"- collectives: {close} of {len(differences)} kinds by axes ({close / len(differences):.0%}) within 1%"
    if proofs:
        errors = [_peak_error(proof) for proof in proofs]
        middle = statistics.median(map(abs, errors))
        above, below = max(0.0, *errors), min(0.0, *errors)
        yield f"- peak: median error {middle:.1%}; at most {above:.1%} above and {-below:.1%} below the compiled one"
        yield f"- above their cap as compiled: {sum(not proof.fits for proof in proofs)} of {len(proofs)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.4g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all numbers")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many cases at a time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
