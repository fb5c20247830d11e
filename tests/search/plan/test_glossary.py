"""The glossary has every word of a printed plan: those in the sources of summaries, and those from elsewhere."""

import ast
import re
from pathlib import Path

import pytest

from autoshard.search.pipeline.schedules.registry import FAMILIES
from autoshard.search.plan.executors import EXECUTORS
from autoshard.search.plan.headline import SCHEDULES
from autoshard.search.problem.live_ranges import Resident

ROOT = Path(__file__).parents[3]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()

SUMMARIES = (
    "argument_lines",
    "headline",
    "summary",
    "text_table",
)
"""The modules of `search/plan` that write printed plans."""

NO_WORDS = frozenset({"es", "param", "f", "g"})
"""An ending, a part of a user's names, and formats."""


def texts(module):
    """The text literals of a module, without docstrings and messages of errors."""
    tree = ast.parse((ROOT / "search" / "plan" / f"{module}.py").read_text())
    skipped = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    patterns = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("re.")
    ]
    skipped |= {id(n) for call in (*patterns, *raised(tree)) for n in ast.walk(call)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped
    ]


def raised(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]


def words(text):
    return {word.lower() for word in re.findall(r"[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*", text)} - NO_WORDS


def forms(word):
    return {word, f"{word}s", word.removesuffix("s"), f"{word}es", word.removesuffix("es")}


KNOWN = words(GLOSSARY)


@pytest.mark.parametrize("module", SUMMARIES)
def test_every_word_of_a_summary_is_on_the_page(module):
    assert {word for text in texts(module) for word in words(text) if not forms(word) & KNOWN} == set()


def test_words_that_come_from_elsewhere_are_on_the_page():
    collectives = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    residents = [kind.value.replace("_", " ") for kind in Resident]
    for text in (*SCHEDULES.values(), *collectives, *residents, *EXECUTORS, *EXECUTORS.values()):
        assert text.lower() in GLOSSARY.lower(), text


def test_every_part_of_a_search_time_is_on_the_page():
    sources = "\n".join(
        path.read_text() for room in ("search", "autoshard") for path in (ROOT / room).rglob("*.py")
    )
    parts = re.findall(r"\blap\(\"(\w+)\"|waited\((?:\w+, )?\"([^\"]+)\"", sources)
    assert len(parts) > 5
    of_verification = {"shorten", "lower", "compile"}
    assert [p for p in map("".join, parts) if p not in of_verification and f"`{p}`" not in GLOSSARY] == []


def test_all_schedules_have_the_names_of_their_papers():
    assert SCHEDULES.keys() == FAMILIES.keys()


@pytest.mark.parametrize(
    "term",
    [
        "data parallel",
        "ZeRO-1",
        "ZeRO-2",
        "FSDP",
        "tensor parallel",
        "with sequence parallelism",
        "sequence parallel",
        "expert parallel",
        "feature parallel",
        "microbatches",
        "MFU",
        "bubble",
        "certified gap",
    ],
)
def test_each_term_has_an_entry_of_its_own(term):
    assert re.search(rf"^{re.escape(term)}\n: ", GLOSSARY, re.MULTILINE)
