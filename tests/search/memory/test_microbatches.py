"""In microbatches a step gives the numbers that it gives in one piece, or says why it cannot."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

from autoshard.cost_model.errors import InputError
from autoshard.executors.rewrite import evaluator
from autoshard.search.ir.graph import Graph, Op, Phase, Role, Step, walk
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.trace import trace
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.memory.microbatches import batch_divisors, batch_halvings, looped, microbatched
from autoshard.search.memory.recompute import recomputed
from autoshard.search.memory.written import SCOPE
from tests.executors.agreement import NOISE, NOISE_GROWN_BY_ADAM
from tests.zoo import make_mlp, make_small

pytestmark = pytest.mark.devices

MODELS = ("autoencoder", "dlrm", "gpt_linen", "gpt_scan", "lstm", "message_passing", "moe", "t5", "unet")
"""Those that differ most."""

SLOW = {*MODELS} - {"dlrm"}
"""Models that take long to compile, of ops that `STEPS` are of."""

BATCH, SEQ, HIDDEN, VOCAB, LAYERS = 8, 4, 6, 10, 3


# --- a small language model, and what people do around one


def embedded(params, tokens):
    return jnp.tanh(params["embedding"][tokens] @ params["dense"])


def logits(params, batch):
    """The embedding is tied: its gradient is a product's and a look-up's."""
    return embedded(params, batch["tokens"]) @ params["embedding"].T


def losses(params, batch):
    log_probs = jax.nn.log_softmax(logits(params, batch))
    return -jnp.take_along_axis(log_probs, batch["targets"][..., None], -1)[..., 0]


def mean(params, batch, key):
    return losses(params, batch).mean()


def sum_of_squares(params):
    return sum(jnp.sum(w**2) for w in jax.tree.leaves(params))


def layer(x, w):
    return x + jnp.tanh(x @ w)


def scanned(params, batch, key):
    """Layers under `scan`, with dropout, and a loss of each layer."""

    def body(carry, w):
        x, key = carry
        key, now = jax.random.split(key)
        x = layer(x, w) * jax.random.bernoulli(now, 0.8, x.shape)
        return (x, key), jnp.mean(x**2)

    (x, _), of_layers = lax.scan(body, (embedded(params, batch["tokens"]), key), params["layers"])
    return jnp.mean(x**2) + jnp.sum(of_layers)


def scanned_sum(params, batch, key):
    """A loss that the layers' loop carries, and that begins with something other than zero."""

    def body(carry, w):
        x, total = carry
        x = layer(x, w)
        return (x, total + jnp.mean(x**2)), None

    first = jnp.sum(params["dense"] ** 2)
    return lax.scan(body, (embedded(params, batch["tokens"]), first), params["layers"])[0][1]


def dropped(params, batch, key):
    x = embedded(params, batch["tokens"])
    x = x * jax.random.bernoulli(key, 0.8, x.shape)
    return jnp.mean((x @ params["dense"]) ** 2)


def dropped_by_example(params, batch, key):
    def of_one(tokens, key):
        x = embedded(params, tokens)
        return jnp.sum((x * jax.random.bernoulli(key, 0.5, x.shape)) ** 2)

    return jax.vmap(of_one)(batch["tokens"], jax.random.split(key, BATCH)).mean()


def chosen(params, batch, key):
    def plain(x):
        return jnp.sum(x**2, -1)

    def noisy(x):
        return jnp.sum(jnp.abs(x), -1) * jax.random.bernoulli(key, 0.5, x.shape[:-1])

    x = embedded(params, batch["tokens"])
    return (lax.cond(params["dense"][0, 0] > 0, plain, noisy, x) + lax.cond(True, plain, noisy, x)).mean()


def repeated(params, batch, key):
    """A loop that tests at run time, with random bits in its body, and a sum that begins with a number."""
    x = embedded(params, batch["tokens"])

    def advance(carry):
        i, x, total = carry
        x = jnp.tanh(x) * jax.random.bernoulli(key, 0.8, x.shape)
        return i + 1, x, total + x.sum()

    _, walked, total = lax.while_loop(
        lambda carry: carry[0] < LAYERS, advance, (0, lax.stop_gradient(x), 1.0)
    )
    return jnp.mean(walked * x) + lax.stop_gradient(total)


