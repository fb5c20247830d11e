"""The roles of arguments: frozen weights, whichever way a step gets them, and all that looks like one."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from autoshard.search.ir.trace import trace, trace_call
from tests.search.lora import lora_chain

STEP, STATE, BASE, X = lora_chain(num_layers=2, width=16, rows=8)
W = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def roles(step, *args, state=()):
    return {a.name: a.role.value for a in trace_call(None, step, args, {}, state).arguments}


def frozen(step, *args, state=()):
    return [name for name, role in roles(step, *args, state=state).items() if role == "frozen"]


def test_an_argument_of_its_own():
    assert frozen(STEP, STATE, BASE, X) == ["base[0]", "base[1]"]


def test_a_part_of_the_state_that_comes_back_as_it_was():
    def step(state, x):
        trained, value = STEP(state["trained"], state["base"], x)
        return {"trained": trained, "base": state["base"]}, value

    assert frozen(step, {"trained": STATE, "base": BASE}, X) == ["state['base'][0]", "state['base'][1]"]


@pytest.mark.parametrize(
    ("freeze", "role"),
    [(optax.set_to_zero(), "frozen"), (optax.sgd(1e-3), "parameter")],
    ids=["zeros", "sgd"],
)
def test_parameters_whose_updates_are_zeros(freeze, role):
    update = optax.multi_transform({"train": optax.adam(1e-3), "freeze": freeze}, ["freeze", "train"])

    def step(params, moments, x):
        def loss(params):
            return jnp.mean(jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]))

        value, grads = jax.value_and_grad(loss)(params)
        changes, moments = update.update(grads, moments, params)
        return optax.apply_updates(params, changes), moments, value

    found = roles(step, [W, W], jax.eval_shape(update.init, [W, W]), X)
    assert (found["params[0]"], found["params[1]"]) == (role, "parameter")


def test_variables_of_a_module_outside_of_its_optimizer():
    model = nnx.eval_shape(
        lambda: nnx.LoRA(16, 4, 16, base_module=nnx.Linear(16, 16, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    )
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam))

    def step(model, optimizer, x):
        trained = nnx.DiffState(0, nnx.LoRAParam)
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2), argnums=trained)(model)
        optimizer.update(model, grads)

    found = nnx_roles(step, model, optimizer, X)
    assert found == {"kernel": "frozen", "bias": "frozen", "lora_a": "parameter", "lora_b": "parameter"}


def nnx_roles(step, model, optimizer, x):
    """The roles of a module's variables, by their names; they are arguments as `nnx.split` gives them."""
    graphs, states = zip(*(nnx.split(one) for one in (model, optimizer)), strict=True)

    def pure(states, x):
        model, optimizer = (nnx.merge(g, s) for g, s in zip(graphs, states, strict=True))
        step(model, optimizer, x)
        return nnx.state(model), nnx.state(optimizer)

    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), states)
    of_model = (a for a in trace(pure, shapes, x).arguments if a.name.startswith("states[0]"))
    return {next(n for n in NAMES if f"'{n}'" in a.name): a.role.value for a in of_model}


NAMES = ("kernel", "bias", "lora_a", "lora_b")


def test_codes_of_weights_are_frozen_whatever_their_dtype():
    """As in QLoRA; counters are arrays that the step changes, or scalars."""

    def step(state, x):
        scales = state["codes"].astype(jnp.float32) * state["scale"]
        grad = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ scales @ w)))(state["w"])
        return state | {"w": state["w"] - grad, "seen": state["seen"] + 1}

    codes = jax.ShapeDtypeStruct((16, 16), jnp.int8)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    seen = jax.ShapeDtypeStruct((16,), jnp.int32)
    state = {"codes": codes, "scale": scale, "seen": seen, "w": W}
    found = roles(step, state, X)
    assert found == {
        "state['codes']": "frozen",
        "state['scale']": "state",
        "state['seen']": "state",
        "state['w']": "parameter",
        "x": "batch",
    }


def test_a_teacher_that_follows_its_student_is_not_frozen():
    def step(state, x):
        student, teacher = state
        grad = jax.grad(lambda w: jnp.mean((x @ w - x @ teacher) ** 2))(student)
        student = student - 0.1 * grad
        return student, 0.9 * teacher + 0.1 * student

    assert frozen(step, (W, W), X) == []


def test_keys_and_rates_are_not_frozen():
    def step(w, key, rate, x):
        noisy = x + jax.random.normal(key, x.shape)
        return w - rate * jax.grad(lambda w: jnp.mean((noisy @ w) ** 2))(w)

    key = jax.eval_shape(lambda: jax.random.key(0))
    assert frozen(step, W, key, jax.ShapeDtypeStruct((), jnp.float32), X) == []


def among_nodes(w, fixed, adjacent, x):
    return w - jax.grad(lambda w: jnp.mean((adjacent @ jnp.tanh(adjacent @ (x @ fixed @ w))) ** 2))(w)


@pytest.mark.parametrize(("state", "wanted"), [((), []), (("fixed",), ["fixed"])])
def test_where_nothing_tells_the_user_says(state, wanted):
    """Nodes read one another: nothing here tells a frozen matrix from an adjacency matrix."""
    nodes = jax.ShapeDtypeStruct((20, 20), jnp.float32), jax.ShapeDtypeStruct((20, 16), jnp.float32)
    assert frozen(among_nodes, W, W, *nodes, state=state) == wanted
