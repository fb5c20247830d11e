"""What pipelines that are one program are predicted to hold and say against what XLA's GPU compiler makes of them, without a
GPU: a table in Markdown.

    python -m benchmarks.one_program [--only NAME ...]

Each case is planned for 8 H100s and compiled as `autoshard verify` would. Collectives are `=` where each kind has the
predicted bytes, within 1% or 64 KiB; peaks are MiB a device, the error positive where the prediction lies above.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.spmd_planning import find
from autoshard.verification import pipeline_judge
from autoshard.verification.judge import CompilerVerifier
from autoshard.verification.records import StageProof
from tests.zoo import Case, make_gpt_scan, make_llama, make_megatron
from tests.zoo.case import Normal

MIB = 1 << 20
CLUSTER = parse_cluster("8xH100-80GB")
SIZES: dict[str, Any] = {"hidden": 512, "heads": 8, "vocab": 1024, "seq": 256, "batch": 32}


def _stack(layer: Callable[[Any, Any], Any], shapes: Mapping[str, tuple[int, ...]], width: int) -> Case:
    """Eight layers in a loop, trained to make little of noise."""

    def loss_fn(params: Any, x: Any) -> Any:
        out, _ = jax.lax.scan(lambda x, w: (x + layer(x, w), None), x, params)
        return jnp.mean(out**2)

    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    def init() -> Any:
        return {name: jnp.zeros((8, *shape)) for name, shape in shapes.items()}

    return Case("stack", step, init, Normal((16, 256, width), jnp.float32))


def _mlp() -> Case:
    shapes = {"up": (2048, 8192), "down": (8192, 2048)}
    return _stack(lambda x, w: jax.nn.relu(x @ w["up"]) @ w["down"], shapes, 2048)


def _gated() -> Case:
    shapes = {"gate": (1024, 4096), "up": (1024, 4096), "down": (4096, 1024), "scale": (1024,)}

    def layer(x: Any, w: Any) -> Any:
        y = x * w["scale"] * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]

    return _stack(layer, shapes, 1024)


def _mixing() -> Case:
    shapes = {"tokens": (256, 256), "channels": (1024, 1024), "bias": (1024,)}

    def layer(x: Any, w: Any) -> Any:
        mixed = jnp.einsum("btc,ts->bsc", x, w["tokens"])
        return jnp.tanh(mixed @ w["channels"] + w["bias"])

    return _stack(layer, shapes, 1024)


MODELS: Mapping[str, Callable[[], Case]] = MappingProxyType(
    {
        "products": _mlp,
        "megatron": lambda: make_megatron(8, **SIZES, compute_dtype=jnp.bfloat16, scanned=True),
        "gpt": lambda: make_gpt_scan(num_layers=8, **SIZES),
        "grouped heads": lambda: make_llama(num_layers=8, **SIZES, kv_heads=4, ffn=1536, scanned=True),
        "gated": _gated,
        "mixing": _mixing,
    }
)


@dataclass(frozen=True, slots=True)
class Pipe:
    """A model in so many stages, under a schedule, each stage on a mesh of replicas and their devices."""

    model: str
    stages: int
    schedule: str
    mesh: tuple[int, int]

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.model}, {self.stages} stages of {self.mesh[0]}x{self.mesh[1]}, {self.schedule}"


WAYS = ((2, "gpipe", (4, 1)), (2, "gpipe", (2, 2)), (4, "circular", (4, 1)), (4, "circular", (2, 2)))
PIPES = tuple(Pipe(model, *way) for model in ("products", "megatron", "gpt", "grouped heads") for way in WAYS)
LAST = tuple(Pipe(model, *way) for model in ("gated", "mixing") for way in WAYS)
"""Written last, and measured once."""


def main() -> None:
    options = _options()
    print("| case | collectives | predicted | compiled | error |", "|---|---|---|---|---|", sep="\n")
    for pipes in (PIPES, LAST):
        errors: list[float] = []
        for pipe in pipes:
            if options.only and pipe.name not in options.only:
                continue
            stage = verified(pipe)
            assert stage.predicted is not None
            predicted, compiled = stage.predicted.peak_bytes, stage.compiled.peak_bytes
            errors.append(predicted / compiled - 1)
            peaks = f"{predicted / MIB:.4g} | {compiled / MIB:.4g} | {errors[-1]:+.1%}"
            print(f"| {pipe.name} | {_moved(stage)} | {peaks} |", flush=True)
        if errors:
            median = statistics.median(map(abs, errors))
            print(f"\nmedian {median:.1%}; {min(errors):+.1%} to {max(errors):+.1%} ({len(errors)} cases)\n")


def verified(pipe: Pipe) -> StageProof:
    """One case, planned and compiled."""
    case = MODELS[pipe.model]()
    step = trace(case.step, *case.abstract_args())
    options = PipelineOptions(
        CLUSTER.device_memory_limit(), pipe.stages, pipe.schedule, 4, pipe.mesh, remat="never"
    )
    verifier = CompilerVerifier(CLUSTER, Compiler(), progress=lambda line: None)
    (stage,) = pipeline_judge.verified(verifier, find(step, CLUSTER, options)).stages
    return stage


def _moved(stage: StageProof) -> str:
    said = (
        f"{c.kind} {'+'.join(c.axes)} {c.predicted_bytes / MIB:.4g} predicted, {c.compiled_bytes / MIB:.4g} compiled"
        for c in stage.collectives
        if c.differs
    )
    return "; ".join(said) or "="


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [pipe.name for pipe in (*PIPES, *LAST)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    return parser.parse_args()


if __name__ == "__main__":
    main()