def recurrent(params, batch, key):
    """A loop over the sequence, which carries what it makes of each example."""

    def body(h, x):
        h = jnp.tanh(x + h @ params["dense"])
        return h, h

    x = embedded(params, batch["tokens"]).swapaxes(0, 1)
    _, hs = lax.scan(body, jnp.zeros_like(x[0]), x)
    return jnp.mean(hs**2)


def of_neighbours(params, batch, key):
    """Each token adds up what others send to it, in a graph of each example's own."""

    def of_one(tokens, senders):
        sent = embedded(params, tokens)[senders % SEQ]
        return jnp.mean(jax.ops.segment_sum(sent, tokens % SEQ, SEQ) ** 2)

    return jnp.mean(jax.vmap(of_one)(batch["tokens"], batch["targets"]))


def balanced_by_sequence(params, batch, key):
    router = jax.nn.softmax(embedded(params, batch["tokens"]) @ params["dense"])
    first = jax.nn.one_hot(router.argmax(-1), HIDDEN).mean(1)
    return losses(params, batch).mean() + jnp.mean(jnp.sum(first * router.mean(1), -1))


def convolved(params, batch, key):
    x = embedded(params, batch["tokens"])
    kernel = params["layers"][:, :, :HIDDEN]
    return jnp.mean(
        lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) ** 2
    )


def sized(params, batch, key):
    """Ops that have the batch's size among their parameters, inside a loop and outside."""
    x = embedded(params, batch["tokens"])[:, 0]
    latents = jnp.tile(params["dense"][None, :2], (BATCH, 1, 1))

    def body(x, w):
        x = jnp.tanh(jnp.concatenate([x, -x, w[:4]]) @ w + jnp.tile(w[:1], (2 * BATCH + 4, 1)))
        one, other = x[:BATCH], x[BATCH:-4]
        other = other.at[jnp.arange(BATCH), batch["targets"][:, 1] % HIDDEN].min(0.1)
        return one * other, jnp.pad(one, ((0, 4), (1, 0)), constant_values=0.5).sum()

    x, of_layers = lax.scan(body, x, lax.stop_gradient(params["layers"]))
    x = x.at[jnp.arange(BATCH), batch["targets"][:, 0] % HIDDEN].multiply(3.0)
    kernels = latents * x[:, None]
    rows = jnp.tanh(jnp.stack([x, 2 * x], 1))
    made = jax.vmap(lambda row, kernel: lax.conv_general_dilated(row[None], kernel[None], (1,), "SAME"))(
        rows, kernels[:, :, :2]
    )
    return made.mean() + of_layers.sum()


def weighted_by_a_loop(params, batch, key):
    """A loop over the inputs alone makes a weight for each example, and their sum, which is needed first."""

    def body(total, mask):
        return total + mask.sum(), 2 * mask

    total, weights = lax.scan(body, 0.0, batch["mask"].T.astype(float))
    return jnp.sum(jnp.tanh(losses(params, batch) / total) * weights.T)


