"""In which order a compiled program runs, read from its HLO text: what the compiler puts beside each collective.

A scheduled module lists the instructions of a computation in the order in which the device is given them. What stands
between the start of a collective and its end runs beside it; one without a start of its own is synchronous: the device waits
for it where it stands. A loop's body is a schedule of its own, as nothing of an iteration reaches into the next.

Kernels are told by what they do: the bytes that they read and write, of a stack only the part that they touch, and the sizes
of a matrix product. A convolution counts by its bytes alone, and of a conditional nothing is counted.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autoshard.cost_model.compute import Product
from autoshard.cost_model.xla.hlo import (
    CALLED,
    KINDS,
    TRIPS,
    HloCollective,
    Instruction,
    collective_of,
    moving,
    num_bytes_of,
    parsed,
)


@dataclass(frozen=True, slots=True)
class HloKernel:
    """A launch that computes.

    Attributes:
      num_bytes: that it reads and writes.
      product: the matrix product that it is; None of others.
      dtype: of the product's operands, by NumPy's name.
    """

    num_bytes: int
    product: Product | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """A collective begins.

    Attributes:
      name: of the instruction, as its `End` says it.
      collective: what it is, each time it runs.
      is_async: whether anything may run beside it.
    """

    name: str
    collective: HloCollective
    is_async: bool


@dataclass(frozen=True, slots=True)
class End:
    """What comes behind waits for the collective of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class Loop:
    """A schedule that runs so many times."""

    trips: int
    body: "Schedule"


Schedule = tuple[HloKernel | Start | End | Loop, ...]


def schedule(text: str, mesh: Mapping[str, int]) -> Schedule:
    """What a device runs in a step, in that order.

    Args:
      text: what `compiled.as_text()` gives.
      mesh: the size of each mesh axis by name, outermost first; devices are numbered in that order.
    """
    computations = dict(parsed(text))
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    return _Reader(computations, mesh).read(entry[1]) if entry else ()


_FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "iota"}
)
"""Instructions that are no kernels."""

_FUSIONS = frozenset({"fusion", "fusion-start"})
"""Kernels of several instructions; a loop's part of a stack may be copied on a stream of its own, and is done later."""

_IGNORED = re.compile(r"conditional|copy-(start|done)|(send|recv)(-done)?|opt-barrier|fusion-done")


@dataclass(frozen=True, slots=True)
class _Reader:
    computations: Mapping[str, Sequence[Instruction]]
    mesh: Mapping[str, int]

    def read(self, name: str) -> Schedule:
        """The schedule of one computation."""
        instructions = self.computations.get(name, ())
        types = {i.name: i.type for i in instructions}
        moved = {i.name: (kind, num_bytes) for kind, i, num_bytes in moving(instructions)}
        return tuple(event for i in instructions for event in self._events(i, moved, types))

    def _events(
        self, i: Instruction, moved: Mapping[str, tuple[str, int]], types: Mapping[str, str]
    ) -> Iterator[HloKernel | Start | End | Loop]:
        if i.name in moved:
            kind, num_bytes = moved[i.name]
            yield from self._begun(i.name, collective_of(kind, i, num_bytes, 1, self.mesh), i.opcode != kind)
        elif i.opcode == "async-start":
            for inner in self.read(_called(i)):
                if isinstance(inner, Start):
                    yield from self._begun(i.name, inner.collective, True)
        elif i.opcode.removesuffix("-done") in (*KINDS, "async"):
            yield End(i.operands[0])
        elif i.opcode == "while":
            trips = TRIPS.search(i.attributes)
            body = re.search(r"body=%?([\w.-]+)", i.attributes)
            yield Loop(int(trips[1]) if trips else 1, self.read(body[1]) if body else ())
        elif i.opcode == "call":
            yield from self.read(_called(i))
        elif i.opcode not in _FREE and not _IGNORED.fullmatch(i.opcode):
            yield self._kernel(i, types)

    @staticmethod
    def _begun(name: str, collective: HloCollective, is_async: bool) -> Iterator[Start | End]:
        if collective.axes:
            yield Start(name, collective, is_async)
            if not is_async:
                yield End(name)

    def _kernel(self, i: Instruction, types: Mapping[str, str]) -> HloKernel:
        body = self.computations.get(_called(i), ()) if i.opcode in _FUSIONS else ()
        inner = {one.name: one.type for one in body}
        product = next(filter(None, (_product(one, inner) for one in body)), None) or _product(i, types)
        if body:
            num_bytes = _fused_bytes(body)
        else:
            made = _ARRAY.findall(i.type)[:1] if product else [i.type]  # behind it is its workspace
            num_bytes = sum(num_bytes_of(types.get(o, "")) for o in i.operands) + sum(map(num_bytes_of, made))
        return HloKernel(num_bytes, *(product or (None, "")))


