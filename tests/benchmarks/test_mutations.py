"""The mutation benchmark: its rooms stand, and what it says of mutants whose fate is plain."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants import Mutant
from benchmarks.mutations import ROOMS, Verdict, report

ROOT = Path(__file__).parents[2]

SOURCE = """def count(limit):
    n = 0
    while n < limit:
        n += 1
    return n
"""
TESTS = """from m import count

def test_count():
    assert count(3) == 3
"""
JUDGE = """
from pathlib import Path
from benchmarks.mutants import every
from benchmarks.mutations import ROOMS, Room, judged

ROOMS["here"] = Room("m.py", "test_m.py")
mutants = {mutant.after: mutant for mutant in every(Path(), "m.py")}
for after, limit_s, why in (
    ("n = 1", 60.0, ""),
    ("n += 2", 60.0, ""),
    ("n -= 1", 2.0, ""),
    ("n = 1", 60.0, "any start below the limit will do"),
    ("while n <= limit:", 60.0, "a wrong claim"),
):
    print(judged("here", mutants[after], limit_s, why).outcome)
"""


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_has_sources_and_tests(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert ROOMS[name].files()
    assert ROOMS[name].tests_of("")


def test_the_tests_named_like_a_file_run_first(monkeypatch):
    monkeypatch.chdir(ROOT)
    in_order = ROOMS["ir"].tests_of("search/ir/trace.py")
    assert in_order[0] == "tests/search/ir/test_trace.py"
    assert sorted(in_order) == ROOMS["ir"].tests_of("")


@pytest.mark.devices
def test_mutants_are_judged_one_after_the_other(tmp_path):
    """The first two have one size and are written within a second: what was compiled of one must not serve the other."""
    (tmp_path / "m.py").write_text(SOURCE)
    (tmp_path / "test_m.py").write_text(TESTS)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    judge = subprocess.run(
        [sys.executable, "-c", JUDGE],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert judge.stdout.split() == ["survived", "killed", "hung", "equivalent", "killed"]
    assert (tmp_path / "m.py").read_text() == SOURCE


def test_the_share_killed_leaves_out_what_is_equivalent():
    mutant = Mutant("m.py", 3, "count", "n += 1", "n += 2", 0, 0)
    fates = (
        ("killed", ""),
        ("hung", ""),
        ("survived", ""),
        ("equivalent", "why"),
        ("killed", "a wrong claim"),
    )
    said = list(report([Verdict("solver", mutant, outcome, 1.0, why) for outcome, why in fates]))
    assert "| solver | 5 | 3 | 1 | 1 | 1 | 75% |" in said
    assert "| all | 5 | 3 | 1 | 1 | 1 | 75% |" in said
    assert said[said.index("Survived:") + 2] == "survived in 1.0 s: m.py:3 in count\n  - n += 1\n  + n += 2"
    assert said[-1].endswith("a wrong claim")
