"""Names and texts of decisions: by hand for small steps; for every model all different, and read back as they were."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace
from autoshard.search.plan.decisions import DecisionCodec, allowed_by_pins, apart
from autoshard.search.plan.plan import Decisions
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.kernels import Kernels
from autoshard.search.problem.op_groups import op_groups
from autoshard.search.problem.reshard import Resharder
from autoshard.search.problem.strategies import CopySource, all_strategies
from autoshard.search.problem.strategy_graph import strategy_graph
from tests.zoo import MAKERS, make_evoformer, make_t5, traced

AXES = ("data", "model")


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def codec(step, *args, mesh=(2, 2)) -> DecisionCodec:
    """Words for a step on a mesh; no word needs the costs."""
    return codec_of(trace(step, *args), mesh)


def codec_of(step: Step, mesh=(2, 2)) -> DecisionCodec:
    folded = fold(flatten(step))
    graph = strategy_graph(folded, op_groups(folded))
    resharder = Resharder(MeshModel(parse_cluster(f"{int(np.prod(mesh))}xH100-80GB"), mesh))
    return DecisionCodec(
        CostedGraph(graph, Kernels((), {}, {}, frozenset(), {}), resharder, all_strategies(graph, resharder))
    )


def layers(params, x):
    def loss(params):
        y = x
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                y = jnp.tanh(y @ w)
        return jnp.sum(y**2)

    return [w - 0.1 * g for w, g in zip(params, jax.grad(loss)(params), strict=True)], jnp.sum(x, 0)


W, X = array(128, 128), array(1024, 128)
TWO = codec(layers, [W] * 2, X)


def node(words: DecisionCodec, name: str) -> int:
    (found,) = [n for n, names in enumerate(words.names) if name in names]
    return found


# --- names


def test_decisions_are_named_by_argument_phase_scope_and_primitive():
    """The transform that an op comes from is in its phase; a group goes by its largest op, what serves a phase by it."""
    assert [names for names in TWO.names if len(names) == 1] == list(TWO.names)
    assert [name for (name,) in TWO.names] == [
        *("params[0]", "params[1]", "x"),
        *("forward layer_0/dot_general", "forward layer_0/tanh"),
        *("forward layer_1/dot_general", "forward layer_1/tanh"),
        *("backward layer_1/dot_general", "backward layer_1/transpose", "backward layer_1/dot_general #2"),
        *("backward layer_0/dot_general", "backward layer_0/transpose"),
        *("update mul", "update mul #2", "update reduce_sum", "result[1]"),
        *("params[1] -> backward", "x -> backward"),
        *("forward layer_0/tanh -> backward", "backward layer_1/mul -> backward"),
    ]


def test_transforms_leave_no_trace_in_a_name():
    def step(w, x):
        def loss(w):
            with jax.named_scope("outer"):
                y = jax.vmap(lambda row: row @ w)(x)
                with jax.named_scope("inner"):
                    return jnp.sum(jax.vmap(jnp.tanh)(y) ** 2)

        return w - jax.grad(loss)(w)

    names = flat(codec(step, W, X))
    assert {"forward outer/dot_general", "forward outer/inner/tanh", "backward outer/dot_general"} < set(
        names
    )
    assert not [name for name in names if "(" in name or "//" in name or "/ " in name]


def test_what_stands_for_several_has_no_number_and_all_of_its_arguments_names():
    words = codec(layers, [W] * 12, X)
    together = next(names for names in words.names if len(names) > 1)
    assert set(together) < {f"params[{n}]" for n in range(12)}
    assert tuple(f"{name} -> backward" for name in together) in words.names
    for n, group in enumerate(words.costed.graph.groups):
        (name, *others), members = words.names[n], words.costed.graph.folded.members
        if "layer_" in name:
            assert ("*" in name) == (len(members[group.op_classes[-1]]) > 1)
            assert not others
    assert {"forward layer_*/dot_general", "forward layer_0/dot_general"} < set(flat(words))


def flat(words: DecisionCodec) -> list[str]:
    return [name for names in words.names for name in names]


def test_a_copy_of_one_of_several_results_has_its_number():
    def picked(x, w, v):
        values, _ = lax.top_k(x, 8)
        return values @ w, values @ v, jnp.sin(values)

    assert "forward top_k[0] -> forward" in flat(codec(picked, X, array(8, 128), array(8, 64)))
    assert "forward sin -> forward" in flat(codec(lambda x, w: ((y := jnp.sin(x)) @ w, y @ w.T), X, W))


# --- texts


def test_a_product_s_texts_are_what_it_reads_and_makes():
    """Each axis splits rows, columns, the dimension summed over, or nothing."""

    def spec(rows, columns, chosen, summed=None) -> P:
        dims = [tuple(a for a, loop in zip(AXES, chosen, strict=True) if loop == d) for d in (rows, columns)]
        while dims and not dims[-1]:
            dims.pop()
        partial = {a for a, loop in zip(AXES, chosen, strict=True) if loop == summed and summed}
        return P(*(d[0] if len(d) == 1 else d or None for d in dims), unreduced=partial)

    def read(text: str) -> tuple[P, ...]:
        return eval(f"({text.replace(' -> ', ', ')},)", {"P": P})

    texts = TWO.texts(node(TWO, "forward layer_0/dot_general"))
    wanted = {
        (spec("m", "k", c), spec("k", "n", c), spec("m", "n", c, "k"))
        for c in product(("", "m", "k", "n"), repeat=2)
    }
    assert len(texts) == len(wanted) == 16
    assert {read(text) for text in texts} == wanted


def test_an_argument_s_text_is_where_it_rests_and_a_copy_s_how_it_comes_there():
    assert set(TWO.texts(node(TWO, "x"))) == {
        *("P()", "P('data')", "P('model')", "P(None, 'data')", "P(None, 'model')"),
        *("P('data', 'model')", "P('model', 'data')", "P(('data', 'model'))", "P(None, ('data', 'model'))"),
    }
    copy = TWO.texts(node(TWO, "x -> backward"))
    assert {text.split(" ", 1)[0] for text in copy} == {"same", "fresh", "kept"}
    for source in CopySource:
        assert {text.split(" ", 1)[1] for text in copy if text.startswith(source)} == set(
            TWO.texts(node(TWO, "x"))
        )


SHALLOW = {"evoformer": make_evoformer, "t5": make_t5}
"""Models of which one layer will do."""

SLOW = {"evoformer", "gpt_nnx", "gpt_nnx_optimizer", "llama", "mixer", "t5", "unet", "vit"}
"""Models of ops that the others have, too: of attention, convolutions, loops, experts and tables."""


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.slow] if m in SLOW else []) for m in MAKERS]
)
def test_no_two_names_or_texts_are_alike_and_all_are_read_as_they_were_written(model):
    case = SHALLOW[model](num_layers=1) if model in SHALLOW else None
    words = codec_of(traced(model) if case is None else trace(case.step, *case.abstract_args()))
    strategies, bits = words.costed.strategies, np.random.default_rng(len(model))
    assert len(set(flat(words))) == len(flat(words))
    for n in range(len(words.names)):
        texts = words.texts(n)
        assert len(set(texts)) == len(texts) == len(strategies[n])
    for _ in range(2):
        chosen = [int(bits.integers(len(s))) for s in strategies]
        found = words.allowed(words.decisions(chosen), "plan")
        assert [left.tolist() for left in found] == [[label] for label in chosen]


# --- what a plan says


FIRST = [0] * len(TWO.names)


def with_edits(**edits: dict[str, str]) -> Decisions:
    said = TWO.decisions(FIRST)
    tables = {kind: {**getattr(said, kind), **edits.get(kind, {})} for kind in ("arguments", "ops", "copies")}
    return Decisions(said.mesh, **tables)


def test_decisions_have_the_mesh_and_the_arguments_in_their_order():
    said = TWO.decisions(FIRST)
    assert said.mesh == {"data": 2, "model": 2}
    assert list(said.arguments) == ["params[0]", "params[1]", "x"]
    assert said.arguments["x"] == "P()"
    assert said.ops["forward layer_0/dot_general"] == "P(), P() -> P()"
    assert said.copies["x -> backward"] == "same P()"
    assert {*said.arguments, *said.ops, *said.copies} == set(flat(TWO))


def test_where_nothing_can_be_chosen_nothing_is_said():
    words = codec(lambda x: jnp.sum(x * 2.0), array(7))
    said = words.decisions([0] * len(words.names))
    assert all(len(words.texts(node(words, name))) > 1 for name in said.ops)
    assert len(said.ops) < len([n for n in flat(words) if n not in said.arguments])


def test_of_what_a_plan_does_not_say_everything_is_left():
    found = TWO.allowed(Decisions({"data": 2, "model": 2}, {}, {}, {}), "plan")
    assert [left.tolist() for left in found] == [list(range(len(s))) for s in TWO.costed.strategies]


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ({"arguments": {"y": "P()"}}, ["'y' names no argument"]),
        ({"ops": {"forward sin": "P()"}}, ["'forward sin' names no op"]),
        ({"copies": {"x -> update": "P()"}}, ["'x -> update' names no copy"]),
        ({"ops": {"x": "P()"}}, ["'x' names no op"]),
        (
            {"ops": {"result[1]": "P(None, 'data')"}},
            [
                "'result[1]' cannot be \"P(None, 'data')\"",
                "Possible are: P(); P('model'); P('data'); P(('data', 'model'))",
            ],
        ),
        ({"copies": {"x -> backward": "same"}}, ["'x -> backward' cannot be 'same'", "; ..."]),
        ({"arguments": {"x": "P('replica')"}}, ["x: axis 'replica' is not in the mesh"]),
        (
            {"arguments": {"x": "P(unreduced={'data'})"}},
            ["x of shape (1024, 128) cannot rest as P(unreduced={'data'})"],
        ),
    ],
)
def test_what_is_not_possible_is_refused_by_name(edits, said):
    with pytest.raises(PlanError) as raised:
        TWO.allowed(with_edits(**edits), "my.json")
    assert str(raised.value).startswith("my.json: ")
    for part in said:
        assert part in str(raised.value)


def test_what_does_not_divide_is_refused_with_shape_and_mesh():
    words = codec(lambda x: x + 1.0, array(6, 128), mesh=(4,))
    with pytest.raises(
        PlanError, match=r"plan: x of shape \(6, 128\) cannot rest as P\('data'\) on the mesh {'data': 4}"
    ):
        words.allowed(Decisions({"data": 4}, {"x": "P('data')"}, {}, {}), "plan")


@pytest.mark.parametrize(
    ("kind", "name", "written", "meant"),
    [
        ("ops", "result[1]", "P('data', )", "P('data')"),
        ("ops", "result[1]", "PartitionSpec(('data',))", "P('data')"),
        ("ops", "result[1]", ' jax.P( "model" ) ', "P('model')"),
        (
            "ops",
            "forward layer_0/dot_general",
            "P('data',None),P(None,None)->P('data')",
            "P('data'), P() -> P('data')",
        ),
        ("copies", "x -> backward", "fresh  P(('data','model'), None)", "fresh P(('data', 'model'))"),
        ("arguments", "x", "jax.sharding.PartitionSpec('data', None)", "P('data')"),
    ],
)
def test_specs_are_compared_as_specs(kind, name, written, meant):
    n = node(TWO, name)
    (label,) = TWO.allowed(with_edits(**{kind: {name: written}}), "plan")[n]
    assert TWO.text(n, label) == meant


def test_the_choices_of_a_decision_are_its_texts():
    name = "forward layer_0/dot_general"
    assert TWO.choices(name, "plan") == tuple(TWO.texts(node(TWO, name)))
    with pytest.raises(
        PlanError, match=r"my\.json: 'forward dot' names no decision of this step\. Near it are: forward "
    ):
        TWO.choices("forward dot", "my.json")


def test_where_not_all_choices_are_shown_it_is_said_how():
    with pytest.raises(
        PlanError,
        match=r"; \.\.\. All 16: autoshard show PLAN TARGET --choices 'forward layer_0/dot_general'",
    ):
        TWO.allowed(with_edits(ops={"forward layer_0/dot_general": "P()"}), "plan")


# --- pins, and arguments taken apart


def test_pins_leave_the_strategies_that_rest_so():
    found = allowed_by_pins(TWO, {"params[1]": (1, -1), "nothing": (0, 0)})
    ((n, left),) = found.items()
    assert [TWO.text(n, label) for label in left] == ["P(None, 'data')"]
    assert n == node(TWO, "params[1]")


def test_arguments_are_apart_of_which_or_of_whose_copies_a_plan_says_different_things():
    step = trace(layers, [W] * 3, X)
    said = Decisions(
        {"data": 4},
        {"params[0]": "P()", "params[1]": "P()", "params[2]": "P()", "x": "P('data')"},
        {},
        {"params[1] -> backward": "kept P()"},
    )
    first, second, third, x = apart(step, said)
    assert first == third != second
    assert x[0] == "P('data')"
