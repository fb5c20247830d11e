"""The execution order of a compiled program, read from its HLO text: the kernels that overlap with each collective.

A scheduled module lists the instructions of a computation in the order in which the device receives them. Instructions
between the start of a collective and its end overlap with it. A collective without a start of its own is synchronous: the
device waits for it there. A loop's body is a schedule of its own, as no instruction of an iteration reaches into the next.

A kernel is described by the bytes that it reads and writes, and by the sizes of its matrix product. For a slice or an
update of a stack only the part counts. A convolution has bytes alone, and conditionals are ignored.
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
    """A kernel that computes.

    Attributes:
      num_bytes: bytes read and written.
      product: its matrix product; None if it has none.
      dtype: NumPy's name for the dtype of the product's operands.
    """

    num_bytes: int
    product: Product | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a collective.

    Attributes:
      name: the instruction's name, which its `End` repeats.
      collective: one run of the collective.
      is_async: whether kernels may overlap with it.
    """

    name: str
    collective: HloCollective
    is_async: bool


@dataclass(frozen=True, slots=True)
class End:
    """The end of the collective of this name; later events wait for it."""

    name: str


@dataclass(frozen=True, slots=True)
class Loop:
    """A schedule that runs `trips` times."""

    trips: int
    body: "Schedule"


Schedule = tuple[HloKernel | Start | End | Loop, ...]


def schedule(text: str, mesh: Mapping[str, int]) -> Schedule:
    """The events of one step on a device, in order.

    Args:
      text: the result of `compiled.as_text()`.
      mesh: the size of each mesh axis by name, outermost first; devices are numbered in that order.
    """
    computations = dict(parsed(text))
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    return _Reader(computations, mesh).read(entry[1]) if entry else ()


_FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "iota"}
)
"""Opcodes of instructions that are not kernels."""

_FUSIONS = frozenset({"fusion", "fusion-start"})
"""Opcodes of kernels of several instructions; a `fusion-start` copies a loop's part of a stack on a stream of its own."""

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
            made = _ARRAY.findall(i.type)[:1] if product else [i.type]  # the second result is its workspace
            num_bytes = sum(num_bytes_of(types.get(o, "")) for o in i.operands) + sum(map(num_bytes_of, made))
        return HloKernel(num_bytes, *(product or (None, "")))


def _called(i: Instruction) -> str:
    found = CALLED.search(i.attributes)
    return found[1] if found else ""


_TAKES_PART = ("dynamic-slice", "slice", "gather")
"""Opcodes that read no more bytes of their first operand than they write."""


def _fused_bytes(body: Sequence[Instruction]) -> int:
    """Bytes that a fused kernel reads and writes; slices, lookups and updates count by the part that they touch."""
    by_name = {i.name: i for i in body}
    read = sum(_read_bytes(i, body) for i in body if i.opcode == "parameter")
    return read + _written_bytes(body[-1], by_name)


def _read_bytes(i: Instruction, body: Sequence[Instruction]) -> int:
    users = [user for user in body if i.name in user.operands]
    if any(not _is_part(i, user) and user.opcode != "bitcast" for user in users):
        return num_bytes_of(i.type)
    return sum(_read_bytes(u, body) if u.opcode == "bitcast" else _part_bytes(u) for u in users)


def _is_part(i: Instruction, user: Instruction) -> bool:
    """Whether `user` reads or replaces only a part of the result of `i`."""
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
    """The matrix product of a library call, with its operands' dtype; None for other instructions."""
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
