"""Warnings that point at the user's line, wherever in autoshard they are raised."""

import warnings
from pathlib import Path

_OURS = str(Path(__file__).parent)


class AutoshardWarning(UserWarning):
    """A call that works, but perhaps not as its user expects."""


def warn(message: str) -> None:
    """Warns at the user's line that called autoshard."""
    warnings.warn(message, AutoshardWarning, skip_file_prefixes=(_OURS,))
