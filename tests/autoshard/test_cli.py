"""The command line: what it prints where, and the exit status of each kind of mistake."""

import json
import os
import pty
import runpy
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import autoshard
from autoshard import cli, commands, listings, terminal
from autoshard.calibrate import calibrate
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.presets import PRESETS
from autoshard.search.plan.plan import Plan
from tests.search.plan.former import FOLDER
from tests.stages import is_stage, without_stages

pytestmark = pytest.mark.devices

ROOT = Path(__file__).parents[2]

TRAIN = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
import autoshard

print("printed on import")
ONES = jnp.ones(3)  # an array, for which JAX starts a platform

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

ARGS = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")

def target():
    print("printed by target")
    return step, ARGS

def partial():
    return functools.partial(step), ARGS

def decorated():
    return autoshard.parallelize(step), ARGS

def branching():
    def step(w, x):
        if x.sum() > 0:
            return w
        return -w
    return step, ARGS

def lookup():
    def step(w, x):
        return {}["nothing"]
    return step, ARGS

def without_rule():
    def step(w, x):
        return w + jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()
    return step, ARGS

def raising():
    raise KeyError("no such model")

def exiting():
    raise SystemExit(1)

def wanting(size, depth=2):
    return step, ARGS

def alone():
    return step

def three():
    return step, ARGS, 1

def stepless():
    return 1, ARGS

def unpacked():
    return step, {"w": ARGS[0]}

number = 3
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture
def run(capsys):
    """Runs one command in this process: (exit status, stdout, stderr without the lines for its stages)."""

    def call(*argv):
        status = cli.main([str(a) for a in argv])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return status, captured.out, without_stages(captured.err)

    return call


def command(*argv, env=None, **options):
    """A process of its own; `env` adds to the environment."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"PYTHONPATH": str(ROOT)}
    environment |= env or {}
    arguments = [sys.executable, "-m", "autoshard", *map(str, argv)]
    return subprocess.Popen(arguments, env=environment, text=True, **options)


# --- what is printed


def test_search_prints_the_summary(run, train):
    status, out, err = run("search", f"{train}:target", "--cluster", "8xH100-80GB")
    assert status == 0
    assert "\nstep      step\n" in out
    assert "\ntraced    fingerprint " in out
    assert "search time" in out
    assert err == "printed on import\nprinted by target\n"


def test_search_saves_what_show_shows(run, train, tmp_path):
    path = tmp_path / "plan.json"
    status, searched, _ = run("search", f"{train}:target", "--cluster", "8xH100-80GB", "--out", path)
    assert status == 0
    status, shown, err = run("show", path)
    assert (status, err) == (0, "")
    of_the_plan = [line for line in searched.splitlines() if not line.startswith("search time: ")]
    assert of_the_plan == shown.splitlines()
    assert shown == f"{Plan.load(path)}\n"


def test_show_against_another_plan_shows_what_differs(run, train, tmp_path):
    paths = [tmp_path / "found.json", tmp_path / "asked.json"]
    run("search", f"{train}:target", "--cluster", "8xH100-80GB", "--out", paths[0])
    run("search", f"{train}:target", "--cluster", "8xH100-80GB", "--mesh", "2x4", "--out", paths[1])
    comparison = Plan.load(paths[0]).compare(Plan.load(paths[1]))
    assert run("show", paths[0], "--against", paths[1]) == (0, f"{comparison}\n", "")
    status, out, _ = run("show", paths[0], "--against", paths[1], "--json")
    assert (status, json.loads(out)) == (0, comparison.to_json())
    status, out, err = run("show", paths[0], "--against", tmp_path / "none.json")
    assert (status, out) == (2, "")
    assert "none.json" in err


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The target's file, and the JSON of a plan for it."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "train.py").write_text(TRAIN)
    step, args = runpy.run_path(str(folder / "train.py"))["target"]()
    return folder / "train.py", autoshard.search(step, *args, cluster="8xCPU", mesh=(8,)).to_json()


def written(path, data, **changes):
    """A plan's file, with changes in its decisions."""
    path.write_text(json.dumps(data | {"shardings": [data["shardings"][0] | changes]}))
    return path


