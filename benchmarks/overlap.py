"""What plans take for hidden behind computation, beside what the schedules of XLA's GPU compiler hide, without a GPU.

    python -m benchmarks.overlap [--cases "fsdp mlp" ...] [--flags="--xla_gpu_..."]

A plan says how much of its communication costs nothing, value by value (`search.problem.streams`). Here its program is
compiled, its schedule read (`benchmarks.compiled_schedule`) and replayed on two streams, one that computes and one that
communicates, by the cost model's own times: what a device waits for is exposed, all else hidden. By kind of collective:
milliseconds of a step, the share that the plan takes for hidden, what XLA's come to, the share that its schedule hides, and
how many of its arrays move asynchronously. Whole steps stand in front, and what of them is computation: XLA's is that of the
kernels that it made, by what they move and multiply.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.compute import kernel_s, product_s
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.hlo import HloCollective
from autoshard.cost_model.xla.process import Compiler, compile_apart
from autoshard.executors.jit import build
from autoshard.search import driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.problem.reshard import SLICE
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.streams import CONTENTION
from autoshard.search.result import SearchResult
from benchmarks.compiled_schedule import End, HloKernel, Loop, Schedule, Start, schedule
from benchmarks.experts import experts, head, line, pins
from tests.zoo import (
    Case,
    make_gpt_linen,
    make_gpt_scan,
    make_llama,
    make_mixer,
    make_mlp,
    make_moe,
    make_t5,
    make_vit,
)

HURRY = "--xla_llvm_disable_expensive_passes=true"
"""LLVM is told to hurry: that changes kernels, not their order."""


def mlp(n: int) -> Case:
    return make_mlp(widths=(4096,) * 7, batch=1024 * n)


def llama(n: int, scanned: bool) -> Case:
    sizes = {"hidden": 2048, "heads": 16, "kv_heads": 8, "ffn": 5632, "vocab": 32000, "seq": 2048}
    return make_llama(num_layers=4, **sizes, batch=n, compute_dtype=jnp.bfloat16, scanned=scanned)


def vit(n: int) -> Case:
    return make_vit(num_layers=4, hidden=1024, heads=16, image=224, patch=16, batch=32 * n)


def gpt(n: int) -> Case:
    sizes = {"hidden": 1024, "heads": 16, "vocab": 50304, "seq": 1024}
    return make_gpt_linen(num_layers=6, **sizes, batch=4 * n, dtype=jnp.bfloat16)


def scanned_gpt(n: int) -> Case:
    sizes = {"hidden": 1536, "heads": 16, "vocab": 32768, "seq": 1024}
    return make_gpt_scan(num_layers=8, **sizes, batch=4 * n, remat=True, dtype=jnp.bfloat16)


def t5(n: int) -> Case:
    sizes = {"hidden": 1024, "heads": 16, "ffn": 2816, "vocab": 32128, "source_seq": 512, "target_seq": 256}
    return make_t5(num_layers=3, **sizes, batch=8 * n)


def mixer(n: int) -> Case:
    sizes = {"channels": 1024, "token_ffn": 512, "channel_ffn": 4096, "image": 224, "patch": 16}
    return make_mixer(num_layers=6, **sizes, num_classes=1000, batch=64 * n)


def moe(n: int) -> Case:
    sizes = {"hidden": 1024, "heads": 16, "num_experts": 8, "ffn": 4096, "vocab": 32000, "seq": 512}
    return make_moe(num_layers=2, **sizes, batch=8 * n)


TUNED: Mapping[str, tuple[Callable[[int], Case], str, str]] = {
    "fsdp mlp": (mlp, "FSDP", "8xH100-80GB"),
    "fsdp mlp, A100": (mlp, "FSDP", "8xA100-80GB"),
    "data parallel mlp": (mlp, "data parallel", "8xH100-80GB"),
    "data parallel mlp, A100": (mlp, "data parallel", "8xA100-80GB"),
    "fsdp llama": (lambda n: llama(n, False), "FSDP", "8xH100-80GB"),
    "fsdp llama, A100": (lambda n: llama(n, False), "FSDP", "8xA100-80GB"),
    "fsdp llama, scanned": (lambda n: llama(n, True), "FSDP", "8xH100-80GB"),
    "fsdp llama, scanned, A100": (lambda n: llama(n, True), "FSDP", "8xA100-80GB"),
    "zero-1 vit": (vit, "ZeRO-1", "8xH100-80GB"),
    "data parallel vit, A100": (vit, "data parallel", "8xA100-80GB"),
    "fsdp mlp on 64": (mlp, "FSDP", "64xH100-80GB"),
    "hybrid llama on 64": (lambda n: llama(n, False), "hybrid sharding", "64xH100-80GB"),
    "hybrid llama on 64, scanned, A100": (lambda n: llama(n, True), "hybrid sharding", "64xA100-80GB"),
}
"""What is trained, by which expert's rule, on what. The rules of `search.problem.traffic` were read from these schedules."""

