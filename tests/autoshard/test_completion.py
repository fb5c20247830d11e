"""Completion in a shell: what argcomplete offers for a command line, and what it costs where no shell asks."""

import os
import subprocess
import sys
from unittest import mock

import pytest

from autoshard import cli, completion


def offered(line, folder):
    """The words that may follow a line, as the shell gets them: through a file instead of its pipe."""
    answer = folder / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    command = [sys.executable, "-m", "autoshard"]
    subprocess.run(command, env=os.environ | asked, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return [word.strip() for word in answer.read_text().split("\n")]


@pytest.mark.devices
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("autoshard sea", ["search"]),
        ("autoshard search t.py:target --clu", ["--cluster"]),
        ("autoshard search t.py:target --cluster 64xGB", ["64xGB200-NVL72", "64xGB300-NVL72"]),
        ("autoshard clusters 72xGB2", ["72xGB200-NVL72"]),
    ],
)
def test_commands_options_and_clusters(line, words, tmp_path):
    assert offered(line, tmp_path) == words


def test_a_count_is_that_of_a_full_node_until_it_is_given():
    assert "8xH100-80GB" in completion.clusters("")
    assert "72xGB200-NVL72" in completion.clusters("7")
    assert completion.clusters("8xL4+16xA10") == [
        "8xL4+16xA10G",
        "8xL4+16xA100-40GB",
        "8xL4+16xA100-40GB-Ethernet",
        "8xL4+16xA100-80GB",
        "8xL4+16xA100-80GB-Ethernet",
    ]
    assert completion.clusters("8xL4,72xGB3") == ["8xL4,72xGB300-NVL72"]
    assert completion.clusters("nothing") == []


def test_argcomplete_is_not_asked_where_no_shell_asks(monkeypatch):
    monkeypatch.delenv("_ARGCOMPLETE", raising=False)
    asked = mock.Mock()
    monkeypatch.setitem(sys.modules, "argcomplete", asked)
    completion.offer(cli.parser())
    assert not asked.mock_calls


def test_without_argcomplete_nothing_is_offered(monkeypatch):
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert completion.offer(cli.parser()) is None
