"""A shortened step is as good as the whole: the same decisions, the same costs, the same memory."""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.plan.decisions import node_names
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.shortening import NUM_REPRESENTATIVES, shortened
from autoshard.search.solver.clock import WorkClock
from autoshard.search.step_problem import StepProblem
from tests import zoo

NUM_LAYERS = 12
DEEP = {
    "gpt_linen": {"num_layers": NUM_LAYERS},
    "gpt_nnx_optimizer": {"num_layers": NUM_LAYERS},
    "llama": {"num_layers": NUM_LAYERS},
    "mixer": {"num_layers": NUM_LAYERS},
    "moe": {"num_layers": 16},  # every other layer has experts
    "resnet": {"blocks_per_stage": (NUM_LAYERS, 2)},
    "t5": {"num_layers": NUM_LAYERS},
    "vit": {"num_layers": NUM_LAYERS},
}
SLOW = {"gpt_linen", "gpt_nnx_optimizer", "mixer", "moe", "t5", "vit"}
"""Models that take long to trace, whose blocks are as those of others, of one stack and of two."""
MODELS = [pytest.param(m, marks=[pytest.mark.slow] if m in SLOW else []) for m in DEEP]
CLUSTER = parse_cluster("8xH100-80GB")


@functools.cache
def traced(model: str) -> Step:
    case = zoo.MAKERS[model](**DEEP[model])
    return trace(case.step, *case.abstract_args())


def unmarked(step: Step) -> list[None]:
    return [None] * len(step.arguments)


@functools.cache
def short(model: str) -> Step:
    both = shortened(traced(model), unmarked(traced(model)))
    assert both is not None
    found = both.step
    assert len(found.graph.ops) < len(traced(model).graph.ops)
    return found


@functools.cache
def problem(model: str, is_short: bool) -> StepProblem:
    step = short(model) if is_short else traced(model)
    return StepProblem.of(step, [""] * len(step.arguments), CLUSTER.device, clock=WorkClock())


@functools.cache
def on_mesh(model: str) -> tuple[MeshProblem, MeshProblem, tuple[int, ...]]:
    """The shortened problem, the whole one, and what is chosen of the whole one."""
    one, other = (problem(model, is_short).on(CLUSTER, (2, 4)) for is_short in (True, False))
    return one, other, tuple(other.solve(other.pinned({}), 1 << 62, 1.0).labels)


# --- what is kept


@pytest.mark.parametrize("model", MODELS)
def test_its_arguments_stand_for_all(model):
    names = [name for a in short(model).arguments for name in a.names]
    assert sorted(names) == sorted(a.name for a in traced(model).arguments)


@pytest.mark.parametrize("model", MODELS)
def test_its_arguments_stand_for_their_like(model):
    step = traced(model)
    types = {
        a.name: (step.graph.values[v], a.role) for v, a in zip(step.graph.inputs, step.arguments, strict=True)
    }
    for argument in short(model).arguments:
        assert {types[name] for name in argument.alike} <= {types[argument.name]}


