"""The documentation site: Sphinx, MyST for Markdown, Furo for the theme. CONTRIBUTING.md has the command that builds it."""

import sys
from pathlib import Path

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
default_role = "literal"

html_theme = "furo"
html_title = f"autoshard {version}"
html_show_copyright = False

reference_pages.write(DOCS / "reference" / "generated")
