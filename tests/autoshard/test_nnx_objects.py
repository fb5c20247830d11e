"""NNX objects among the arguments: a decorated step does to them what `nnx.jit` does, on many devices."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard import AutoshardWarning, InputError
from autoshard.search import driver

pytestmark = pytest.mark.devices

X = jnp.linspace(-1, 1, 32).reshape(8, 4)
LABELS = jnp.arange(8) % 4

parallelize = functools.partial(autoshard.parallelize, mesh=(8,))


class Mlp(nnx.Module):
    def __init__(self, rngs, width=16):
        self.layers = nnx.List([nnx.Linear(4, width, rngs=rngs), nnx.Linear(width, 4, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


class Noisy(Mlp):
    """An MLP with statistics of its batches and a random stream."""

    def __init__(self, rngs, width=16):
        super().__init__(rngs, width)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(nnx.relu(self.norm(self.layers[0](x)))))


class Tied(nnx.Module):
    """Two layers of one kernel."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


class Tree(nnx.Module):
    """A child that knows its parent."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.child = Child(self)

    def __call__(self, x):
        return self.child(x)


class Child(nnx.Module):
    def __init__(self, parent):
        self.parent, self.scale = parent, nnx.Param(jnp.ones(4))

    def __call__(self, x):
        return self.parent.linear(x) * self.scale


class Stack(nnx.Module):
    """Layers under `nnx.scan`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def layers(rngs):
            return nnx.Linear(4, 4, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return jnp.tanh(layer(x))

        return run(x, self.layers)


def create(module=Mlp):
    model = module(nnx.Rngs(0, params=1, dropout=2))
    return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)


def create_with_metrics():
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    return *create(Noisy), metrics


def loss_fn(model, batch):
    return jnp.mean((model(batch) - 1) ** 2)


def step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def step_with_metrics(model, optimizer, metrics, batch):
    def loss_fn(model, x, labels):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch["x"], batch["labels"])
    metrics.update(loss=loss, logits=logits, labels=batch["labels"])
    optimizer.update(model, grads)


def arrays_of(tree):
    leaves = jax.tree.leaves(nnx.state(tree))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]


def assert_as_nnx_jit(step, create, *others, count=3, jit=parallelize):
    """Results, and all that the objects hold afterwards."""
    ran = []
    for run in (nnx.jit(step), jit(step)):
        objects = create()
        ran.append(([run(*objects, *others) for _ in range(count)], arrays_of(objects)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), *ran)


# --- what is carried


@pytest.mark.parametrize("module", [Noisy, Tied, Tree, Stack])
def test_a_step_trains_in_place(module):
    assert_as_nnx_jit(step, functools.partial(create, module), X)


def test_metrics_statistics_and_random_streams():
    assert_as_nnx_jit(step_with_metrics, create_with_metrics, {"x": X, "labels": LABELS})


@pytest.mark.parametrize(
    "options", [{}, {"graph": False}, {"graph_updates": False}], ids=["graph", "tree", "no-updates"]
)
def test_a_step_that_is_jitted_by_nnx(options):
    assert_as_nnx_jit(step, create, X, jit=lambda step: parallelize(nnx.jit(step, **options)))


def test_in_microbatches():
    def create():
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9), wrt=nnx.Param)

    assert_as_nnx_jit(step, create, X, jit=functools.partial(parallelize, microbatches=2))


def test_what_is_returned_is_the_object_that_was_given():
    def returning(model, optimizer, batch):
        loss = step(model, optimizer, batch)
        return {"kernel": model.layers[0].kernel, "loss": loss}, model

    model, optimizer = create()
    parallel = parallelize(returning)
    for _ in range(2):
        result, same = parallel(model, optimizer, X)
        assert same is model
        assert result["kernel"] is model.layers[0].kernel
    assert_as_nnx_jit(lambda *args: returning(*args)[0]["loss"], create, X)


