"""What each stage runs: the backward phase where the forward phase was, and nothing sent that need not be."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir.graph import Phase, Role
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import looped as looped_step
from autoshard.search.memory.offload import offloaded
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.programs import made_ready, stage_programs
from autoshard.search.pipeline.split_loops import between_ops, num_positions
from autoshard.search.pipeline.stage_cut import StageCut
from autoshard.search.pipeline.stages import assign
from autoshard.search.plan.schedule import TaskKind
from tests import zoo

WIDTH, LAYERS, BATCH = 4, 4, 8
FORWARD, BACKWARD, WEIGHT_GRADIENT = TaskKind


def trained(loss_fn):
    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    return step


def layers(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def looped(params, batch):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0] ** 2)


def encoder_decoder(params, batch):
    """What the first layer makes, all others read."""
    first, *others = params
    memory = jnp.tanh(batch["x"] @ first)
    x = memory
    for w in others:
        x = jnp.tanh(x @ w) * memory
    return jnp.mean(x**2)


def parts_of(loss_fn, num_microbatches=2, num_replicas=1):
    shape = (WIDTH, WIDTH)
    params = [jax.ShapeDtypeStruct(shape, "float32")] * LAYERS
    if loss_fn is looped:
        params = jax.ShapeDtypeStruct((LAYERS, *shape), "float32")
    batch = {"x": jax.ShapeDtypeStruct((BATCH, WIDTH), "float32")}
    return PipelineStep.of(trace(trained(loss_fn), params, batch), num_microbatches, num_replicas)


def behind(parts, *num_products):
    """A cut behind so many products of the forward phase."""
    ops = parts.forward_ops
    products = [i for i, op in enumerate(ops) if op.name == "dot_general"]
    return StageCut(tuple(products[n] for n in num_products))


def names_of(program):
    return [op.name for op in program.graph.ops]


def test_each_layers_gradient_is_made_where_the_layer_is():
    parts = parts_of(layers)
    programs = stage_programs(*made_ready(parts, behind(parts, 1)))
    assert names_of(programs.tasks[0, FORWARD]).count("dot_general") == 1
    assert names_of(programs.tasks[1, FORWARD]).count("dot_general") == 3
    assert names_of(programs.tasks[0, BACKWARD]).count("dot_general") == 1  # its input needs no gradient
    assert names_of(programs.tasks[1, BACKWARD]).count("dot_general") == 6
    homes = [programs.stage_of[v] for v in parts.step.graph.inputs]
    assert homes == [0, 1, 1, 1, 0]


def test_an_activation_and_its_gradient_cross_and_nothing_else():
    parts = parts_of(layers)
    programs = stage_programs(*made_ready(parts, behind(parts, 2)))
    assert [(t.source, t.target, t.is_per_microbatch) for t in programs.transfers] == [
        (0, 1, True),
        (1, 0, True),
    ]
    assert all(programs.values[t.value].shape == (BATCH // 2, WIDTH) for t in programs.transfers)


def test_a_value_may_skip_stages():
    parts = parts_of(encoder_decoder)
    programs = stage_programs(*made_ready(parts, behind(parts, 1, 2, 3)))
    memory = next(op for op in parts.forward_ops if op.name == "tanh").outputs[0]
    assert [t.target for t in programs.transfers if t.value == memory] == [1, 2, 3]


@pytest.mark.parametrize("loss_fn", [layers, encoder_decoder])
def test_data_flows_forth_and_then_back(loss_fn):
    parts = parts_of(loss_fn)
    assigned = assign(parts, behind(parts, 1, 2, 3))
    for op in parts.body:
        if op not in parts.duplicated:
            stage = assigned.of_op[op]
            made = [v for v in op.operands if parts.is_of_microbatch(v) and v in assigned.of_value]
            for v in made:
                is_gradient = parts.maker[v] in assigned.backward
                before = assigned.of_value[v]
                assert before >= stage if is_gradient else op in assigned.backward or before <= stage


def test_weight_gradients_are_left_for_later():
    parts = parts_of(layers)
    programs = stage_programs(*made_ready(parts, behind(parts, 2)), splits_backward=True)
    backward, later = programs.tasks[1, BACKWARD], programs.tasks[1, WEIGHT_GRADIENT]
    assert names_of(backward).count("dot_general") == names_of(later).count("dot_general") == 2
    assert not backward.sums
    assert len(later.sums) == 2
    assert (0, BACKWARD) not in programs.tasks  # nothing waits for the first stage


def test_a_cut_loop_has_slices_of_parameters_at_each_stage():
    parts = parts_of(looped)
    assert num_positions(parts, parts.forward_ops[0]) == LAYERS
    programs = stage_programs(*made_ready(parts, StageCut((1,))))
    for stage, length in enumerate((1, LAYERS - 1)):
        for kind in (FORWARD, BACKWARD):
            (loop,) = (op for op in programs.tasks[stage, kind].graph.ops if op.name == "scan")
            assert loop.params["length"] == length
    stacks = [t for t in programs.transfers if len(programs.values[t.value].shape) == 3]
    assert {programs.values[t.value].shape[0] for t in stacks} == {LAYERS - 1}
    assert not any(t.is_per_microbatch for t in stacks)


def test_a_cut_between_ops_cuts_no_loop():
    parts = parts_of(looped)
    after, cut = between_ops(parts, StageCut((LAYERS,)))
    assert after is parts
    assert cut == StageCut((1,))


def test_a_recurrent_networks_steps_stay_together():
    case = zoo.make_lstm()
    parts = PipelineStep.of(trace(case.step, *case.abstract_args()), 2)
    loops = [op for op in parts.forward_ops if op.name == "scan"]
    assert loops
    assert all(num_positions(parts, op) == 1 for op in loops)


def test_light_ops_are_made_anew_rather_than_sent():
    def masked(params, batch):
        x = batch["x"]
        mask = jnp.arange(BATCH)[:, None] < batch["length"]
        for w in params:
            x = jnp.where(mask, jnp.tanh(x @ w), 0)
        return jnp.mean(x**2)

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * LAYERS
    batch = {
        "x": jax.ShapeDtypeStruct((BATCH, WIDTH), "float32"),
        "length": jax.ShapeDtypeStruct((), "int32"),
    }
    parts = PipelineStep.of(trace(trained(masked), params, batch), 2)
    programs = stage_programs(*made_ready(parts, behind(parts, 2)))
    assert not [t for t in programs.transfers if programs.values[t.value].dtype == bool]


def test_forward_programs_hold_no_backward_op():
    parts = parts_of(layers)
    programs = stage_programs(*made_ready(parts, behind(parts, 2)))
    assert all(op.phase is Phase.FORWARD for s in (0, 1) for op in programs.tasks[s, FORWARD].graph.ops)


def test_a_stage_waits_with_its_state_on_the_host_for_values_of_its_own_only():
    """Moments are named so that those of both stages take turns."""
    width = 128
    names = [f"{kind}{layer}" for kind in "ab" for layer in range(2)]

    def step(state, x):
        def loss_fn(w):
            out = x
            for layer in range(2):
                out = jnp.tanh(out @ w[f"a{layer}"]) @ w[f"b{layer}"]
            return jnp.mean(out**2)

        grads = jax.grad(loss_fn)(state["w"])
        m = {name: 0.9 * state["m"][name] + grads[name] for name in names}
        return {"w": {name: state["w"][name] - m[name] for name in names}, "m": m}

    weights = {name: jax.ShapeDtypeStruct((width, width), "float32") for name in names}
    traced = trace(step, {"w": weights, "m": weights}, jax.ShapeDtypeStruct((BATCH, width), "float32"))
    moments = {i for i, a in enumerate(traced.arguments) if a.role is Role.OPTIMIZER_STATE}
    assert len(moments) == len(names)
    parts = PipelineStep.of_loop(offloaded(looped_step(traced, 2), frozenset(moments)).step)
    programs = stage_programs(*made_ready(parts, behind(parts, 2)))
    assert not [t for t in programs.transfers if programs.values[t.value].is_on_host]
    updates = [program for program in programs.epilogue if "optimization_barrier" in names_of(program)]
    assert [program.stage for program in updates] == [0, 1]
    rests = {programs.stage_of[parts.step.graph.inputs[i]] for i in moments}
    assert rests == {0, 1}
