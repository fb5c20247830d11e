"""Sweeps of one small step: rows, reasons, processes, the command line."""

import json

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import cli
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.sweep import command, searches
from autoshard.sweep.cases import cases
from autoshard.sweep.pool import KILLED, at_once
from autoshard.sweep.rows import WhatIf
from autoshard.sweep.searches import OfTarget, in_turn
from autoshard.sweep.what_if import SweepRequest
from tests.autoshard.sweep.test_rows import row

FLOAT = "float32"


def step(w, ids):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(w[ids] ** 2))(w)


SHAPES = (jax.ShapeDtypeStruct((64, 8), FLOAT), jax.ShapeDtypeStruct((16, 4), "int32"))


def what_if(*args, **options):
    options = {"clusters": ["8xL4"], "progress": lambda line: None} | options
    return autoshard.what_if(step, *(args or SHAPES), **options)


TARGET = """
import jax, jax.numpy as jnp

def step(w, ids):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(w[ids] ** 2))(w)

def target():
    print("not a part of the answer")
    return step, (jax.ShapeDtypeStruct((64, 8), "float32"), jax.ShapeDtypeStruct((16, 4), "int32"))

def killed():
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TARGET)
    return path


def test_a_row_is_the_plan_that_a_search_finds():
    (one,) = what_if(prices={"l4": 1.0}, tokens=6400)
    assert one.plan == autoshard.search(step, *SHAPES, cluster="8xL4")
    assert one.steps == 100
    assert one.cost == pytest.approx(one.gpu_hours)
    assert one.is_on_front


def test_a_combination_without_a_plan_is_a_row(monkeypatch):
    def planned(traced, hardware, asked):
        raise InfeasibleError("nothing fits 1.5 GiB a device. Allow more memory", 2 << 30)

    monkeypatch.setattr(searches.api, "planned", planned)
    tight, unequal = what_if(devices=[8, 13])
    assert tight.plan is unequal.plan is None
    assert tight.reason == "nothing fits 1.5 GiB a device; the least that was found needs 2 GiB"
    assert unequal.reason.startswith("13 devices in '13xL4' do not divide into equal nodes")
    assert not tight.is_on_front


def test_the_step_is_traced_once_for_gpus_alike():
    count = []

    def counted(w, ids):
        count.append(1)
        return step(w, ids)

    autoshard.what_if(counted, *SHAPES, clusters=["2xL4", "2xL40S"], progress=lambda line: None)
    assert len(count) == 1


def test_a_step_that_cannot_be_traced_is_an_error():
    with pytest.raises(InputError, match="step"):
        what_if(SHAPES[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1, "tokens": 1}, "wanted steps or tokens, got both"),
        ({"steps": 0}, "wanted steps as a whole number, at least 1, got 0"),
        ({"prices": {"h100": 1}}, "there is a price for 'h100', and GPUs are L4"),
        ({"clusters": ["8xL5"]}, "unknown preset 'L5'"),
    ],
)
def test_mistakes_are_found_before_the_search(options, message):
    with pytest.raises(InputError, match=message):
        what_if(**options)


def test_a_step_that_cannot_be_sent_to_processes():
    with pytest.raises(InputError, match=r"processes= wants a step of a module"):
        autoshard.what_if(lambda w, ids: step(w, ids), *SHAPES, clusters=["8xL4"], processes=2)


@pytest.mark.devices
def test_other_processes_find_the_same(train, capfd):
    source, wanted = OfTarget(f"{train}:target"), cases(["2xL4"], devices=[2, 13])
    apart = dict(at_once(source, wanted, None, 1))
    here = dict(in_turn(source, wanted, None))
    assert {n: (a.plan, a.reason) for n, a in apart.items()} == {
        n: (a.plan, a.reason) for n, a in here.items()
    }
    assert "not a part" not in capfd.readouterr().out.replace("not a part of the answer\n" * 1, "", 1)


@pytest.mark.devices
@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_row(train):
    ((_, answer),) = at_once(OfTarget(f"{train}:killed"), cases(["8xL4"]), None, 2)
    assert answer.reason == KILLED


def test_warnings_of_processes_are_said_once(monkeypatch):
    answers = [(n, searches.Answer(reason="no", warned=("twice",))) for n in range(2)]
    monkeypatch.setattr("autoshard.sweep.pool.at_once", lambda *args: iter(answers))
    sweep = SweepRequest(cases(["8xL4", "16xL4"]))
    with pytest.warns(autoshard.AutoshardWarning, match="twice") as said:
        rows = dict(sweep.rows(OfTarget("train.py:target"), 2, lambda line: None))
    assert len(said) == 1
    assert [one.reason for one in rows.values()] == ["no", "no"]


# --- the command line


@pytest.fixture
def run(monkeypatch, capsys):
    """A command whose rows are found at once, in the given order; None stands for Ctrl-C."""

    def called(*arguments, rows=None):
        def found(self, source, processes, progress):
            assert processes > 0
            called.sweeps.append(self)
            for number, one in enumerate(rows or [row(0.9)]):
                if one is None:
                    raise KeyboardInterrupt
                yield number, one

        monkeypatch.setattr(command.SweepRequest, "rows", found)
        status = cli.main(["what-if", "train.py:target", "--clusters", "16xH100-80GB,8xL4", *arguments])
        return status, *capsys.readouterr()

    called.sweeps = []
    return called


def test_the_command_prints_a_table(run):
    status, out, _ = run()
    assert status == 0
    assert out.splitlines()[0] == "GPU hours of 1000 steps; * no other is as fast and as cheap"


def test_the_command_has_the_options_of_the_function(run):
    options = (
        "--memory",
        "10GiB,12GiB",
        "--devices",
        "8,16",
        "--price",
        "h100=2.5",
        "--tokens",
        "7",
        "--time-limit",
        "3",
    )
    assert run(*options)[0] == 0
    (sweep,) = run.sweeps
    assert sweep == SweepRequest(
        cases(["16xH100-80GB", "8xL4"], ["10GiB", "12GiB"], [8, 16]), None, 7, {"h100": 2.5}, time_limit_s=3.0
    )


def test_the_command_prints_json_and_writes_a_plot(run, tmp_path):
    status, out, _ = run("--json", "--html", str(tmp_path / "plot.html"))
    assert status == 0
    assert [one["cluster"] for one in json.loads(out)] == ["16xH100-80GB"]
    assert "<svg" in (tmp_path / "plot.html").read_text()


def test_after_ctrl_c_the_rows_so_far_are_printed(run):
    status, out, err = run(rows=(row(0.9), None, row(1.8)))
    assert status == 130
    assert len(out.splitlines()) == 3
    assert "interrupted: 1 of 2 rows were found" in err


def test_the_exit_status_says_if_nothing_fits(run):
    misfit = WhatIf(cluster="8xL4", memory_bytes=1, plan=None, reason="no")
    assert run(rows=(misfit,))[0] == 3
    assert run(rows=(misfit, row(1)))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "8,x"], "wanted a whole number, at least 1, got 'x'"),
        (["--price", "h100"], "wanted KIND=PRICE such as h100=2.5, got 'h100'"),
        (["--price", "h100=1", "--price", "h100=2"], "--price h100 is given twice"),
        (["--steps", "1", "--tokens", "2"], "wanted steps or tokens, got both"),
        (["--memory", "24GiB,"], "wanted names separated by commas, got '24GiB,'"),
        (["--html", "/nowhere/plot.html"], "there is no folder /nowhere"),
    ],
)
def test_mistakes_on_the_command_line(run, arguments, message):
    status, _, err = run(*arguments)
    assert status == 2
    assert message in err