def test_attributes_that_come_change_and_go():
    def changing(model, x):
        model.total = nnx.Variable(x.sum())
        model.alias = model.layers[0]
        model.name = "second"
        del model.dropout

    model = create(Noisy)[0]
    parallelize(changing)(model, X)
    assert (model.alias, model.name) == (model.layers[0], "second")
    assert not hasattr(model, "dropout")
    np.testing.assert_allclose(model.total[...], X.sum(), atol=1e-6)


def test_a_count_that_is_no_array_goes_on_and_is_not_searched_for(monkeypatch):
    def counting(model, optimizer, batch):
        model.calls += 1
        return step(model, optimizer, batch)

    model, optimizer = create()
    model.calls, parallel = 0, parallelize(counting)
    parallel(model, optimizer, X)
    monkeypatch.setattr(driver, "find", None)
    with pytest.warns(
        AutoshardWarning, match=r"has changed: calls \(0, now 1\)\. .*nnx\.Variable of an array"
    ):
        parallel(model, optimizer, X)
    assert model.calls == 2


def test_a_variable_among_the_arguments():
    def counting(count, batch):
        count[...] += batch.sum()

    count, parallel = nnx.Variable(jnp.zeros(())), parallelize(counting)
    for _ in range(3):
        parallel(count, X + 1)
    np.testing.assert_allclose(count[...], 3 * 32, rtol=1e-5)


def test_keywords_are_the_same_call():
    model, optimizer = create(Tied)
    parallel = parallelize(step)
    losses = [float(parallel(model, batch=X, optimizer=optimizer)), float(parallel(model, optimizer, X))]
    assert_as_nnx_jit(step, functools.partial(create, Tied), X, count=2)
    plain = create(Tied)
    np.testing.assert_allclose(losses, [step(*plain, X), step(*plain, X)], rtol=1e-4)


def test_a_module_with_a_step_of_its_own():
    class Trainer(nnx.Module):
        def __init__(self):
            self.model, self.optimizer = create(Tied)

        @parallelize
        def step(self, batch):
            return step(self.model, self.optimizer, batch)

    trainer, plain = Trainer(), create(Tied)
    losses = [float(trainer.step(X)) for _ in range(3)]
    np.testing.assert_allclose(losses, [step(*plain, X) for _ in range(3)], rtol=1e-4)
    assert trainer.step.plan.step == "step"


# --- arrays that several objects hold


def follow(model, target, optimizer, batch):
    """A target network that follows the model."""

    def distance(model):
        return jnp.mean((model(batch) - target(batch) - 1) ** 2)

    loss, grads = nnx.value_and_grad(distance)(model)
    optimizer.update(model, grads)
    nnx.update(target, jax.tree.map(lambda t, m: 0.9 * t + 0.1 * m, nnx.state(target), nnx.state(model)))
    return loss


def create_with_target():
    model, optimizer = create(Tied)
    return model, nnx.clone(model), optimizer


def test_a_clone_is_left_alone():
    assert_as_nnx_jit(follow, create_with_target, X)
    model, target, optimizer = create_with_target()
    kept = nnx.clone(model)
    parallel = parallelize(follow)
    parallel(model, target, optimizer, X)
    nnx.update(target, nnx.state(model))
    assert np.isfinite(parallel(model, target, optimizer, X))
    assert np.isfinite(kept(X)).all()


