"""What is recomputed, said and read again."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.trace import trace
from autoshard.search.memory.loop_segments import LoopSegments, segments_site
from autoshard.search.plan.retention import RetentionCodec
from autoshard.search.problem.equivalence import folded_like
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.shortening import shortened
from tests.search.recurrence import traced
from tests.zoo import MAKERS
from tests.zoo import traced as traced_model

LAYERS = 12


def step(w, x):
    def loss(w):
        y = x
        for i in range(LAYERS):
            y = jnp.tanh(y @ w[i])
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


CODEC = RetentionCodec(
    fold(
        flatten(
            trace(
                step,
                jax.ShapeDtypeStruct((LAYERS, 8, 8), jnp.float32),
                jax.ShapeDtypeStruct((4, 8), jnp.float32),
            )
        )
    )
)
NAME, SITES = max(CODEC.sites.items(), key=lambda item: len(item[1]))


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ((0,), "remat 0 of {}"),
        ((0, 1, 2, 5), "remat 0-2, 5 of {}"),
        ((1, 3), "remat 1, 3 of {}"),
        (tuple(range(len(SITES))), "remat"),
    ],
)
def test_some_of_a_class_may_be_recomputed(members, text):
    some = {SITES[n] for n in members}
    said = CODEC.decisions(some)
    assert said == {NAME: text.format(len(SITES))}
    assert CODEC.read(said, "plan") == (some, frozenset())
    waiting = {NAME: text.replace("remat", "offload").format(len(SITES))}
    assert CODEC.decisions((), some) == waiting
    assert CODEC.read(waiting, "plan") == (frozenset(), some)


def test_some_of_a_class_may_be_recomputed_and_others_wait_on_the_host():
    again, waiting = frozenset(SITES[:2]), frozenset(SITES[2:3])
    said = CODEC.decisions(again, waiting)
    assert said == {NAME: f"remat 0-1 of {len(SITES)}; offload 2 of {len(SITES)}"}
    assert CODEC.read(said, "plan") == (again, waiting)


def test_nothing_is_said_of_what_is_kept():
    assert CODEC.decisions(()) == {}
    assert CODEC.read({}, "plan") == (frozenset(), frozenset())


@pytest.mark.parametrize(
    "model", ["gpt_linen", "gpt_scan", "lstm", "moe", pytest.param("evoformer", marks=pytest.mark.slow)]
)
def test_every_forward_op_of_a_model_has_one_name(model):
    codec = RetentionCodec(fold(flatten(traced_model(model))))
    every = [site for sites in codec.sites.values() for site in sites]
    assert len(every) == len(set(every))
    assert codec.read(codec.decisions(every), "plan") == (set(every), frozenset())
    assert all(name.startswith("forward ") for name in codec.sites)


@pytest.mark.parametrize(
    "text",
    [
        "keep",
        "remat 0-2",
        f"remat 0-2 of {len(SITES) + 1}",
        f"remat {len(SITES)} of {len(SITES)}",
        "remat of 3",
    ],
)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(
        PlanError,
        match=f"plan: retention '{NAME}' cannot be '{text}'. Say 'remat' or, of what is made outside",
    ):
        CODEC.read({NAME: text}, "plan")


def test_what_is_no_op_is_refused():
    with pytest.raises(PlanError, match="plan: retention 'forward nothing' names no forward op of this step"):
        CODEC.read({"forward nothing": "remat"}, "plan")


def test_of_two_ops_alike_in_every_layer_the_same_one_is_recomputed_in_the_likes_of_a_layer():
    case = MAKERS["llama"](num_layers=12)
    step = trace(case.step, *case.abstract_args())
    few = shortened(step, [""] * len(step.arguments))
    assert few is not None
    folded = fold(flatten(few.step))
    of_few, of_all = RetentionCodec(folded), RetentionCodec(folded_like(flatten(few.whole), folded))
    known = few.step.graph.ops
    both = [
        s
        for s in of_few.sites.values()
        if len(s) > 2 and known[s[1][0]].equivalence.block == known[s[2][0]].equivalence.block
    ]
    assert both, "layers have two norms"
    seen = {
        (n, known[site[0]].equivalence.block): site
        for n, sites in enumerate(both)
        for site in reversed(sites)
    }
    first = frozenset(seen.values())
    sites, _ = of_all.read(of_few.decisions(first), "plan")
    stand_ins = [
        {s.graph.ops[i].equivalence.representative for (i,) in told}
        for s, told in ((few.step, first), (few.whole, sites))
    ]
    assert stand_ins[0] == stand_ins[1]


RECURRENCE, LOOP = traced(64)
LOOPS = RetentionCodec(fold(flatten(RECURRENCE)))


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        (LoopSegments((8,)), "remat in segments of 8"),
        (LoopSegments((16, 4)), "remat in segments of 16, 4"),
        (LoopSegments((16, 4), 48), "remat in segments of 16, 4 before 48"),
    ],
)
def test_a_loop_may_be_cut_into_segments(segments, text):
    sites = frozenset({segments_site((LOOP,), segments)})
    assert LOOPS.decisions(sites) == {"forward scan": text}
    assert LOOPS.read({"forward scan": text}, "plan") == (sites, frozenset())


@pytest.mark.parametrize("text", ["remat in segments", "remat in segments of", "offload in segments of 8"])
def test_segments_without_lengths_are_refused(text):
    with pytest.raises(PlanError, match="'forward scan' cannot be"):
        LOOPS.read({"forward scan": text}, "plan")


def test_what_is_no_loop_is_not_cut():
    with pytest.raises(
        PlanError, match=r"plan: retention .* cannot be cut into segments: no backward loop reads"
    ):
        CODEC.read({NAME: "remat in segments of 4"}, "plan")