LATER: Mapping[str, tuple[Callable[[int], Case], str, str]] = {
    "fsdp gpt on 16": (gpt, "FSDP", "16xH100-80GB"),
    "hybrid gpt on 64, A100, Ethernet": (gpt, "hybrid sharding", "64xA100-80GB-Ethernet"),
    "fsdp gpt, scanned": (scanned_gpt, "FSDP", "8xH100-80GB"),
    "fsdp t5, A100": (t5, "FSDP", "8xA100-80GB"),
    "data parallel mixer, B200": (mixer, "data parallel", "8xB200"),
    "zero-1 moe": (moe, "ZeRO-1", "8xH100-80GB"),
}
"""Likewise; written when the rules stood, and first measured then."""

CASES = {**TUNED, **LATER}

HEAD = (
    *("case", "step ms", "XLA's", "computes ms", "XLA's"),
    *("collective", "ms", "hidden", "XLA's ms", "hidden by XLA", "asynchronous"),
)


@dataclass(slots=True)
class Hidden:
    """Seconds of one kind of collective in a step.

    Attributes:
      seconds: of all of them, one after the other.
      hidden_s: of these, what runs beside computation.
      arrays: how many move.
      asynchronous: how many of them beside anything.
    """

    seconds: float = 0.0
    hidden_s: float = 0.0
    arrays: int = 0
    asynchronous: int = 0

    @property
    def share(self) -> float:
        """Of it that is hidden."""
        return self.hidden_s / self.seconds if self.seconds else 1.0


@dataclass(slots=True)
class Replay:
    """A schedule on two streams.

    Attributes:
      mesh: by which its collectives' times are.
      now_s: how far the device is.
      free_s: from when on its links are free.
      computed_s: how long it has computed.
      by_kind: what was communicated.
    """

    mesh: MeshModel
    now_s: float = 0.0
    free_s: float = 0.0
    computed_s: float = 0.0
    by_kind: dict[str, Hidden] = field(default_factory=lambda: defaultdict(Hidden))
    _under_way: dict[str, tuple[str, float, float]] = field(default_factory=dict)

    def run(self, events: Schedule, times: int = 1) -> None:
        """Runs a schedule, which stands for so many alike ones."""
        for event in events:
            match event:
                case HloKernel():
                    seconds = times * self._kernel_s(event)
                    self.now_s += seconds
                    self.computed_s += seconds
                case Start():
                    self._start(event, times)
                case End():
                    self._wait(event.name)
                case Loop():
                    self.run(event.body, times * event.trips)

    def _start(self, event: Start, times: int) -> None:
        seconds, found = times * self._collective_s(event.collective), self.by_kind[event.collective.kind]
        begins_s = max(self.now_s, self.free_s)
        self.free_s = begins_s + seconds
        self._under_way[event.name] = (event.collective.kind, begins_s, self.free_s)
        found.seconds += seconds
        found.hidden_s += seconds
        found.arrays += times * event.collective.num_operands
        found.asynchronous += times * event.collective.num_operands * event.is_async

    def _wait(self, name: str) -> None:
        """Until a collective has ended: what runs on the links meanwhile, whichever it is, is not hidden."""
        if name not in self._under_way:  # among devices that each talk to themselves
            return
        _, _, ends_s = self._under_way[name]
        for kind, begins_s, its_end_s in self._under_way.values():
            waited_s = min(its_end_s, ends_s) - max(begins_s, self.now_s)
            self.by_kind[kind].hidden_s -= max(waited_s, 0.0)
        self.now_s = max(self.now_s, ends_s)
        self._under_way = {n: one for n, one in self._under_way.items() if one[2] > self.now_s}

    def _kernel_s(self, kernel: HloKernel) -> float:
        device = self.mesh.cluster.device
        if kernel.product is None:
            return float(kernel_s(device, kernel.num_bytes))
        peak_flops_per_s = device.peak_flops_per_s(kernel.dtype)
        return float(product_s(device, kernel.product, kernel.num_bytes, peak_flops_per_s))

    def _collective_s(self, collective: HloCollective) -> float:
        return float(self.mesh.time_s(collective.kind, self._axes(collective), collective.num_bytes))

    def _axes(self, collective: HloCollective) -> tuple[int, ...]:
        names = ("data", "model") if len(self.mesh.shape) == 2 else ("data",)
        return tuple(names.index(a) for a in collective.axes)


