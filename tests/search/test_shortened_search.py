"""The plan of a shortened step is one of the whole step: it is told, executed, saved and edited as any other."""

import functools
import re
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import build
from autoshard.search import applying, driver
from autoshard.search import result as results
from autoshard.search.ir.graph import Phase, Step
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.retention import CoarseError
from autoshard.search.problem import shortening
from autoshard.search.problem.equivalence import blocks, places
from autoshard.search.result import SearchResult
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import WorkClock
from autoshard.search.space.warm_starts import for_whole_step, passed_between_layers, unlike_neighbours
from autoshard.search.step_problem import StepProblem
from tests import zoo
from tests.decisions import with_decisions

NUM_LAYERS = 16
WIDTH = 1024
BATCH = 65536
"""Activations are much, parameters are little: what does not fit is recomputed."""
H100S = parse_cluster("8xH100-80GB")
PLENTY_BYTES = 60 << 30
TIGHT_BYTES = 900 << 20
"""Less than what the plan without a cap holds: something is recomputed."""

ALIKE_BYTES = 1200 << 20
"""A cap under which layers recompute different things, and some of them hand on what they are handed."""

TIGHTER_BYTES = 600 << 20
"""Less than a plan holds that keeps what each layer hands to the next."""

OPTIMIZER = optax.adam(1e-3)


def train_step(state, x):
    def loss_of(layers):
        y = x
        for layer in layers:
            y = y + jnp.tanh(y @ layer["up"]) @ layer["down"]
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_of)(state["layers"])
    updates, moments = OPTIMIZER.update(grads, state["moments"])
    return {"layers": optax.apply_updates(state["layers"], updates), "moments": moments}, loss


def abstract_state(width: int):
    layers = [dict.fromkeys(("up", "down"), jax.ShapeDtypeStruct((width, width), "float32"))] * NUM_LAYERS
    return {"layers": layers, "moments": jax.eval_shape(OPTIMIZER.init, layers)}


@functools.cache
def stack(width: int = WIDTH, batch: int = BATCH) -> Step:
    return trace(train_step, abstract_state(width), jax.ShapeDtypeStruct((batch, width), "float32"))


@functools.cache
def found(limit_bytes: int = PLENTY_BYTES, cluster: Cluster = H100S) -> SearchResult:
    return driver.find(stack(), cluster, Options(limit_bytes, (8,), offload="never", microbatches=1))


def test_few_layers_stand_for_many():
    program = found().problem.graph.folded.program
    assert program.is_shortened
    assert len(program.step.graph.ops) < len(stack().graph.ops)


@pytest.mark.slow  # the two below show when all layers are searched; tests/search/test_few_layers.py, that they are
def test_where_that_fits_nothing_all_layers_are_searched():
    result = found(TIGHTER_BYTES)
    assert not result.problem.graph.folded.program.is_shortened
    assert result.plan.estimates.peak_bytes <= TIGHTER_BYTES


@pytest.mark.parametrize(
    ("times", "is_searched"), [(driver.MAX_SHORT_PEAK, True), (driver.MAX_SHORT_PEAK + 0.1, False)]
)
def test_where_few_layers_hold_far_more_than_fits_all_are_not_searched(times, is_searched, monkeypatch):
    searched = list[bool]()

    def misses(forms, *_):
        searched.append(forms[0].short is None)
        raise InfeasibleError("as if", times * TIGHT_BYTES)

    monkeypatch.setattr(driver, "_found", misses)
    with pytest.raises(InfeasibleError, match="as if"):
        driver.find(stack(), H100S, Options(TIGHT_BYTES, (8,)))
    assert searched == [False, True][: 1 + is_searched]


def test_of_few_layers_and_all_what_holds_less_is_said_where_neither_fits(monkeypatch):
    said = iter([InfeasibleError("few", 1.2 * TIGHT_BYTES), InfeasibleError("all", 1.3 * TIGHT_BYTES)])
    monkeypatch.setattr(driver, "_found", mock.Mock(side_effect=said))
    with pytest.raises(InfeasibleError, match="few"):
        driver.find(stack(), H100S, Options(TIGHT_BYTES, (8,)))


