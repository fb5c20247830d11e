"""Of an ejected step's forms, the one that compiles to the plan's program on GPUs is taken."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import autoshard


@pytest.mark.parametrize(
    ("form", "mesh", "pins"),
    [
        ("wrapper", (8,), {"w": jax.P(), "x": jax.P("data")}),
        ("written", (2, 4), {"w": jax.P("data", "model"), "x": jax.P("data")}),
    ],
)
def test_on_gpus_the_form_that_compiles_to_the_plans_program_is_taken(form, mesh, pins):
    def step(w, x):
        def loss(w):
            hidden = jnp.tanh(x @ w[0])
            return jnp.mean((hidden @ w[1]) ** 2)

        return jax.tree.map(lambda w, g: w - g, w, jax.grad(loss)(w))

    w = jax.ShapeDtypeStruct((1024, 1024), "float32")
    args = [w, w], jax.ShapeDtypeStruct((4096, 1024), "float32")
    plan = autoshard.search(step, *args, cluster="8xH100-80GB", mesh=mesh, pin=pins, verify="never")
    made = autoshard.eject(step, *args, plan=plan)
    assert (made.form, made.differences, made.is_compiled) == (form, (), True)
    assert made.collectives
    assert all(c.predicted_bytes == c.compiled_bytes for c in made.collectives)
    assert bool(made.tried) == (form == "written")
    assert "it has the collectives and the peak memory of the plan's program" in " ".join(made.text.split())


def test_on_gpus_a_step_that_changes_objects_compiles_to_the_plans_program():
    def step(model, x):
        grads = nnx.grad(lambda model: ((jnp.tanh(model(x)) - 1) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))

    model = nnx.eval_shape(lambda: nnx.Linear(1024, 1024, rngs=nnx.Rngs(0)))
    args = model, jax.ShapeDtypeStruct((4096, 1024), "float32")
    pins = {"x": jax.P("data"), "model": jax.P()}
    plan = autoshard.search(step, *args, cluster="8xH100-80GB", mesh=(8,), pin=pins, verify="never")
    made = autoshard.eject(step, *args, plan=plan, verify="always")
    assert (made.differences, made.is_compiled) == ((), True)
    assert made.collectives
    assert all(c.predicted_bytes == c.compiled_bytes for c in made.collectives)