LOSSES = {
    "mean": mean,
    "sum": lambda params, batch, key: losses(params, batch).sum(),
    "mean over tokens": lambda params, batch, key: (
        (losses(params, batch) * batch["mask"]).sum() / batch["mask"].sum()
    ),
    "mean over tokens, if any": lambda params, batch, key: (
        (losses(params, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)
    ),
    "mean where": lambda params, batch, key: jnp.mean(losses(params, batch), where=batch["mask"]),
    "weight decay in the loss": lambda params, batch, key: (
        mean(params, batch, key) + 0.1 * sum_of_squares(params)
    ),
    "rank of an example": lambda params, batch, key: (
        losses(params, batch) * jnp.sort(batch["mask"].sum(1))[:, None]
    ).sum(),
    "place in the batch": lambda params, batch, key: (
        losses(params, batch) * jnp.arange(BATCH)[:, None] * jnp.linspace(0, 1, BATCH)[:, None]
    ).sum(),
    "own rows": lambda params, batch, key: (
        -jax.nn.log_softmax(logits(params, batch)[:, 0])[jnp.arange(BATCH), batch["targets"][:, 0]].mean()
    ),
    "merged dims": lambda params, batch, key: jnp.mean(
        jnp.tanh(logits(params, batch).reshape(BATCH * SEQ, VOCAB)).reshape(BATCH * SEQ // 2, -1) ** 2
    ),
    "sequence first": lambda params, batch, key: jnp.mean(
        jnp.tanh(logits(params, batch).swapaxes(0, 1).reshape(-1, VOCAB)) ** 2
    ),
    "dropout": dropped,
    "dropout by example": dropped_by_example,
    "checkpoint": jax.checkpoint(dropped),
    "weight decay in a checkpoint": jax.checkpoint(
        lambda params, batch, key: mean(params, batch, key) + 0.1 * sum_of_squares(params)
    ),
    "layers under scan": scanned,
    "checkpointed layers under scan": jax.checkpoint(scanned),
    "a sum that a loop carries": scanned_sum,
    "weights of a loop over the inputs": weighted_by_a_loop,
    "sizes of the batch": sized,
    "branches": chosen,
    "while": repeated,
    "recurrent": recurrent,
    "neighbours": of_neighbours,
    "balance by sequence": balanced_by_sequence,
    "convolution": convolved,
}

OF_TOKENS = (
    "mean",
    "sum",
    "mean over tokens",
    "mean over tokens, if any",
    "weight decay in the loss",
    "rank of an example",
    "place in the batch",
    "own rows",
    "merged dims",
    "sequence first",
)


OF_LOOPS = (
    "a sum that a loop carries",
    "weights of a loop over the inputs",
    "sizes of the batch",
    "while",
    "recurrent",
)

OF_OPS = ("branches", "neighbours", "balance by sequence", "convolution")


def together(names):
    """The sum of these losses: one program compiles faster than one for each."""
    return lambda params, batch, key: sum(LOSSES[name](params, batch, key) for name in names)


def trained(loss, transform=lambda grads, key: grads):
    def step(params, batch, key):
        value, grads = jax.value_and_grad(loss)(params, batch, key)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, transform(grads, key)), value

    return step


def clipped(grads, key):
    norm = jnp.sqrt(sum_of_squares(grads))
    return jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), grads)


def with_noise(grads, key):
    return grads | {"dense": grads["dense"] + jax.random.uniform(key, grads["dense"].shape)}


def metrics(params, batch):
    made = logits(params, batch)
    is_right = made.argmax(-1) == batch["targets"]
    return {
        "accuracy": is_right.mean(),
        "of tokens": (is_right & batch["mask"]).sum() / batch["mask"].sum(),
        "perplexity": jnp.exp(losses(params, batch).mean()),
        "largest": made.max(),
        "smallest by place": made.min(0),
        "all": jnp.all(made < 1e3),
        "sizes": sum_of_squares(params),
    }


def by_example(params, batch):
    """What is returned for each example, wherever its dim lies."""
    made = logits(params, batch)
    return {
        "logits": made,
        "flat": made.reshape(-1, VOCAB),
        "last": made.transpose(2, 1, 0),
        "minor": made.swapaxes(0, 1).reshape(-1, VOCAB),
        "mask": ~batch["mask"],
        "losses": losses(params, batch).sum(1),
    }


def alike(params, batch):
    """A loop that makes, beside what it makes of examples, what is alike for all of them."""

    def body(carry, w):
        x, total = carry
        return (layer(x, w), total + jnp.sum(w)), 2 * w

    (x, total), doubled = lax.scan(body, (embedded(params, batch["tokens"]), 0.0), params["layers"])
    return {"x": x, "total": total, "doubled": doubled, "both": jnp.exp(total) + x.mean()}


def statistics(params, batch):
    """Of each layer's activations, in a loop that begins with such a statistic."""

    def body(carry, w):
        x, largest, total = carry
        x = layer(x, w)
        made = {
            "std": jnp.std(x),
            "of features": x.var((0, 1)),
            "norm": jnp.linalg.norm(x),
            "any": jnp.any(x > 1),
        }
        return (x, jnp.maximum(largest, x.max()), total + jnp.std(x)), made

    x = embedded(params, batch["tokens"])
    is_asked = params["dense"][0, 0] != 0
    sometimes = lax.cond(is_asked, lambda x: (jnp.std(x), x.max()), lambda x: (0.0, jnp.inf), x)
    (x, *carried), of_layers = lax.scan(body, (x, x.max(), jnp.std(x)), params["layers"])
    return carried, of_layers, sometimes, jnp.std(x), x.min()


REPORTS = {"metrics": metrics, "by example": by_example, "alike": alike, "statistics": statistics}


def reported(report):
    def step(params, batch, key):
        grads = jax.grad(mean)(params, batch, key)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), report(params, batch)

    return step