def _called(i: Instruction) -> str:
    found = CALLED.search(i.attributes)
    return found[1] if found else ""


_TAKES_PART = ("dynamic-slice", "slice", "gather")
"""What reads of its first operand no more than it makes."""


def _fused_bytes(body: Sequence[Instruction]) -> int:
    """What a fused kernel reads and writes: of what it slices or looks up, the parts; of what it updates, the updates."""
    by_name = {i.name: i for i in body}
    read = sum(_read_bytes(i, body) for i in body if i.opcode == "parameter")
    return read + _written_bytes(body[-1], by_name)


def _read_bytes(i: Instruction, body: Sequence[Instruction]) -> int:
    users = [user for user in body if i.name in user.operands]
    if any(not _is_part(i, user) and user.opcode != "bitcast" for user in users):
        return num_bytes_of(i.type)
    return sum(_read_bytes(u, body) if u.opcode == "bitcast" else _part_bytes(u) for u in users)


def _is_part(i: Instruction, user: Instruction) -> bool:
    """Whether another instruction reads or replaces no more than a part of this one."""
    return user.opcode in (*_TAKES_PART, "dynamic-update-slice") and user.operands[0] == i.name


def _part_bytes(user: Instruction) -> int:
    return num_bytes_of(user.type) if user.opcode in _TAKES_PART else 0


def _written_bytes(root: Instruction, by_name: Mapping[str, Instruction]) -> int:
    if root.opcode in ("tuple", "bitcast"):
        return sum(_written_bytes(by_name[o], by_name) for o in root.operands if o in by_name)
    if root.opcode == "dynamic-update-slice":
        return num_bytes_of(by_name[root.operands[1]].type)
    return num_bytes_of(root.type)


_ARRAY = re.compile(r"[a-z]+\d*\w*\[[\d,]*\]")
_SHAPE = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_DIMS = r'"{}_dimensions":\[([^\]]*)\]'


def _product(i: Instruction, types: Mapping[str, str]) -> tuple[Product, str] | None:
    """The matrix product that an instruction calls a library for, and its operands' dtype."""
    if i.opcode != "custom-call" or '"dot_dimension_numbers"' not in i.attributes:
        return None
    left, right = (_SHAPE.search(types.get(o, "")) for o in i.operands[:2])
    if left is None or right is None:
        return None
    sizes = [int(n) for n in left[2].split(",") if n]
    summed, batch = (_dims(i, f"lhs_{which}") for which in ("contracting", "batch"))
    k, b = prod(sizes[d] for d in summed), prod(sizes[d] for d in batch)
    columns = prod(int(n) for n in right[2].split(",") if n)
    return Product(b, prod(sizes) // (b * k), columns // (b * k), k), _DTYPES.get(left[1], left[1])


def _dims(i: Instruction, which: str) -> list[int]:
    found = re.search(_DIMS.format(which), i.attributes)
    return [int(n) for n in re.findall(r"\d+", found[1])] if found else []