def planned(found: SearchResult) -> dict[str, Hidden]:
    """What a plan communicates, and what of it it takes for hidden, by kind."""
    by_kind = defaultdict[str, Hidden](Hidden)
    for collective in found.plan.estimates.collectives:
        by_kind[collective.kind].seconds += collective.seconds
        by_kind[collective.kind].arrays += collective.count
    for hidden_s, shares in _hidden_edges(found):
        for kind, share in shares.items():
            by_kind[kind].hidden_s += share * hidden_s / (1 - CONTENTION)
    return by_kind


def _hidden_edges(found: SearchResult) -> Iterator[tuple[float, dict[str, float]]]:
    """Of each edge with something hidden: the seconds, and the shares that its collectives have of them."""
    found = found.whole
    costed, hiding = found.on_mesh.memory.costed, found.on_mesh.hiding
    paths, mesh = ReshardPaths(costed, found.chosen), costed.resharder.mesh
    for edge, seconds in zip(costed.graph.edges, hiding.seconds, strict=True):
        at = found.chosen[edge.source.node], found.chosen[edge.target.node]
        if not isinstance(seconds, np.ndarray) or seconds[at] <= 0:
            continue
        op_class, result = edge.maker
        folded = costed.graph.folded
        value = folded.program.ops[folded.members[op_class][0]].results[result]
        chain = paths.chain(value, paths.spec(edge.source), paths.spec(edge.target))
        joined_bytes = costed.handling(edge.source.node, edge.maker).combined_bytes
        taken = defaultdict[str, float](float)
        for step in chain:
            if step.kind != SLICE:
                taken[step.kind] += float(mesh.time_s(step.kind, step.axes, step.num_bytes, joined_bytes))
        total_s = sum(taken.values())
        yield float(seconds[at]), {kind: each_s / total_s for kind, each_s in taken.items()}


def rows(name: str, flags: str) -> Iterator[tuple[str, ...]]:
    """A case's lines of the table, one for each kind of collective."""
    make, rule, preset = CASES[name]
    cluster = parse_cluster(preset)
    case = make(cluster.num_devices)
    step = trace(case.step, *case.abstract_args())
    shapes = {
        a.name: step.graph.values[v].shape for a, v in zip(step.arguments, step.graph.inputs, strict=True)
    }
    expert = next(e for e in experts(cluster) if e.name == rule)
    options = Options(
        cluster.device_memory_limit(),
        expert.mesh,
        pins(shapes, expert),
        remat="never",
        offload="never",
        microbatches=1,
    )
    found = driver.find(step, cluster, options)
    program = build(found.step, found.sharding, None)
    module = module_bytes(lower(program.fn, program.args))
    compiled = compile_apart(module, cluster, compiler=Compiler(flags=f"{HURRY} {flags}"))
    replay = Replay(found.on_mesh.memory.costed.resharder.mesh)
    replay.run(schedule(compiled.text, found.plan.decisions.mesh))
    ours = planned(found)
    estimates = found.plan.estimates
    times = ms(estimates.step_s), ms(max(replay.now_s, replay.free_s))
    computed = ms(estimates.compute_s), ms(replay.computed_s)
    for kind in sorted(ours.keys() | replay.by_kind.keys()):
        plan, xla = ours.get(kind, Hidden()), replay.by_kind.get(kind, Hidden())
        yield (
            name,
            *times,
            *computed,
            kind,
            ms(plan.seconds),
            f"{plan.share:.0%}",
            ms(xla.seconds),
            f"{xla.share:.0%}",
            f"{xla.asynchronous} of {xla.arrays}",
        )


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--flags", default="", help="added to XLA_FLAGS")
    options = parser.parse_args()
    print(head(HEAD))
    for name in options.cases:
        for cells in rows(name, options.flags):
            print(line(cells), flush=True)
    print(f"\nJAX {jax.__version__}")


if __name__ == "__main__":
    main()