STEPS = {
    **{name: trained(loss) for name, loss in LOSSES.items()},
    "losses of tokens": trained(together(OF_TOKENS)),
    "losses of loops": trained(together(OF_LOOPS)),
    "losses of other ops": trained(together(OF_OPS)),
    "clipped": trained(mean, clipped),
    "noise": trained(mean, with_noise),
    **{name: reported(report) for name, report in REPORTS.items()},
    "reports": reported(lambda params, batch: [report(params, batch) for report in REPORTS.values()]),
}


def arguments():
    rng = np.random.default_rng(0)
    params = {
        "embedding": rng.normal(size=(VOCAB, HIDDEN)),
        "dense": rng.normal(size=(HIDDEN, HIDDEN)),
        "layers": 0.3 * rng.normal(size=(LAYERS, HIDDEN, HIDDEN)),
    }
    batch = {
        "tokens": rng.integers(VOCAB, size=(BATCH, SEQ)),
        "targets": rng.integers(VOCAB, size=(BATCH, SEQ)),
        "mask": rng.random((BATCH, SEQ)) < 0.7,
    }
    return *jax.tree.map(jnp.asarray, (params, batch)), jax.random.key(0)


def results(step: Step, flat) -> list:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return jax.jit(evaluator(step.graph, StepSharding((1,), ("data",), {}, {}), mesh))(flat)


def assert_same(step, split: Step, args, atol: float = NOISE) -> None:
    """The user's function, and its rewriting."""
    assert_equal(jax.jit(step)(*args), results(split, jax.tree.leaves(args)), atol)


def assert_equal(wanted, got: list, atol: float = NOISE) -> None:
    for (path, one), other in zip(jax.tree.leaves_with_path(wanted), got, strict=True):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(
                other, one, rtol=1e-9, atol=atol, err_msg=jax.tree_util.keystr(path), strict=True
            )


def loop(step: Step) -> Op:
    """The loop over microbatches."""
    (found,) = (op for op in step.graph.ops if op.name == "scan" and op.scope == SCOPE)
    return found


def body(step: Step) -> Graph:
    return loop(step).bodies["jaxpr"][0]


def names(graph: Graph) -> set[str]:
    return {op.name for _, inner in walk(graph) for op in inner.ops}


def outside(step: Step) -> list[Op]:
    return [op for op in step.graph.ops if op is not loop(step)]


@functools.cache
def traced(name: str) -> Step:
    return trace(STEPS[name], *arguments())


@functools.cache
def on_one_device(name: str) -> tuple[Step, list, Any]:
    """A step in float64, its arguments, and what the user's function makes of them."""
    with jax.enable_x64(True):
        args = arguments()
        return trace(STEPS[name], *args), jax.tree.leaves(args), jax.jit(STEPS[name])(*args)


# --- the numbers


SHOWN_BY_OTHERS = {"mean where", "weight decay in a checkpoint", "checkpointed layers under scan", "dropout"}
SHOWN_BY_OTHERS |= {*OF_TOKENS, *OF_LOOPS, *OF_OPS, *REPORTS}
"""Steps of which others are made, or that are made of others."""


def slowly(name):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [slowly(n) if n in SHOWN_BY_OTHERS else n for n in STEPS])
def test_the_numbers_stay(name):
    step, flat, wanted = on_one_device(name)
    with jax.enable_x64(True):
        assert_equal(wanted, results(microbatched(step, 4), flat))


@pytest.mark.parametrize(
    "name", ["reports", *map(slowly, ("layers under scan", "mean over tokens", "own rows"))]
)
def test_a_microbatch_may_be_one_example(name):
    step, flat, wanted = on_one_device(name)
    with jax.enable_x64(True):
        assert_equal(wanted, results(microbatched(step, BATCH), flat))


@pytest.mark.parametrize("model", [slowly(m) if m in SLOW else m for m in MODELS])
def test_the_numbers_of_models_stay(model):
    with jax.enable_x64(True):
        case = make_small(model, dtype=jnp.float64)
        split = microbatched(trace(case.step, *case.abstract_args()), 2)
        assert_same(case.step, split, case.args(), NOISE_GROWN_BY_ADAM)


def test_one_microbatch_is_the_step_itself():
    step = traced("mean")
    assert microbatched(step, 1) is step


