"""`verify` from the command line to the compiler and back. What peaks should be is not judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import cli
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.plan.plan import Plan
from tests.stages import without_stages

TRAIN = """
import jax
import jax.numpy as jnp

ARGS = jax.ShapeDtypeStruct((1024, 1024), "float32"), jax.ShapeDtypeStruct((64, 1024), "float32")

def target():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return step, ARGS

def refused():
    def step(w, x):
        return w + jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct(w.shape, w.dtype))(w)
    return step, ARGS

def talking():
    def step(w, x):
        jax.debug.print("{}", x.sum())
        return w * 2
    return step, ARGS

def of_arrays():
    step, _ = target()
    return step, tuple(jnp.zeros(a.shape, a.dtype) for a in ARGS)

def in_place():
    import optax
    from flax import nnx

    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))

    def create():
        model = nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    return step, (*nnx.eval_shape(create), ARGS[1])
"""


@pytest.fixture
def run(tmp_path, capfd):
    """Plans one of the targets and verifies the plan: (exit status, stdout, stderr)."""
    train, plan = tmp_path / "train.py", tmp_path / "plan.json"
    train.write_text(TRAIN)

    def call(name, *options, cluster="8xH100-80GB"):
        assert cli.main(["search", f"{train}:{name}", "--cluster", cluster, "--out", str(plan)]) == 0
        capfd.readouterr()
        status = cli.main(["verify", f"{train}:{name}", str(plan), *options])
        out, err = capfd.readouterr()
        return status, out, without_stages(err)

    return call


def test_a_plan_is_compiled_and_compared(run, tmp_path):
    status, out, err = run("target", "--json")
    found = json.loads(out)
    assert (status, err) == (found["exit_status"], "")
    assert found["fits"]
    rests = Plan.load(tmp_path / "plan.json").decisions.arguments.values()
    whole_bytes = (4 * 1024 * 1024, 4 * 64 * 1024)
    expected = sum(n // (8 if "data" in spec else 1) for n, spec in zip(whole_bytes, rests, strict=True))
    assert found["compiled"]["residents"]["arguments"] == expected
    assert not [s for s in found["differences"] if " over " in s], "collectives"
    assert set(found["seconds"]) == {"trace", "lower", "compile"}


def test_a_step_that_changes_its_objects_in_place(run, tmp_path):
    status, out, _ = run("in_place", "--json")
    found = json.loads(out)
    assert (status, found["fits"], found["is_extrapolated"]) == (found["exit_status"], True, False)
    rests = Plan.load(tmp_path / "plan.json").decisions.arguments
    sizes = {"model.kernel": 1024 * 1024, "model.bias": 1024, "x": 64 * 1024}
    expected = sum(4 * n // (8 if "data" in rests[name] else 1) for name, n in sizes.items())
    assert found["compiled"]["residents"]["arguments"] == pytest.approx(expected, abs=64)
    assert not [s for s in found["differences"] if " over " in s], "collectives"


SAYS_WHAT_WAS_STARTED = """
import atexit, jax._src.xla_bridge
atexit.register(lambda: print(*jax._src.xla_bridge._backends))
"""

FROM_PYTHON = """
import autoshard, train
step, args = train.target()
print(autoshard.verify(step, *args, plan=autoshard.search(step, *args, cluster="8xH100-80GB")).fits)
"""

FROM_THE_COMMAND_LINE = """
from autoshard.cli import main
plan = ("search", "train.py:of_arrays", "--cluster", "8xH100-80GB", "--out", "plan.json")
for command in (plan, ("show", "plan.json"), ("clusters",), ("verify", "train.py:of_arrays", "plan.json")):
    assert main(command) == 0, command
