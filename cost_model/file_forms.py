"""Dataclasses as JSON objects whose numbers carry their units.

A field declares how it is written in a file with `field(metadata=in_file("memory", BYTES))`: the key, and
how its value is read and written. A field with a default may be absent from a file. `read_record` and
`write_record` are generic over such dataclasses and inverse to each other. Every mistake becomes one
`ClusterError` that names the file and the path of the key, such as `device.memory`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from typing import Any

from cost_model.errors import ClusterError, InputError
from cost_model.units import (
    exact_bytes,
    exact_flops,
    exact_rate,
    exact_seconds,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
)

_FILE_KEY = "file_key"
_FORM = "form"


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind of value looks in a file.

    Attributes:
      read: from the JSON value and its place ("FILE: key.path") to ours; raises InputError.
      write: the inverse.
    """

    read: Callable[[Any, str], Any]
    write: Callable[[Any], Any]


def in_file(key: str, form: Form) -> Mapping[str, Any]:
    """The `metadata` of a dataclass field that is written under `key` in the given form."""
    return {_FILE_KEY: key, _FORM: form}


def read_record(cls: type, data: Any, place: str) -> Any:
    """A `cls` from a JSON object; `place` says where the object stands, for messages.

    Raises:
      ClusterError: a missing or unknown key, a value of the wrong form, or values that `cls` refuses.
    """
    forms = _forms(cls)
    data = _object(data, place)
    check_keys(data, tuple(forms), place)
    required = [key for key, (item, _) in forms.items() if item.default is MISSING]
    missing = [key for key in required if key not in data]
    if missing:
        raise ClusterError(f"{place}: missing {_names(missing)}; wanted the keys {_names(required)}")
    given = {key: forms[key] for key in forms if key in data}
    values = {item.name: form.read(data[key], join(place, key)) for key, (item, form) in given.items()}
    return _located(lambda: cls(**values), place)


def write_record(value: Any) -> dict[str, Any]:
    """The JSON object that `read_record` turns back into an equal value."""
    return {key: form.write(getattr(value, item.name)) for key, (item, form) in _forms(type(value)).items()}


def check_keys(data: Mapping[str, Any], known: tuple[str, ...], place: str) -> None:
    """Refuses keys other than the known ones, with the closest known one as a hint."""
    for key in data:
        if key not in known:
            hint = closest(key, known)
            raise ClusterError(f"{place}: unknown key {key!r}{hint}; wanted the keys {_names(known)}")


def closest(name: str, known: tuple[str, ...]) -> str:
    """A hint such as ` (did you mean 'memory'?)`, or nothing when no known name is close."""
    longer = [candidate for candidate in known if name and candidate.lower().startswith(name.lower())]
    matches = longer or get_close_matches(name.lower(), [candidate.lower() for candidate in known], n=1)
    meant = [candidate for candidate in known if candidate in matches or candidate.lower() in matches]
    return f" (did you mean {' or '.join(repr(candidate) for candidate in meant)}?)" if meant else ""


def join(place: str, key: str) -> str:
    """The place of a key in an object: from `"a.json"` to `"a.json: device"` to `"a.json: device.memory"`."""
    return f"{place}.{key}" if ": " in place else f"{place}: {key}"


def record(cls: type) -> Form:
    """A nested object."""
    return Form(read=lambda data, place: read_record(cls, data, place), write=write_record)


def _quantity(parse: Callable[[str], Any], exact: Callable[[Any], str]) -> Form:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, str):
            raise ClusterError(f"{place}: wanted text that carries its unit, got {value!r}")
        return _located(lambda: parse(value), place)

    return Form(read=read, write=exact)


def _plain(kinds: tuple[type, ...], wanted: str) -> Form:
    def read(value: Any, place: str) -> Any:
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ClusterError(f"{place}: wanted {wanted}, got {value!r}")
        return kinds[0](value)

    return Form(read=read, write=lambda value: value)


def _read_flag(value: Any, place: str) -> bool:
    if not isinstance(value, bool):
        raise ClusterError(f"{place}: wanted true or false, got {value!r}")
    return value


TEXT = _plain((str,), "text")
COUNT = _plain((int,), "a whole number")
SHARE = _plain((float, int), "a number above 0 and at most 1")
FLAG = Form(read=_read_flag, write=lambda value: value)
BYTES = _quantity(parse_bytes, exact_bytes)
RATE = _quantity(parse_rate, exact_rate)
SECONDS = _quantity(parse_seconds, exact_seconds)
FLOPS = _quantity(parse_flops, exact_flops)


def table(form: Form) -> Form:
    """An object with free keys and one form of value; for us a tuple of pairs."""

    def read(data: Any, place: str) -> tuple[tuple[str, Any], ...]:
        return tuple((key, form.read(value, join(place, key))) for key, value in _object(data, place).items())

    return Form(read=read, write=lambda pairs: {key: form.write(value) for key, value in pairs})


def _forms(cls: type) -> dict[str, tuple[Field, Form]]:
    return {item.metadata[_FILE_KEY]: (item, item.metadata[_FORM]) for item in fields(cls)}


def _object(data: Any, place: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ClusterError(f"{place}: wanted a JSON object {{...}}, got {data!r}")
    return data


def _located(make: Callable[[], Any], place: str) -> Any:
    try:
        return make()
    except InputError as error:
        raise ClusterError(f"{place}: {error}") from None


def _names(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys)