def test_a_step_that_accumulates_already_is_split_further():
    """The user's own loop over parts of the batch stays; each part is cut in two."""

    def step(params, batch, key):
        parts = jax.tree.map(lambda x: x.reshape(2, BATCH // 2, *x.shape[1:]), batch)

        def accumulate(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(mean)(params, part, key)), None

        zeros = (0.0, jax.tree.map(jnp.zeros_like, params))
        (value, grads), _ = lax.scan(accumulate, zeros, parts)
        return jax.tree.map(lambda w, g: w - 0.05 * g, params, grads), value / 2

    with jax.enable_x64(True):
        args = arguments()
        plain = trace(step, *args)
        num_params = len(jax.tree.leaves(args[0]))
        roles = [Role.PARAMETER] * num_params + [a.role for a in plain.arguments[num_params:]]
        named = tuple(replace(a, role=role) for a, role in zip(plain.arguments, roles, strict=True))
        split = microbatched(replace(plain, arguments=named), 2)
        assert "scan" in names(body(split))
        assert_same(step, split, args)


@pytest.mark.parametrize("name", ["mean", "clipped", "layers under scan"])
def test_what_is_added_up_is_added_as_soon_as_it_is_made(name):
    """Else the gradients of all layers would be there together, in program order."""
    graph = body(microbatched(traced(name), 4))
    maker = {v: i for i, op in enumerate(graph.ops) for v in op.outputs}
    sums = [(maker[v], graph.ops[maker[v]]) for v in graph.outputs if v in maker]
    added = [(i, op) for i, op in sums if op.name == "add" and not set(op.operands).isdisjoint(graph.inputs)]
    assert len(added) > 1
    for i, op in added:
        (term,) = set(op.operands) - {*graph.inputs}
        made = maker[term]
        others = {op.name for op in graph.ops[made + 1 : i]}
        assert made < i
        assert others <= {"add"}, f"{others} stand between {graph.ops[made].name} and its addition"


def test_recomputation_goes_on_inside_the_loop():
    with jax.enable_x64(True):
        args = arguments()
        split = microbatched(trace(STEPS["mean"], *args), 2)
        at = split.graph.ops.index(loop(split))
        ops = body(split).ops
        forward = [i for i, op in enumerate(ops) if op.phase is Phase.FORWARD and op.name == "tanh"]
        again = recomputed(split, frozenset((at, "jaxpr", 0, i) for i in forward))
        num_tanh = sum(op.name == "tanh" for op in body(again).ops)
        assert num_tanh == 2 * len(forward) == 2
        assert_same(STEPS["mean"], again, args)


# --- what is refused


def normalized(params, batch, key):
    x = embedded(params, batch["tokens"])
    x = (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 1e-5)
    return jnp.mean((x @ params["dense"]) ** 2)


def contrasted(params, batch, key):
    x = embedded(params, batch["tokens"]).mean(1)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(x @ x.T)))


def balanced_by_batch(params, batch, key):
    router = jax.nn.softmax(embedded(params, batch["tokens"]) @ params["dense"])
    fractions = jax.nn.one_hot(router.argmax(-1), HIDDEN).mean((0, 1))
    return jnp.sum(fractions * router.mean((0, 1)))


def ranked(params, batch, key):
    return jnp.sum(jnp.sort(losses(params, batch).sum(1)) * jnp.arange(BATCH))


def exponential(params, batch, key):
    return jnp.exp(losses(params, batch).mean())


def normalized_layers(params, batch, key):
    def body(x, w):
        return x @ w - jnp.mean(x, 0), None

    return jnp.mean(lax.scan(body, embedded(params, batch["tokens"]), params["layers"])[0] ** 2)


def recurrent_over_examples(params, batch, key):
    def body(carry, x):
        return jnp.tanh(carry @ params["dense"] + x), None

    x = embedded(params, batch["tokens"])
    return jnp.mean(lax.scan(body, x[0], x)[0])


@pytest.mark.parametrize(
    ("loss", "line", "op"),
    [
        (normalized, 2, "reduce_sum"),
        (contrasted, 2, "dot_general"),
        (balanced_by_batch, 2, "reduce_sum"),
        (ranked, 1, "sort"),
        (exponential, 1, "reduce_sum"),
        (normalized_layers, 2, "reduce_sum"),
        (recurrent_over_examples, 5, "slice"),
    ],
)
def test_examples_that_depend_on_one_another_are_refused_with_the_line(loss, line, op):
    step = trace(trained(loss), *arguments())
    expected = loss.__code__.co_firstlineno + line
    with pytest.raises(NotSplittableError, match=rf"{op} at \S*test_microbatches\.py:{expected}\b"):
        microbatched(step, 2)


