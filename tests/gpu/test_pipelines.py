"""What XLA's GPU compiler makes of pipelines: the messages that are meant, and no others."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.hardware import parse_cluster, parse_hardware
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.process import Compiler, compile_apart
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.executors.jit import Program
from autoshard.executors.spmd import build
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.spmd import written
from autoshard.search.pipeline.spmd_planning import find
from autoshard.search.plan.spmd_step import LayerLoop, SpmdSharding
from autoshard.verification.pipeline_result import PipelineVerification
from tests.gpu.compiled import COLLECTIVES_ALONE
from tests.zoo import Case, make_gpt_scan
from tests.zoo.megatron import make_megatron
from tests.zoo.mlp import make_mlp

LAYERS, HIDDEN, SEQ, VOCAB, BATCH = 4, 64, 32, 128, 64
STAGES, REPLICAS, MICROBATCHES = 2, 4, 4
FLOAT_BYTES = 4
WORKSPACE_BYTES = 32 << 20
"""Of a product that reads a slice of stacked weights, on an H100. Source: measured."""


def compiled(program: Program) -> CompiledStats:
    module = module_bytes(lower(program.fn, program.args))
    answer = compile_apart(module, parse_cluster("8xH100-80GB"), compiler=Compiler(flags=COLLECTIVES_ALONE))
    return CompiledStats.of(answer, dict(program.mesh.shape))


def test_one_program_sends_activations_adds_gradients_up_once_and_holds_all_residuals():
    case = make_gpt_scan(LAYERS, HIDDEN, 4, VOCAB, SEQ, BATCH)
    step = trace(case.step, *case.abstract_args())
    parts = written(step, PipelineStep.of(step, MICROBATCHES * REPLICAS), STAGES, 1)
    stats = compiled(build(parts, SpmdSharding(REPLICAS), None))
    moved = {key: num_bytes for key, (_, num_bytes) in stats.collectives.items()}

    arguments = zip(step.arguments, step.abstract_inputs(), strict=True)
    sizes = {a.name: s.size * FLOAT_BYTES for a, s in arguments if a.name.startswith("state.params")}
    of_layers = sum(size for name, size in sizes.items() if "blocks" in name)
    others = sum(sizes.values()) - of_layers
    activation = BATCH // (MICROBATCHES * REPLICAS) * SEQ * HIDDEN * FLOAT_BYTES
    ticks = MICROBATCHES + STAGES - 1
    dealt = moved.pop(("all-to-all", ("replica",)))
    assert dealt <= 2 * BATCH * SEQ * FLOAT_BYTES  # tokens and targets
    assert moved.pop(("all-reduce", ("replica",))) == of_layers // STAGES
    loss = moved.pop(("all-reduce", ("stage", "replica"))) - others
    assert loss == FLOAT_BYTES
    assert moved.pop(("collective-permute", ("stage",))) == 2 * ticks * activation  # forward and backward
    for kind in ("all-gather", "reduce-scatter"):  # into each of the two loops, and out of it
        assert moved.pop((kind, ("stage",))) == 2 * MICROBATCHES * activation
    assert not moved

    assert stats.argument_bytes >= 3 * (of_layers // STAGES + others)
    forward, _ = (part for part in parts.parts if isinstance(part, LayerLoop))
    stacks = (v for v in forward.op.outputs[forward.op.loop_counts[1] :] if v in forward.exported)
    residual_bytes = sum(parts.values[v].num_bytes for v in stacks) // STAGES  # of a microbatch
    in_flight = (MICROBATCHES + 1) * residual_bytes  # and a slot that nobody reads
    assert in_flight < stats.temporary_bytes < in_flight + 3 * residual_bytes + WORKSPACE_BYTES


WIDTH, TOKENS, DEPTH = 2048, 256, 4


def wide_step(params, x):
    def loss_fn(params):
        out, _ = jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w["up"]) @ w["down"], None), x, params)
        return jnp.mean(out**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss


def test_stages_are_compiled_apart_equal_ones_once_and_take_what_is_predicted(tmp_path):
    params = {
        "up": jax.ShapeDtypeStruct((DEPTH, WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((DEPTH, 4 * WIDTH, WIDTH), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((16, TOKENS, WIDTH), jnp.float32)
    options = {"stages": DEPTH, "schedule": "1f1b", "microbatches": 8, "mesh": (2, 2)}
    plan = autoshard.search(wide_step, params, x, cluster="16xH100-80GB", **options)
    plan.save(tmp_path / "plan.json")
    proof = autoshard.verify(wide_step, params, x, plan=tmp_path / "plan.json")
    assert isinstance(proof, PipelineVerification)
    assert proof.fits
    assert proof.num_compiled < len(proof.programs)
    runs = {one.name: one.count for one in proof.programs}
    assert (runs["forward 1"], runs["backward 1"], runs["reduce 1"]) == (8, 8, 1)
    held = [one.held_bytes for one in proof.programs if one.name.startswith("backward")]
    assert len({*held}) == DEPTH  # each holds another number of microbatches
    assert proof.stages[0].peak_at == "prologue 0"  # it takes the stack of all layers apart
    for stage in proof.stages:
        assert stage.predicted is not None
        assert stage.predicted.peak_bytes > 0.95 * stage.compiled.peak_bytes
    for stage in proof.stages[1:]:  # the first one sends no gradient
        moved = {(c.kind, c.axes): c.compiled_bytes for c in stage.collectives}
        assert moved["all-reduce", ("data",)] == 2 * 8 * TOKENS * WIDTH * FLOAT_BYTES
        assert ("reduce-scatter", ("replica",)) in moved
        assert not any(c.differs for c in stage.collectives)
    assert str(proof).splitlines()[0].endswith("4 stages, schedule 1f1b")
    assert proof.to_json()["exit_status"] == proof.exit_status


def test_devices_of_a_replica_share_layers_and_only_their_terms_go_between_them():
    params = {
        "up": jax.ShapeDtypeStruct((DEPTH, WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((DEPTH, 4 * WIDTH, WIDTH), jnp.float32),
    }
    microbatches, replicas, size = 2, 2, 2
    x = jax.ShapeDtypeStruct((microbatches * replicas, TOKENS, WIDTH), jnp.float32)
    step = trace(wide_step, params, x)
    cluster = parse_cluster("8xH100-80GB")
    options = PipelineOptions(cluster.device_memory_limit(), STAGES, "gpipe", microbatches, (replicas, size))
    found = find(step, cluster, options)
    assert found.plan.shardings[0].arguments["params['up']"] == "P(None, None, 'data')"
    assert found.plan.shardings[0].arguments["params['down']"] == "P(None, 'data')"
    stats = compiled(build(found.program, found.sharding, None))
    layers = DEPTH // STAGES * 2 * 4 * WIDTH * WIDTH * FLOAT_BYTES // size  # a device's
    activation, ticks = TOKENS * WIDTH * FLOAT_BYTES, microbatches + STAGES - 1
    assert layers <= stats.argument_bytes < 1.1 * layers
    assert {key: num_bytes for key, (_, num_bytes) in stats.collectives.items()} == {
        ("all-reduce", ("data",)): 2
        * ticks
        * DEPTH
        // STAGES
        * activation,  # in each layer, forward and backward
        ("all-reduce", ("replica",)): layers,
        ("all-reduce", ("stage", "replica")): FLOAT_BYTES,  # the loss
        ("collective-permute", ("stage",)): 2 * ticks * activation,
        ("reduce-scatter", ("stage",)): microbatches * activation,  # out of the forward loop
        ("all-gather", ("stage",)): microbatches * activation,  # into the backward one
    }
    predicted = {(c.kind, c.axes): c.bytes for c in found.plan.estimates.collectives}
    assert predicted == {key: num_bytes for key, (_, num_bytes) in stats.collectives.items()}


@pytest.mark.slow  # products alone show it: `test_layers_read_and_write_stacks_where_they_lie_and_go_...`
def test_what_is_predicted_of_one_program_is_what_is_compiled():
    case = make_megatron(4, 256, 4, 512, 128, 16, compute_dtype=jnp.bfloat16, scanned=True)
    options = {"stages": 2, "mesh": (4, 1), "microbatches": 2, "executor": "spmd"}
    plan = autoshard.search(case.step, *case.abstract_args(), cluster="8xH100-80GB", **options)
    proof = autoshard.verify(case.step, *case.abstract_args(), plan=plan)
    assert isinstance(proof, PipelineVerification)
    (stage,) = proof.stages
    assert proof.is_one_program
    assert "all stages in one program" in str(proof)
    assert 0.9 < stage.predicted.peak_bytes / stage.compiled.peak_bytes < 1.1
    assert not [c for c in stage.collectives if c.differs and c.kind != "all-to-all"]  # which deal tokens


@pytest.mark.parametrize(
    ("stages", "schedule", "mesh"), [(2, "gpipe", (4, 1)), (4, "circular", (4, 1)), (4, "circular", (2, 2))]
)
def test_layers_read_and_write_stacks_where_they_lie_and_go_to_their_stages_at_once(stages, schedule, mesh):
    params = {
        "up": jax.ShapeDtypeStruct((8, WIDTH, 4 * WIDTH), jnp.float32),
        "down": jax.ShapeDtypeStruct((8, 4 * WIDTH, WIDTH), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((16, TOKENS, WIDTH), jnp.float32)
    options = {"stages": stages, "schedule": schedule, "mesh": mesh, "microbatches": 4}
    plan = autoshard.search(
        wide_step, params, x, cluster="8xH100-80GB", executor="spmd", remat="never", **options
    )
    proof = autoshard.verify(wide_step, params, x, plan=plan)
    assert isinstance(proof, PipelineVerification)
    (stage,) = proof.stages
    assert stage.predicted is not None
    assert abs(stage.predicted.peak_bytes / stage.compiled.peak_bytes - 1) < 0.05
    assert not [c for c in stage.collectives if c.differs]


def scanned(layer):
    """A training step of layers in a loop."""

    def step(params, x):
        def loss_fn(params):
            out, _ = jax.lax.scan(layer, x, params)
            return jnp.mean(out**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    return step


def test_a_stack_of_which_devices_read_parts_is_stacked_up_in_these():
    """Of layers that mix tokens and channels, each weight gradient reads a part of what it is of on each device."""
    tokens, width = 256, 1024

    def layer(x, w):
        mixed = jnp.einsum("btc,ts->bsc", x, w["tokens"])
        return x + jnp.tanh(mixed @ w["channels"] + w["bias"]), None

    shapes = {"tokens": (8, tokens, tokens), "channels": (8, width, width), "bias": (8, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((16, tokens, width), jnp.float32)
    cluster = parse_cluster("8xH100-80GB")
    options = PipelineOptions(cluster.device_memory_limit(), 4, "circular", 4, (2, 2), remat="never")
    found = find(trace(scanned(layer), params, x), cluster, options)
    stats = compiled(build(found.program, found.sharding, None))
    peak_bytes = stats.argument_bytes + stats.fresh_output_bytes + stats.temporary_bytes
    assert 0.95 < found.plan.estimates.peak_bytes / peak_bytes < 1.08
    forward = next(part for part in found.program.parts if isinstance(part, LayerLoop))
    stacks = [v for v in forward.op.outputs[forward.op.loop_counts[1] :] if v in forward.exported]
    assert len(stacks) == 3
    assert sum(max(found.sharding.spec(v)) >= 0 for v in stacks) == 2


def test_a_stage_writes_out_what_it_is_handed_in_the_orders_of_its_products():
    """Queries, keys and values of many heads, which lie behind the positions."""
    heads, tokens, depth, length, batch = 16, 64, 64, 4, 32
    width = heads * depth

    def layer(x, w):
        q, k, v = ((x @ w[name]).reshape(*x.shape[:2], heads, depth) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q + 1, k + 1), -1)
        return x + jnp.einsum("bhts,bshd->bthd", scores, v + 1).reshape(x.shape), None

    params = {name: jax.ShapeDtypeStruct((length, width, width), jnp.float32) for name in "qkv"}
    x = jax.ShapeDtypeStruct((batch, tokens, width), jnp.float32)
    options = {
        "stages": 2,
        "schedule": "1f1b",
        "microbatches": 2,
        "mesh": (4, 1),
        "executor": "mpmd",
    }
    step = scanned(layer)
    plan = autoshard.search(step, params, x, cluster="8xH100-80GB", **options)
    proof = autoshard.verify(step, params, x, plan=plan)
    assert isinstance(proof, PipelineVerification)
    for stage in proof.stages:
        assert stage.predicted is not None
        assert abs(stage.predicted.peak_bytes / stage.compiled.peak_bytes - 1) < 0.05


def verified_on_two_kinds_of_node(case: Case, stages: int) -> PipelineVerification:
    """A plan that is compiled for both, each stage for its own."""
    cluster = "4xH100-80GB+4xA100-40GB"
    options = {"stages": stages, "microbatches": 4, "schedule": "1f1b"}
    plan = autoshard.search(case.step, *case.abstract_args(), cluster=cluster, **options)
    proof = autoshard.verify(case.step, *case.abstract_args(), plan=plan)
    assert isinstance(proof, PipelineVerification)
    assert proof.fits
    caps = {group.name: group.device_memory_limit() for group in parse_hardware(cluster).groups}
    assert [stage.cap_bytes for stage in proof.stages] == [caps[name] for name in plan.stands_on]
    assert {*plan.stands_on} == caps.keys()
    for stage in proof.stages:
        assert stage.predicted.peak_bytes == pytest.approx(stage.compiled.peak_bytes, rel=0.1)
    return proof


def test_stages_on_several_kinds_of_node_are_compiled_each_for_its_own():
    verified_on_two_kinds_of_node(make_mlp(widths=(1024,) * 7, batch=512), stages=3)


@pytest.mark.slow  # products alone show that each stage is compiled for its own
def test_a_transformers_stages_on_several_kinds_of_node_gather_nothing_in_each_task():
    proof = verified_on_two_kinds_of_node(make_megatron(4, 256, 4, 512, 128, 32), stages=3)
    shared = [c for stage in proof.stages for c in stage.collectives if c.axes == ("data",)]
    assert shared
    for c in shared:  # parameters are not gathered by each task
        assert c.compiled_count <= 2 * c.predicted_count


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_stages_programs_hold_and_send_what_is_predicted(dtype):
    """Of square weights, and of a batch of which each task reads its part. Replicas' gradients travel in their own type."""
    case = make_mlp(widths=(1024,) * 5, batch=1024, dtype=dtype)
    options = {"stages": 2, "mesh": (4, 1), "microbatches": 4, "executor": "mpmd", "schedule": "1f1b"}
    plan = autoshard.search(case.step, *case.abstract_args(), cluster="8xH100-80GB", **options)
    assert "fits, as predicted" in str(autoshard.verify(case.step, *case.abstract_args(), plan=plan))


def test_state_on_the_host_is_fetched_in_its_stages_update_and_takes_no_device_memory_else():
    case = make_mlp(widths=(1024,) * 5, batch=1024)
    options = {"stages": 2, "mesh": (4, 1), "microbatches": 4, "executor": "mpmd", "schedule": "1f1b"}
    proofs = list[PipelineVerification]()
    for offload in (None, ("optimizer_state",)):
        found = {"cluster": "8xH100-80GB", "offload": offload, **options}
        plan = autoshard.search(case.step, *case.abstract_args(), **found)
        proof = autoshard.verify(case.step, *case.abstract_args(), plan=plan)
        assert isinstance(proof, PipelineVerification)
        assert "fits, as predicted" in str(proof)
        assert ("its host" in str(proof)) is bool(offload)
        proofs.append(proof)
    for plain, hosted in zip(*(proof.stages for proof in proofs), strict=True):
        moved_bytes = hosted.predicted.host_bytes
        assert moved_bytes > 0
        assert hosted.compiled.host_bytes == moved_bytes
        assert plain.compiled.peak_bytes - hosted.compiled.peak_bytes == pytest.approx(moved_bytes, rel=0.01)
