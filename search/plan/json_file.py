"""A plan's file as JSON: read whole, or refused by a sentence that says where it breaks off; and which schema it has."""

import json
import os
from pathlib import Path
from typing import Any, cast

from autoshard.cost_model.errors import InputError, PlanError


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


def schema_of(data: Any) -> str | None:
    """What JSON-ready values say that they are, if they say so."""
    schema: Any = cast(dict[str, Any], data).get("schema") if isinstance(data, dict) else None
    return schema if isinstance(schema, str) else None
