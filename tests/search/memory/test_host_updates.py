"""Which state the host may update, and what travels for it: by the optimizers' formulas."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.search.ir.graph import Role
from autoshard.search.ir.trace import trace
from autoshard.search.memory.host_updates import host_updates, updatable
from autoshard.search.memory.offload import may_rest_on_host, offloaded

SIZE = 256
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def on_host(tx, *roles, dtype=jnp.float32, leaves=2):
    """A step of a chain of square weights, and its arguments of some roles."""

    def step(params, state, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(y @ w.astype(jnp.float32))
            return jnp.mean(y**2)

        gradients = jax.grad(loss)(params)
        changes, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    params = [jax.ShapeDtypeStruct((SIZE, SIZE), dtype)] * leaves
    traced = trace(
        step, params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((8, SIZE), jnp.float32)
    )
    hosted = frozenset(i for i, role in may_rest_on_host(traced).items() if role in roles)
    return traced, hosted


def copied(tx, *roles, **options):
    """The number of whole arrays that go to the host and come from it, when the host updates all that it can."""
    step, hosted = on_host(tx, *roles, **options)
    graph = offloaded(step, hosted, updated=updatable(step, hosted)).step.graph
    moved = [op.result_values[0] for op in graph.ops if op.name == "device_put" and op.result_values[0].shape]
    return tuple(sum(v.is_on_host is there for v in moved) for there in (True, False))


@pytest.mark.parametrize("tx", [optax.adamw(1e-3), CLIPPED, optax.adam(1e-3), optax.sgd(0.1, momentum=0.9)])
def test_gradients_and_parameters_go_and_parameters_come_back(tx):
    """Neither clipped gradients nor decayed weights do, which the host computes for itself."""
    assert copied(tx, Role.OPTIMIZER_STATE) == (2 * 2, 2)


def test_only_gradients_go_where_parameters_rest_there():
    """And parameters come for the two phases that read them: those of the first layer for one."""
    assert copied(CLIPPED, Role.OPTIMIZER_STATE, Role.PARAMETER) == (2, 2 + 1)


def test_a_gradient_leaves_before_the_norm_of_all_is_known():
    step, hosted = on_host(CLIPPED, Role.OPTIMIZER_STATE)
    ops = offloaded(step, hosted, updated=updatable(step, hosted)).step.graph.ops
    norm = next(n for n, op in enumerate(ops) if op.name == "sqrt" and not op.result_values[0].shape)
    sent = [n for n, op in enumerate(ops) if op.name == "device_put" and op.result_values[0].shape]
    assert sum(n < norm for n in sent) == 2 * 2


def test_the_old_state_is_read_and_the_new_written_in_the_hosts_memory():
    step, hosted = on_host(CLIPPED, Role.OPTIMIZER_STATE)
    rewritten = offloaded(step, hosted, updated=updatable(step, hosted)).step
    graph = rewritten.graph
    updates = [op for op in graph.ops if op.is_host_update]
    read = {v for op in updates for v in op.operands}
    made = {v for op in updates for v in op.outputs}
    new = {r: a for a, r in zip(graph.outputs, rewritten.replaces, strict=True)}
    assert len(updates) == 2
    assert all(graph.inputs[i] in read and new[i] in made for i in hosted)
    assert all(graph.values[v].is_on_host for v in read | made)


def test_new_state_that_the_device_reads_in_the_same_step_comes_to_it():
    """As that of a discriminator that trains before its generator."""

    def step(w, m, x):
        m = 0.9 * m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        w = w - 0.1 * m
        return w, m, jnp.max(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x))

    square = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    traced = trace(step, square, square, jax.ShapeDtypeStruct((8, SIZE), jnp.float32))
    hosted = frozenset({0, 1})
    assert updatable(traced, hosted) == hosted
    graph = offloaded(traced, hosted, updated=hosted).step.graph
    here = [op for op in graph.ops if not (op.is_host_update or op.is_transfer)]
    assert sum(op.name == "dot_general" for op in here) == 4
    assert not any(graph.values[v].is_on_host for op in here for v in op.operands)
    assert [graph.value(a).is_on_host for a in graph.outputs] == [True, True, False]


def divided_by_norm():
    """An optimizer whose update divides by a norm of its state."""

    def update(gradients, state, params):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, gradients)
        return jax.tree.map(lambda m: -0.1 * m / jnp.linalg.norm(m), state), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def with_products():
    """An optimizer that keeps a sum of gradients' products, as Shampoo does."""

    def update(gradients, state, params):
        state = jax.tree.map(lambda s, g: s + g @ g.T, state, gradients)
        return jax.tree.map(lambda s, g: -0.1 * (s @ g), state, gradients), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.mark.parametrize("tx", [divided_by_norm(), with_products(), optax.lamb(1e-3)])
def test_a_norm_or_a_product_of_the_state_keeps_its_update_on_the_device(tx):
    step, hosted = on_host(tx, Role.OPTIMIZER_STATE)
    assert hosted
    assert host_updates(step, hosted) == ()


def test_a_moment_that_stays_on_the_device_goes_to_the_host_for_the_update():
    step, hosted = on_host(optax.adamw(1e-3), Role.OPTIMIZER_STATE)
    second = frozenset(i for i in hosted if ".nu" in step.arguments[i].name)
    assert updatable(step, hosted) == hosted
    assert updatable(step, second) == second
    (first, *_) = host_updates(step, second)
    assert len(first.state) == 1
    assert len(first.arrays) == 3  # the parameter, its gradient and the first moment


def test_parameters_in_16_bits_travel_in_16_bits():
    step, hosted = on_host(
        optax.chain(optax.scale_by_adam(mu_dtype=jnp.float32), optax.scale(-1e-3)),
        Role.OPTIMIZER_STATE,
        dtype=jnp.bfloat16,
    )
    for update in host_updates(step, hosted):
        assert {step.graph.values[v].dtype for v in update.arrays} == {jnp.dtype(jnp.bfloat16)}