def test_a_plan_of_one_program_is_written_as_a_trace(run, saved, tmp_path):
    _, data = saved
    path, trace = written(tmp_path / "plan.json", data), tmp_path / "trace.json"
    assert run("show", path, "--trace", trace)[0] == 0
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tracks == set(data["estimates"]["profile"]["busy"])
    status, _, err = run("show", path, "--timeline")
    assert (status, "--trace" in err) == (2, True)
    plan, older = autoshard.Plan.from_json(data), tmp_path / "older.json"
    replace(plan, estimates=replace(plan.estimates, profile=None)).save(older)
    status, _, err = run("show", older, "--trace", trace)
    assert status == 2
    assert "train.py:target --trace" in err


def test_show_with_the_step_prices_an_edited_plan_anew(run, saved, tmp_path):
    train, data = saved
    edited = written(tmp_path / "edited.json", data | {"estimates": data["estimates"] | {"step_s": 1e-9}})
    status, out, _ = run("show", edited)
    assert (status, "no estimates" in out, "step time" in out) == (0, True, False)
    status, out, _ = run("show", edited, f"{train}:target", "--json")
    assert status == 0
    assert json.loads(out)["estimates"] == data["estimates"]
    small = written(tmp_path / "small.json", data | {"memory_bytes": 1000})
    assert run("show", small, f"{train}:target")[0] == 3


def test_show_refuses_a_spec_that_cannot_be(run, saved, tmp_path):
    train, data = saved
    args = data["shardings"][0]["arguments"]
    unknown = written(tmp_path / "unknown.json", data, arguments=args | {"w": "P('batch')"})
    status, out, err = run("show", unknown)
    assert (status, out, err.count("\n")) == (4, "", 1)
    assert "unknown.json: w: axis 'batch' is not in the mesh" in err
    deep = written(tmp_path / "deep.json", data, arguments=args | {"w": "P(None, None, 'data')"})
    status, out, err = run("show", deep, f"{train}:target")
    assert (status, out) == (4, "")
    assert "cannot rest as P(None, None, 'data')" in err


def test_show_compares_only_plans_of_one_step_whose_estimates_hold(run, saved, tmp_path):
    train, data = saved
    plan = written(tmp_path / "plan.json", data)
    other_step = written(tmp_path / "other.json", data | {"step": "other", "fingerprint": "0" * 16})
    status, out, err = run("show", plan, "--against", other_step)
    assert (status, out, err.count("\n")) == (4, "", 1)
    assert "only plans of one step are compared" in err
    args = data["shardings"][0]["arguments"]
    edited = written(tmp_path / "edited.json", data, arguments=args | {"x": "P('data')"})
    status, out, err = run("show", plan, "--against", edited)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "edited.json was edited by hand" in err
    status, out, _ = run("show", plan, f"{train}:target", "--against", edited)
    assert status == 0
    assert out.startswith("this plan is ")


def test_show_compares_a_pipeline_with_one_program(run):
    status, out, err = run("show", FOLDER / "mpmd.json", "--against", FOLDER / "jit.json")
    assert (status, err) == (0, "")
    assert "executor  mpmd" in out
    data = json.loads(run("show", FOLDER / "spmd.json", "--against", FOLDER / "mpmd.json", "--json")[1])
    assert data["mesh"] == [{"stage": 2, "replica": 2, "data": 2}] * 2


