"""A region's labels as the layout of its op."""

from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.search.ir.attention.layout import CHANNEL, KEY, QUERY, VALUE_CHANNEL, Dims, Layout
from autoshard.search.memory.attention.names import Name, Shape, check
from autoshard.search.memory.attention.region import Region


@dataclass(frozen=True)
class _Labels:
    """A region's labels as the op's layout names them."""

    region: Region

    @cached_property
    def of(self) -> dict[Name, str]:
        region, names = self.region, self.region.names
        query, key = names.flat(region.query_shape), names.flat(region.key_shape)
        value = names.flat(region.value_shape)
        output = names.flat(region.output[1] if region.output else region.seen_shape)
        row, column = names.find(region.row), names.find(region.column)
        found = {row: QUERY, column: KEY}
        scores = [a for a in query if a not in key and a != row]
        found |= {a: f"g{n}" for n, a in enumerate(scores)}
        batch = [a for a in key if a in value and a in output and a != column]
        found |= {a: f"b{n}" for n, a in enumerate(batch)}
        (channel,) = [a for a in key if a not in found] or [None]
        (made,) = [a for a in value if a not in found] or [None]
        check(channel is not None and made is not None and channel in query and made in output)
        assert channel is not None, "as checked"
        assert made is not None, "as checked"
        found |= {channel: CHANNEL, made: VALUE_CHANNEL}
        return found

    def dims(self, shape: Shape, wanted: str) -> Dims:
        """A value's dimensions; of which kinds its labels are."""
        names = self.region.names
        flat = names.flat(shape)
        check(len(set(flat)) == len(flat) and all(a in self.of for a in flat))
        kinds = {self.of[a] if self.of[a][0] not in "bg" else self.of[a][0] for a in flat}
        check(kinds - {"b", "g"} <= set(wanted))
        needed = set(wanted) | ({"b"} if any(k[0] == "b" for k in self.of.values()) else set())
        check(needed - {"b"} <= kinds)
        return tuple(tuple(self.of[names.find(a)] for a in dim) for dim in shape)


def layout_of(region: Region) -> Layout:
    labels = _Labels(region)
    gradients = region.gradients
    query = labels.dims(region.query_shape, QUERY + CHANNEL)
    rows = sorted(a for dim in query for a in dim if a != CHANNEL)
    plain = Layout(
        query,
        labels.dims(region.key_shape, KEY + CHANNEL),
        labels.dims(region.value_shape, KEY + VALUE_CHANNEL),
        labels.dims(region.output[1], QUERY + VALUE_CHANNEL) if region.output else _like_query(query),
        tuple((a,) for a in rows),
        operands=tuple(_operand_dims(labels, shape) for _, shape in region.operands),
    )
    if not gradients:
        return plain
    operands = {
        "query": (region.query_shape, QUERY + CHANNEL),
        "key": (region.key_shape, KEY + CHANNEL),
        "value": (region.value_shape, KEY + VALUE_CHANNEL),
    }
    made = [(gradients[k][1] if k in gradients else own, wanted) for k, (own, wanted) in operands.items()]
    found = replace(
        plain,
        output_gradient=labels.dims(region.seen_shape, QUERY + VALUE_CHANNEL),
        gradients=tuple(labels.dims(shape, wanted) for shape, wanted in made),
    )
    for ours, theirs in zip((found.query, found.key, found.value), found.gradients, strict=True):
        check(_labels(ours) == _labels(theirs))
    check(_labels(found.output) == _labels(found.output_gradient))
    return found


def _like_query(query: Dims) -> Dims:
    """The dimensions of an output that lies as the queries do."""
    return tuple(tuple(VALUE_CHANNEL if a == CHANNEL else a for a in dim) for dim in query)


def _labels(dims: Dims) -> list[str]:
    return sorted(a for dim in dims for a in dim)


def _operand_dims(labels: _Labels, shape: Shape) -> Dims:
    names = labels.region.names
    flat = names.flat(shape)
    check(len(set(flat)) == len(flat) and all(a in labels.of for a in flat))
    found = tuple(tuple(labels.of[names.find(a)] for a in dim) for dim in shape)
    check(not {CHANNEL, VALUE_CHANNEL} & set(_labels(found)))
    return found
