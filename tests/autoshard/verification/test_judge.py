"""How the compiler is asked about a plan."""

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla.compiler import Compiled
from autoshard.cost_model.xla.gpu_targets import ATTEMPTS
from autoshard.cost_model.xla.process import Compiler
from autoshard.search import driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.verification import judge
from autoshard.verification.judge import CompilerVerifier
from tests.search.adamw import adamw_chain

CLUSTER = parse_cluster("8xH100-80GB")
STEP = trace(*adamw_chain(num_layers=2, width=64, rows=16))


@pytest.mark.parametrize("num_larger", [0, 1, 2, 3])
def test_what_holds_too_much_is_compiled_otherwise(num_larger, monkeypatch):
    """Without overlap, and then with what XLA makes again; the first program counts where nothing fits."""
    found, asked = driver.find(STEP, CLUSTER, Options(1 << 30)), list[str]()

    def compile_apart(module, cluster, memory_bytes, compiler, tell) -> Compiled:
        asked.append(compiler.flags)
        temporary_bytes = (1 << 31) + len(asked) if len(asked) <= num_larger else 0
        return Compiled("HloModule nothing\n", 0, 0, 0, temporary_bytes, 0)

    monkeypatch.setattr(compiler, "check", lambda *_: None)
    monkeypatch.setattr(judge, "compile_apart", compile_apart)
    proof = CompilerVerifier(CLUSTER, Compiler(flags="--own"), lambda line: None).verified(found)
    attempts = ATTEMPTS[: num_larger + 1]
    told = [["--own", *(f"--{name}={value}" for name, value in one.items())] for one in attempts]
    assert [flags.split() for flags in asked] == told
    assert proof.fits == (num_larger < len(ATTEMPTS))
    assert proof.compiled.peak_bytes == (0 if proof.fits else (1 << 31) + 1)