@pytest.mark.parametrize("command", [["clusters"], ["clusters", "64xH100-80GB"]])
def test_tables_fit_the_terminal(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(*command)
    assert 60 < max(map(len, out.splitlines())) <= 80


def test_show_lists_the_choices_of_a_decision_and_each_can_be(run, train, tmp_path):
    path, name = tmp_path / "plan.json", "forward dot_general"
    run("search", f"{train}:target", "--cluster", "8xCPU", "--mesh", "8", "--out", path)
    status, out, _ = run("show", path, f"{train}:target", "--choices", name)
    choices = out.splitlines()
    assert status == 0
    assert sorted(choices) == sorted(
        [
            "P(), P() -> P()",
            "P('data'), P() -> P('data')",
            "P(None, 'data'), P('data') -> P(unreduced={'data'})",
            "P(), P(None, 'data') -> P(None, 'data')",
        ]
    )
    assert json.loads(path.read_text())["shardings"][0]["ops"][name] in choices
    assert json.loads(run("show", path, f"{train}:target", "--choices", name, "--json")[1]) == choices
    status, _, err = run("show", path, "--choices", name)
    assert (status, err.count("\n")) == (2, 1)
    assert "--choices needs the step" in err
    assert run("show", path, f"{train}:target", "--choices", "nothing")[0] == 4


def test_a_saved_plan_suits_the_step_that_it_was_made_for(run, train, tmp_path):
    path = tmp_path / "plan.json"
    for name in ("target", "partial"):
        run("search", f"{train}:{name}", "--cluster", "8xCPU", "--out", path)
        step, args = runpy.run_path(str(train))[name]()
        program = autoshard.emit(step, *args, plan=Plan.load(path))
        assert program.fn.lower(*program.args)
        assert Plan.load(path).step == getattr(step, "__name__", "partial")


@pytest.mark.parametrize(
    ("said", "asked"),
    [([], None), (["--verify"], "always"), (["--verify", "never"], "never"), (["--verify", "auto"], "auto")],
)
def test_search_hands_on_which_plans_are_compiled(run, train, monkeypatch, said, asked):
    def search(*args, verify, **options):
        raise autoshard.InputError(f"verify is {verify}")

    monkeypatch.setattr("autoshard.api.search", search)
    _, _, err = run("search", f"{train}:target", "--cluster", "8xH100-80GB", *said)
    assert f"verify is {asked} " in err


@pytest.mark.parametrize("status", [0, 1, 3])
def test_verify_ends_with_the_verdicts_status(run, train, tmp_path, monkeypatch, status):
    path = tmp_path / "plan.json"
    run("search", f"{train}:target", "--cluster", "8xH100-80GB", "--out", path)
    verdict = Verdict(status)
    monkeypatch.setattr("autoshard.api.verify", lambda *args, plan, **options: verdict)
    assert run("verify", f"{train}:target", path)[:2] == (status, "the table\n")
    printed = run("verify", f"{train}:target", path, "--json")
    assert (printed[0], json.loads(printed[1])) == (status, {"exit_status": status})


@dataclass(frozen=True)
class Verdict:
    """Stands in for a `Verification`."""

    exit_status: int

    def __str__(self):
        return "the table"

    def to_json(self):
        return {"exit_status": self.exit_status}


def test_json_is_all_of_stdout(run, train, tmp_path):
    path = tmp_path / "plan.json"
    _, out, _ = run("search", f"{train}:target", "--cluster", "8xH100-80GB", "--json", "--out", path)
    printed = json.loads(out)
    assert set(printed.pop("search_s")) >= {"graph", "solve"}
    assert printed == json.loads(path.read_text())
    assert Plan.from_json(printed) == Plan.load(path)
    assert run("show", path, "--json") == (0, path.read_text(), "")


def test_options_reach_the_search(run, train):
    options = ["--cluster", "8xCPU", "--mesh", "2,4", "--pin", "w=P(None, 'model')", "--memory", "1GiB"]
    status, out, _ = run("search", f"{train}:target", *options, "--time-limit", "5", "--json")
    plan = json.loads(out)
    assert status == 0
    assert plan["shardings"][0]["mesh"] == {"data": 2, "model": 4}
    assert plan["shardings"][0]["arguments"]["w"] == "P(None, 'model')"
    assert plan["memory_bytes"] == 1 << 30


@pytest.mark.parametrize(
    ("said", "options"),
    [("never", "never"), ("residuals", ["residuals"]), ("optimizer_state,residuals", None)],
)
def test_what_is_on_the_host_reaches_the_search(run, train, said, options):
    status, out, err = run("search", f"{train}:target", "--cluster", "8xCPU", "--offload", said, "--json")
    if options is None:
        assert status == 2
        assert "has no optimizer_state that can rest on the host" in err
    else:
        assert json.loads(out)["options"]["offload"] == options


def test_microbatches_reach_the_search(run, train):
    _, out, _ = run("search", f"{train}:target", "--cluster", "8xCPU", "--microbatches", "4", "--json")
    plan = json.loads(out)
    assert plan["microbatches"] == plan["options"]["microbatches"] == 4


def test_a_parallelized_step_is_a_step(run, train):
    _, plain, _ = run("search", f"{train}:target", "--cluster", "8xCPU", "--json")
    status, decorated, _ = run("search", f"{train}:decorated", "--cluster", "8xCPU", "--json")
    assert status == 0
    assert json.loads(decorated)["shardings"] == json.loads(plain)["shardings"]


def test_a_module_of_a_package(run, train, monkeypatch):
    package = train.parent / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    train.rename(package / "checkout.py")
    monkeypatch.chdir(train.parent)
    path = list(sys.path)
    assert run("search", "shop.checkout:target", "--cluster", "8xCPU")[0] == 0
    assert sys.path == path


def test_a_warning_is_one_line(run, train):
    status, _, err = run("search", f"{train}:without_rule", "--cluster", "8xCPU")
    assert status == 0
    (line,) = [line for line in err.splitlines() if "no factor rule" in line]
    assert line.startswith("autoshard: warning: pure_callback has no factor rule")


def test_a_pipe_gets_a_line_for_each_stage(train, capsys):
    assert cli.main(["search", f"{train}:target", "--cluster", "8xH100-80GB"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    said = err.splitlines()
    stages = [line.removeprefix("autoshard: ") for line in said if is_stage(line)]
    assert without_stages(err) == "printed on import\nprinted by target\n"
    assert stages[:2] == [f"loading {train}:target", "tracing"]
    assert stages[2] in ("mesh 8 (1 of 2)", "mesh 2x4 (1 of 2)")
    assert len(set(stages)) == len(stages)


def read_all(descriptor):
    chunks = []
    while True:
        try:
            chunks.append(os.read(descriptor, 4096))
        except OSError:  # Linux's way to say that the other end has been closed
            break
        if not chunks[-1]:
            break
    return b"".join(chunks).decode()


def test_a_terminal_gets_progress(train):
    ours, theirs = pty.openpty()
    process = command(
        "search", f"{train}:target", "--cluster", "8xH100-80GB", stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    shown = read_all(ours)
    os.close(ours)
    assert process.wait(timeout=120) == 0
    assert "loading" in shown
    assert "\x1b" in shown


@pytest.fixture
def interruptible():
    """Ctrl-C reaches the programs started here, even where the tests run in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_for(line, process):
    """Reads what a program says until it says this."""
    assert process.stderr is not None
    assert any(line in said for said in process.stderr), "it ended before"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_jax_loads(tmp_path):
    (tmp_path / "jax.py").write_text(
        "import sys, time\nprint('now', file=sys.stderr, flush=True)\ntime.sleep(60)\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    process = command("show", "plan.json", env={"PYTHONPATH": path}, stderr=subprocess.PIPE)
    wait_for("now", process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "autoshard: interrupted\n")


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(TRAIN + "\n\ndef slow():\n    import time\n    print('now')\n    time.sleep(60)\n")
    process = command(
        "search", f"{path}:slow", "--cluster", "8xCPU", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for("now", process)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "autoshard: interrupted\n")


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_the_solver_runs(tmp_path):
    path = tmp_path / "slow.py"
    wait = "\n\ndef search(*args, **kwargs):\n    print('now', file=sys.__stderr__, flush=True)\n    time.sleep(60)\n"
    path.write_text(
        TRAIN + "\nimport sys, time\nfrom autoshard import api" + wait + "\napi.search = search\n"
    )
    process = command(
        "search", f"{path}:target", "--cluster", "8xCPU", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for("now", process)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "autoshard: interrupted\n")


def test_a_reader_that_goes_away(saved, tmp_path):
    path = written(tmp_path / "plan.json", saved[1])
    with command("show", path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 0


# --- mistakes


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py:target", r"there is no file nowhere.py"),
        ("nowhere.nothing:target", "there is no module 'nowhere.nothing' to import"),
        ("train.py", "wanted TARGET as file.py:function or package.module:function, got 'train.py'"),
        ("train.py:", "wanted TARGET as file.py:function"),
        ("{train}:missing", "there is no 'missing'; functions there: step, target, partial, "),
        ("{train}:number", "number is no function but int"),
        (
            "{train}:wanting",
            "wanting must take no arguments and return (train_step, args), but it takes size",
        ),
        ("{train}:raising", "raised KeyError: 'no such model' ({train}:"),
        ("{train}:exiting", "raised SystemExit: 1 ({train}:"),
        ("{train}:alone", "must return (train_step, args); it returned function"),
        ("{train}:three", "must return (train_step, args); it returned tuple of 3"),
        ("{train}:stepless", "must return (train_step, args); its train_step is int, not a function"),
        ("{train}:unpacked", "must return (train_step, args); its args are dict, not a tuple"),
        ("{train}:branching", "Attempted boolean conversion of traced array with shape bool[]. ({train}:"),
        ("{train}:lookup", "it raised KeyError: 'nothing' ({train}:"),
    ],
)
def test_target_mistakes(run, train, target, message):
    status, out, err = run("search", target.format(train=train), "--cluster", "8xCPU")
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("autoshard: error: ")
    assert message.format(train=train) in last


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nonexistent_package", "raised ModuleNotFoundError: No module named 'nonexistent_package'"),
        ("def target(:", "raised SyntaxError: "),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported(run, tmp_path, source, message):
    path = tmp_path / "broken.py"
    path.write_text(f"\n{source}\n")
    status, _, err = run("search", f"{path}:target", "--cluster", "8xCPU")
    assert status == 2
    assert message in err
    assert f"({path}:2) (see docs/" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", "8xH1000"], "error: unknown preset 'H1000' in '8xH1000' (did you mean 'H100-80GB'?)"),
        (["--cluster", "mine.json"], "mine.json"),
        (
            ["--cluster", "8xCPU", "--memory", "70 gigs"],
            "error: wanted a size such as '70GiB', got the unit 'gigs'",
        ),
        (
            ["--cluster", "8xCPU", "--mesh", "3x2"],
            "error: the mesh (3, 2) has 6 devices, the cluster 8xCPU has 8",
        ),
        (["--cluster", "8xCPU", "--mesh", "wide"], "argument --mesh: wanted sizes such as 2x4, got 'wide'"),
        (["--cluster", "8xCPU", "--time-limit", "nan"], "wanted a positive number of seconds, got 'nan'"),
        (["--cluster", "8xCPU", "--pin", "w"], "wanted PATH=SPEC such as"),
        (["--cluster", "8xCPU", "--pin", "w=exit(1)"], "wanted PATH=SPEC such as"),
        (["--cluster", "8xCPU", "--pin", "v=P('data')"], "pin 'v' matches no argument"),
        (
            ["--cluster", "8xCPU", "--pin", "w=P('data')", "--pin", "w=P()"],
            "--pin w is given twice: as P('data',) and as P()",
        ),
        (["--cluster", "8xCPU", "--pin", "w=P(None, None, 'data')"], "w of shape (256, 256) cannot rest as"),
        (["--cluster", "8xCPU", "--out", "/nowhere/plan.json"], "there is no folder /nowhere"),
        (
            ["--cluster", "8xCPU", "--out", "/dev/null"],
            "--out cannot be written to /dev/null: it is no regular file",
        ),
        (["--cluster", "8xCPU", "--microbatches", "0"], "wanted a whole number, at least 1, got '0'"),
        (["--cluster", "8xCPU", "--microbatches", "3"], "x has 64 examples, which is not a multiple of 3"),
        (
            ["--cluster", "8xCPU", "--out", "/"],
            "--out cannot be written to /: it is a folder; name a file in it",
        ),
        (["--cluster", "-8xH100"], "wanted a cluster as '<count>x<GPU>' or a JSON file, got '-8xH100'"),
        (["--cluster", "8xCPU", "--memory", "-1GiB"], "must be finite and not negative, got '-1GiB'"),
        (
            ["--cluster", "8xCPU", "--memory", "-5%"],
            "wanted a share of a device's memory such as '90%', got '-5%'",
        ),
        (["--cluster", "8xCPU", "--memory", "101%"], "memory='101%' is more than the"),
        (["--cluster", "8xCPU", "--time-limit", "-.5"], "wanted a positive number of seconds, got '-.5'"),
        (
            ["--cluster", "8xCPU", "--cluster", "4xCPU"],
            "argument --cluster: it is given twice, the second time as 4xCPU. Keep one of them",
        ),
        (["--cluster", "8xCPU", "--mesh", "2,4", "--mesh", "8"], "argument --mesh: it is given twice"),
        (["--cluster", "8xCPU", "--mesh", "2,4,"], "argument --mesh: wanted sizes such as 2x4, got '2,4,'"),
        ([], "the following arguments are required: --cluster"),
    ],
)
def test_option_mistakes(run, train, options, message):
    status, out, err = run("search", f"{train}:target", *options)
    assert (status, out) == (2, "")
    assert message in err
    assert "usage:" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster", ""], "wanted a cluster as '<count>x<GPU>' or a JSON file, got ''"),
        (["--cluster", "-h100"], "got '-h100'"),
        (["--cluster", "8xCPU", "--memory", "lots"], "wanted a size such as '70GiB', got 'lots'"),
        (["--cluster", "8xCPU", "--mem", "-1GiB"], "got '-1GiB'"),
        (["--cluster", "8xCPU", "--memory", "900TiB"], "memory='900TiB' is more than the"),
        (["--cluster", "8xCPU", "--mesh", "0x8"], "wanted sizes such as 2x4, got '0x8'"),
        (["--cluster", "8xCPU", "--mesh", "2", "4"], "unexpected argument: 4 (see autoshard search --help)"),
        (["--cluster", "8xCPU", "--pin", "=P()"], "wanted PATH=SPEC such as"),
        (["--cluster", "8xCPU", "--pin", "w='data'"], "wanted PATH=SPEC such as"),
        (["--cluster", "8xCPU", "--stages", "1.5"], "wanted a number of stages, or auto, got '1.5'"),
        (["--cluster", "8xCPU", "--schedule", "1f1b"], "schedule='1f1b' is of a pipeline"),
        (["--cluster", "8xCPU", "--microbatches", "2.0"], "wanted a whole number, at least 1, got '2.0'"),
        (
            ["--cluster", "8xCPU", "--offload", "never,residuals"],
            "wanted never, or names separated by commas",
        ),
        (["--cluster", "8xCPU", "--offload", ""], "wanted never, or names separated by commas"),
        (["--cluster", "8xCPU", "--target-config", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--cluster", "8xCPU", "--json=yes"], "--json takes no value, got 'yes'"),
        (["--gpus", "8"], "there is no option --gpus (see autoshard search --help)"),
        (["-c", "8xCPU"], "there is no option -c"),
        (["--clusters", "8xCPU"], "there is no option --clusters (did you mean '--cluster'?)"),
    ],
)
def test_a_wrong_option_is_refused_before_the_step_is_loaded(run, options, message):
    status, out, err = run("search", "nowhere.py:target", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_an_option_before_the_command_is_said_to_stand_behind_it(run):
    status, _, err = run("--json", "show", "plan.json")
    assert status == 2
    assert "there is no option --json. Options of a command stand behind it" in err


def test_a_value_may_start_with_a_hyphen(run, train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (
        run("search", f"{train}:target", "--cluster", "8xCPU", "--mesh", "8", "--out", "-plan.json")[0] == 0
    )
    assert Plan.load("-plan.json").step == "step"


def test_no_command(run):
    assert run()[0] == 2
    assert run("guess")[0] == 2
    assert run("--help")[0] == 0


COMMAND_LINES = (
    ("--version", 0),
    ("--help", 0),
    ("search --help", 0),
    ("search train.py:target --no-such-flag", 2),
    ("search train.py:target --cluster 8xCPU --mesh two", 2),
    ("show", 2),
    ("clusters 64xH100-80GB", 0),
    ("schema plan", 0),
)


def test_a_command_line_is_parsed_before_jax_loads():
    """JAX takes seconds to import; whoever mistypes an option or asks for help waits for none of it."""
    source = (
        "import sys; from autoshard import cli; "
        f"ended = [cli.main(line.split()) for line, _ in {COMMAND_LINES}]; "
        "print(ended, sorted({'jax', 'jaxlib', 'ortools', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stderr.splitlines()[-1] == f"{[status for _, status in COMMAND_LINES]} []"


def test_version(run):
    assert run("--version") == (0, f"autoshard {autoshard.__version__}\n", "")


@pytest.mark.parametrize(
    "verb",
    ["search", "verify", "show", "report", "trace-compare", "what-if", "clusters", "schema", "calibrate"],
)
def test_help_ends_with_an_example_that_parses_and_the_exit_statuses(run, verb, monkeypatch):
    status, out, _ = run(verb, "--help")
    assert status == 0
    ending = out[out.index("example:") :].splitlines()
    assert {line.split()[0] for line in ending[4:]} >= {"0", "2", "130"}
    where = listings if verb in ("report", "clusters", "schema") else commands
    monkeypatch.setattr(where, verb.replace("-", "_"), lambda options: 17)
    assert run(*shlex.split(ending[1].partition(">")[0])[1:])[0] == 17


def test_a_nan_in_a_cluster_file(run, train, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"name": "mine", "num_devices": NaN}')
    status, _, err = run("search", f"{train}:target", "--cluster", path)
    assert status == 2
    assert "mine.json" in err


def test_a_cap_too_small(run, train, tmp_path):
    path = tmp_path / "plan.json"
    status, out, err = run(
        "search", f"{train}:target", "--cluster", "8xCPU", "--memory", "1KiB", "--out", path
    )
    assert (status, out) == (3, "")
    assert "autoshard: error: " in err
    assert not path.exists()


def test_damaged_plans(run, train, tmp_path):
    path = tmp_path / "plan.json"
    run("search", f"{train}:target", "--cluster", "8xCPU", "--out", path)
    text = path.read_text()
    for damaged, message in [
        (text[:500], "is not whole JSON"),
        (text.replace("autoshard.plan/2", "autoshard.plan/9"), "has schema 'autoshard.plan/9'"),
        (text.replace('"num_devices": 8', '"num_devices": NaN'), "num_devices"),
        (text.replace('"mesh"', '"mash"'), "shardings[0].mesh is missing"),
    ]:
        path.write_text(damaged)
        status, out, err = run("show", path)
        assert (status, out) == (4, "")
        assert err.startswith("autoshard: error: ")
        assert message in err


def test_a_plan_that_is_not_there(run, tmp_path):
    status, _, err = run("show", tmp_path / "none.json")
    assert status == 2
    message = f"the plan {tmp_path}/none.json cannot be read: No such file or directory"
    link = "docs/when-it-says-no.md#an-argument-that-cannot-be-used"
    assert err == f"autoshard: error: {message} (see {link})\n"


# --- clusters and calibrate


def test_clusters_lists_the_presets(run):
    status, out, err = run("clusters")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["preset", "memory", "bandwidth"]
    (h100,) = [line for line in lines if line.startswith("H100-80GB")]
    for number in (
        "79.1 GiB",
        "3.35 TB/s",
        "989 TFLOP/s",
        "450 GB/s",
        "InfiniBand 50 GB/s",
        "Ethernet 1.56 GB/s",
    ):
        assert number in h100


@pytest.mark.parametrize("name", ["h100-80gb", "64xH100-80GB"])
def test_clusters_shows_each_number_with_its_source(run, name):
    status, out, _ = run("clusters", name)
    assert status == 0
    assert out.startswith(
        "8xH100-80GB: 1 node of 8" if name.islower() else "64xH100-80GB: 8 nodes of 8 H100-80GB"
    )
    (line,) = [line for line in out.splitlines() if "device.flops.bfloat16" in line]
    assert line.split()[1] == "989TFLOP/s"
    assert "NVIDIA H100 and H200 datasheets" in line
    assert not [line for line in out.splitlines() if line.endswith("default")]


def test_clusters_writes_a_file_to_start_from(run, tmp_path):
    status, out, _ = run("clusters", "16xA100-80GB-Ethernet", "--json")
    assert status == 0
    path = tmp_path / "mine.json"
    path.write_text(out)
    assert parse_cluster(path) == parse_cluster("16xA100-80GB-Ethernet")
    status, shown, _ = run("clusters", path)
    assert status == 0
    assert shown.startswith("16xA100-80GB-Ethernet: 2 nodes of 8")
    status, out, _ = run("clusters", "--json")
    assert set(json.loads(out)) == set(PRESETS)


def test_schema_prints_one_that_editors_read(run):
    status, out, err = run("schema", "plan")
    assert (status, err) == (0, "")
    plan = json.loads(out)
    assert plan["properties"]["shardings"]["items"] == {"$ref": "#/$defs/Sharding"}
    status, out, err = run("schema", "cluster")
    assert (status, err) == (0, "")
    device = json.loads(out)["$defs"]["Device"]
    assert device["required"] == ["name", "memory", "memory_bandwidth", "flops"]
    assert device["properties"]["memory"] == {
        "type": "string",
        "examples": ["80GiB"],
        "title": "Memory",
        "description": "What the runtime sees as device memory.",
    }


def test_clusters_knows_no_other_names(run):
    status, out, err = run("clusters", "H100-80G")
    assert (status, out) == (2, "")
    assert "did you mean '8xH100-80GB'" in err


def test_calibrate_measures_and_search_takes_the_file(run, train, tmp_path):
    path = tmp_path / "node.json"
    process = command(
        *("calibrate", "--quick", "--devices", 2, "--out", path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"JAX_PLATFORMS": "cpu"},
    )
    out, err = process.communicate(timeout=300)
    assert (process.returncode, without_stages(err)) == (0, "")
    assert out.startswith("node: 2 x CPU, in ")
    assert f"saved {path}" in out
    cluster = parse_cluster(path)
    assert (cluster.num_devices, cluster.num_nodes, cluster.device.matmul_efficiency) == (2, 1, 1.0)
    sources = dict(cluster.sources)
    for key in ("device.launch", "device.flops.bfloat16", "intra.latency", "host_link.bandwidth"):
        assert sources[key].startswith("measured on 2 x cpu, 20"), key
        assert key in out
    assert sources["inter.bandwidth"].startswith("not measured: preset CPU")
    status, out, _ = run("search", f"{train}:target", "--cluster", path)
    assert status == 0
    assert "node: 1 node of 2 CPU" in out
    assert run("clusters", path)[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "{tmp}/none/node.json"), "there is no folder"),
        (("--out", "{tmp}"), "is a folder; name a file in it"),
        ((), "--out"),
        (("--out", "{tmp}/node.json", "--slow"), "there is no option --slow"),
        (("--out", "{tmp}/node.json", "--devices", "few"), "wanted a whole number, at least 1, got 'few'"),
    ],
)
def test_calibrate_refuses_before_it_measures(run, tmp_path, options, message, monkeypatch):
    monkeypatch.setattr(commands, "measured", None)
    status, out, err = run("calibrate", *(option.format(tmp=tmp_path) for option in options))
    assert (status, out) == (2, "")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_calibrate_has_not_more_devices_than_there_are():
    with pytest.raises(autoshard.InputError, match="wanted between 1 and 8 devices, as JAX sees here, got 9"):
        calibrate("here", num_devices=9)


def test_explain_says_why_a_decision_is_so(run, train, tmp_path):
    path = tmp_path / "plan.json"
    run("search", f"{train}:target", "--cluster", "8xCPU", "--mesh", "8", "--out", path)
    status, out, err = run("explain", f"{train}:target", path, "w")
    plan = Plan.load(path)
    assert status == 0
    assert "printed" in err
    assert out.splitlines()[:2] == ["w", f"  is {plan.decisions.arguments['w']}"]
    data = json.loads(run("explain", f"{train}:target", path, "w", "--json")[1])
    step, args = runpy.run_path(str(train))["target"]()
    assert data == autoshard.explain(step, *args, plan=plan, name="w").to_json()
    status, _, err = run("explain", f"{train}:target", path, "nothing")
    assert status == 4
    assert "names no decision of this step" in err


def test_show_against_tells_by_its_status_if_plans_differ(run):
    one, stages = FOLDER / "jit.json", FOLDER / "mpmd.json"
    assert run("show", one, "--against", one, "--exit-code")[0] == 0
    assert run("show", one, "--against", stages)[0] == 0
    status, out, _ = run("show", one, "--against", stages, "--exit-code", "--markdown")
    assert status == 1
    assert "| - | `stage 0` |" in out
    for options in (["--exit-code"], ["--markdown"], ["--against", stages, "--markdown", "--json"]):
        assert run("show", one, *options)[0] == 2


@pytest.mark.parametrize(
    ("is_terminal", "no_color", "is_coloured"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_signs_are_coloured_on_a_terminal_only(monkeypatch, is_terminal, no_color, is_coloured):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    text = "mesh\n+ a  1\n     2\nops\n  b"
    coloured = "mesh\n\x1b[32m+ a  1\x1b[0m\n\x1b[32m     2\x1b[0m\nops\n  b"
    assert terminal.with_signs_coloured(text) == (coloured if is_coloured else text)
