"""Bytes of an argument on one device, from its type and its spec as a plan's file says them; without JAX."""

import ast
import math
import re
from collections.abc import Mapping

from autoshard.search.plan.resting_places import without_place


def local_bytes(array_type: str, spec: str, mesh: Mapping[str, int]) -> int | None:
    """Bytes on one device, or beside it in its host's memory; None if the type is not known.

    Args:
      array_type: dtype and shape, such as `float32[64,16]`.
      spec: `P('data', None)`, `P(('data', 'model')) on host`.
      mesh: sizes of mesh axes by name.

    Example:
      >>> local_bytes("float32[64,16]", "P(('data', 'model'), None)", {"data": 2, "model": 4})
      512
    """
    found = re.fullmatch(r"([\w<>]+)\[([\d,]*)\]", array_type)
    if found is None or (bits := type_bits(found[1])) is None:
        return None
    sizes = [int(size) for size in found[2].split(",") if size]
    parts = [*spec_parts(spec, mesh), *[1] * len(sizes)]
    return math.ceil(math.prod(math.ceil(size / n) for size, n in zip(sizes, parts, strict=False)) * bits / 8)


def type_bits(dtype: str) -> int | None:
    """Bits of an element: `bfloat16` has 16, `float8_e4m3fn` 8, `bool` 8; None of a key."""
    if dtype == "bool":
        return 8
    found = re.match(r"(?:bfloat|float|uint|int|complex)(\d+)", dtype)
    return int(found[1]) if found else None


def spec_parts(spec: str, mesh: Mapping[str, int]) -> list[int]:
    """The number of parts into which a spec divides each dimension that it names."""
    text = without_place(spec).removeprefix("P")
    try:
        dims = ast.literal_eval(text if text.endswith(",)") or text == "()" else f"{text[:-1]},)")
    except (SyntaxError, ValueError):
        return []
    return [_size(one, mesh) for one in dims]


def _size(named: object, mesh: Mapping[str, int]) -> int:
    names = named if isinstance(named, tuple) else (named,)
    return math.prod(mesh.get(str(name), 1) for name in names if name is not None)
