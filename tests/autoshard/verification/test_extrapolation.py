"""What is compiled of a deep step, and what follows from it; a stand-in for the compiler."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import jax
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.executors.jit import Program
from autoshard.search import driver
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.result import SearchResult
from autoshard.search.stopwatch import Stopwatch
from autoshard.verification import extrapolation
from autoshard.verification.extrapolation import extrapolated
from autoshard.verification.judge import CompilerVerifier, Progress
from autoshard.verification.shorten import ShortPrograms
from tests.zoo import make_megatron

H100S = parse_cluster("8xH100-80GB")
CLUSTER = replace(H100S, device=replace(H100S.device, name="CPU"))
"""H100s that hide nothing, as simulated devices: under the cap, state is then split and gathered again."""
CAP_BYTES = 256 * 2**20
LAYERS = 8
GATHERED = ("all-gather", ("data",))


@dataclass(frozen=True)
class StandIn(CompilerVerifier):
    """Compiles nothing: as many gathers as products, and temporaries that use all of the cap."""

    caps: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """There is no compiler to look for."""

    def stats(
        self,
        step: Step,
        program: Program,
        cap_bytes: int,
        watch: Stopwatch,
        tell: Progress,
        overlap: float = 1.0,
    ) -> CompiledStats:
        tell("compiling")
        self.caps.append(cap_bytes)
        num_products = sum(op.name == "dot_general" for op in step.graph.ops)
        shards = ((a.sharding.shard_shape(a.shape), a.dtype) for a in jax.tree.leaves(program.args))
        arguments = sum(prod(shape) * dtype.itemsize for shape, dtype in shards)
        traffic = {GATHERED: (num_products, 1000 * num_products)}
        return CompiledStats(arguments, 0, cap_bytes - arguments, 0, traffic, {})


@pytest.fixture(scope="module")
def deep() -> SearchResult:
    case = make_megatron(num_layers=LAYERS, hidden=256, heads=8, vocab=128, seq=64, batch=64)
    step = trace(case.step, *case.abstract_args())
    return driver.find(step, CLUSTER, Options(CAP_BYTES, (8,), None, 2.0, remat="never"))


@pytest.fixture
def ask(monkeypatch):
    monkeypatch.setattr(extrapolation, "FIXED_OPS", 0)
    lines: list[str] = []
    judge = StandIn(CLUSTER, Compiler(), lines.append)
    return judge, lines


def test_a_few_of_many_blocks_are_compiled_and_the_rest_follows(deep, ask):
    judge, lines = ask
    short, full = judge.verified(deep), judge.verified(deep, full=True)
    assert (short.is_extrapolated, full.is_extrapolated) == (True, False)
    assert short.extent.num_blocks == LAYERS
    assert [line.split(",")[0] for line in lines if line.startswith("compiling")] == [
        f"compiling 1 of 2 ({short.extent.compiled_blocks} of {LAYERS} blocks)",
        f"compiling 2 of 2 ({short.extent.compiled_blocks - 1} of {LAYERS} blocks)",
        "compiling",
    ]
    gathered = [
        next(c for c in v.collectives if c.kind == "all-gather" and c.compiled_bytes) for v in (short, full)
    ]
    assert gathered[0].compiled_count == gathered[1].compiled_count > LAYERS
    assert gathered[0].compiled_bytes == gathered[1].compiled_bytes
    residents = [v.compiled.residents for v in (short, full)]
    assert residents[0]["arguments"] == residents[1]["arguments"]


def test_the_scheduler_has_as_much_to_spend_on_a_part_as_on_the_whole(deep, ask):
    """One that uses all of its cap on each program uses all of the plan's cap, and no more."""
    judge, _ = ask
    short = judge.verified(deep)
    assert short.compiled.peak_bytes == pytest.approx(CAP_BYTES, rel=0.01)
    more, less = judge.caps
    assert less < more < CAP_BYTES


@pytest.mark.parametrize("num_ops", [4000, 10**6])
def test_a_step_that_compiles_fast_anyway_stays_whole(deep, ask, monkeypatch, num_ops):
    """One that is shorter than the fixed cost, and one of which too little can be left out."""
    judge, _ = ask
    monkeypatch.setattr(extrapolation, "FIXED_OPS", num_ops)
    found = judge.verified(deep)
    assert (found.is_extrapolated, found.extent.reason, judge.caps) == (False, "", [CAP_BYTES])


# --- numbers


def stats(temporary_bytes: int, collectives: dict[Any, Any]) -> CompiledStats:
    return CompiledStats(100, 1, temporary_bytes, 0, collectives, {"to host": (1, temporary_bytes)})


def cut(*missing: int) -> ShortPrograms:
    pair: Any = None
    return ShortPrograms(pair, (pair,) * len(missing), missing, 10, ())


def test_missing_blocks_add_what_one_block_adds():
    once, others = ("all-to-all", ("data",)), ("reduce-scatter", ("data",))
    short = stats(50, {GATHERED: (5, 500), once: (1, 7), others: (3, 30)})
    less = [stats(40, {GATHERED: (4, 400), once: (1, 7), others: (3, 30)})]
    less += [stats(47, {GATHERED: (5, 500), once: (1, 7)})]
    found = extrapolated(cut(4, 2), short, less)
    assert (found.argument_bytes, found.fresh_output_bytes) == (100, 1)
    assert found.temporary_bytes == 50 + 4 * 10 + 2 * 3
    assert found.collectives == {GATHERED: (9, 900), once: (1, 7), others: (9, 90)}
    assert found.host_copies == {"to host": (1 + 0, 96)}


def test_nothing_is_less_than_none():
    found = extrapolated(cut(9), stats(10, {GATHERED: (1, 10)}), [stats(20, {GATHERED: (2, 20)})])
    assert (found.temporary_bytes, found.collectives) == (0, {GATHERED: (0, 0)})
