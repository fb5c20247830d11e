"""The documentation site: Sphinx, MyST for Markdown, Furo for the theme. CONTRIBUTING.md has the command that builds it."""

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent

sys.path.insert(0, str(DOCS))

import reference_pages  # noqa: E402

import autoshard  # noqa: E402

project = "autoshard"
author = "The autoshard contributors"
version = release = autoshard.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "reference/generated"]

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the docstrings say them in words
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"autoshard {version}"
html_show_copyright = False


def setup(app: Any) -> None:
    reference_pages.write(DOCS / "reference" / "generated")
    app.connect("autodoc-process-docstring", as_written, priority=400)  # before napoleon


def as_written(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings have Markdown's `code`, and no types in front of results.

    reStructuredText wants two backticks, with nothing but space behind them. Napoleon takes the words before a sentence's
    first colon for a type; a colon in front leaves it the empty one.
    """
    lines[:] = [re.sub(r"(?<!`)`([^`]+)`(\w?)", r"``\1``\\ \2", line) for line in lines]
    results = [i + 1 for i, line in enumerate(lines) if line.strip() == "Returns:"]
    for i in [*results, *([0] if what == "property" else [])]:
        lines[i] = re.sub(r"^( *)", r"\1: ", lines[i])