def test_where_the_whole_step_cannot_do_the_same_all_layers_are_searched(monkeypatch):
    assert unlike_neighbours(found(TIGHT_BYTES).problem.graph.folded)

    def but_for_all(forms, *_):
        if forms[0].short is None:
            raise InfeasibleError("all layers are searched", 2.0 * TIGHT_BYTES)
        return found(TIGHT_BYTES)

    monkeypatch.setattr(driver, "_found", but_for_all)
    monkeypatch.setattr(results, "for_whole_step", mock.Mock(side_effect=NoFitError("as if", bound_s=0.0)))
    with pytest.raises(InfeasibleError, match="all layers are searched"):
        driver.find(stack(), H100S, Options(TIGHT_BYTES, (8,), offload="never", microbatches=1))


def test_where_pairs_of_layers_cannot_say_what_is_recomputed_the_whole_step_is_asked(monkeypatch):
    """As one op stands there for some that are recomputed and some that are not."""
    result = found(TIGHT_BYTES)
    monkeypatch.setattr(shortening, "_runs", lambda alike: [alike[1:-1]])
    coarse = shortening.shortened(stack(), [""] * len(stack().arguments))
    assert coarse is not None
    assert result.short is not None
    short = replace(result.short, paired=lambda _: coarse.step)
    with pytest.raises(CoarseError):
        replace(result, short=short)._for_step(short.paired(()))
    for limit_bytes, may in ((PLENTY_BYTES, nullcontext()), (TIGHTER_BYTES, pytest.raises(NoFitError))):
        with may:
            plan = replace(result.plan, memory_bytes=limit_bytes)
            replace(result, plan=plan, short=short).check_goes_together()


def test_strategies_that_do_not_go_together_are_not_handed_over():
    result = found()
    edge, where = next(
        (e, np.argwhere(np.isinf(e.cost_s))[0])
        for e in result.on_mesh.problem.edges
        if np.isinf(e.cost_s).any()
    )
    torn = list(result.chosen)
    torn[edge.u], torn[edge.v] = map(int, where)
    with pytest.raises(NoFitError):
        for_whole_step(result.on_mesh, tuple(torn), result.whole.on_mesh)


@pytest.mark.parametrize("offload", ["never", ("optimizer_state",)])
def test_in_microbatches_all_layers_do_what_few_do(offload):
    """But for the zeros that gradients are added to: no layer made them."""
    result = driver.find(stack(), H100S, Options(PLENTY_BYTES, (8,), offload=offload, microbatches=2))
    assert result.short is not None
    few, whole = result.problem.graph.folded, result.whole.problem.graph.folded
    besides = {
        op.name for op, k in zip(whole.program.ops, whole.class_of, strict=True) if k >= len(few.members)
    }
    assert besides == {"broadcast_in_dim"}
    assert_the_whole_step_takes(result, 0.12)


def test_two_layers_for_each_that_stands_for_others_have_all_nodes_of_the_whole_step():
    result = found(TIGHT_BYTES)
    assert result.short is not None
    blocks = unlike_neighbours(result.problem.graph.folded)
    steps = (result.short.paired(blocks), result.short.whole)
    of_pairs, of_all = (result._for_step(s).problem.graph for s in steps)
    assert [g.op_classes for g in of_pairs.groups] == [g.op_classes for g in of_all.groups]
    assert [(c.maker, c.phase) for c in of_pairs.copies] == [(c.maker, c.phase) for c in of_all.copies]


@pytest.mark.slow  # `test_layers_that_hand_on_otherwise_are_paired` shows which layers a plan has paired
def test_only_layers_decided_as_none_next_to_them_are_paired():
    """Of a GPT, the first layer that stands for others recomputes, and the next one reads what that makes."""
    case = zoo.MAKERS["gpt_linen"](num_layers=12)
    step = trace(case.step, *case.abstract_args())
    unmarked = [""] * len(step.arguments)
    short = shortening.shortened(step, unmarked)
    assert short is not None
    ops = short.step.graph.ops
    blocks = sorted(
        {op.equivalence.block for op in ops if op.equivalence is not None and op.equivalence.repeats > 1}
    )
    assert len(blocks) == shortening.NUM_REPRESENTATIVES

    def unlike(recomputing):
        sites = frozenset(
            (i,)
            for i, op in enumerate(ops)
            if op.equivalence is not None
            and op.equivalence.block in recomputing
            and op.phase is Phase.FORWARD
            and op.name in ("tanh", "mul", "add", "one_minus_square")
        )
        marks = unmarked[: len(short.step.arguments)]
        problem = StepProblem.of(short.step, marks, H100S.device, sites, clock=WorkClock())
        return unlike_neighbours(problem.graph.folded)

    assert unlike(()) == frozenset()
    some = unlike((0, 1, blocks[0]))
    assert some == {*blocks[:2]}
    assert len(ops) < len(short.paired(some).graph.ops) < len(short.paired(blocks).graph.ops)


