"""A plan's file as JSON: read whole, or refused by a sentence that says where it breaks off; its schema and its seal."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.cost_model.errors import InputError, PlanError

_NUMBERS = re.compile(r"\[\n\s+[-\d][^\[\]\"{}]*\]")
"""A list of numbers in indented JSON. In JSON's strings no line ends, so that this is no part of one."""

SEAL_DIGITS = 16
"""Hexadecimal digits of a seal, as many as in a step's fingerprint."""


def read_file(path: str | os.PathLike[str]) -> Any:
    """The JSON of a plan's file.

    Raises:
      InputError: no such file, or it cannot be read.
      PlanError: it is not JSON.
    """
    try:
        text = Path(path).read_text()
    except OSError as e:
        raise InputError(f"the plan {path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise PlanError(f"the plan {path} is not text: {e.reason} at byte {e.start}") from e
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise PlanError(
            f"the plan {path} is not whole JSON: {e.msg} at line {e.lineno}, column {e.colno}"
        ) from e
    except (ValueError, RecursionError) as e:
        raise PlanError(f"the plan {path} cannot be read as JSON: {e}") from e


def text_of(values: Mapping[str, Any]) -> str:
    """The text of a plan's file: a value on each line, but for lists of numbers, which are on one."""
    text = json.dumps(values, indent=1, allow_nan=False)
    return _NUMBERS.sub(
        lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text
    )


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON-ready values with a digest of them all, by which a later edit of any of them is seen."""
    text = json.dumps(values, sort_keys=True)
    return {**values, "seal": hashlib.sha256(text.encode()).hexdigest()[:SEAL_DIGITS]}