def test_batch_normalization_is_refused():
    case = make_small("resnet")
    with pytest.raises(
        NotSplittableError, match=r"sub at \S*resnet\.py:\d+ needs, for each example, what reduce_sum"
    ):
        microbatched(trace(case.step, *case.abstract_args()), 2)


def test_a_batch_that_does_not_divide_is_refused_by_name():
    with pytest.raises(InputError, match=r"batch\['\w+'\] has 8 examples, which is not a multiple of 3"):
        microbatched(traced("mean"), 3)


def example_loss(w, x):
    return jnp.sum((x @ w) ** 2)


def layer_and_pairs(w, x):
    """A layer, and then a loop over its results two by two."""
    return jnp.mean(lax.map(lambda one: example_loss(w, one), jnp.tanh(x @ w), batch_size=2))


def pairs(w, x):
    """A loop over the examples two by two."""
    return jnp.mean(lax.map(lambda one: example_loss(w, one), x, batch_size=2))


def descended(loss, num_examples):
    """The step of a gradient descent, traced for so many examples."""
    w, x = (jax.ShapeDtypeStruct((n, 4), "float32") for n in (4, num_examples))
    return trace(lambda w, x: w - jax.grad(loss)(w, x), w, x)


@pytest.mark.parametrize("count", [3, 6])
@pytest.mark.parametrize(
    ("loss", "at"), [(layer_and_pairs, r"reshape at \S*test_microbatches\.py:\d+"), (pairs, "it")]
)
def test_groups_that_a_number_does_not_divide_are_refused_with_one_that_does(loss, at, count):
    step = descended(loss, 6)
    assert microbatched(step, 2).num_microbatches == 2
    said = rf"into {count} microbatches, but into 2: {at} takes the examples in groups.* Take microbatches=2"
    with pytest.raises(NotSplittableError, match=said):
        microbatched(step, count)


def test_a_batch_of_one_example_is_refused_as_that():
    step = descended(example_loss, 1)
    with pytest.raises(
        InputError, match=r"x has 1 example, which is not a multiple of 2\. Take a larger batch"
    ):
        microbatched(step, 2)
    with pytest.raises(NotSplittableError, match=r"x has 1 example\. Take a larger batch, or leave this one"):
        looped(step, 1)


def test_effects_in_a_loop_are_refused():
    def loss(params, batch, key):
        def body(x, w):
            jax.debug.print("{}", w.sum())
            return layer(x, w), None

        return jnp.mean(lax.scan(body, embedded(params, batch["tokens"]), params["layers"])[0])

    with pytest.raises(NotSplittableError, match=r"debug_\w+ at \S*test_microbatches\.py"):
        microbatched(trace(trained(loss), *arguments()), 2)


def test_a_raw_key_is_no_batch_of_two():
    def step(key, params, x):
        def loss(params):
            return jnp.mean(((x @ params) * jax.random.bernoulli(key, 0.5, x.shape)) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    with jax.enable_x64(True):
        args = jax.random.PRNGKey(0), jnp.eye(4), jnp.linspace(0.0, 1.0, 32).reshape(8, 4)
        assert_same(step, microbatched(trace(step, *args), 4), args)


@pytest.mark.parametrize("count", [0, -2])
def test_fewer_than_one_microbatch_are_refused(count):
    with pytest.raises(InputError, match=f"at least 1 microbatch, got {count}"):
        microbatched(traced("mean"), count)


def test_a_step_without_a_batch_is_refused():
    step = trace(lambda w: w - 0.1 * jax.grad(lambda w: jnp.sum(w**2))(w), jnp.ones((4,)))
    with pytest.raises(InputError, match="no argument is a batch of examples"):
        microbatched(step, 2)


def test_a_step_that_learns_nothing_is_refused():
    with pytest.raises(NotSplittableError, match="nothing to run in microbatches"):
        microbatched(trace(lambda x: jnp.sum(x**2), jnp.ones((4,))), 2)


# --- what stands where


def test_all_products_and_no_update_run_in_the_loop():
    case = make_mlp(optimizer=optax.adam(1e-3))
    split = microbatched(trace(case.step, *case.abstract_args()), 4)
    assert not any(op.name == "dot_general" for op in outside(split))
    assert {op.phase for op in body(split).ops} == {Phase.FORWARD, Phase.BACKWARD}
    assert loop(split).phase is Phase.FORWARD
    assert "sqrt" in {op.name for op in outside(split)}  # Adam's


def test_the_loop_carries_one_sum_for_each_parameter_and_for_the_loss():
    split = microbatched(traced("mean"), 2)
    carried = sorted(v.shape for v in loop(split).result_values)
    assert carried == sorted([(), (VOCAB, HIDDEN), (HIDDEN, HIDDEN)])


def test_gradients_add_up_in_the_type_that_they_are_converted_to():
    def half(params, batch, key):
        return mean(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), batch, key).astype(jnp.float32)

    params, batch, key = arguments()
    params = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    split = microbatched(trace(trained(half), params, batch, key), 2)
    assert np.dtype(jnp.bfloat16) in {v.dtype for v in body(split).values}
    assert {v.dtype for v in loop(split).result_values if v.shape} == {np.dtype(np.float32)}