def test_layers_that_hand_on_what_they_are_handed_are_not_paired():
    result = found(ALIKE_BYTES)
    assert result.short is not None
    paired = passed_between_layers(result.on_mesh, result.chosen)
    assert paired < unlike_neighbours(result.problem.graph.folded)
    not_asked_for = mock.patch.object(results, "for_whole_step", side_effect=AssertionError("not asked for"))
    with mock.patch.object(results, "passed_between_layers", return_value=frozenset()), not_asked_for:
        result.check_goes_together()


def test_layers_that_hand_on_otherwise_are_paired():
    """Here as one holds a copy of what it is handed that lies otherwise than the copy that its next one holds."""
    result = found(ALIKE_BYTES)
    graph, strategies = result.on_mesh.memory.costed.graph, result.on_mesh.memory.costed.strategies
    unlike, block_of = unlike_neighbours(graph.folded), blocks(graph.folded.program)
    alike = unlike - passed_between_layers(result.on_mesh, result.chosen)

    def torn(node: int, block: int) -> bool:
        own = strategies[node].assignment
        others = np.flatnonzero((own != own[result.chosen[node]]).any(axis=1))
        chosen = (*result.chosen[:node], *map(int, others[:1]), *result.chosen[node + 1 :])
        return len(others) > 0 and block in passed_between_layers(result.on_mesh, chosen)

    made_in = [(c.node, {block_of[i] for i in graph.folded.members[c.maker[0]]}) for c in graph.copies]
    assert any(torn(node, block) for node, own in made_in for block in alike if own == {block})


def test_the_plan_decides_every_argument():
    assert list(found().plan.decisions.arguments) == [a.name for a in stack().arguments]


@pytest.mark.parametrize(
    ("limit_bytes", "put_off"),
    # more layers have more that may wait for a window to fill
    [(PLENTY_BYTES, 0.12), (TIGHT_BYTES, 0.01), (ALIKE_BYTES, 0.01)],
)
def test_the_whole_step_takes_it_as_it_is_and_as_long(limit_bytes, put_off):
    assert_the_whole_step_takes(found(limit_bytes), put_off)


@pytest.mark.slow  # `test_in_microbatches_all_layers_do_what_few_do` shows it where sums of gradients are smaller
def test_what_goes_round_the_microbatches_is_there_for_all_layers():
    """Sums of gradients above all."""
    options = Options(PLENTY_BYTES, (2, 4), offload="never", microbatches=4)
    result = driver.find(stack(4096, 2048), H100S, options)
    assert_the_whole_step_takes(result)
    program = result.problem.graph.folded.program
    assert None not in {
        place for op, place in zip(program.ops, places(program), strict=True) if op.repeats > 1
    }


def assert_the_whole_step_takes(result: SearchResult, put_off: float = 0.01) -> None:
    """As it is, and as long, and with as much memory; but for a share of what the compiler's scheduler puts off."""
    whole = result.whole
    assert len(whole.step.graph.ops) > len(result.problem.step.graph.ops)
    said = whole.on_mesh.codec.decisions(whole.chosen)
    assert said.arguments == result.plan.decisions.arguments
    cost_s = [one.on_mesh.problem.cost_s(one.chosen) for one in (result, whole)]
    assert cost_s[0] == pytest.approx(cost_s[1], rel=0.01)
    predicted = [one.on_mesh.predicted(one.chosen, result.plan.memory_bytes) for one in (result, whole)]
    least, peaks = zip(*((p.least.num_bytes, p.peak.num_bytes) for p in predicted), strict=True)
    assert least[0] == pytest.approx(least[1], rel=0.01)
    assert peaks[0] == pytest.approx(peaks[1], rel=put_off)


