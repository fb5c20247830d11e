"""Typed fields of a plan's JSON, each with its place for messages.

A plan may be edited by hand, so nothing in it is taken on trust: what is missing or of another type is refused by a sentence
that says where it stands, what was wanted and what came.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from cost_model.errors import InputError, PlanError


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


class JsonReader:
    """Reads typed fields of a JSON object, naming the place of whatever is wrong."""

    def __init__(self, data: Any, place: str, path: str = "") -> None:
        if not isinstance(data, dict):
            where = f"{place}: {path}" if path else place
            raise PlanError(f"{where} must be an object, got {shown(data)}")
        self.data = cast(dict[str, Any], data)
        self.place, self.path = place, path

    def where(self, key: str) -> str:
        """`plan.json: decisions.mesh` for messages."""
        return f"{self.place}: {self.path}.{key}" if self.path else f"{self.place}: {key}"

    def get(self, key: str, kind: type) -> Any:
        if key not in self.data:
            raise PlanError(f"{self.where(key)} is missing")
        value = self.data[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise PlanError(f"{self.where(key)} must be {_KINDS[kind]}, got {shown(value)}")
        if kind is int and value < 0:
            raise PlanError(f"{self.where(key)} must not be negative, got {shown(value)}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key, int) if isinstance(self.data.get(key), int) else self.get(key, float)
        if not 0 <= value <= sys.float_info.max:
            raise PlanError(f"{self.where(key)} must be a finite number, at least zero; got {shown(value)}")
        return float(value)

    def names(self, key: str) -> tuple[str, ...]:
        values = self.get(key, list)
        if not all(isinstance(v, str) for v in values):
            raise PlanError(f"{self.where(key)} must be a list of texts, got {shown(values)}")
        return tuple(values)

    def meshes(self, key: str) -> tuple[tuple[int, ...], ...]:
        meshes: list[Any] = self.get(key, list)
        if not all(map(_is_mesh, meshes)):
            raise PlanError(f"{self.where(key)} must be lists of positive sizes, got {shown(meshes)}")
        return tuple([tuple(cast(list[int], mesh)) for mesh in meshes])

    def inner(self, key: str) -> "JsonReader":
        return JsonReader(self.get(key, dict), self.place, f"{self.path}.{key}" if self.path else key)

    def table(self, key: str, kind: type) -> dict[str, Any]:
        inner = self.inner(key)
        return {name: inner.get(name, kind) for name in inner.data}


def _is_mesh(sizes: Any) -> bool:
    return (
        isinstance(sizes, list)
        and sizes != []
        and all(type(n) is int and n > 0 for n in cast(list[Any], sizes))
    )


_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list"}


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    return json.dumps(value)[:60]
