"""The face: a decorated step runs like the plain one, state is born on its shards, plans go in and come out."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import Parallelized, Plan
from autoshard.search import driver
from autoshard.search.memory import offload

pytestmark = pytest.mark.devices


def train_step(state, batch, rate=0.1):
    def loss_fn(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - rate * v, state["params"], velocity)
    return {"params": params, "velocity": velocity}, {"loss": loss}


def create_state(key):
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (32, 64)) / 8, "down": jax.random.normal(down, (64, 16)) / 8}
    return {"params": params, "velocity": jax.tree.map(jnp.zeros_like, params)}


def make_batch(i=0, size=24):
    rng = np.random.default_rng(i)
    return {name: rng.standard_normal((size, n)).astype("float32") for name, n in (("x", 32), ("y", 16))}


SPLIT = {"state['params']['up']": jax.P(None, "model"), "state['velocity']['up']": jax.P("data", "model")}
parallelize = functools.partial(autoshard.parallelize, mesh=(2, 4), pin=SPLIT)


def assert_close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), a, b)


def plain_steps(count):
    state = create_state(jax.random.key(0))
    for i in range(count):
        state, metrics = train_step(state, make_batch(i))
    return state, metrics


# --- running


def test_steps_are_those_of_the_plain_function():
    step, state = parallelize(train_step), create_state(jax.random.key(0))
    for i in range(3):
        state, metrics = step(state, make_batch(i))
    assert_close((state, metrics), plain_steps(3))


def test_steps_in_microbatches_are_those_of_the_plain_function():
    step, state = parallelize(train_step, microbatches=3), create_state(jax.random.key(0))
    for i in range(3):
        state, metrics = step(state, make_batch(i))
    assert step.plan.decisions.microbatches == 3
    assert_close((state, metrics), plain_steps(3))


def test_state_in_the_hosts_memory_is_that_of_the_plain_function(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    step = parallelize(train_step, offload=("optimizer_state",))
    state = step.init(create_state, jax.random.key(0), args=(make_batch(),))
    for i in range(3):
        state, metrics = step(state, make_batch(i))
        kinds = {k: {x.sharding.memory_kind for x in jax.tree.leaves(v)} for k, v in state.items()}
        assert kinds["velocity"] == {"pinned_host"} != kinds["params"]
    assert_close((state, metrics), plain_steps(3))
    assert step.plan.decisions.arguments["state['velocity']['up']"] == "P('data', 'model') on host"
    assert step.plan.estimates.host_bytes > 0
    step.plan.save(tmp_path / "plan.json")
    again = autoshard.parallelize(train_step, plan=tmp_path / "plan.json")
    state = create_state(jax.random.key(0))
    for i in range(3):
        state, metrics = again(state, make_batch(i))
    assert_close((state, metrics), plain_steps(3))


def test_as_a_decorator_with_and_without_options():
    @autoshard.parallelize
    def bare(w, x):
        "Doubles."
        return w + x.sum()

    @autoshard.parallelize(memory="1GiB")
    def capped(w, x):
        return w + x.sum()

    for step in (bare, capped):
        assert isinstance(step, Parallelized)
        assert_close(step(jnp.ones(8), jnp.ones(16)), jnp.full(8, 17.0))
    assert (bare.__name__, bare.__doc__) == ("bare", "Doubles.")
    assert capped.plan.memory_bytes == 1 << 30


def test_later_calls_neither_trace_nor_search():
    traced = []

    @parallelize
    def step(state, batch):
        traced.append(None)
        return train_step(state, batch)

    state, _ = step(create_state(jax.random.key(0)), make_batch())
    plan = step.plan
    for i in range(3):
        state, _ = step(state, make_batch(i))
    assert len(traced) == 1
    assert step.plan is plan


@pytest.mark.parametrize(
    "call",
    [
        lambda step, state, batch: step(state, batch=batch),
        lambda step, state, batch: step(batch=batch, state=state),
        lambda step, state, batch: step(state, batch, rate=0.1),
        lambda step, state, batch: step(state, rate=np.float32(0.1), batch=batch),
    ],
)
def test_keyword_arguments(call):
    step, state = autoshard.parallelize(train_step, mesh=(2, 4)), create_state(jax.random.key(0))
    for i in range(2):
        state, metrics = call(step, state, make_batch(i))
    assert_close((state, metrics), plain_steps(2))


class Trainer:
    def __call__(self, state, batch):
        return train_step(state, batch)

    def method(self, state, batch):
        return train_step(state, batch)


@pytest.mark.parametrize(
    "function",
    [jax.jit(train_step), functools.partial(train_step, rate=0.1), Trainer(), Trainer().method],
    ids=["jitted", "partial", "object", "method"],
)
def test_anything_that_can_be_called(function):
    state, metrics = autoshard.parallelize(function)(create_state(jax.random.key(0)), make_batch())
    assert_close((state, metrics), plain_steps(1))


def test_state_is_donated_and_batches_are_not():
    step = parallelize(train_step)
    state = step.init(create_state, jax.random.key(0), args=(make_batch(),))
    batch = jax.tree.map(jnp.asarray, make_batch())
    new, _ = step(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves((new, batch)))


def test_fewer_devices_than_jax_sees():
    step = autoshard.parallelize(train_step, devices=jax.devices()[2:4])
    state, metrics = step(create_state(jax.random.key(0)), make_batch())
    assert_close((state, metrics), plain_steps(1))
    used = {d for x in jax.tree.leaves(state) for d in x.devices()}
    assert used == set(jax.devices()[2:4])


# --- init and lower


def test_state_is_born_on_its_shards():
    step = parallelize(train_step)
    state = step.init(create_state, jax.random.key(0), args=(make_batch(),))
    assert state["params"]["up"].sharding.spec == jax.P(None, "model")
    assert state["velocity"]["up"].sharding.spec == jax.P("data", "model")
    assert {s.data.shape for s in state["velocity"]["up"].addressable_shards} == {(16, 16)}
    assert_close(state, create_state(jax.random.key(0)))
    assert_close(step(state, make_batch()), plain_steps(1))


def test_init_takes_shapes_for_the_other_arguments():
    shapes = jax.eval_shape(make_batch_arrays)
    step = parallelize(train_step)
    state = step.init(create_state, jax.random.key(0), args=(shapes,))
    assert_close(step(state, make_batch()), plain_steps(1))


def make_batch_arrays():
    return jax.tree.map(jnp.asarray, make_batch())


def test_lower_takes_shapes_and_is_what_runs():
    step = parallelize(train_step)
    lowered = step.lower(jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays))
    compiled = lowered.compile()
    assert compiled.input_shardings[0][0]["params"]["up"].spec == jax.P(None, "model")
    assert any(kind in compiled.as_text() for kind in ("all-reduce", "all-gather"))


def test_the_shardings_of_a_call_are_known_before_it():
    step = parallelize(train_step)
    shapes = jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays)
    wanted = step.in_shardings(*shapes)
    (compiled, _), ranks = step.lower(*shapes).compile().input_shardings, jax.tree.map(jnp.ndim, shapes)
    assert all(jax.tree.leaves(jax.tree.map(jax.sharding.Sharding.is_equivalent_to, wanted, compiled, ranks)))
    ahead = jax.device_put(make_batch(), wanted[1])
    assert_close(step(create_state(jax.random.key(0)), ahead), plain_steps(1))


# --- plans


@pytest.fixture(scope="module")
def plan():
    shapes = jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays)
    return autoshard.search(train_step, *shapes, cluster="8xCPU", mesh=(2, 4), pin=SPLIT)


def test_a_search_and_a_call_agree(plan):
    step = parallelize(train_step)
    step.lower(create_state(jax.random.key(0)), make_batch())
    assert step.plan.to_json() == plan.to_json()


def test_a_plan_is_the_same_from_whichever_folder_it_is_searched(plan, tmp_path, monkeypatch):
    shapes = jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays)
    monkeypatch.chdir(tmp_path)
    jax.clear_caches()  # of the trace
    again = autoshard.search(train_step, *shapes, cluster="8xCPU", mesh=(2, 4), pin=SPLIT)
    assert json.dumps(again.to_json()) == json.dumps(plan.to_json())
    assert "(autoshard/test_api.py:" in plan.estimates.peak_at


@pytest.mark.parametrize("given", ["path", "text", "plan"])
def test_a_plan_is_run_without_a_search(plan, given, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    plan.save(path)
    monkeypatch.setattr(driver, "find", None)
    step = autoshard.parallelize(train_step, plan={"path": path, "text": str(path), "plan": plan}[given])
    state = step.init(create_state, jax.random.key(0), args=(make_batch(),))
    assert state["velocity"]["up"].sharding.spec == jax.P("data", "model")
    assert_close(step(state, make_batch()), plain_steps(1))
    assert step.plan == plan


def test_an_edited_plan_file_is_run(plan, tmp_path):
    path = tmp_path / "plan.json"
    data = plan.to_json()
    data["shardings"][0]["arguments"]["state['velocity']['up']"] = "P('model')"
    path.write_text(json.dumps(data))
    step = autoshard.parallelize(train_step, plan=path)
    state = step.init(create_state, jax.random.key(0), args=(make_batch(),))
    assert state["velocity"]["up"].sharding.spec == jax.P("model")
    assert_close(step(state, make_batch()), plain_steps(1))


def test_emit_gives_what_to_lower(plan, tmp_path):
    shapes = jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays)
    plan.save(tmp_path / "plan.json")
    program = autoshard.emit(train_step, *shapes, plan=tmp_path / "plan.json")
    assert program.args[0]["params"]["up"].sharding.spec == jax.P(None, "model")
    assert program.donated == (True, False)
    placed = jax.device_put((create_state(jax.random.key(0)), make_batch()), program.shardings)
    assert_close(program.fn(*placed), plain_steps(1))


def step_by_platform(w, x):
    def loss(w):
        y = jax.lax.platform_dependent(x @ w, cpu=jnp.sin, cuda=jnp.tanh)
        return jnp.mean(y**2) + jnp.diagonal(w[:8, :8]).sum()

    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("cluster", ["8xCPU", "8xH100-80GB"])
def test_branches_by_platform_are_the_clusters_and_warn_of_nothing(cluster):
    """The GPU's program runs on other devices, too: it is what the GPUs would compute."""
    w, x = jax.random.normal(jax.random.key(0), (16, 8)), jnp.linspace(-1, 1, 384).reshape(24, 16)
    plan = autoshard.search(step_by_platform, w, x, cluster=cluster)
    program = autoshard.emit(step_by_platform, w, x, plan=plan)
    ours = {"8xCPU": jnp.sin, "8xH100-80GB": jnp.tanh}[cluster]
    wanted = w - 0.1 * jax.grad(lambda w: jnp.mean(ours(x @ w) ** 2) + jnp.trace(w[:8, :8]))(w)
    assert_close(program.fn(*jax.device_put((w, x), program.shardings)), wanted)


def test_emit_takes_a_parallelized_step(plan):
    shapes = jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays)
    program = autoshard.emit(parallelize(train_step), *shapes, plan=plan, devices=jax.devices())
    assert program.mesh.shape == {"data": 2, "model": 4}


def test_progress_is_reported_to_who_asks():
    lines = []
    shapes = jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays)
    found = autoshard.search(train_step, *shapes, cluster="8xH100-80GB", progress=lines.append)
    assert isinstance(found, Plan)
    assert any("mesh " in line for line in lines)


def test_a_search_is_silent(capfd):
    shapes = jax.eval_shape(create_state, jax.random.key(0)), jax.eval_shape(make_batch_arrays)
    autoshard.search(train_step, *shapes, cluster="8xH100-80GB")
    assert capfd.readouterr() == ("", "")