def test_some_layers_recompute_and_others_do_not():
    said = found(TIGHT_BYTES).plan.decisions.retention
    assert said
    assert found(TIGHT_BYTES).plan.estimates.recompute_s > 0
    parts = [re.findall(r"\d+", text) for text in said.values() if " of " in text]
    assert parts, "of some classes a part is recomputed"
    assert all(int(part[-1]) > 4 for part in parts), "they are counted in the whole step"


@pytest.mark.slow  # `test_less_memory_never_makes_it_faster` of test_recomputation.py shows it for all layers at once
def test_little_is_recomputed_where_little_is_missing():
    """Other shardings hold 1,213 MiB without recomputation. Below that, 4 layers of 16 recompute at first, then 13. Nobody
    puts the kernels into another order there."""
    in_order = parse_cluster("8xCPU")
    again_s = [found(mib << 20, in_order).plan.estimates.recompute_s for mib in (1200, 900)]
    assert 0 < again_s[0] < again_s[-1] / 3
    assert again_s == sorted(again_s)


@pytest.mark.parametrize(
    "limit_bytes", [PLENTY_BYTES, TIGHT_BYTES, pytest.param(TIGHTER_BYTES, marks=pytest.mark.slow)]
)
def test_a_saved_plan_comes_back_as_it_was(limit_bytes):
    plan = found(limit_bytes).plan
    again = applying.apply(stack(), Plan.from_json(plan.to_json(), "plan.json"), H100S).plan
    assert again.decisions == plan.decisions
    assert again.estimates == plan.estimates
    assert again.gap == plan.gap


def test_an_edit_of_one_layer_holds_for_that_layer():
    plan, name = found().plan, "state['layers'][7]['up']"
    was = plan.decisions.arguments[name]
    other = "P(None, 'data')" if was != "P(None, 'data')" else "P('data')"
    text = plan.to_json()
    text["shardings"][0]["arguments"][name] = other
    edited = applying.apply(stack(), Plan.from_json(text, "plan.json"), H100S).plan
    assert edited.decisions.arguments[name] == other
    assert (
        edited.decisions.arguments["state['layers'][9]['up']"]
        == plan.decisions.arguments["state['layers'][9]['up']"]
    )


def test_what_one_layer_recomputes_alone_is_kept_elsewhere():
    plan = found(TIGHT_BYTES).plan
    name, text = next((n, t) for n, t in plan.decisions.retention.items() if " of " in t)
    one = f"remat 1 of {text.split()[-1]}"
    decisions = replace(plan.decisions, ops={}, copies={}, retention={name: one})
    roomy = with_decisions(plan, decisions, memory_bytes=PLENTY_BYTES)
    assert applying.apply(stack(), roomy, H100S).plan.decisions.retention == {name: one}


def test_a_pinned_layer_is_pinned():
    name = "state['layers'][7]['up']"
    options = Options(PLENTY_BYTES, (8,), pins={name: P(None, "data")})
    plan = driver.find(stack(), H100S, options).plan
    assert plan.decisions.arguments[name] == "P(None, 'data')"


@pytest.mark.devices
def test_a_run_gives_the_numbers_of_a_single_device():
    width, batch = 64, 16
    step = stack(width, batch)
    result = driver.find(step, parse_cluster("8xCPU"), Options(PLENTY_BYTES, (2, 4)))
    program = build(result.step, result.sharding, jax.devices())
    draws = np.random.default_rng(1)
    start = jax.tree.map(lambda x: jnp.asarray(draws.random(x.shape) / width, x.dtype), abstract_state(width))
    x = draws.standard_normal((batch, width), "float32")
    wanted_state, wanted_loss = jax.jit(train_step)(start, x)
    placed = jax.tree.map(jax.device_put, (start, x), jax.tree.map(lambda s: s.sharding, program.args))
    got_state, got_loss = program.fn(*placed)
    np.testing.assert_allclose(got_loss, wanted_loss, rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(got_state), jax.tree.leaves(wanted_state), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
