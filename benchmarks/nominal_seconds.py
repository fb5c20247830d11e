"""Whether nominal seconds are seconds: what a search's clock counts, beside what the processor takes, in all and by place.

python -m benchmarks.nominal_seconds [--models llama unet] [--clusters 64xA100-80GB-Ethernet] [--share 0.3]

What passes between two calls of `spend` is taken for the second one's. Where a place's ratio is far from 1, its constants
(those that end in `_S`, beside what is done there) do not suit this machine; that of the whole search should be within 1.5.
With `--share`, memory is capped at that share of a device's, and the search recomputes, offloads and splits batches.
"""

import argparse
import os
import sys
from collections import defaultdict
from pathlib import Path
from time import thread_time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.solver.clock import WorkClock
from autoshard.search.space.queue import Queue
from autoshard.search.space.trials import Trials
from benchmarks.experts import CLUSTERS, MODELS

LEAST_SHARE = 0.03
"""Of a search; places that take less are not listed."""


class ComparedClock(WorkClock):
    """Counts work, and notes what it took.

    Attributes:
      nominal_s: by place.
      processor_s: by place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nominal_s, self.processor_s = defaultdict[str, float](float), defaultdict[str, float](float)
        self._last_s = thread_time()

    def spend(self, nominal_s: float) -> None:
        super().spend(nominal_s)
        place = _caller()
        self.nominal_s[place] += nominal_s
        self.processor_s[place] += thread_time() - self._last_s
        self._last_s = thread_time()


def _caller() -> str:
    """Who spent, as module and function."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "_spend" and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def compare(model: str, preset: str, share: float) -> None:
    """Searches, and prints what it took by both clocks."""
    cluster = parse_cluster(preset)
    case = MODELS[model](cluster.num_devices)
    step = trace(case.step, *case.abstract_args())
    options = Options(int(share * cluster.device_memory_limit()))
    clock, marks = ComparedClock(), [""] * len(step.arguments)
    try:
        Queue(Trials(step, marks, cluster, options, lambda line: None, clock)).run()
    except InfeasibleError:
        print("nothing fits:", end=" ")
    whole_s = sum(clock.processor_s.values())
    print(f"{model} on {preset}: {whole_s:.2f} s for {clock.now_s:.2f} nominal, {whole_s / clock.now_s:.2f}x")
    for place, seconds in sorted(clock.processor_s.items(), key=lambda one: -one[1]):
        if seconds > LEAST_SHARE * whole_s:
            nominal_s = clock.nominal_s[place]
            print(f"  {place:30s} {seconds:6.2f} s for {nominal_s:6.2f}, {seconds / nominal_s:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--share", type=float, default=1.0, help="of a device's memory")
    options = parser.parse_args()
    for model in options.models:
        for preset in options.clusters:
            compare(model, preset, options.share)


if __name__ == "__main__":
    main()
