"""Which arguments that a step does not hand back are a batch, and which are read as a whole: as their names say."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.search.ir.trace import trace


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def frozen(step, *args):
    return [a.name for a in trace(step, *args).arguments if a.role.value == "frozen"]


def descended(loss, params):
    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def adapted(adapters, weights, x):
    """A frozen language model under `scan`, with adapters of low rank."""

    def loss(adapters):
        def layer(h, both):
            w, lora = both
            return jnp.tanh(h @ w["kernel"] + w["bias"] + (h @ lora["down"]) @ lora["up"]), None

        h = weights["embedding"][x] + weights["positions"]
        h, _ = jax.lax.scan(layer, h, (weights["layers"], adapters))
        return jnp.mean(jax.nn.logsumexp(h @ weights["embedding"].T, -1))

    return descended(loss, adapters)


WEIGHTS = {
    "embedding": f32(100, 16),
    "layers": {"bias": f32(3, 16), "kernel": f32(3, 16, 16)},
    "positions": f32(12, 16),
}
ADAPTERS = {"down": f32(3, 16, 4), "up": f32(3, 4, 16)}


def test_frozen_weights_under_adapters():
    assert len(frozen(adapted, ADAPTERS, WEIGHTS, i32(8, 12))) == len(jax.tree.leaves(WEIGHTS))


def test_layers_that_are_taken_one_by_one():
    def step(head, stack, x):
        def loss(head):
            h = x
            for i in range(3):
                h = jnp.tanh(h @ stack[i])
            return jnp.mean((h @ head) ** 2)

        return descended(loss, head)

    assert frozen(step, f32(16, 4), f32(3, 16, 16), f32(16, 16)) == ["stack"]


@pytest.mark.parametrize("size", [4, 16], ids=["another size", "the weights' size"])
def test_a_teacher_beside_inputs_and_labels(size):
    def step(w, teacher, x, y):
        def loss(w):
            return jnp.mean((jnp.tanh(x @ w) - jnp.tanh(x @ teacher)) ** 2) + jnp.mean((x @ w - y) ** 2)

        return descended(loss, w)

    assert frozen(step, f32(16, 16), f32(16, 16), f32(size, 16), f32(size, 16)) == ["teacher"]


def test_tables_masks_and_weights_of_classes():
    def step(w, batch, mask, classes, betas):
        def loss(w):
            h = jnp.einsum("btd,de->bte", batch["x"], w) + betas[batch["t"]][:, None, None]
            scores = jnp.where(mask, jnp.einsum("bte,bse->bts", h, h), -1e9)
            return jnp.mean(jax.nn.softmax(scores) @ h * classes)

        return descended(loss, w)

    batch = {"t": i32(8), "x": f32(8, 6, 16)}
    mask = jax.ShapeDtypeStruct((6, 6), bool)
    found = frozen(step, f32(16, 10), batch, mask, f32(10), f32(1000))
    assert found == ["mask", "classes", "betas"]


def test_examples_are_no_weights_whatever_is_made_of_them():
    def step(w, x, y, weight):
        def loss(w):
            flat = jnp.reshape(x, (-1, 16)) @ w
            sent = jnp.reshape(flat[jnp.argsort(flat[:, 0])], (8, 6, 16))
            return jnp.vdot(weight, jnp.mean(sent, (1, 2)) - y)

        return descended(loss, w)

    assert frozen(step, f32(16, 16), f32(8, 6, 16), f32(8), f32(8)) == []


@pytest.mark.parametrize("name", ["nodes that read one another", "time first", "one by one"])
def test_where_no_argument_looks_like_a_batch_none_is_taken_for_weights(name):
    def graph(w, adjacent, x):
        return descended(lambda w: jnp.mean((adjacent @ jnp.tanh(adjacent @ (x @ w))) ** 2), w)

    def recurrent(w, x, y):
        def cell(w):
            h, _ = jax.lax.scan(lambda h, now: (jnp.tanh(h @ w + now), None), jnp.zeros((8, 16)), x)
            return jnp.mean((h - y[0]) ** 2)

        return descended(cell, w)

    def accumulated(w, x, y):
        def add(total, both):
            return total + jax.grad(lambda w: jnp.mean((both[0] @ w - both[1]) ** 2))(w), None

        return w - 0.1 * jax.lax.scan(add, jnp.zeros_like(w), (x, y))[0]

    step, *args = {
        "nodes that read one another": (graph, f32(20, 20), f32(20, 16)),
        "time first": (recurrent, f32(5, 8, 16), f32(1, 8, 16)),
        "one by one": (accumulated, f32(4, 8, 16), f32(4, 8, 16)),
    }[name]
    assert frozen(step, f32(16, 16), *args) == []


def test_a_batch_of_one_example():
    """Its dims meet nothing, and positions read one another; all the same it is no weight, and weights are none of it."""

    def step(w, weights, x):
        def loss(w):
            h = weights["embedding"][x[:, :-1]]
            h = jax.nn.softmax(jnp.einsum("btd,bsd->bts", h, h)) @ h @ weights["kernel"] @ w
            return optax.softmax_cross_entropy_with_integer_labels(h, x[:, 1:]).mean()

        return descended(loss, w)

    weights = {"embedding": f32(100, 16), "kernel": f32(16, 16)}
    found = frozen(step, f32(16, 100), weights, i32(1, 12))
    assert found == ["weights['embedding']", "weights['kernel']"]


def test_what_only_the_update_reads_is_no_batch():
    def step(params, decay, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        return {"w": params["w"] - 0.1 * grads["w"] - decay * params["w"]}

    assert frozen(step, {"w": f32(16, 16)}, f32(16, 16), f32(16, 16)) == ["decay"]