def test_frozen_variables_stay_where_they_are():
    def step(model, optimizer, batch):
        wrt = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=wrt)(model, batch)
        optimizer.update(model, grads)
        return loss

    def create():
        model = nnx.LoRALinear(4, 4, lora_rank=2, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    assert_as_nnx_jit(step, create, X)
    (model, optimizer), parallel = create(), parallelize(step)
    parallel(model, optimizer, X)
    frozen, trained = model.kernel.get_raw_value(), model.lora.lora_a.get_raw_value()
    parallel(model, optimizer, X)
    assert model.kernel.get_raw_value() is frozen
    assert trained.is_deleted()


def test_what_is_only_read_stays_where_another_step_has_it():
    train = parallelize(step, pin={"model.layers[0].kernel": jax.P(None, "data")})
    evaluate = parallelize(lambda model, x: model(x).sum(), pin={"model.layers[0].kernel": jax.P()})
    model, optimizer = create()
    train(model, optimizer, X)
    kernel = model.layers[0].kernel.get_raw_value()
    wanted = model(X).sum()
    for _ in range(2):
        np.testing.assert_allclose(evaluate(model, X), wanted, rtol=1e-4)
    assert model.layers[0].kernel.get_raw_value() is kernel
    assert kernel.sharding.spec == jax.P(None, "data")


# --- the other verbs


def test_a_model_is_born_on_its_shards():
    split = {"model.layers[0].kernel": jax.P(None, "data")}
    parallel = parallelize(step, pin=split)
    model, optimizer = parallel.init(create, args=(X,))
    kernel = model.layers[0].kernel[...]
    assert kernel.sharding.spec == jax.P(None, "data")
    assert {s.data.shape for s in kernel.addressable_shards} == {(4, 2)}
    losses = [float(parallel(model, optimizer, X)) for _ in range(3)]
    plain = create()
    np.testing.assert_allclose(losses, [step(*plain, X) for _ in range(3)], rtol=1e-4)
    assert model.layers[0].kernel[...].sharding.spec == jax.P(None, "data")


def test_streams_that_create_a_model_go_on():
    def create(rngs):
        model = Tied(rngs)
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    ours, theirs = nnx.Rngs(0), nnx.Rngs(0)
    made = parallelize(step).init(create, ours, args=(X,))
    np.testing.assert_allclose(made[0].first.kernel[...], create(theirs)[0].first.kernel[...], rtol=1e-5)
    assert ours.default.count[...] == theirs.default.count[...] > 0


def test_from_abstract_modules_to_a_program():
    abstract = nnx.eval_shape(create)
    plan = autoshard.search(step, *abstract, X, cluster="8xCPU")
    assert "model.layers[0].kernel" in plan.decisions.arguments
    program = autoshard.emit(step, *abstract, X, plan=plan)
    assert program.fn.lower(*program.args).compile()
    parallel = autoshard.parallelize(step, plan=plan)
    assert np.isfinite(parallel(*create(), X))
    assert parallel.plan == plan


# --- what is refused


def test_metadata_that_is_changed():
    def step(model, batch):
        model.layers[1].kernel.set_metadata(frozen=True)

    with pytest.raises(InputError, match=r"changes the metadata 'frozen' of layers\.1\.kernel, a Param"):
        parallelize(step)(create()[0], X)


def test_a_mutable_array():
    class Counter(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()), ref=True)

    with pytest.raises(InputError, match=r"count of Counter refers to a mutable array"):
        parallelize(lambda counter, x: x)(Counter(), X)


def test_an_object_that_is_no_argument():
    model, optimizer = create()
    with pytest.raises(InputError, match="cannot be traced"):
        parallelize(lambda batch: step(model, optimizer, batch))(X)


def test_what_fails_leaves_the_objects_as_they_were():
    def failing(model, optimizer, batch):
        step(model, optimizer, batch)
        raise ValueError("no luck")

    model, optimizer = create()
    before = arrays_of((model, optimizer))
    with pytest.raises(InputError, match="no luck"):
        parallelize(failing)(model, optimizer, X)
    jax.tree.map(np.testing.assert_array_equal, arrays_of((model, optimizer)), before)


# --- what it costs


def test_later_calls_neither_trace_nor_plan():
    traced = []

    def counted(model, optimizer, batch):
        traced.append(None)
        return step(model, optimizer, batch)

    parallel, (model, optimizer) = parallelize(counted), create()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            parallel(model, optimizer, X)
    assert len(traced) == 1


def test_flax_is_not_imported():
    code = """
import sys, jax.numpy as jnp, autoshard
autoshard.parallelize(lambda w, x: w - x["x"].mean())(jnp.ones(8), {"x": jnp.ones(8)})
assert not [name for name in sys.modules if name.split(".")[0] == "flax"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."})
