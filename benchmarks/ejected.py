"""Plans as files of plain JAX, beside the programs that autoshard runs: a table in Markdown.

    python -m benchmarks.ejected [--only NAME ...]

Each model is planned in float64 for 8 H100s and ejected. `autoshard.eject` chooses the form, and XLA's GPU compiler compiles
the file's step and the plan's program, without a GPU: `=` where collectives, by kind, axes and bytes, and the peak are equal
to the byte. The last column has the differences of the wrapper form where it was not chosen. The file then runs on 8
simulated devices for two steps; the error is the largest of the new state and the metrics against one device, relative to
the largest entry of each array, or to 1. No test of the suite runs these models through `eject`.
"""

import argparse
import os
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cost_model.units import format_mesh
from tests.zoo import (
    MOMENTUM,
    Case,
    make_gpt_linen,
    make_gpt_nnx,
    make_gpt_nnx_optimizer,
    make_gpt_scan,
    make_llama,
    make_mlp,
    make_moe,
    make_resnet,
)

CLUSTER = "8xH100-80GB"
NUM_STEPS = 2
TIGHT = 0.8
"""The cap of a plan that has to save memory, as a share of the peak of a plan without a cap."""

SEARCH_S = 2.0
"""Processor seconds for the solver: a good plan is enough."""

SMALL = {"hidden": 128, "heads": 8, "vocab": 256, "seq": 32, "batch": 32}
GPT = {**SMALL, "num_layers": 1, "optimizer": MOMENTUM}
SCAN = {**SMALL, "num_layers": 2, "optimizer": MOMENTUM}
ONE_LAYER = {"num_layers": 1, "optimizer": MOMENTUM}
WIDE = {"widths": (256, 1024, 1024, 256), "batch": 512}

LINE, GRID = {"mesh": (8,)}, {"mesh": (2, 4)}
SPLIT = {"pin": {"batch": P("data")}}
"""Small steps are fastest replicated; examples on all devices make them what large ones are."""


@dataclass(frozen=True, slots=True)
class Row:
    """A model, what it shows, and the options of its search."""

    make: Callable[..., Case]
    kind: str
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_tight: bool = False


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        "mlp": Row(make_mlp, "plain JAX, unrolled", WIDE, GRID),
        "mlp, data": Row(make_mlp, "plain JAX, unrolled", WIDE, LINE | SPLIT),
        "mlp, hosted": Row(
            make_mlp, "optimizer state on the host", WIDE, LINE | {"offload": ("optimizer_state",)}
        ),
        "linen": Row(make_gpt_linen, "Linen, unrolled", GPT, GRID | SPLIT),
        "linen, tight": Row(
            make_gpt_linen, "Linen, unrolled, under a cap", SCAN, LINE | SPLIT, is_tight=True
        ),
        "scan": Row(make_gpt_scan, "Linen, scanned", SCAN, GRID | SPLIT),
        "scan, tight": Row(make_gpt_scan, "Linen, scanned, under a cap", SCAN, LINE | SPLIT, is_tight=True),
        "scan, checkpoint": Row(
            make_gpt_scan, "Linen, scanned, `nn.remat`", {**SCAN, "remat": True}, LINE | SPLIT
        ),
        "nnx": Row(make_gpt_nnx, "NNX, unrolled", {**SMALL, "num_layers": 1}, LINE | SPLIT),
        "nnx, dropout": Row(
            make_gpt_nnx_optimizer, "NNX, dropout keys in the state", {**SMALL, "num_layers": 1}, GRID | SPLIT
        ),
        "llama": Row(make_llama, "plain JAX, grouped heads", ONE_LAYER, GRID | SPLIT),
        "microbatches": Row(
            make_gpt_scan, "Linen, scanned, 4 microbatches", SCAN, LINE | {"microbatches": 4}
        ),
        "experts": Row(make_moe, "Linen, routed experts", ONE_LAYER, GRID | SPLIT),
        "convolutions": Row(
            make_resnet,
            "Linen, running statistics",
            {"stage_features": (16,), "blocks_per_stage": (1,), "stem": (3, 2)},
            LINE | SPLIT,
        ),
        "pipeline": Row(
            make_gpt_scan,
            "one program for 2 stages",
            SCAN,
            {"stages": 2, "executor": "spmd", "microbatches": 4},
        ),
    }
)

