"""Recomputing changes no number, whatever is recomputed, and what is no longer read is no longer kept."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from autoshard.executors.rewrite import evaluator
from autoshard.search.ir.graph import Graph, Phase, Site, Step, walk
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.sinking import LEAST_BYTES
from autoshard.search.ir.trace import trace
from autoshard.search.memory.copies import SCOPE
from autoshard.search.memory.loop_pairs import loop_pairs
from autoshard.search.memory.recompute import recomputed
from tests.executors.agreement import NOISE_GROWN_BY_ADAM
from tests.search.chain import chain
from tests.zoo import make_small

pytestmark = pytest.mark.devices

LAYERS = 4
MODELS = {
    "mlp": 0.5,
    "gpt_linen": 1.0,
    "gpt_scan": 0.5,
    "moe": 1.0,
    "resnet": 0.5,
    "lstm": 1.0,
    "evoformer": 0.5,
    "unet": 1.0,
}
"""And the share of their ops that is recomputed; `STEPS` are tried under several."""

SLOW = {*MODELS} - {"mlp", "resnet"}
"""Models that take long to compile and are of loops and ops that `STEPS` are of."""


def layer(w, x):
    h = jax.nn.gelu(x @ w["up"])
    return x + jnp.tanh(h @ w["down"]), jnp.mean(h)


def scanned(params, x):
    x, means = jax.lax.scan(lambda x, w: layer(w, x), x, params)
    return jnp.mean(x**2) + jnp.sum(means)


def unrolled(params, x):
    means = []
    for i in range(LAYERS):
        x, mean = layer(jax.tree.map(lambda w, i=i: w[i], params), x)
        means.append(mean)
    return jnp.mean(x**2) + sum(means)


def dropped(params, x):
    """Random bits inside the loop, and a scale from outside of it."""

    def body(carry, w):
        x, key = carry
        key, now = jax.random.split(key)
        x = layer(w, x * scale)[0] * jax.random.bernoulli(now, 0.9, x.shape)
        return (x, key), None

    scale = 1 + jnp.mean(params["up"] ** 2)
    (x, _), _ = jax.lax.scan(body, (x, jax.random.key(0)), params)
    return jnp.mean(x**2)


def accumulated(params, x):
    """Forward and backward phases inside a loop; its gradient is what the loop makes."""
    _, (losses, grads) = jax.lax.scan(
        lambda c, x: (c, jax.value_and_grad(scanned)(params, x)), 0, jnp.stack([x, 2 * x])
    )
    return jnp.mean(losses), jax.tree.map(lambda g: jnp.mean(g, 0), grads)


def stepped(loss, value_and_grad=jax.value_and_grad):
    def step(params, x):
        value, grads = value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step


STEPS = {
    "scanned": stepped(scanned),
    "unrolled": stepped(unrolled),
    "dropped": stepped(dropped),
    "accumulated": stepped(accumulated, lambda loss: loss),
}


def arguments():
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(LAYERS, 8, 16)), "down": rng.normal(size=(LAYERS, 16, 8))}
    return jax.tree.map(jnp.asarray, params), jnp.asarray(rng.normal(size=(3, 8)))


def all_sites(step: Step) -> list[Site]:
    """Where ops stand that may be recomputed."""
    found: list[Site] = []
    for path, graph in walk(step.graph):
        if any(op.phase is Phase.BACKWARD for op in graph.ops):
            pairs = loop_pairs(graph)
            found += [(*path, i) for i, op in enumerate(graph.ops) if is_forward(op) and i not in pairs]
            for f in pairs:
                found += [(*path, f, "jaxpr", 0, i) for i in range(len(graph.ops[f].bodies["jaxpr"][0].ops))]
    return found


def is_forward(op) -> bool:
    inner = {o.phase for bodies in op.bodies.values() for body in bodies for o in body.ops}
    return {op.phase, *inner} == {Phase.FORWARD}


def results(step: Step, flat) -> list[np.ndarray]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return jax.jit(evaluator(step.graph, StepSharding((1,), ("data",), {}, {}), mesh))(flat)


def assert_same(wanted: list[np.ndarray], again: Step, flat, atol: float = 1e-14) -> None:
    for one, other in zip(wanted, results(again, flat), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=atol)


def drawn_sites(step: Step, seed: int, share: float) -> frozenset[Site]:
    rng = random.Random(seed)
    return frozenset(site for site in all_sites(step) if rng.random() < share)


@functools.cache
def plain(name: str) -> tuple[Step, list, list[np.ndarray]]:
    """A step, its arguments, and what it makes of them."""
    args = arguments()
    step, flat = trace(STEPS[name], *args), jax.tree.leaves(args)
    return step, flat, results(step, flat)


def slowly(*values):
    """Other parts of the steps are recomputed than the quick cases and the models show."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "seed", "share"),
    [
        *((name, 0, 1.0) for name in STEPS),
        ("dropped", 2, 0.5),
        *(slowly(name, 2, 0.5) for name in STEPS if name != "dropped"),
        *(slowly(name, *drawn) for name in STEPS for drawn in ((1, 0.8), (3, 0.2))),
    ],
)
def test_the_numbers_stay(name, seed, share):
    with jax.enable_x64(True):
        step, flat, wanted = plain(name)
        again = recomputed(step, drawn_sites(step, seed, share))
        assert sum(op.scope.endswith(SCOPE) for _, graph in walk(again.graph) for op in graph.ops) > 0
        assert_same(wanted, again, flat)


