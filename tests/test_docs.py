"""The documentation: its snippets run as they stand, page after page, in one folder, and its links lead somewhere."""

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
DOCS = ROOT / "docs"

PAGES = (
    "get-started",
    "guides/plain-jax",
    "guides/nnx",
    "guides/linen",
    "guides/equinox",
    "guides/data-loading",
    "guides/evaluation",
    "guides/checkpoints",
    "guides/explain",
    "guides/plans-by-hand",
    "guides/memory",
    "guides/pipelines",
    "guides/mixed-clusters",
    "guides/several-nodes",
    "guides/verify",
    "guides/report",
    "guides/eject",
    "guides/notebook",
    "when-it-says-no",
)
"""Those with snippets, in the order in which they go on from one another."""

RUNS = ("python", "console")
"""Languages of snippets that are run; a `sh` needs a GPU, a launcher or a network."""

LAUNCHED = """
import functools, sys, jax
jax.distributed.initialize = functools.partial(jax.distributed.initialize, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_disable_most_optimizations", True)
"""
"""The settings that a launcher would give, where there is none."""


@dataclass(frozen=True)
class Snippet:
    language: str
    note: str
    text: str


def snippets(page: str) -> list[Snippet]:
    found = re.findall(
        r"^```(\w+) ?(\S*)\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [Snippet(*parts) for parts in found if parts[0] in RUNS]


def pages() -> list[Path]:
    return sorted(p for p in DOCS.rglob("*.md") if not {"_build", "generated"} & set(p.parts))


def test_each_page_with_snippets_is_run():
    names = [page.relative_to(DOCS).with_suffix("").as_posix() for page in pages()]
    assert sorted(name for name in names if snippets(name)) == sorted(PAGES)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_and_sections_lead_somewhere(name):
    """Sphinx checks those inside the site."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)", (ROOT / name).read_text())
    lost = [file for file, _ in links if not (ROOT / file).exists()]
    assert lost == []
    assert [(file, section) for file, section in links if section and section not in sections(file)] == []


def sections(file: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_each_table_of_benchmarks_has_its_command_and_date():
    """In its own section."""
    sections = re.split(r"^#+ ", (DOCS / "benchmarks.md").read_text(), flags=re.MULTILINE)
    with_tables = [section for section in sections if "\n|---" in section]
    assert len(with_tables) >= 10
    for section in with_tables:
        assert re.search(r"\d November 2026", section), section[:60]
        assert re.search(r"`(python -m|autoshard) |The same GPU", section), section[:60]


def test_the_readme_is_short_and_keeps_its_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    for command in ("examples/train_gpt.py", "--extra verify pytest"):
        assert f"python -m pip install uv && python -m uv run {command}" in lines


@pytest.mark.devices
@pytest.mark.first
@pytest.mark.filterwarnings("ignore::autoshard.AutoshardWarning")
def test_all_snippets_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    variables = {"__name__": "docs"}
    for page in PAGES:
        for snippet in snippets(page):
            run(snippet, variables)
    capsys.readouterr()


def run(snippet, variables):
    if snippet.language == "console":
        run_commands(snippet.text)
    elif snippet.note == "simulated":
        pass  # before the snippet that runs in processes
    elif snippet.note == "processes":
        run_in_processes(snippet.text)
    elif snippet.note.endswith("Error"):
        with pytest.raises(getattr(autoshard, snippet.note)):
            exec(snippet.text, variables)
    else:
        if snippet.note:
            Path(snippet.note).write_text(snippet.text)
        exec(snippet.text, variables)


def run_commands(text):
    for line in text.splitlines():
        program, *arguments = shlex.split(line.removeprefix("$ "))
        assert (program, cli.main(arguments)) == ("autoshard", 0), line


def run_in_processes(text, count=2):
    """In as many processes, with eight devices in all."""
    address = f"localhost:{free_port()}"
    (simulated,) = (s.text for s in snippets("guides/several-nodes") if s.note == "simulated")
    known = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHED + at_a_free_port(simulated) + text, address, str(count), str(i)],
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


def at_a_free_port(text):
    return text.replace("9000", str(free_port()))


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]
