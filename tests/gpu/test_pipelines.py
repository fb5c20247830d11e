"""What XLA's GPU compiler makes of pipelines: the messages that are meant, and no others."""

from cost_model.hardware import parse_cluster
from cost_model.xla._jax import lower, module_bytes
from cost_model.xla.process import Compiler, compile_apart
from cost_model.xla.stats import CompiledStats
from executors.spmd import build
from search.ir.trace import trace
from search.pipeline.spmd import spmd_step
from search.plan.spmd_step import LayerLoop
from tests.gpu.compiled import HURRY
from tests.zoo import make_gpt_scan

LAYERS, HIDDEN, SEQ, VOCAB, BATCH = 4, 64, 32, 128, 64
STAGES, DATA, MICROBATCHES = 2, 4, 4
FLOAT_BYTES = 4
WORKSPACE_BYTES = 32 << 20
"""Of a product that reads a slice of stacked weights, on an H100. Source: measured."""


def test_one_program_sends_activations_adds_gradients_up_once_and_holds_all_residuals():
    case = make_gpt_scan(LAYERS, HIDDEN, 4, VOCAB, SEQ, BATCH)
    step = trace(case.step, *case.abstract_args())
    parts = spmd_step(step, MICROBATCHES * DATA, STAGES, 1)
    program = build(parts, STAGES * DATA)
    module = module_bytes(lower(program.fn, program.args))
    answer = compile_apart(module, parse_cluster("8xH100-80GB"), compiler=Compiler(flags=HURRY))
    stats = CompiledStats.of(answer, {"stage": STAGES, "data": DATA})
    moved = {key: num_bytes for key, (_, num_bytes) in stats.collectives.items()}

    arguments = zip(step.arguments, step.abstract_inputs(), strict=True)
    sizes = {a.name: s.size * FLOAT_BYTES for a, s in arguments if a.name.startswith("state.params")}
    of_layers = sum(size for name, size in sizes.items() if "blocks" in name)
    others = sum(sizes.values()) - of_layers
    activation = BATCH // (MICROBATCHES * DATA) * SEQ * HIDDEN * FLOAT_BYTES
    ticks = MICROBATCHES + STAGES - 1
    dealt = moved.pop(("all-to-all", ("data",)))
    assert dealt <= 2 * BATCH * SEQ * FLOAT_BYTES  # tokens and targets
    assert moved.pop(("all-reduce", ("data",))) == of_layers // STAGES
    loss = moved.pop(("all-reduce", ("stage", "data"))) - others
    assert loss == FLOAT_BYTES
    assert moved.pop(("collective-permute", ("stage",))) == 2 * ticks * activation  # forward and backward
    for kind in ("all-gather", "reduce-scatter"):  # into each of the two loops, and out of it
        assert moved.pop((kind, ("stage",))) == 2 * MICROBATCHES * activation
    assert not moved

    assert stats.argument_bytes >= 3 * (of_layers // STAGES + others)
    forward, _ = (part for part in parts.parts if isinstance(part, LayerLoop))
    stacks = (v for v in forward.op.outputs[forward.op.loop_counts[1] :] if v in forward.wanted)
    residual_bytes = sum(parts.values[v].num_bytes for v in stacks) // STAGES  # of a microbatch
    in_flight = (MICROBATCHES + 1) * residual_bytes  # and a slot that nobody reads
    assert in_flight < stats.temporary_bytes < in_flight + 3 * residual_bytes + WORKSPACE_BYTES