@pytest.mark.parametrize(
    ("model", "share"),
    [pytest.param(*m, marks=[pytest.mark.slow] if m[0] in SLOW else []) for m in MODELS.items()],
)
def test_the_numbers_of_models_stay(model, share):
    with jax.enable_x64(True):
        case = make_small(model, dtype=jnp.float64)
        step, flat = trace(case.step, *case.abstract_args()), jax.tree.leaves(case.args())
        again = recomputed(step, drawn_sites(step, 0, share))
        assert_same(results(step, flat), again, flat, NOISE_GROWN_BY_ADAM)


def loops(graph: Graph) -> tuple:
    """The forward and the backward loop of a graph with one pair."""
    ((f, (b,)),) = loop_pairs(graph).items()
    return graph.ops[f], graph.ops[b]


def test_a_loop_that_is_recomputed_stacks_its_carry_alone():
    step = trace(STEPS["scanned"], *arguments())
    body = [(0, "jaxpr", 0, i) for i in range(len(step.graph.ops[0].bodies["jaxpr"][0].ops))]
    forward, backward = loops(recomputed(step, frozenset(body)).graph)
    stacked = [v.shape for v in forward.result_values[forward.loop_counts[1] :]]
    assert sorted(stacked) == [(LAYERS,), (LAYERS, 3, 8)]  # the means, and each layer's input
    assert len(loops(step.graph)[0].outputs) > len(forward.outputs)
    assert len(backward.bodies["jaxpr"][0].ops) > len(loops(step.graph)[1].bodies["jaxpr"][0].ops)


def test_what_is_recomputed_waits_for_a_gradient():
    """The barrier that hands over what is kept holds a value of the backward phase besides."""
    step = trace(STEPS["unrolled"], *arguments())
    graph = recomputed(step, drawn_sites(step, 0, 1.0)).graph
    made_backward: set[int] = set()
    barriers = 0
    for op in graph.ops:
        if op.name == "optimization_barrier" and op.scope == SCOPE:
            barriers += 1
            assert made_backward.intersection(op.operands)
        if op.phase is Phase.BACKWARD:
            made_backward.update(op.outputs)
    assert barriers


def attended(w, x):
    """Queries that attend to what they are made of."""
    return jnp.mean((jax.nn.softmax((x @ w) @ x.T, -1) @ x) ** 2)


def test_it_waits_for_gradients_that_are_arrays():
    """What a barrier holds, XLA stores: not what is computed on the fly of a product."""
    scores = 512, 512
    step = trace(jax.grad(attended), *(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (512, 64))))
    forward = [(i, op) for i, op in enumerate(step.graph.ops) if op.phase is Phase.FORWARD]
    chosen = {"sub", "exp"}
    sites = frozenset((i,) for i, op in forward if op.name in chosen and op.result_values[0].shape == scores)
    graph = recomputed(step, sites).graph
    makers = {v: op for op in graph.ops for v in op.outputs}
    (barrier,) = (op for op in graph.ops if op.name == "optimization_barrier")
    arrived = [makers[v] for v in barrier.operands if v in makers and makers[v].phase is Phase.BACKWARD]
    assert [(op.name, op.result_values[0].shape) for op in arrived] == [("dot_general", scores)]


def classified(w, x, labels):
    logits = jnp.tanh(x) @ w
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels, 1)[:, 0])


