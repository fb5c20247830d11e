"""What light ops make for a loop stays in the loop: the compiler hoists no array of the scores' size."""

import re

import jax.numpy as jnp

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.process import Compiler, compile_apart
from autoshard.executors.jit import build
from autoshard.search import driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from benchmarks.scanned_stacks import everything, make_scanned_gpt

from .compiled import HURRY

CLUSTER = parse_cluster("8xH100-80GB")
SIZES = {"num_layers": 3, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 512, "batch": 32}


def carried(text: str) -> list[str]:
    """The arrays that are as large as the scores of one layer, of those that loops carry."""
    types = [line.split(" while(")[0] for line in text.splitlines() if " while(" in line]
    return [array for line in types for array in re.findall(r"\w+\[4,8,512,512\]", line)]


def test_the_compiler_carries_no_mask_through_a_loop():
    case = make_scanned_gpt(everything, compute_dtype=jnp.bfloat16, **SIZES)
    found = driver.find(trace(case.step, *case.abstract_args()), CLUSTER, Options(1 << 40, (8,)))
    program = build(found.step, found.sharding, None)
    module = module_bytes(lower(program.fn, program.args))
    text = compile_apart(module, CLUSTER, compiler=Compiler(flags=HURRY)).text
    assert " while(" in text
    assert carried(text) == []
