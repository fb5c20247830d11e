"""Plan files: written from the dataclasses of `search.plan.values`, and read, checked and described by them.

A field is a key. A field with its default is left out. The key `schema` names the form of a file, and `seal` is a digest of
the rest, by which a later edit is seen. Pydantic reads, checks and describes a file by the dataclasses: a message names the
path of the wrong key, and editors complete and check a plan by its JSON Schema (`autoshard schema plan`). It takes a while
to import, so it is imported only where a file is read or described.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from inspect import cleandoc
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast, get_args

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.values import PlanValues

if TYPE_CHECKING:
    from pydantic import TypeAdapter

SCHEMA = "autoshard.plan/2"

NOT_SAVED = ("search_s", "is_sealed")
"""Fields of a plan that its file does not have."""

EXPECTED = MappingProxyType(
    {
        "string_type": "text",
        "int_type": "a whole number",
        "float_type": "a number",
        "dict_type": "an object",
        "mapping_type": "an object",
        "dataclass_type": "an object",
        "tuple_type": "a list",
        "greater_than": "more than zero",
        "greater_than_equal": "at least zero",
        "finite_number": "finite",
        "too_short": "given for one at least",
    }
)
"""The wanted value, by Pydantic's name of the mistake."""


def written(plan: PlanValues) -> dict[str, Any]:
    """A plan as JSON-ready values, without a seal; the same plan gives the same values in the same order."""
    values = cast(dict[str, Any], _json(plan))
    return {"schema": SCHEMA, **{key: values[key] for key in values if key not in NOT_SAVED}}


def _json(value: Any) -> Any:
    """A value of a plan as JSON has it."""
    if is_dataclass(value):
        held = ((f, getattr(value, f.name)) for f in fields(value))
        return {f.name: _json(one) for f, one in held if not _is_default(f, one)}
    if isinstance(value, Mapping):
        return {key: _json(one) for key, one in cast(Mapping[str, Any], value).items()}
    return [_json(one) for one in cast(Sequence[Any], value)] if isinstance(value, tuple | list) else value


def _is_default(field: Field[Any], value: Any) -> bool:
    """Whether a field may be left out."""
    if field.default_factory is not MISSING:
        return value == field.default_factory()
    return field.default is not MISSING and value == field.default


def read[Kind: PlanValues](data: Mapping[str, Any], kind: type[Kind], place: str) -> Kind:
    """The plan that a JSON object describes.

    Args:
      data: the file's content, in today's form.

    Raises:
      PlanError: a key is missing or of the wrong type; the message names the first.
    """
    from pydantic import ValidationError

    kept = {key: value for key, value in data.items() if key not in NOT_SAVED}
    try:
        return _adapter(kind).validate_json(json.dumps(kept))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise PlanError(_message(first["type"], first["loc"], first["input"], first["msg"], place)) from None


def described(kind: type[PlanValues]) -> dict[str, Any]:
    """The JSON Schema of a plan's file."""
    found = _adapter(kind).json_schema()
    _explain(found, kind)
    for name, one in found["$defs"].items():
        _explain(one, _dataclasses(kind)[name])
    own = {name: one for name, one in found["properties"].items() if name not in NOT_SAVED}
    schema = {"type": "string", "const": SCHEMA, "description": "The form of this file."}
    seal = {"type": "string", "description": "A digest of the rest, by which an edit by hand is seen."}
    found |= {
        "properties": {"schema": schema, **own, "seal": seal},
        "required": ["schema", *found["required"]],
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


@cache
def _adapter(kind: type) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _explain(schema: dict[str, Any], kind: type) -> None:
    """Describes a class and its keys as its docstring does."""
    words, _, attributes = cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    lines = re.sub(r"\n {4,}", " ", attributes.partition("\n\n")[0])
    descriptions = dict(re.findall(r"^ {2}(\w+): (.*)$", lines, re.MULTILINE))
    schema["description"] = words.strip()
    for name, one in schema["properties"].items():
        one["description"] = f"{descriptions[name][:1].upper()}{descriptions[name][1:]}"


def _dataclasses(kind: type) -> dict[str, type]:
    """By name, a dataclass and those of its fields."""
    found, waiting = dict[str, type](), list[Any]([kind])
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and is_dataclass(one):
            found[one.__name__] = one
            waiting += [f.type for f in fields(one)]
        waiting += get_args(one)
    return found


def _message(kind: str, path: Sequence[int | str], value: Any, message: str, place: str) -> str:
    where = f"{place}: {_joined(path)}" if path else place
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{where} is missing"
    wanted = f"must be {EXPECTED[kind]}" if kind in EXPECTED else f"is not as it should be ({message})"
    return f"{where} {wanted}, got {json.dumps(value)[:60]}"


def _joined(path: Sequence[int | str]) -> str:
    """`estimates.collectives[0].kind`."""
    parts = [f"[{p}]" if isinstance(p, int) else f".{p}" for p in path]
    return "".join(parts).removeprefix(".")