def test_the_first_two_blocks_and_the_last_two_stand_for_themselves():
    found = Counter(op.repeats for op in short("llama").graph.ops if op.name == "dot_general")
    of_a_block = sum(op.name == "dot_general" for op in traced("llama").graph.ops) // NUM_LAYERS
    assert found[(NUM_LAYERS - 4) // NUM_REPRESENTATIVES] >= of_a_block * NUM_REPRESENTATIVES
    assert found[1] >= 4 * of_a_block


def chained(num_layers: int, table: np.ndarray | float = 0.0) -> Step:
    """Layers of one product and a tanh; the first reads an array besides."""

    def loss(params, x):
        return jnp.sum(functools.reduce(lambda x, w: jnp.tanh(x @ w), params, x + table))

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * num_layers
    return trace(jax.value_and_grad(loss), params, jax.ShapeDtypeStruct((16, 8), jnp.float32))


@pytest.mark.parametrize(("num_layers", "is_short"), [(7, False), (8, True), (16, True)])
def test_a_step_of_few_blocks_stays_whole(num_layers, is_short):
    step = chained(num_layers)
    assert (shortened(step, unmarked(step)) is not None) == is_short


def test_a_deep_step_may_have_arrays_of_its_own():
    """They come in through boundaries that read no value which could say how many they stand for."""
    step = chained(16, np.linspace(-1, 1, 8, dtype=np.float32))
    both = shortened(step, unmarked(step))
    assert both is not None
    whole, few = (flatten(one).ops for one in (step, both.step))
    assert sum(op.name == "dot_general" for op in whole) == sum(
        op.repeats for op in few if op.name == "dot_general"
    )


def test_parts_of_one_array_are_read_as_often():
    """The gradient of stacked look-ups is one array, of which each table gets a part."""
    case = zoo.make_dlrm(table_rows=(64,) * 20)
    step = trace(case.step, *case.abstract_args())
    both = shortened(step, unmarked(step))
    assert both is not None
    reads = [Counter[str](), Counter[str]()]
    for found, one in zip(reads, (step, both.step), strict=True):
        program = flatten(one)
        for op in program.ops:
            for v, count in zip(op.operands, op.operand_counts, strict=True):
                found[program.ops[program.maker[v][0]].name] += count
    assert reads[0]["unstack"] == reads[1]["unstack"] == 21


def test_a_block_stands_for_consecutive_ones():
    """One that is marked lies between others, which hand on to it and not to one another."""
    step = chained(16)
    both = shortened(step, [P("model") if "[6]" in a.name else None for a in step.arguments])
    assert both is not None
    runs = [[int(name[name.index("[") + 1 : -1]) for name in a.names] for a in both.step.arguments[:-1]]
    assert runs == [[0], [1], [2, 3], [4, 5], [6], [7], [8, 9, 10], [11, 12, 13], [14], [15]]


def test_what_is_marked_stands_for_itself():
    step = chained(16)
    marked = next(n for n, a in enumerate(step.arguments) if "[7]" in a.name)
    both = shortened(step, [P("model") if n == marked else None for n in range(len(step.arguments))])
    assert both is not None
    found = both.step
    (there,) = (a for a in found.arguments if step.arguments[marked].name in a.names)
    assert there.repeats == 1
    assert any(a.repeats > 1 for a in found.arguments)


# --- the same problem


@pytest.mark.parametrize("model", MODELS)
def test_as_many_ops_run(model):
    one, other = (Counter[tuple[str, str]]() for _ in range(2))
    for counted, is_short in ((one, True), (other, False)):
        for op in problem(model, is_short).graph.folded.program.ops:
            counted[op.name, op.phase] += op.count
    assert one == other


@pytest.mark.parametrize("model", MODELS)
def test_the_same_decisions_under_the_same_names(model):
    names = [[set(said) for said in node_names(problem(model, is_short).graph)] for is_short in (True, False)]
    assert names[0] == names[1]


@pytest.mark.parametrize("model", MODELS)
def test_as_much_is_handed_over(model):
    one, other = (problem(model, is_short).graph.edges for is_short in (True, False))
    handed = [sum(edge.count * edge.value.num_bytes for edge in edges) for edges in (one, other)]
    assert handed[0] == pytest.approx(handed[1], rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_computation_and_communication_cost_the_same(model):
    one, other, chosen = on_mesh(model)
    costed = one.memory.costed, other.memory.costed
    compute_s = [c.compute_s(chosen) for c in costed]
    assert compute_s[0] == pytest.approx(compute_s[1], rel=0.001)
    moved_s = [
        sum(float(c.edge_seconds(e)[chosen[e.source.node], chosen[e.target.node]]) for e in c.graph.edges)
        for c in costed
    ]
    assert moved_s[0] == pytest.approx(moved_s[1], rel=1e-6)
    hidden_s = [p.hiding.hidden_s(chosen) for p in (one, other)]
    assert hidden_s[0] == pytest.approx(hidden_s[1], rel=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_a_device_holds_as_much(model):
    one, other, chosen = on_mesh(model)
    peaks = [p.predicted(chosen, 1e12).least for p in (one, other)]
    assert peaks[0].num_bytes == pytest.approx(peaks[1].num_bytes, rel=0.02)
    kinds = [dict(peak.residents) for peak in peaks]
    for kind in kinds[1].keys() & {"parameters", "optimizer_state", "batch"}:
        assert kinds[0][kind] == pytest.approx(kinds[1][kind], rel=1e-6)
    in_order = [p.memory.peak(chosen).num_bytes for p in (one, other)]
    assert in_order[0] == pytest.approx(in_order[1], rel=0.02)


def test_a_step_that_was_not_shortened_counts_as_it_did():
    program = flatten(traced("llama"))
    assert {op.repeats for op in program.ops} == {1}
    assert not program.is_shortened
    ops = short("llama").graph.ops
    again = replace(
        short("llama"),
        graph=replace(short("llama").graph, ops=tuple(replace(op, equivalence=None) for op in ops)),
    )
    assert sum(op.count for op in flatten(again).ops) < sum(op.count for op in flatten(short("llama")).ops)
