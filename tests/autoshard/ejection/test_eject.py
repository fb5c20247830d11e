"""A plan as a file of plain JAX: it runs where autoshard cannot be imported, and gives one device's numbers."""

import ast
import dataclasses
import functools
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import autoshard
from autoshard import cli
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.ejection.proof import Beside

pytestmark = pytest.mark.devices

TRAIN = """
import jax
import jax.numpy as jnp


def train_step(state, batch):
    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
    return {"params": params, "moments": moments}, {"loss": value}


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float64)


WEIGHTS = {"up": shaped(32, 64), "down": shaped(64, 16)}
ARGS = {"params": WEIGHTS, "moments": WEIGHTS}, {"x": shaped(24, 32), "y": shaped(24, 16)}


def target():
    return train_step, ARGS
"""

ALONE = """
import sys

sys.modules["autoshard"] = None  # an import of it fails
import importlib

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
from train import ARGS, train_step

rng = np.random.default_rng(0)
start = jax.tree.map(lambda x: rng.standard_normal(x.shape), ARGS)
wanted, metrics = jax.jit(train_step)(*start)
wanted, metrics = jax.jit(train_step)(wanted, start[1])
for name in sys.argv[1:]:
    ejected = importlib.import_module(name)
    mesh = ejected.make_mesh()
    state = ejected.placed("state", start[0], mesh)
    run = ejected.sharded(train_step, *start, mesh=mesh)
    for _ in range(2):
        state, found = run(state, start[1])
    for one, many in zip(jax.tree.leaves((wanted, metrics)), jax.tree.leaves((state, found)), strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-12)
    assert state["params"]["up"].sharding.spec == ejected.SPECS["state"]["params/up"]
    assert len(state["params"]["up"].sharding.device_set) == 8
"""

