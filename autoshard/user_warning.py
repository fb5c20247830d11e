"""Warnings that point at the user's line, however deep in here they come from."""

import warnings
from pathlib import Path

_OURS = str(Path(__file__).parent)


class AutoshardWarning(UserWarning):
    """Something that works, but perhaps not as its user thinks."""


def warn(message: str) -> None:
    """Warns, at the line that called autoshard."""
    warnings.warn(message, AutoshardWarning, skip_file_prefixes=(_OURS,))
