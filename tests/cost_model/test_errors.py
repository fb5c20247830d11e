"""Quotes of foreign exceptions, and links to the documentation."""

import pickle
import re
import traceback
from pathlib import Path

import pytest

import autoshard  # noqa: F401  (all kinds of errors exist once it is imported)
from autoshard.cost_model.errors import PAGE, AutoshardError, InfeasibleError, PlanError, first_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n no such shape\nfor more, see"), "no such shape"),
        (ValueError(), "ValueError"),
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_the_first_line_says_something(error, line):
    assert first_line(error) == line


# --- the links


def all_errors(base=AutoshardError):
    return [base, *(e for kind in base.__subclasses__() for e in all_errors(kind))]


def sections_of_the_page():
    """The anchors of the page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^## (.*)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_every_error_links_to_a_section_of_the_page():
    assert {error.section for error in all_errors()} <= sections_of_the_page()
    assert InfeasibleError("too large").link == "docs/when-it-says-no.md#nothing-fits"


def test_every_section_that_a_message_names_is_on_the_page():
    folders = ("autoshard", "cost_model", "executors", "search")
    sources = [path.read_text() for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    named = set(re.findall(r"\bsection=\"([^\"]+)\"", "\n".join(sources)))
    assert "a-wrong-name" in named
    assert named <= sections_of_the_page()


def test_a_traceback_shows_the_link_below_the_message_once():
    error = pickle.loads(pickle.dumps(PlanError("stale", section="a-wrong-name")))
    assert str(error) == "stale"
    assert "".join(traceback.format_exception_only(error)).endswith(
        "PlanError: stale\nSee docs/when-it-says-no.md#a-wrong-name\n"
    )
