"""The examples train as README shows; each is run for its first steps."""

import re
import runpy
from pathlib import Path

import pytest

pytestmark = [pytest.mark.devices, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[1] / "examples"


def losses(text: str) -> dict[int, float]:
    """By step, in lines such as `step   25  loss 2.79  14,689 tokens/s`."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+) +loss ([\d.]+)", text, re.M)}


def main(name: str):
    return runpy.run_path(str(EXAMPLES / name))["main"]


def test_readme_shows_what_the_first_example_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main("train_gpt.py")(num_steps=25)
    printed = losses(capsys.readouterr().out)
    shown = losses((EXAMPLES.parent / "README.md").read_text())
    assert printed == pytest.approx({step: shown[step] for step in (1, 25)}, abs=0.03)
    assert (tmp_path / "plan.json").exists()


def test_dlrm_learns(capsys):
    main("dlrm.py")(num_steps=40)
    printed = losses(capsys.readouterr().out)
    assert printed[40] < printed[20] < printed[1]


def test_resnet_goes_on_from_its_checkpoint(tmp_path, capsys):
    """Stopped after half of its steps, it ends with the loss and the accuracy of a run that is not stopped."""
    main("resnet.py")(num_steps=20, folder=tmp_path / "stopped")
    main("resnet.py")(num_steps=40, folder=tmp_path / "stopped")
    stopped = capsys.readouterr().out
    main("resnet.py")(num_steps=40, folder=tmp_path / "whole")
    whole = capsys.readouterr().out
    assert "going on after step 20" in stopped
    last = re.compile(r"^step   40  loss .*", re.M)
    assert last.findall(stopped) == last.findall(whole) != []