HEAD = ("model", "kind", "mesh", "recomputed", "form", "collectives", "peak", "largest error", "the wrapper")


def row(name: str) -> tuple[str, ...]:
    """One line of the table."""
    one = ROWS[name]
    case = one.make(**one.sizes, dtype=jnp.float64)
    args = case.abstract_args()
    plan = found(case, args, one)
    ejected = autoshard.eject(case.step, *args, plan=plan, verify="always")
    ours, theirs = ejected.planned, ejected.compiled
    assert ours is not None, "the compiler is not installed"
    assert theirs is not None
    moved = [c for c in ejected.collectives if c.predicted_bytes != c.compiled_bytes]
    collectives = "; ".join(f"{c.kind} {c.predicted_bytes} to {c.compiled_bytes} B" for c in moved) or "="
    peak = "=" if ours.peak_bytes == theirs.peak_bytes else f"{theirs.peak_bytes / ours.peak_bytes - 1:+.2%}"
    differences = ejected.tried
    if not differences and ejected.form == "written":
        differences = autoshard.eject(case.step, *args, plan=plan, form="wrapper").differences
    mesh = format_mesh(tuple(plan.shardings[0].mesh.values()))
    return (
        name,
        one.kind,
        mesh if not plan.is_pipeline else f"{len(plan.stages)} stages of {mesh}",
        str(len(plan.retention)),
        ejected.form,
        collectives,
        peak,
        f"{error(case, ejected):.1e}",
        "; ".join(differences) or "=",
    )


def found(case: Case, args: tuple[Any, ...], one: Row) -> autoshard.Plan:
    """The model's plan. A tight one has a share of the peak without a cap, and can only recompute."""
    asked = {"cluster": CLUSTER, "verify": "never", "time_limit_s": SEARCH_S, **one.options}
    plan = autoshard.search(case.step, *args, **asked)
    if not one.is_tight:
        return plan
    cap = int(TIGHT * plan.estimates.peak_bytes)
    alone = {"memory": cap, "offload": "never", "microbatches": 1}
    return autoshard.search(case.step, *args, **{**asked, **alone})


def error(case: Case, ejected: autoshard.Ejected) -> float:
    """The largest error of the file's step against one device."""
    with TemporaryDirectory() as folder:
        ejected.save(f"{folder}/step.py")
        namespace = runpy.run_path(f"{folder}/step.py")
    mesh = namespace["make_mesh"]()
    start = case.start()
    state = namespace["placed"](namespace["ARGUMENTS"][0], jax.tree.map(jnp.copy, start), mesh)
    many = trained(namespace["sharded"](case.step, *case.args(), mesh=mesh), case, state)
    alone = trained(jax.jit(case.step), case, start)
    return max(map(_error, jax.tree.leaves(alone), jax.tree.leaves(many)), default=0.0)


def trained(step: Callable[..., Any], case: Case, state: Any) -> Any:
    """The state and the metrics after some steps."""
    metrics = None
    for i in range(NUM_STEPS):
        state, metrics = step(state, case.batch(i), *case.extra())
    return state, metrics


def _error(one: Any, many: Any) -> float:
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, many = jax.random.key_data(one), jax.random.key_data(many)
    one, many = np.asarray(one, np.float64), np.asarray(many, np.float64)
    return float(np.abs(one - many).max(initial=0) / max(np.abs(one).max(initial=0), 1.0))


def line(cells: Iterator[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="NAME")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 8)
    print(f"{line(HEAD)}\n|{'---|' * len(HEAD)}", flush=True)
    for name in options.only:
        print(line(row(name)), flush=True)


if __name__ == "__main__":
    main()
