"""What drafts of pipelines say of themselves, against their schedules in time."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.cost_model.cluster import Link
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.mixed_cluster import MixedCluster
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.drafts import Drafting
from autoshard.search.pipeline.layers import MAX_LAYERS
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.proposals import Proposal
from autoshard.search.pipeline.search import PipelineSearch
from autoshard.search.pipeline.simulator import simulate
from tests.zoo.megatron import make_megatron
from tests.zoo.mlp import make_mlp

CLUSTER = parse_cluster("8xA100-80GB")
SHAPES = ((1,), (2,))


BLOCKS, EXAMPLES, TOKENS, WIDTH = 6, 16, 256, 512


@cache
def traced() -> Step:
    """Blocks of two products under AdamW: few ops, and as much to weigh as there is in a transformer."""
    update = optax.adamw(1e-3)

    def step(params, state, x):
        def loss_fn(params):
            y = x
            for w in params:
                y = y + jax.nn.gelu(y @ w["up"]) @ w["down"]
            return jnp.mean(y**2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        changes, state = update.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, loss

    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}] * BLOCKS
    x = jax.ShapeDtypeStruct((EXAMPLES, TOKENS, WIDTH), jnp.float32)
    return trace(step, params, jax.eval_shape(update.init, params), x)


@cache
def attending() -> Step:
    """Layers of which some residuals are cheaper to recompute than others."""
    case = make_megatron(2, 512, 8, 1024, 256, EXAMPLES)
    return trace(case.step, *case.abstract_args())


PREPARED = Prepared.within()


def plain(count: int) -> Parts:
    """As the searches prepare it."""
    step = traced()
    return PREPARED.in_parts(count, step, CLUSTER, PipelineOptions(80 << 30))


@cache
def may_recompute() -> tuple[Parts, Parts]:
    """A step in eight parts: all is kept, and all is recomputed that may be."""
    step = attending()
    parts = Parts.of(step, CLUSTER, 8)
    return parts, parts.recomputing(parts.choices(SHAPES[-1])[-1].sites)


def drafting(num_replicas: int, among: tuple[Parts, ...] = (), **wanted) -> Drafting:
    """Of the step in eight parts."""
    options = PipelineOptions(**{"memory_bytes": 80 << 30, **wanted})
    return Drafting(among or (plain(8),), num_replicas, SHAPES, options, CLUSTER)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "eager-1f1b", "gpipe"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_no_schedule_takes_less_than_a_draft_says(name, num_replicas):
    draft = drafting(num_replicas, schedule=name, stages=4).draft()
    assert draft is not None
    proposal = draft.proposal()
    assert isinstance(proposal, Proposal)
    again = simulate(proposal.schedule, [stage.cost for stage in proposal.stages])
    assert draft.least_s <= again.makespan_s + max(stage.once_s for stage in proposal.stages)


def test_what_is_promised_is_what_is_worked_out_where_nothing_is_recomputed():
    draft = drafting(2).draft()
    assert draft is not None
    proposal = draft.proposal()
    assert isinstance(proposal, Proposal)
    assert proposal.step_s == draft.promised_s


@pytest.mark.parametrize("share", [0.9, 0.7, 0.65])
def test_what_is_promised_of_stages_that_recompute_is_about_what_they_take(share):
    kept, recomputed = may_recompute()
    free = drafting(2, (kept,), stages=2).draft()
    assert free is not None
    cap_bytes = share * free.fullness * free.drafting.options.memory_bytes
    draft = drafting(2, (kept, recomputed), memory_bytes=cap_bytes, stages=2).draft()
    assert draft is not None
    proposal = draft.proposal()
    assert isinstance(proposal, Proposal)
    assert proposal.parts.step_problem.sites
    assert proposal.step_s == pytest.approx(draft.promised_s, rel=0.015)
    assert max(proposal.peak_bytes) <= cap_bytes


def test_numbers_that_suit_no_schedule_are_refused_before_anything_is_worked_out():
    with pytest.raises(InputError, match="wants microbatches in groups of as many as there are workers"):
        drafting(4, schedule="interleaved-1f1b", stages=8).draft()


@pytest.mark.parametrize("microbatches", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))])
def test_nothing_that_is_passed_over_is_faster(microbatches):
    """Each number of replicas worked out."""
    step = traced()
    options = PipelineOptions(80 << 30, microbatches=microbatches, remat="never")
    search = PipelineSearch(step, CLUSTER, options, prepared=PREPARED)
    found_s = search.run().step_s
    least_s = math.inf
    for num_replicas, shapes in [(1, ((1,), (2,), (4,))), (2, ((1,), (2,))), (4, ((1,),))]:
        if 16 % (microbatches * num_replicas) == 0:
            draft = Drafting(
                (plain(microbatches * num_replicas),), num_replicas, shapes, options, CLUSTER
            ).draft()
            proposal = None if draft is None else draft.proposal()
            least_s = min(least_s, proposal.step_s) if isinstance(proposal, Proposal) else least_s
    assert found_s <= least_s * (1 + 1e-9)


MIXED = MixedCluster("mixed", (parse_cluster("4xH100-80GB"), parse_cluster("4xA100-40GB")), Link(1e10, 1e-5))


PREPARED_MIXED = Prepared.within()


@pytest.mark.parametrize("cap_bytes", [40 << 30, 150 << 20])
def test_groups_of_nodes_stand_in_the_order_that_is_best(cap_bytes):
    """Each order worked out, for each number of replicas."""
    step = traced()
    options = PipelineOptions(cap_bytes, microbatches=4, remat="never")
    search = PipelineSearch(step, MIXED, options, prepared=PREPARED_MIXED)
    found_s, by_order = search.run().step_s, dict[str, float]()
    for num_replicas, shapes in [(1, ((1,), (2,), (4,))), (2, ((1,), (2,))), (4, ((1,),))]:
        parts = PREPARED_MIXED.parts[4 * num_replicas]
        for order, one in product(MIXED.orders, (parts, parts.with_split_parameters)):
            draft = Drafting((one,), num_replicas, shapes, options, order).draft()
            proposal = None if draft is None else draft.proposal()
            if isinstance(proposal, Proposal):
                assert proposal.cluster == order
                first = order.groups[0].name
                by_order[first] = min(by_order.get(first, math.inf), proposal.step_s)
    assert found_s == pytest.approx(min(by_order.values()))
    in_each = {by_order.get(group.name, math.inf) for group in MIXED.groups}
    assert len(in_each) == 2, "the order does not matter here"


def test_a_stage_takes_what_its_own_kind_of_device_takes():
    """The second group's devices, were they the first one's, would take less."""
    parts = Parts.of(traced(), MIXED.groups[0], 8)
    of_h100, of_a100 = (parts.on(group).costs((1,), 4) for group in MIXED.groups)
    assert (of_a100.forward_s > 1.2 * of_h100.forward_s).all()
    draft = Drafting((parts,), 4, ((1,),), PipelineOptions(80 << 30, stages=2), MIXED).draft()
    assert draft is not None
    first, second = draft.cut.stages
    assert first.time_s == pytest.approx(
        (of_h100.forward_s + of_h100.backward_s + of_h100.weight_gradient_s)[: first.end_layer].sum()
    )
    assert second.time_s == pytest.approx(
        (of_a100.forward_s + of_a100.backward_s + of_a100.weight_gradient_s)[second.first_layer :].sum()
    )
    assert first.end_layer > parts.layers.num_layers / 2


def test_a_draft_without_a_cap_is_the_fastest():
    capped = drafting(2, memory_bytes=1 << 28)
    free, tight = capped.without_cap.draft(), capped.draft()
    assert free is not None
    assert tight is None or free.cut.step_s <= tight.cut.step_s


def test_where_another_plan_is_faster_anyway_nothing_is_drafted():
    step = traced()
    options = PipelineOptions(80 << 30, microbatches=4)
    search = PipelineSearch(step, CLUSTER, options, prepared=PREPARED)
    with pytest.raises(
        InfeasibleError, match=r"pipelines of step take .* or more, and there is a plan of 1 us"
    ):
        search.run(cutoff_s=1e-6)
    assert search.best is None


def test_when_the_time_is_over_nothing_more_is_begun():
    step, said, prepared = traced(), list[str](), Prepared.within(0.0)
    search = PipelineSearch(step, CLUSTER, PipelineOptions(80 << 30), said.append, prepared)
    with pytest.raises(InfeasibleError, match="was found in the time limit"):
        search.run()
    assert (said, prepared.parts) == ([], {})


def test_a_number_of_parts_that_was_begun_in_time_has_a_pipeline_on_the_most_promising_mesh():
    """To make the step in parts ready takes more than a millisecond."""
    step, prepared = traced(), Prepared.within(1e-3)
    search = PipelineSearch(step, CLUSTER, PipelineOptions(80 << 30), prepared=prepared)
    found = search.run()
    (parts,) = prepared.parts.values()
    assert found.parts is parts
    assert len(parts.ledgers) == 1


def test_state_that_cannot_be_shared_out_over_replicas_is_counted_whole():
    """Of hidden sizes of 512 no replica can have a third, but of queries, keys and values."""
    whole = plain(8).costs((1,), 1).state_bytes.sum()
    halves, thirds = (plain(8).costs((1,), n).state_bytes.sum() for n in (2, 3))
    assert halves < 0.8 * whole
    assert thirds > 0.9 * whole


def test_what_tasks_would_gather_for_each_microbatch_lies_whole():
    """Of layers so small that their products are not split, moments lie in parts, as the update is; parameters do not."""
    case = make_megatron(2, 256, 4, 512, 128, 32)
    step = trace(case.step, *case.abstract_args())
    found = Parts.of(step, CLUSTER, 8).solution((2,))
    decisions = found.on_mesh.codec.decisions(found.labels)
    matrices = {n: s for n, s in decisions.arguments.items() if n.endswith("['w']")}
    assert {s for n, s in matrices.items() if ".mu" in n} != {"P()"}
    assert {s for n, s in matrices.items() if "['params']" in n} == {"P()"}
    products = {n: s for n, s in decisions.ops.items() if "forward" in n and "dot_general" in n}
    assert {*products.values()} == {"P(), P() -> P()"}


@cache
def wide() -> Step:
    """One example on four devices is best split by positions, with parameters that are whole."""
    case = make_megatron(2, 1024, 8, 2048, 512, 8, compute_dtype=jnp.bfloat16)
    return trace(case.step, *case.abstract_args())


def test_lean_stages_hold_a_part_of_their_parameters_and_take_no_less_time():
    parts = Parts.of(wide(), CLUSTER, 8)
    assert (
        parts.with_split_parameters.costs((4,), 2).state_bytes.sum()
        < 0.95 * parts.costs((4,), 2).state_bytes.sum()
    )
    assert parts.with_split_parameters.ledger((4,)).microbatch_s > parts.ledger((4,)).microbatch_s
    assert parts.with_split_parameters.recomputing(frozenset()).splits_parameters


def test_where_parameters_do_not_fit_whole_stages_are_lean():
    cluster = parse_cluster("16xA100-80GB")
    options = PipelineOptions(80 << 30, stages=2, schedule="1f1b", microbatches=4, mesh=(2, 4), remat="never")

    def found(memory_bytes: int) -> Proposal:
        asked = replace(options, memory_bytes=memory_bytes)
        return PipelineSearch(wide(), cluster, asked).run()

    roomy = found(80 << 30)
    tight = found(int(0.92 * max(roomy.peak_bytes)))
    assert (roomy.parts.splits_parameters, tight.parts.splits_parameters) == (False, True)
    assert max(tight.peak_bytes) < max(roomy.peak_bytes)
    assert tight.step_s > roomy.step_s


def test_stages_that_share_workers_have_any_equal_share_of_the_devices():
    """Four workers of three devices each, where a stage by itself would have one, two or four of a node."""
    options = PipelineOptions(30 << 30, stages=8, schedule="zb-v", microbatches=4)
    step, twelve = batch_of_48(), parse_cluster("12xA100-40GB")
    found = PipelineSearch(step, twelve, options).run()
    sizes = [found.num_replicas * math.prod(stage.placed.shape) for stage in found.stages]
    assert sizes == [3] * 8


def batch_of_48() -> Step:
    case = make_mlp(widths=(512,) * 17, batch=48)
    return trace(case.step, *case.abstract_args())


def test_a_deep_model_has_as_many_stages_as_are_asked_for():
    """A stage for each of more layers than a search makes by itself."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def step(params, x):
        def loss(p):
            return (jax.lax.scan(layer, x, p)[0] ** 2).sum()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    num_layers = MAX_LAYERS + 8
    stack, x = jax.ShapeDtypeStruct((num_layers, 64, 64), "float32"), jax.ShapeDtypeStruct((8, 64), "float32")
    options = PipelineOptions(1 << 30, stages=num_layers, schedule="1f1b", microbatches=4)
    traced, cluster = trace(step, stack, x), parse_cluster(f"{num_layers}xA100-80GB")
    found = PipelineSearch(traced, cluster, options).run()
    assert [(s.placed.first_layer, s.placed.end_layer) for s in found.stages] == [
        (n, n + 1) for n in range(num_layers)
    ]
