"""The form of a dataclass's numbers in a JSON file: keys without units, values with units.

A field's annotation states its form: `memory_bytes: Annotated[int, BYTES]` is `"memory": "80GiB"` in a file. Pydantic
reads, checks and describes files from these annotations (`cost_model.cluster_schema`); `Quantity` and `Table` give it
their schemas. As Pydantic imports slowly, this module reads and writes valid data, such as our own, without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Protocol, get_origin, get_type_hints

from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.units import (
    exact_bytes,
    exact_flops,
    exact_rate,
    exact_seconds,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
)

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "memory_bytes": "memory",
        "memory_bytes_per_s": "memory_bandwidth",
        "flops_per_s": "flops",
        "reserve_bytes": "reserve",
        "num_cores": "cores",
        "launch_s": "launch",
        "bytes_per_s": "bandwidth",
        "latency_s": "latency",
        "host_bytes_per_node": "host_memory_per_node",
        "host_bytes_per_s": "host_memory_bandwidth_per_node",
        "host_cores": "host_cores_per_node",
    }
)
"""The keys of fields whose names differ in a file, where the values carry the units."""


def key_of(name: str) -> str:
    """A field's key in a file."""
    return KEYS.get(name, name)


def file_config() -> dict[str, Any]:
    """The Pydantic configuration of each dataclass, its `__pydantic_config__`."""
    return {"strict": True, "extra": "forbid", "use_attribute_docstrings": True, "alias_generator": key_of}


class Form(Protocol):
    """The form of one kind of value in a file."""

    def read(self, data: Any) -> Any:
        """The Python value of a JSON value."""
        ...

    def write(self, value: Any) -> Any:
        """The JSON value of a Python value; `read` turns it back into an equal one."""
        ...


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that is text with a unit in a file.

    Attributes:
      parse: converts the text to SI units.
      exact: converts SI units to text that `parse` turns back into the same number.
      example: a valid text.
    """

    parse: Callable[[str], Any]
    exact: Callable[[Any], str]
    example: str

    def read(self, data: Any) -> Any:
        """The number in SI units. Raises ClusterError, or InputError, for data that is not such a text."""
        if not isinstance(data, str):
            raise ClusterError(f"wanted text that carries its unit, got {data!r}")
        return self.parse(data)

    def write(self, value: Any) -> Any:
        return self.exact(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        written = core_schema.plain_serializer_function_ser_schema(self.exact)
        return core_schema.no_info_plain_validator_function(self.read, serialization=written)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {"type": "string", "examples": [self.example]}


@dataclass(frozen=True, slots=True)
class Table:
    """A tuple of pairs that is an object with arbitrary keys in a file.

    Attributes:
      kind: the type of the values, which may be annotated with a form.
    """

    kind: Any

    def read(self, data: Any) -> Any:
        return tuple((key, _read(self.kind, value)) for key, value in data.items())

    def write(self, value: Any) -> Any:
        return {key: _write(self.kind, one) for key, one in value}

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        there = core_schema.dict_schema(core_schema.str_schema(), handler.generate_schema(self.kind))
        written = core_schema.plain_serializer_function_ser_schema(self.write, return_schema=there)
        return core_schema.no_info_after_validator_function(
            lambda pairs: tuple(pairs.items()), there, serialization=written
        )


@dataclass(frozen=True, slots=True)
class Records:
    """A tuple of dataclasses that is a list of objects in a file.

    Attributes:
      kind: the dataclass.
    """

    kind: type

    def read(self, data: Any) -> Any:
        return tuple(read_record(self.kind, one) for one in data)

    def write(self, value: Any) -> Any:
        return [write_record(one) for one in value]


BYTES = Quantity(parse_bytes, exact_bytes, "80GiB")
RATE = Quantity(parse_rate, exact_rate, "450GB/s")
SECONDS = Quantity(parse_seconds, exact_seconds, "5us")
FLOPS = Quantity(parse_flops, exact_flops, "989TFLOP/s")


def read_record(cls: type, data: Mapping[str, Any]) -> Any:
    """A dataclass from a JSON object that is known to be valid. A field with a default may be absent."""
    kinds = field_types(cls)
    return cls(**{n: _read(kind, data[key_of(n)]) for n, kind in kinds.items() if key_of(n) in data})


def write_record(value: Any) -> dict[str, Any]:
    """The JSON object that `read_record` turns back into an equal value."""
    return {key_of(n): _write(kind, getattr(value, n)) for n, kind in field_types(type(value)).items()}


@cache
def field_types(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, annotated with their forms."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def record_of(kind: Any) -> Any:
    """The dataclass of a field that holds one dataclass, or a tuple of them."""
    form = _form(kind)
    return form.kind if isinstance(form, Records) else kind


def _read(kind: Any, data: Any) -> Any:
    if is_dataclass(kind):
        return read_record(kind, data)  # type: ignore[arg-type]
    form = _form(kind)
    return data if form is None else form.read(data)


def _write(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        return write_record(value)
    form = _form(kind)
    return value if form is None else form.write(value)


def _form(kind: Any) -> Form | None:
    return kind.__metadata__[0] if get_origin(kind) is Annotated else None
