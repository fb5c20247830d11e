"""How a value lies on a mesh, in the form that the search counts with, and as a `PartitionSpec`.

A `Spec` says for each mesh axis which of the value's dimensions it splits: a dimension's number, `WHOLE` when
the value is replicated over the axis, `PARTIAL` when the devices along it hold terms of a sum (JAX's
`unreduced`). Several axes may split one dimension; the outer axis is then the major one, so the order needs
no saying.
"""

import ast
import math
import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.cost_model.errors import PlanError

Spec = tuple[int, ...]
WHOLE = -1
PARTIAL = -2

AXIS_NAMES = {1: ("data",), 2: ("data", "model"), 3: ("replica", "data", "model")}
"""Names of mesh axes, outermost first, by their number."""


_CALLED = frozenset(
    ("P", "PartitionSpec", "jax.P", "jax.sharding.PartitionSpec", "jax.sharding.P", "sharding.PartitionSpec")
)
"""A spec's names where users write it."""


def shard_size(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """Elements that one device holds, padding included."""
    return math.prod(shard_shape(spec, shape, mesh_shape))


def shard_shape(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """What one device holds, padding included."""
    parts = _parts(spec, shape, mesh_shape)
    return tuple(-(-size // part) for size, part in zip(shape, parts, strict=True))


MAX_PADDING = 1 / 32
"""A dimension may be padded by this share of its extent to split into equal parts, where XLA pads (a vocabulary of
50,257 over 8 devices is padded by seven rows)."""


def divides(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    """Whether every dimension splits evenly."""
    return all(size % part == 0 for size, part in zip(shape, _parts(spec, shape, mesh_shape), strict=True))


def may_split(size: int, parts: int) -> bool:
    """Whether an extent splits into parts evenly, or with little padding."""
    return -size % parts <= MAX_PADDING * size


def _parts(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> list[int]:
    parts = [1] * len(shape)
    for d, n in zip(spec, mesh_shape, strict=True):
        if d >= 0:
            parts[d] *= n
    return parts


def partition_spec(spec: Spec, axis_names: Sequence[str]) -> PartitionSpec:
    """The spec in JAX's terms; partial axes are left out, as a constraint cannot say them."""
    rank = max(spec, default=WHOLE) + 1
    dims = [tuple(a for d, a in zip(spec, axis_names, strict=True) if d == dim) for dim in range(rank)]
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims))


def format_spec(spec: Spec, axis_names: Sequence[str]) -> str:
    """A spec as text: `P('data', None)`, `P(None, ('data', 'model'))`, `P(unreduced={'model'})`."""
    parts = [repr(entry) for entry in partition_spec(spec, axis_names)]
    partial = [repr(a) for d, a in zip(spec, axis_names, strict=True) if d == PARTIAL]
    if partial:
        parts.append("unreduced={" + ", ".join(partial) + "}")
    return f"P({', '.join(parts)})"


def parse_spec(text: str, axis_names: Sequence[str]) -> Spec:
    """Reads what `format_spec` writes.

    Raises:
      PlanError: not of that form, or an axis is unknown or used twice.
    """
    match = re.fullmatch(r"\s*P\((.*)\)\s*", text)
    if match is None:
        raise PlanError(f"wanted a spec such as P('data', None), got {text!r}")
    body, partial = match[1], ""
    if found := re.search(r",?\s*unreduced=\{([^}]*)\}", body):
        partial, body = found[1], body[: found.start()] + body[found.end() :]
    entries = re.findall(r"\([^()]*\)|'[^']*'|\"[^\"]*\"|None|[^,\s]+", body)
    dims = {a: d for d, entry in enumerate(entries) for a in _names(entry, text)}
    dims |= dict.fromkeys(_names(partial, text), PARTIAL)
    named = [a for entry in (*entries, partial) for a in _names(entry, text)]
    unknown = [a for a in named if a not in axis_names]
    if unknown or len(set(named)) < len(named):
        what = (
            f"axis {unknown[0]!r} is not in the mesh {tuple(axis_names)}"
            if unknown
            else "an axis is used twice"
        )
        raise PlanError(f"{what}, in the spec {text!r}")
    return tuple(dims.get(a, WHOLE) for a in axis_names)


def read_partition_spec(text: str) -> PartitionSpec:
    """A `PartitionSpec` from text, whatever axes it names.

    Raises:
      PlanError: it is not written as one.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.keywords or ast.unparse(call.func) not in _CALLED:
            raise ValueError
        return PartitionSpec(*(ast.literal_eval(entry) for entry in call.args))
    except (SyntaxError, ValueError, TypeError):
        raise PlanError(f"wanted a spec such as P('data', None), got {text!r}") from None


def from_partition_spec(spec: PartitionSpec, axis_names: Sequence[str]) -> Spec:
    """A user's `PartitionSpec` as a `Spec`.

    Raises:
      PlanError: as `parse_spec`.
    """
    entries: list[Any] = [e if isinstance(e, tuple) else (e,) if e is not None else None for e in spec]
    return parse_spec(f"P({', '.join(map(repr, entries))})", axis_names)


def _names(entry: str, text: str) -> list[str]:
    if entry == "None":
        return []
    names = re.findall(r"'([^']*)'|\"([^\"]*)\"", entry)
    if entry.strip() and not names and entry.strip() not in ("()",):
        raise PlanError(f"wanted quoted axis names or None, got {entry!r} in the spec {text!r}")
    return [a or b for a, b in names]
