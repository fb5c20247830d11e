"""The user's guide: its snippets run as they stand, in their order, in one folder."""

import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import autoshard
from autoshard import cli

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide.md"

SECTIONS = (
    "A step",
    "Flax NNX",
    "Flax Linen",
    "Evaluation",
    "Checkpoints",
    "Reading and editing a plan",
    "Pipelines",
    "Several nodes",
    "When it says no",
)

LAUNCHED = """
import functools, sys, jax
jax.distributed.initialize = functools.partial(jax.distributed.initialize, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
"""
"""What a launcher would say, in the place of which there is none."""


@dataclass(frozen=True)
class Snippet:
    language: str
    note: str
    text: str


def snippets() -> list[Snippet]:
    found = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [Snippet(*parts) for parts in found]


def test_each_matter_has_its_section():
    assert tuple(re.findall(r"^## (.*)$", GUIDE.read_text(), re.MULTILINE)) == SECTIONS
    assert "(docs/guide.md)" in (ROOT / "README.md").read_text()


@pytest.mark.filterwarnings("ignore::autoshard.AutoshardWarning")
def test_all_snippets_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    variables = {"__name__": "guide"}
    for snippet in snippets():
        if snippet.language == "console":
            run_commands(snippet.text)
        elif snippet.note == "simulated":
            pass  # before what runs in processes
        elif snippet.note == "processes":
            run_in_processes(snippet.text)
        elif snippet.note.endswith("Error"):
            with pytest.raises(getattr(autoshard, snippet.note)):
                exec(snippet.text, variables)
        else:
            if snippet.note:
                Path(snippet.note).write_text(snippet.text)
            exec(snippet.text, variables)
    capsys.readouterr()


def run_commands(text):
    for line in text.splitlines():
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert (program, cli.main(arguments)) == ("autoshard", 0), line


def run_in_processes(text, count=2):
    """In as many processes, with eight devices in all."""
    address = f"localhost:{free_port()}"
    (simulated,) = (s.text for s in snippets() if s.note == "simulated")
    known = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHED + of_its_own(simulated) + text, address, str(count), str(i)],
            env=os.environ | known,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    said = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, said
    results = [out.splitlines()[-1].split() for out, _ in said]
    assert [(int(i), int(n)) for i, n, _ in results] == [(i, 8) for i in range(count)]
    assert len({loss for _, _, loss in results}) == 1


def of_its_own(text):
    """With a port of its own."""
    return text.replace("9000", str(free_port()))


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
