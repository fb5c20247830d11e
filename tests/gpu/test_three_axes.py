"""Plans on meshes of three axes are what the compiler makes of them: every collective with its bytes, and the peak.

Terms are scattered over one axis after another there, which the partitioner does only where it is told so by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.search.device.prediction import MARGIN
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.verification.judge import CompilerVerifier
from autoshard.verification.records import PEAK_ABOVE
from autoshard.verification.result import Verification
from tests.search.adamw import adamw_chain
from tests.search.chain import chain
from tests.zoo import Case, make_moe


@dataclass(frozen=True, slots=True)
class Asked:
    """A plan to make.

    Attributes:
      make: the step and its arguments.
      cluster: for which devices.
      mesh: sizes of the axes.
      pins: specs of arguments.
    """

    make: Callable[[], tuple]
    cluster: str
    mesh: tuple[int, int, int]
    pins: Mapping[str, P] | None = None


def _chain() -> tuple:
    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
    return chain, weights, jax.ShapeDtypeStruct((1 << 17, 2048), jnp.float32)


def _convolutions() -> tuple:
    def step(kernels, images):
        def loss_fn(kernels):
            x = images
            for w in kernels:
                x = jax.nn.silu(
                    jax.lax.conv_general_dilated(
                        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                    )
                )
            return jnp.mean(x**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, kernels, jax.grad(loss_fn)(kernels))

    kernels = [jax.ShapeDtypeStruct((3, 3, 256, 256), jnp.float32)] * 2
    return step, kernels, jax.ShapeDtypeStruct((48, 32, 32, 256), jnp.float32)


def _of(case: Case) -> tuple:
    return case.step, *case.abstract_args()


def _experts() -> tuple:
    sizes = {"hidden": 512, "num_experts": 8, "ffn": 2048, "vocab": 1024, "seq": 256, "batch": 32}
    return _of(make_moe(num_layers=1, heads=8, **sizes))


ASKED = {
    "chain": Asked(_chain, "64xA100-80GB-Ethernet", (2, 4, 8)),
    "AdamW": Asked(lambda: adamw_chain(4, 2048, 4096), "16xH100-80GB", (2, 2, 4)),
    "convolutions": Asked(
        _convolutions,
        "12xA100-40GB",
        (2, 2, 3),
        {f"kernels[{i}]": P("model", None, "replica", "data") for i in range(2)}
        | {"images": P(("replica", "data", "model"))},
    ),
    "experts": Asked(_experts, "16xH100-80GB", (2, 2, 4)),
}


@cache
def proven(name: str, cap_bytes: int | None = None) -> Verification:
    """A plan beside its compiled program; by default the cap is what the devices have."""
    asked = ASKED[name]
    cluster = parse_cluster(asked.cluster)
    options = Options(cap_bytes or cluster.device_memory_limit(), asked.mesh, pins=asked.pins)
    found = find(trace(*asked.make()), cluster, options)
    return CompilerVerifier(cluster, Compiler(), progress=lambda line: None).verified(found)


@pytest.mark.parametrize(
    "name", ["chain", "AdamW", "convolutions", pytest.param("experts", marks=pytest.mark.slow)]
)
def test_the_compiler_emits_what_the_plan_lists(name):
    assert not proven(name).differing


@pytest.mark.parametrize(("name", "most_above"), [("chain", MARGIN), ("AdamW", 0.055)])
def test_the_compiled_program_holds_what_the_plan_says(name, most_above):
    """Of AdamW two plans take equally long and hold equally much, as is predicted: by 5.1% too much where parameters rest
    split by rows, by 1.6% where by columns. Of experts, on two axes too, it is up to a ninth (`benchmarks/truth.py`)."""
    proof = proven(name)
    assert -MARGIN <= proof.predicted.peak_bytes / proof.compiled.peak_bytes - 1 <= most_above


@pytest.mark.slow  # `test_a_step_that_recomputes_keeps_to_its_cap` of `test_collectives` shows it on fewer axes
def test_a_plan_keeps_to_its_cap():
    cap_bytes = int(0.7 * proven("AdamW").compiled.peak_bytes)
    proof = proven("AdamW", cap_bytes)
    assert not proof.differing
    assert proof.compiled.peak_bytes <= (1 + PEAK_ABOVE) * cap_bytes
