"""Cluster files as their types have them: read, checked and described by Pydantic.

It does all three from the annotations of `cost_model.cluster`: a mistake is named with the path of its key, and editors
complete and check a file by its JSON Schema (`autoshard schema cluster`). It takes a while to import, so this module is
imported where a file is read.
"""

import json
from collections.abc import Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from cost_model.cluster import Cluster
from cost_model.errors import ClusterError, closest
from cost_model.file_forms import field_types, key_of

WANTED = MappingProxyType(
    {
        "string_type": "text",
        "int_type": "a whole number",
        "float_type": "a number above 0 and at most 1",
        "bool_type": "true or false",
        "dict_type": "a JSON object {...}",
        "dataclass_type": "a JSON object {...}",
    }
)
"""What was wanted, by Pydantic's names for what may be wrong. All numbers without a unit or a count are shares."""


def json_schema() -> dict[str, Any]:
    """What a cluster file looks like, as JSON Schema; as it is written, so that defaults have their units."""
    found = _adapter().json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def checked(data: Any, place: str) -> Cluster:
    """The cluster that a JSON object describes.

    Args:
      data: as `json.loads` gives it.
      place: the file's name, for messages.

    Raises:
      ClusterError: a missing or unknown key, a value of the wrong form, or values that make no sense together; names the
        place and the key.
    """
    try:
        return _adapter().validate_json(json.dumps(data))
    except ValidationError as e:
        raise ClusterError(_said(e.errors(include_url=False), place)) from None


@cache
def _adapter() -> TypeAdapter[Cluster]:
    return TypeAdapter(Cluster)


def _said(errors: Sequence[ErrorDetails], place: str) -> str:
    """The first mistake; of keys that are none before those that are missing, which may be meant by them."""
    first = next((e for e in errors if e["type"] == "unexpected_keyword_argument"), errors[0])
    path, kind = [str(part) for part in first["loc"]], first["type"]
    above = _joined(place, path[:-1])
    if kind == "unexpected_keyword_argument":
        known = _keys(path[:-1])
        return f"{above}: unknown key {path[-1]!r}{closest(path[-1], known)}; wanted the keys {_names(known)}"
    if kind == "missing":
        missing = [
            str(e["loc"][-1]) for e in errors if e["type"] == kind and e["loc"][:-1] == first["loc"][:-1]
        ]
        return f"{above}: missing {_names(missing)}; wanted the keys {_names(_keys(path[:-1]))}"
    at = _joined(place, path)
    if kind in WANTED:
        return f"{at}: wanted {WANTED[kind]}, got {first['input']!r}"
    return f"{at}: {first.get('ctx', {}).get('error', first['msg'])}"


def _keys(path: Sequence[str]) -> list[str]:
    """Of the object at a path."""
    kinds = field_types(Cluster)
    for key in path:
        kinds = field_types(next(kind for name, kind in kinds.items() if key_of(name) == key))
    return [key_of(name) for name in kinds]


def _joined(place: str, path: Sequence[str]) -> str:
    """`a.json: device.memory`, or `plan.json: cluster.device.memory` of a cluster in a plan."""
    if not path:
        return place
    return f"{place}{'.' if ': ' in place else ': '}{'.'.join(path)}"


def _names(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys))