def test_nothing_of_the_size_of_all_activations_stands_outside():
    """Random bits are made in the loop, zeros for each example are made smaller."""
    for name in ("dropout", "own rows", "layers under scan", "merged dims"):
        split = microbatched(traced(name), 4)
        made = [v for op in outside(split) for v in op.result_values]
        assert max(int(np.prod(v.shape)) for v in made) <= max(BATCH * SEQ, LAYERS * HIDDEN * HIDDEN), name


def test_random_bits_wait_for_their_microbatch():
    ops = body(microbatched(traced("dropout"), 4)).ops
    made = {v: op for op in ops for v in op.outputs}
    (bits,) = (op for op in ops if op.name == "random_bits")
    assert bits.params["shape"] == (BATCH, SEQ, HIDDEN)
    assert made[bits.operands[0]].name == "optimization_barrier"


def test_every_microbatch_takes_examples_of_every_shard():
    """Microbatch i holds the examples i, i + count, ..."""
    split = microbatched(traced("by example"), 2)
    dealt = [op for op in outside(split) if op.scope == SCOPE and op.name == "reshape"]
    assert (BATCH // 2, 2, SEQ) in {op.result_values[0].shape for op in dealt}


def test_arguments_and_results_stay():
    step = traced("metrics")
    split = microbatched(step, 2)
    assert (split.arguments, split.results, split.replaces) == (step.arguments, step.results, step.replaces)
    assert split.graph.inputs == step.graph.inputs
    assert list(map(split.graph.value, split.graph.outputs)) == list(
        map(step.graph.value, step.graph.outputs)
    )


def test_the_same_step_comes_out_each_time():
    one, other = (microbatched(trace(STEPS["metrics"], *arguments()), 2) for _ in range(2))
    assert [(op.name, op.inputs, op.outputs) for op in outside(one) if not _has_literals(op)] == [
        (op.name, op.inputs, op.outputs) for op in outside(other) if not _has_literals(op)
    ]
    assert [op.outputs for op in body(one).ops] == [op.outputs for op in body(other).ops]


def _has_literals(op: Op) -> bool:
    return len(op.operands) < len(op.inputs)


def test_the_batch_is_split_though_most_arguments_are_frozen_layers():
    def step(head, layers, x):
        def loss(head):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["a"] + w["b"]), None), x, layers)
            return jnp.mean((h @ head) ** 2)

        value, grads = jax.value_and_grad(loss)(head)
        return head - 0.1 * grads, value

    layers = {"a": jax.ShapeDtypeStruct((3, 6, 6), "float32"), "b": jax.ShapeDtypeStruct((3, 6), "float32")}
    traced = trace(
        step, jax.ShapeDtypeStruct((6, 2), "float32"), layers, jax.ShapeDtypeStruct((8, 6), "float32")
    )
    assert batch_divisors(traced) == [1, 2, 4, 8]
    assert microbatched(traced, 4).num_microbatches == 4


def test_a_batch_is_halved_as_long_as_the_halves_are_whole():
    traced = trace(
        lambda w, x: w - jax.grad(lambda w: jnp.sum(x @ w))(w), jnp.ones((4, 2)), jnp.ones((24, 4))
    )
    assert batch_halvings(traced) == [24, 12, 6, 3]
    assert batch_halvings(trace(lambda w: 0.9 * w, jnp.ones(()))) == [1]