def test_where_no_gradient_is_an_array_yet_it_waits_for_a_small_one():
    """The loss's gradient is spread over all classes on the fly; if a barrier held that, XLA would store it."""
    shapes = ((64, 4096), jnp.float32), ((512, 64), jnp.float32), ((512, 1), jnp.int32)
    step = trace(jax.grad(classified), *(jax.ShapeDtypeStruct(*s) for s in shapes))
    forward = [(i, op) for i, op in enumerate(step.graph.ops) if op.phase is Phase.FORWARD]
    sites = frozenset((i,) for i, op in forward if op.result_values[0].shape == (512, 4096))
    graph = recomputed(step, sites).graph
    makers = {v: op for op in graph.ops for v in op.outputs}
    (barrier,) = (op for op in graph.ops if op.name == "optimization_barrier")
    (arrived,) = (v for v in barrier.operands if v in makers and makers[v].phase is Phase.BACKWARD)
    assert graph.values[arrived].shape in ((512,), (512, 1))
    assert makers[arrived].operands  # no constant


def masked(params, x):
    """Layers of scores, of which a mask leaves the lower half."""
    causal = jnp.tril(jnp.ones((x.shape[-1],) * 2, bool))
    for w in params:
        x = x + jax.nn.softmax(jnp.where(causal, jnp.sin(x) @ w, -1e9), -1)
    return jnp.mean(x**2)


def test_masks_and_numbers_are_made_anew_and_pass_no_barrier():
    """What a barrier holds, XLA stores: a mask as large as the scores, and as many numbers."""
    shape = 32, 256, 256
    assert np.prod(shape) >= LEAST_BYTES
    params = [jax.ShapeDtypeStruct(shape[1:], jnp.float32)] * 3
    step = trace(jax.grad(masked), params, jax.ShapeDtypeStruct(shape, jnp.float32))
    chosen = {"sin", "select_n", "exp", "sub", "div"}
    forward = ((i, op) for i, op in enumerate(step.graph.ops) if op.phase is Phase.FORWARD)
    graph = recomputed(step, frozenset((i,) for i, op in forward if op.name in chosen)).graph
    makers = {v: op for op in graph.ops for v in op.outputs}
    barriers = [op for op in graph.ops if op.name == "optimization_barrier"]
    large = [v for op in barriers for v in op.operands if graph.values[v].shape == shape]
    assert large  # the arrays that are kept
    assert not [v for v in large if graph.values[v].dtype == bool]
    assert not [v for v in large if v in makers and makers[v].name == "broadcast_in_dim"]


def test_each_piece_waits_for_the_weight_gradients_before_the_last_piece():
    """Of a chain of layers, each recomputed from the one before: what is held for one layer is let go two layers on."""
    widths = [jnp.zeros((8, 8))] * 5
    step = trace(chain, widths, jnp.zeros((4, 8)))
    forward = [i for i, op in enumerate(step.graph.ops) if op.phase is Phase.FORWARD]
    bounds = {i for i in forward if step.graph.ops[i].name == "dot_general"}
    graph = recomputed(step, frozenset((i,) for i in forward if i not in bounds and is_array(step, i))).graph
    products = [op for op in graph.ops if op.name == "dot_general" and op.phase is Phase.BACKWARD]
    gradients = [op.outputs[0] for op in products if graph.values[op.outputs[0]].shape == (8, 8)]
    barriers = [op for op in graph.ops if op.name == "optimization_barrier"]
    waited_for = [[gradients.index(v) for v in op.operands if v in gradients] for op in barriers]
    assert waited_for == [[], [], [], [0], [1]]


def is_array(step: Step, i: int) -> bool:
    return all(value.shape for value in step.graph.ops[i].result_values)


def test_the_backward_phase_reads_nothing_that_is_recomputed():
    step = trace(STEPS["unrolled"], *arguments())
    sites = drawn_sites(step, 1, 0.6)
    anew = {v for i, op in enumerate(step.graph.ops) if (i,) in sites for v in op.outputs}
    graph = recomputed(step, sites).graph
    read = {v for op in graph.ops if op.phase is Phase.BACKWARD for v in op.operands}
    assert anew
    assert not read & anew


def test_nothing_to_recompute_is_the_step_itself():
    step = trace(STEPS["scanned"], *arguments())
    assert recomputed(step, frozenset()) is step


def test_a_loop_reads_the_copy_of_what_is_recomputed_outside_of_it():
    """A scale from outside, which only the forward loop read."""
    step = trace(STEPS["dropped"], *arguments())
    ((f, (b,)),) = loop_pairs(step.graph).items()
    sites = frozenset(all_sites(step))
    outside = {v for i, op in enumerate(step.graph.ops) if (i,) in sites for v in op.outputs}
    assert outside.intersection(step.graph.ops[f].operands)
    _, backward = loops(recomputed(step, sites).graph)
    assert len(backward.operands) > len(step.graph.ops[b].operands) - len(step.graph.ops[f].outputs)
    assert not outside.intersection(backward.operands)
