"""Values as Python source: what `eval` with the names `jax`, `jnp`, `lax`, `np` and `P` makes the value of."""

import enum
import json
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from autoshard.search.ir import _jax

MAX_WIDTH = 100
"""Characters of a line, of which longer ones are broken."""


class UnwritableError(Exception):
    """A part of a program has no source; the printer notes it and goes on."""


def text(value: Any) -> str:
    """A value's source, in one line.

    Raises:
      UnwritableError: a value of its type has no source.
    """
    if isinstance(value, PartitionSpec):
        return f"P({', '.join(map(text, value))})"
    if isinstance(value, enum.Enum):
        return f"{_home(type(value))}.{value.name}"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _record(value, value._fields)  # type: ignore[attr-defined]
    if isinstance(value, tuple | list):
        return sequence(tuple(map(text, value)))
    if isinstance(value, np.dtype) or value in (np.bool_,) or _is_scalar_type(value):
        return dtype(value)
    if isinstance(value, np.generic):
        return text(value.item())
    if isinstance(value, float):
        return numbers(repr(value))
    if value is None or isinstance(value, bool | int):
        return repr(value)
    raise UnwritableError(f"{type(value).__name__} {value!r:.60}")


def numbers(text: str) -> str:
    """The source of numbers in text, infinite ones and NaN included."""
    return re.sub(r"\b(nan|inf)\b", r"jnp.\1", text)


def quoted(value: str) -> str:
    """A text in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def sequence(items: tuple[str, ...]) -> str:
    """Sources as the source of a tuple."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def dtype(value: Any) -> str:
    """A dtype's source.

    Raises:
      UnwritableError: the dtype is an extended one, such as a key's.
    """
    if _jax.is_extended(value):
        raise UnwritableError(f"dtype {value}")
    name = np.dtype(value).name
    return f"jnp.{name}_" if name == "bool" else f"jnp.{name}"


def broken(line: str, indent: str) -> list[str]:
    """A statement as lines that are not too long: a call has an argument a line, if it has to."""
    if len(indent) + len(line) <= MAX_WIDTH or not line.endswith(")"):
        return [f"{indent}{line}"]
    start = _opening(line)
    inner = [f"{argument}," for argument in _at_commas(line[start + 1 : -1])]
    lines = [part for argument in inner for part in broken(argument, f"{indent}    ")]
    return [f"{indent}{line[: start + 1]}", *lines, f"{indent})"]


def _opening(line: str) -> int:
    """The position of the parenthesis that the last one closes."""
    depth = 0
    for i in range(len(line) - 1, -1, -1):
        depth += (line[i] in ")]}") - (line[i] in "([{")
        if not depth:
            return i
    raise AssertionError(f"unbalanced: {line}")


def _at_commas(arguments: str) -> list[str]:
    """Arguments, split at the commas between them."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def dictionary(name: str, entries: Mapping[str, str | Mapping[str, str]]) -> str:
    """The assignment of a dict literal, one entry a line; an entry may be a dict again."""
    return f"{name} = {_braced(entries, '')}"


def _braced(entries: Mapping[str, str | Mapping[str, str]], indent: str) -> str:
    if not entries:
        return "{}"
    inner = f"{indent}    "
    lines = [
        f"{inner}{quoted(key)}: {value if isinstance(value, str) else _braced(value, inner)},"
        for key, value in entries.items()
    ]
    return "\n".join(["{", *lines, f"{indent}}}"])


def _record(value: Any, fields: tuple[str, ...]) -> str:
    arguments = ", ".join(f"{name}={text(getattr(value, name))}" for name in fields)
    return f"{_home(type(value))}({arguments})"


def _home(kind: type) -> str:
    """The public name of a type of `jax.lax`."""
    if getattr(jax.lax, kind.__name__, None) is not kind:
        raise UnwritableError(f"{kind.__name__} is not in jax.lax")
    return f"lax.{kind.__name__}"


def _is_scalar_type(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, np.generic)