PINS = {"state['params']['up']": jax.P("data", "model"), "batch": jax.P("data")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One with the step, and its plan on two axes."""
    folder = tmp_path_factory.mktemp("eject")
    (folder / "train.py").write_text(TRAIN)
    with jax.enable_x64(True):
        step, args = definitions()
        plan = autoshard.search(step, *args, cluster="8xCPU", mesh=(4, 2), pin=PINS, verify="never")
        plan.save(folder / "plan.json")
    return folder


def definitions():
    variables = {}
    exec(TRAIN, variables)
    return variables["target"]()


def ejected(folder, **options):
    step, args = definitions()
    with jax.enable_x64(True):
        return autoshard.eject(step, *args, plan=folder / "plan.json", **options)


def test_both_forms_give_one_devices_numbers_where_autoshard_is_missing(folder):
    (folder / "alone.py").write_text(ALONE)
    for form in ("wrapper", "written"):
        made = ejected(folder, form=form)
        made.save(folder / f"{form}_step.py")
        code = ast.unparse(ast.parse(made.text))  # comments name the step's folder
        assert "autoshard" not in code.replace("Ejected by autoshard", "")
        assert (made.form, made.is_compiled, made.differences) == (form, False, ())
    command = [sys.executable, "alone.py", "wrapper_step", "written_step"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_dict_of_shardings_is_that_of_the_program(folder):
    variables = {}
    exec(ejected(folder, only="shardings").text, variables)
    step, args = definitions()
    with jax.enable_x64(True):
        program = autoshard.emit(step, *args, plan=folder / "plan.json")
        arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), args)
        specs = {"state": variables["SPECS"]["state"], "batch": variables["SPECS"]["batch"]}
        mesh = jax.make_mesh(tuple(variables["MESH"].values()), tuple(variables["MESH"]))
        placed = tuple(
            jax.tree.map_with_path(
                lambda path, x, own=own: jax.device_put(
                    x, NamedSharding(mesh, own[jax.tree_util.keystr(path, simple=True, separator="/")])
                ),
                tree,
            )
            for own, tree in zip(specs.values(), arrays, strict=True)
        )
    for x, wanted in zip(jax.tree.leaves(placed), jax.tree.leaves(program.shardings), strict=True):
        assert x.sharding.is_equivalent_to(wanted, x.ndim)
    assert variables["SPECS"]["state"]["params/up"] == jax.P("data", "model")
    assert variables["MEMORY_KINDS"] == {}


def test_arrays_on_the_host_have_their_memory_kind_and_come_to_the_device():
    def step(state, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        moment = 0.9 * state["moment"] + grad
        return {"w": state["w"] - 0.1 * moment, "moment": moment}

    w = jax.ShapeDtypeStruct((256, 256), "float32")
    args = {"w": w, "moment": w}, jax.ShapeDtypeStruct((64, 256), "float32")
    asked = {"cluster": "8xCPU", "mesh": (8,), "offload": ("state['moment']",), "verify": "never"}
    plan = autoshard.search(step, *args, **asked)
    variables = {}
    exec(autoshard.eject(step, *args, plan=plan, only="shardings").text, variables)
    assert variables["MEMORY_KINDS"] == {"state": {"moment": "pinned_host"}}
    whole = autoshard.eject(step, *args, plan=plan, form="wrapper")
    exec(whole.text, variables)
    rng = np.random.default_rng(0)
    start = jax.tree.map(lambda x: rng.standard_normal(x.shape, "float32"), args)
    state = variables["placed"]("state", start[0], variables["make_mesh"]())
    made = variables["sharded"](step, *start)(state, start[1])
    assert made["moment"].sharding.memory_kind == "pinned_host"
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), made, step(*start))


@pytest.mark.parametrize("options", [{"memory": "1.3MiB", "microbatches": 1}, {"microbatches": 4}])
def test_recomputation_and_microbatches_are_written_out(options):
    def step(w, x):
        def loss(w):
            out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
            return jnp.mean(out**2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    args = jax.ShapeDtypeStruct((4, 64, 64), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
    asked = {"cluster": "8xCPU", "mesh": (8,), "offload": "never", "verify": "never", **options}
    plan = autoshard.search(step, *args, **asked)
    assert plan.retention or plan.microbatches == 4
    variables = {}
    exec(autoshard.eject(step, *args, plan=plan, form="written").text, variables)
    rng = np.random.default_rng(0)
    start = jax.tree.map(lambda x: rng.standard_normal(x.shape, "float32") / 8, args)
    made = variables["sharded"](step, *start)(*start)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), made, jax.jit(step)(*start)
    )


def test_long_constants_are_said_by_their_rule_or_lie_beside_the_file(tmp_path):
    mask = np.tri(32, dtype=np.float32)
    table = np.sin(np.arange(32 * 16, dtype=np.float32)).reshape(32, 16)

    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean((mask @ jnp.tanh((x + table) @ w)) ** 2))(w)
        return w - grad, value

    args = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((64, 32, 16), "float32")
    plan = autoshard.search(step, *args, cluster="8xCPU", mesh=(8,), pin={"x": jax.P("data")}, verify="never")
    made = autoshard.eject(step, *args, plan=plan, form="written")
    assert (len(made.constants), made.differences) == (1, ())
    assert "jnp.where(jnp.tri(32, 32, 0, dtype=bool)" in made.text
    made.save(tmp_path / "step.py")
    rng = np.random.default_rng(0)
    start = jax.tree.map(lambda x: rng.standard_normal(x.shape, "float32"), args)
    found = runpy.run_path(tmp_path / "step.py")["sharded"](step, *start)(*start)
    wanted = jax.jit(step)(*start)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, wanted)


def test_the_command_line_writes_the_file_and_says_its_form(folder, capsys):
    with jax.enable_x64(True):
        out = folder / "by_command.py"
        argv = ["eject", f"{folder}/train.py:target", f"{folder}/plan.json"]
        assert cli.main([*argv, "-o", str(out), "--verify", "never"]) == 0
        assert f"saved {out}: the written form, not compiled" in capsys.readouterr().out
        assert cli.main([*argv, "--only", "shardings"]) == 0
    compile(out.read_text(), str(out), "exec")
    assert '"params/up": P("data", "model"),' in capsys.readouterr().out


def test_a_step_that_cannot_be_printed_is_wrapped_and_says_so():
    def step(w, x):
        return w + jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()

    args = jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((16, 8), "float32")
    with pytest.warns(autoshard.AutoshardWarning, match="has no factor rule"):
        plan = autoshard.search(step, *args, cluster="8xCPU", verify="never")
    with pytest.warns(autoshard.AutoshardWarning, match="has no factor rule"):
        made = autoshard.eject(step, *args, plan=plan)
    assert (made.form, made.exit_status) == ("wrapper", 1)
    (difference,) = made.differences
    assert "pure_callback" in difference
    assert "test_eject.py" in difference
    assert difference[:40] in made.text


def test_a_wrapper_says_the_decisions_that_it_has_no_place_for(folder, capsys):
    step, args = definitions()
    with jax.enable_x64(True):
        plan = autoshard.search(step, *args, cluster="8xCPU", mesh=(8,), microbatches=2, verify="never")
        made = autoshard.eject(step, *args, plan=plan, form="wrapper")
    assert made.differences == ("the plan goes through the batch in 2 microbatches",)
    assert (made.exit_status, made.verdict) == (1, "the wrapper form, which differs from the plan's program")
    assert "  * the plan goes through the batch in 2 microbatches" in made.text
    assert ":8: dot_general float64[12, 64] is P(" in made.text  # a line to constrain by hand
    plan.save(folder / "parts.json")
    with jax.enable_x64(True):
        argv = ["eject", f"{folder}/train.py:target", f"{folder}/parts.json", "--form", "wrapper"]
        assert cli.main([*argv, "--out", f"{folder}/parts.py"]) == made.exit_status
    assert "differs: the plan goes through the batch in 2 microbatches\n" in capsys.readouterr().err
    assert "the plan goes through the batch in 2 microbatches" in (folder / "parts.py").read_text()


def test_a_partly_donated_argument_is_not_donated_and_said():
    def step(state, x):
        return {"w": state["w"] - x.mean() * state["table"]}

    w = jax.ShapeDtypeStruct((16, 8), "float32")
    args = {"w": w, "table": w}, jax.ShapeDtypeStruct((16, 8), "float32")
    plan = autoshard.search(step, *args, cluster="8xCPU", state="state['w']", verify="never")
    made = autoshard.eject(step, *args, plan=plan, state="state['w']", form="written")
    assert "donate_argnums=()," in made.text
    assert made.differences[0].startswith("the plan's program donates some arrays of state, and `jax.jit`")


def test_a_program_per_stage_is_refused_with_a_remedy():
    args = jax.ShapeDtypeStruct((2, 16, 16), "float32"), jax.ShapeDtypeStruct((16, 16), "float32")

    def step(w, x):
        def loss(w):
            return jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2)

        return w - jax.grad(loss)(w)

    stages = {"stages": 2, "microbatches": 2, "executor": "mpmd", "verify": "never"}
    plan = autoshard.search(step, *args, cluster="8xCPU", **stages)
    with pytest.raises(autoshard.InputError, match=r'only="shardings"\. Or search with executor="spmd"'):
        autoshard.eject(step, *args, plan=plan)


def test_the_shardings_of_a_pipeline_are_those_in_which_its_arguments_rest():
    def step(state, x):
        def loss(w):
            h = x
            for layer in w:
                h = jnp.tanh(h @ layer)
            return jnp.mean(h**2)

        return {"w": jax.tree.map(lambda w, g: w - g, state["w"], jax.grad(loss)(state["w"]))}

    w = [jax.ShapeDtypeStruct((16, 16), "float32")] * 4
    args = {"w": w}, jax.ShapeDtypeStruct((16, 16), "float32")
    stages = {
        "stages": 4,
        "schedule": "interleaved-1f1b",
        "microbatches": 2,
        "executor": "mpmd",
        "verify": "never",
    }
    plan = autoshard.search(step, *args, cluster="8xCPU", **stages)
    variables = {}
    exec(autoshard.eject(step, *args, plan=plan, only="shardings").text, variables)
    (state, _), devices = autoshard.parallelize(step, plan=plan).in_shardings(*args), jax.devices()
    for n, wanted in enumerate(state["w"]):
        stage, spec = variables["STAGE"]["state"][f"w/{n}"], variables["SPECS"]["state"][f"w/{n}"]
        there = np.array([devices[i] for i in variables["DEVICES"][stage]])
        mesh = jax.sharding.Mesh(
            there.reshape(*variables["STAGES"][stage].values()), (*variables["STAGES"][stage],)
        )
        assert NamedSharding(mesh, spec).is_equivalent_to(wanted, 2)
        assert wanted.device_set == {*there.flat}
    assert len({*variables["STAGE"]["state"].values()}) == 4
    assert variables["STAGE"]["x"] == {"": 0}


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.up, self.norm = nnx.Linear(16, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.drop, self.down = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jax.nn.relu(self.norm(self.up(x)))))


def with_optimizer():
    model = Model()
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def train_objects(model, x, optimizer):
    value, grads = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
    optimizer.update(model, grads)
    return {"loss": value}


@functools.cache
def plan_of_objects():
    model, optimizer = nnx.eval_shape(with_optimizer)
    args = model, jax.ShapeDtypeStruct((64, 16), jnp.float32), optimizer
    asked = {"cluster": "8xCPU", "mesh": (8,), "pin": {"x": jax.P("data")}, "verify": "never"}
    return args, autoshard.search(train_objects, *args, **asked)


@pytest.mark.parametrize("form", ["wrapper", "written"])
def test_objects_are_changed_in_place_as_on_one_device(form):
    """Parameters, moments, running statistics and dropout's count."""
    args, plan = plan_of_objects()
    made = autoshard.eject(train_objects, *args, plan=plan, form=form)
    assert made.differences == ()
    variables = {}
    exec(made.text, variables)
    mesh, many, one = variables["make_mesh"](), with_optimizer(), with_optimizer()
    for name, own in zip(("model", "optimizer"), many, strict=True):
        nnx.update(own, variables["placed"](name, nnx.state(own), mesh))
    run = variables["sharded"](train_objects, many[0], args[1], many[1], mesh=mesh)
    for seed in range(2):
        batch = np.random.default_rng(seed).standard_normal((64, 16), "float32")
        found, wanted = run(many[0], batch, many[1]), nnx.jit(train_objects)(one[0], batch, one[1])
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)
    for p, q in zip(jax.tree.leaves(nnx.state(many)), jax.tree.leaves(nnx.state(one)), strict=True):
        if not jnp.issubdtype(p.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(p, q, rtol=1e-3, atol=1e-4)
    assert len(many[0].up.kernel.get_value().sharding.device_set) == 8
    assert 'nnx.update(optimizer, placed("optimizer", nnx.state(optimizer), mesh))' in made.text


def static_change(model, x):
    model.calls += 1
    model.kernel.set_value(model.kernel.get_value() * x.mean())


def new_variable(model, x):
    model.last = nnx.Cache(model(x))


@pytest.mark.parametrize(
    ("step", "reason"),
    [(static_change, "changes static attributes"), (new_variable, "gives its objects new variables")],
)
def test_what_an_update_of_objects_does_not_carry_is_refused_with_a_remedy(step, reason):
    def make():
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        model.calls = 0
        return model

    model, x = nnx.eval_shape(make), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    plan = autoshard.search(step, model, x, cluster="8xCPU", verify="never")
    with pytest.raises(autoshard.InputError, match=rf"{reason}.*nnx\.split outside and nnx\.merge inside"):
        autoshard.eject(step, model, x, plan=plan)
    variables = {}
    exec(autoshard.eject(step, model, x, plan=plan, only="shardings").text, variables)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(nnx.state(model))
    ]
    assert sorted(variables["SPECS"]["model"]) == sorted(paths) == ["bias/value", "kernel/value"]


STATS = CompiledStats(10 << 20, 0, 10 << 20, 0, {("all-reduce", ("data",)): (2, 1 << 20)}, {})


def test_equal_statistics_have_no_differences():
    assert Beside(STATS, STATS).differences == ()


def test_other_collectives_and_another_peak_are_said_with_both_sizes():
    moved = {("all-gather", ("model",)): (1, 3 << 20)}
    other = dataclasses.replace(STATS, temporary_bytes=14 << 20, collectives=moved)
    assert Beside(STATS, other).differences == (
        "all-gather over model: 3 MiB a device and step, and the plan's program 0 B",
        "all-reduce over data: 0 B a device and step, and the plan's program 1 MiB",
        "peak memory: 24 MiB a device, 4 MiB more than the plan's program",
    )