"""


@pytest.mark.parametrize(
    ("script", "platforms", "started"),
    [
        pytest.param(FROM_PYTHON, {}, [], marks=pytest.mark.slow),
        (FROM_THE_COMMAND_LINE, {"JAX_PLATFORMS": ""}, ["cpu"]),
    ],
    ids=["from Python", "from the command line"],
)
def test_no_device_is_looked_for(tmp_path, script, platforms, started):
    """JAX would start the GPU's platform, or say at length why the plugin cannot."""
    (tmp_path / "train.py").write_text(TRAIN)
    kept = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", SAYS_WHAT_WAS_STARTED + script],
        env=kept | platforms | {"PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, without_stages(done.stderr)) == (0, "")
    assert done.stdout.splitlines()[-1].split() == started


def test_a_program_that_the_compiler_refuses(run):
    status, out, err = run("refused")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1] == (
        "autoshard: error: the compiler refused the program: No FFI handler registered for nowhere on a platform CUDA "
        "(canonical cuda) (see docs/when-it-says-no.md#the-compiler-fails)"
    )


def test_a_program_that_calls_python(run):
    status, _, err = run("talking")
    assert status == 2
    last = err.splitlines()[-1]
    assert last.startswith("autoshard: error: debug_")
    assert "train.py:19) calls Python on the host" in last


def test_too_little_time(run):
    status, _, err = run("target", "--timeout", "0.1")
    assert (status, err) == (
        2,
        "autoshard: error: the compiler was stopped after 0.1 s, the time limit. Give it more time, or a smaller program "
        "(see docs/when-it-says-no.md#the-compiler-fails)\n",
    )


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        ("8xCPU", (), "XLA's GPU compiler cannot be asked about 8xCPU"),
        ("{other}", (), "does not know 'L9000'. Describe it with --target-config FILE"),
        ("8xL4", ("--target-config", "nowhere.txtpb"), "the target config nowhere.txtpb cannot be read"),
        (
            "8xL4",
            ("--target-config", "{train}"),
            "wanted a target config as XLA's GpuTargetConfigProto in text",
        ),
    ],
)
def test_who_cannot_be_asked(run, tmp_path, cluster, options, message):
    given = {"train": tmp_path / "train.py", "other": tmp_path / "other.json"}
    numbers = parse_cluster("8xL4").to_json()
    given["other"].write_text(json.dumps(numbers | {"device": numbers["device"] | {"name": "L9000"}}))
    options = tuple(o.format_map(given) for o in options)
    status, out, err = run("target", *options, cluster=cluster.format_map(given))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_search_near_its_cap_asks_the_compiler_and_returns_what_it_says():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    args = jax.ShapeDtypeStruct((1024, 1024), "float32"), jax.ShapeDtypeStruct((64, 1024), "float32")
    free = autoshard.search(step, *args, cluster="8xH100-80GB")
    assert free.estimates.compiled_peak_bytes is None, "far below the device's memory"
    assert "compiler" not in free.search_s
    cap_bytes = int(1.1 * free.estimates.peak_bytes)
    plan = autoshard.search(step, *args, cluster="8xH100-80GB", memory=cap_bytes)
    proof = autoshard.verify(step, *args, plan=plan)
    assert plan.estimates.compiled_peak_bytes == proof.compiled.peak_bytes <= cap_bytes
    assert plan.search_s["compiler"] > 0
    assert "(compiled) of" in str(plan)


def test_attention_of_cudnn_compiles_as_planned():
    def step(w, x):
        def loss(w):
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, one) for one in (w["q"], w["k"], w["v"]))
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
            return jnp.sum(jnp.einsum("btnh,nhd->btd", attended, w["o"]).astype(jnp.float32) ** 2)

        return jax.tree.map(jnp.subtract, w, jax.grad(loss)(w))

    shapes = {"q": (64, 4, 64), "k": (64, 2, 64), "v": (64, 2, 64), "o": (4, 64, 64)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
    plan = autoshard.search(step, w, x, cluster="2xH100-80GB")
    assert autoshard.verify(step, w, x, plan=plan).exit_status == 0
