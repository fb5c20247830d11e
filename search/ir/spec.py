"""Shardings of a value on a mesh: `Spec`, the search's form, and its conversion from and to `PartitionSpec`.

A `Spec` has one entry per mesh axis: the number of the dimension that the axis splits, or `WHOLE` if the value is replicated
over the axis. It is `PARTIAL` if the devices along the axis hold terms of a sum (JAX's `unreduced`). Several axes may split
one dimension; the outer axis is then always the major one, so a spec needs no order.
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
"""Names by which users write a `PartitionSpec`."""


def num_shards(spec: Spec, mesh_shape: Sequence[int]) -> int:
    """Number of different shards."""
    return math.prod(n for d, n in zip(spec, mesh_shape, strict=True) if d >= 0)


def shard_size(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """Number of elements on one device, padding included."""
    return math.prod(shard_shape(spec, shape, mesh_shape))


def shard_shape(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of one device's shard, padding included."""
    parts = _parts(spec, shape, mesh_shape)
    return tuple(-(-size // part) for size, part in zip(shape, parts, strict=True))


MAX_PADDING = 1 / 32
"""Largest padding, as a share of a dimension's extent, for which a dimension may be split unevenly. XLA pads it to equal
parts: a vocabulary of 50,257 over 8 devices by seven rows."""


def divides(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> bool:
    """True if every dimension splits evenly."""
    return all(size % part == 0 for size, part in zip(shape, _parts(spec, shape, mesh_shape), strict=True))


def may_split(size: int, parts: int) -> bool:
    """True if an extent splits into parts evenly, or with little padding (`MAX_PADDING`)."""
    return -size % parts <= MAX_PADDING * size


def _parts(spec: Spec, shape: Sequence[int], mesh_shape: Sequence[int]) -> list[int]:
    parts = [1] * len(shape)
    for d, n in zip(spec, mesh_shape, strict=True):
        if d >= 0:
            parts[d] *= n
    return parts


def partition_spec(spec: Spec, axis_names: Sequence[str]) -> PartitionSpec:
    """The spec as a `PartitionSpec`, without its partial axes, which a constraint cannot express."""
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
    """Reads a spec from the text that `format_spec` writes.

    Raises:
      PlanError: the text has another form, or an axis is unknown or used twice.
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
    """Reads a `PartitionSpec` from text, with any axis names.

    Raises:
      PlanError: the text is no `PartitionSpec`.
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
      PlanError: an axis is unknown or used twice.
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
