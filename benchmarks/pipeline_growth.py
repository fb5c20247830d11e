"""How the search for a pipeline grows with layers and with devices: GPTs as wide as Megatron's of 39B and GPT-3.

python -m benchmarks.pipeline_growth [--widths 39B 175B] [--layers 12 24 48 96] [--devices 64 256 1024] [--out rows.md]

Each model is searched in its published depth on all numbers of devices, and in all depths on the published number. Seconds
are the processor's, after tracing; batches grow with devices, 3 examples on each (175B: 1.5). Layers are unrolled.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from time import process_time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.planning import find
from benchmarks.experts import head, line, standing
from benchmarks.pipelines import SEQUENCE, VOCABULARY, layout
from tests.zoo.megatron import make_megatron


@dataclass(frozen=True, slots=True)
class Width:
    """A model of any depth.

    Attributes:
      layers: as published, like `hidden` and `heads`.
      devices: on which it is searched in all depths.
      examples: on two devices.
    """

    layers: int
    hidden: int
    heads: int
    devices: int
    examples: int


WIDTHS = {"39B": Width(48, 8192, 64, 64, 6), "175B": Width(96, 12288, 96, 1024, 3)}

HEAD = ("width", "layers", "A100s", "layout", "step s", "ops", "traced s", "searched s")


def row(name: str, layers: int, devices: int) -> tuple[str, ...]:
    """One line of the table."""
    width, cluster = WIDTHS[name], parse_cluster(f"{devices}xA100-80GB")
    batch = width.examples * devices // 2
    case = make_megatron(
        layers, width.hidden, width.heads, VOCABULARY, SEQUENCE, batch, compute_dtype=jnp.bfloat16
    )
    start_s = process_time()
    step = trace(case.step, *case.abstract_args())
    traced_s = process_time()
    try:
        plan = find(step, cluster, PipelineOptions(cluster.device_memory_limit())).plan
        found = layout(plan), f"{plan.estimates.step_s:.2f}"
    except InfeasibleError:
        found = "nothing fits", "-"
    took = f"{traced_s - start_s:.1f}", f"{process_time() - traced_s:.1f}"
    return name, str(layers), str(devices), *found, str(len(step.graph.ops)), *took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 24, 48, 96])
    parser.add_argument("--devices", type=int, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--out", type=Path, help="a file of rows, to begin or to go on with")
    options = parser.parse_args()
    rows = standing(options.out)
    print(head(HEAD))
    for cells in rows:
        print(line(cells))
    known = {tuple(cells[:3]) for cells in rows}
    for name in options.widths:
        width = WIDTHS[name]
        deep = [(layers, width.devices) for layers in options.layers]
        wide = [(width.layers, devices) for devices in options.devices]
        for layers, devices in dict.fromkeys((*deep, *wide)):
            if (name, str(layers), str(devices)) in known:
                continue
            cells = row(name, layers, devices)
            print(line(cells), flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line(cells) + "\n")


if __name__ == "__main__":
    main()
