"""Cluster files: Pydantic reads, checks and describes them.

Pydantic derives all three from the annotations of a class, such as `cost_model.cluster.Cluster`. An error names the path of
its key, and editors complete and check a file by its JSON Schema (`autoshard schema cluster`). Pydantic imports slowly, so
only the functions that read a file import this module. It knows no class itself, so that a class can read its own files.
"""

import json
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from autoshard.cost_model.errors import ClusterError, closest
from autoshard.cost_model.file_forms import field_types, key_of, record_of

EXPECTED = MappingProxyType(
    {
        "string_type": "text",
        "int_type": "a whole number",
        "float_type": "a number above 0 and at most 1",
        "bool_type": "true or false",
        "dict_type": "a JSON object {...}",
        "dataclass_type": "a JSON object {...}",
        "tuple_type": "a JSON list [...]",
    }
)
"""The expected form, by Pydantic's error type. All numbers that have no unit and are no count are shares."""


def described(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a class's file as it is written, so that defaults have their units."""
    found = TypeAdapter(kind).json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def checked[Kind](data: Any, place: str, kind: type[Kind]) -> Kind:
    """The object that a JSON object describes.

    Args:
      data: the result of `json.loads`.
      place: the file's name, for messages.
      kind: its class: `Cluster` for one kind of node, `MixedCluster` for several.

    Raises:
      ClusterError: a missing or unknown key, a value of the wrong form, or inconsistent values; names the place and
        the key.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(data))
    except ValidationError as e:
        raise ClusterError(_message(e.errors(include_url=False), place, kind)) from None


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _message(errors: Sequence[ErrorDetails], place: str, cluster: type) -> str:
    """The message for the first error; an unknown key comes before a missing one, as it may be a misspelling of it."""
    first = next((e for e in errors if e["type"] == "unexpected_keyword_argument"), errors[0])
    path, kind = [str(part) for part in first["loc"]], first["type"]
    above = _joined(place, path[:-1])
    if kind == "unexpected_keyword_argument":
        known = _keys(cluster, path[:-1])
        return f"{above}: unknown key {path[-1]!r}{closest(path[-1], known)}; wanted the keys {_names(known)}"
    if kind == "missing":
        missing = [
            str(e["loc"][-1]) for e in errors if e["type"] == kind and e["loc"][:-1] == first["loc"][:-1]
        ]
        return f"{above}: missing {_names(missing)}; wanted the keys {_names(_keys(cluster, path[:-1]))}"
    at = _joined(place, path)
    if kind in EXPECTED:
        return f"{at}: wanted {EXPECTED[kind]}, got {first['input']!r}"
    return f"{at}: {first.get('ctx', {}).get('error', first['msg'])}"


def _keys(cluster: type, path: Sequence[str]) -> list[str]:
    """The keys of the object at a path."""
    kinds = field_types(cluster)
    for key in path:
        if not key.isdecimal():  # the number of a group
            kinds = field_types(record_of(next(kind for name, kind in kinds.items() if key_of(name) == key)))
    return [key_of(name) for name in kinds]


def _joined(place: str, path: Sequence[str]) -> str:
    """`a.json: device.memory`, or `plan.json: cluster.device.memory` for a cluster in a plan."""
    if not path:
        return place
    return f"{place}{'.' if ': ' in place else ': '}{'.'.join(path)}"


def _names(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys))
