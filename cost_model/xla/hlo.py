"""The collectives and the host copies of a compiled program, read from its HLO text.

XLA prints a module as computations of one instruction a line. A collective has one of three forms, and each is
counted once: synchronous (`all-gather`), a pair (`all-gather-start`, `all-gather-done`), or synchronous inside a
computation that an `async-start` calls. The number of its runs is the product of the trip counts of the loops
around it. A combined collective has several operands; `num_operands` counts them and `num_bytes` is their sum.

The participating devices are printed in one of four forms:

  ==================================================  ===========================================================
  `{{0,1},{2,3}}`                                     the groups themselves; `{}` is one group of all devices
  `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`                  iota of the right shape, transposed, cut into rows
  `mesh['x'=2,'y'=4] {'y'}`                           over axes of a mesh of XLA's own naming; `device_ids=(...)`
                                                      gives its devices, `'y':(1)2` a part of an axis
  `source_target_pairs={{0,1},{1,0}}`                 of a collective-permute
  ==================================================  ===========================================================

In every form, `axes` are the axes of *our* mesh along which the members of a group differ.

A layout with `S(5)` means host memory. A host copy is a `copy`, or a slice of a stack in host memory (the residuals
of a loop), each synchronous or a pair of `-start` and `-done`. A call to the host (`HostExecute`) also copies.

Written against the text of JAX 0.11 and 0.12 (XLA of 2026; `xla/hlo/ir/replica_group.cc`,
`mesh_and_axis.cc`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: one of `KINDS`.
      axes: the mesh axes along which the members of a group differ, outermost first.
      num_operands: arrays that it moves; XLA combines small ones.
      num_bytes: bytes per device and run, the larger of input and output.
      count: runs in one step.
    """

    kind: str
    axes: tuple[str, ...]
    num_operands: int
    num_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One instruction that copies data between a device and its host.

    Attributes:
      direction: `TO_HOST` or `FROM_HOST`.
      num_bytes: bytes per device and run.
      count: runs in one step.
    """

    direction: str
    num_bytes: int
    count: int


TO_HOST, FROM_HOST = "to host", "from host"


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


def collectives(text: str, mesh: Mapping[str, int]) -> tuple[HloCollective, ...]:
    """The collectives of a compiled module, in program order, without those in which no device talks to another.

    Args:
      text: the result of `compiled.as_text()`.
      mesh: the size of each mesh axis by name, outermost first; devices are numbered in that order.
    """
    computations = dict(parsed(text))
    runs = _runs(text, computations)
    found = (
        collective_of(kind, i, num_bytes, runs[name], mesh)
        for name, instructions in computations.items()
        if runs.get(name)
        for kind, i, num_bytes in moving(instructions)
    )
    return tuple(c for c in found if c.axes)


def host_copies(text: str) -> tuple[HostCopy, ...]:
    """The host copies of a compiled module, in program order."""
    computations = dict(parsed(text))
    runs = _runs(text, computations)
    return tuple(
        HostCopy(direction, num_bytes, runs[name])
        for name, instructions in computations.items()
        if runs.get(name)
        for direction, num_bytes in _crossing(instructions)
    )


def totals(found: Sequence[HloCollective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """(Arrays moved, bytes per device) in one step, by kind and axes."""
    sums: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for c in found:
        count, num_bytes = sums.get((c.kind, c.axes), (0, 0))
        sums[c.kind, c.axes] = (count + c.count * c.num_operands, num_bytes + c.count * c.num_bytes)
    return dict(sorted(sums.items()))


_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9-]*)\((.*)$")


def parsed(text: str) -> Iterator[tuple[str, list[Instruction]]]:
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            instructions = []
            yield head[1], instructions
        elif body := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            operands, _, attributes = body[4].partition(")")
            instructions.append(
                Instruction(body[1], body[2], body[3], tuple(re.findall(r"%([\w.-]+)", operands)), attributes)
            )


CALLED = re.compile(r"(?:body|condition|calls|to_apply|(?:true|false)_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"?known_trip_count"?:\{"?n"?:"?(\d+)"?\}')
_CALLERS = frozenset({"while", "call", "conditional", "async-start"})


def _runs(text: str, computations: Mapping[str, list[Instruction]]) -> dict[str, int]:
    """The runs of each computation in one step; a loop of unknown trip count counts as one iteration."""
    entry = re.search(r"^ENTRY %?([\w.-]+)", text, re.MULTILINE)
    runs: dict[str, int] = {}
    waiting = [(entry[1], 1)] if entry else []
    while waiting:
        name, times = waiting.pop()
        runs[name] = runs.get(name, 0) + times
        for i in computations.get(name, ()):
            if i.opcode in _CALLERS:
                trips = TRIPS.search(i.attributes) if i.opcode == "while" else None
                called = CALLED.findall(i.attributes)
                called += [
                    c.strip(" %") for names in _BRANCHES.findall(i.attributes) for c in names.split(",")
                ]
                waiting += [(c, times * (int(trips[1]) if trips else 1)) for c in called]
    return runs


def moving(instructions: Sequence[Instruction]) -> Iterator[tuple[str, Instruction, int]]:
    """(Kind, instruction, bytes) for each collective of one computation."""
    types = {i.name: i.type for i in instructions}
    for i in instructions:
        kind = i.opcode.removesuffix("-start")
        if kind in KINDS:
            read = sum(num_bytes_of(types.get(o, "")) for o in i.operands)
            made = num_bytes_of(i.type)
            if kind != i.opcode and made > read:
                made -= read  # the start of a pair returns a tuple of its operands and its results
            yield kind, i, max(read, made)


_HOST = re.compile(r"S\(5\)")
_CROSSERS = re.compile(r"(?:copy|fusion|async|dynamic-slice|dynamic-update-slice)(?:-start)?")


_HOST_CALL = 'custom_call_target="HostExecute"'
"""In the attributes of a call to the host. Its operands and results that are on the device are copied by the call."""

_ELEMENT = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?")


def _is_on_device(type_text: str) -> bool:
    """True for an array in a device's memory; scalars do not count."""
    return "[]" not in type_text and not _HOST.search(type_text)


def _crossing(instructions: Sequence[Instruction]) -> Iterator[tuple[str, int]]:
    """(Direction, bytes) for each host copy of one computation."""
    types = {i.name: i.type for i in instructions}
    made = {i.operands[0]: i.type for i in instructions if i.opcode.endswith("-done")}
    for i in instructions:
        if _HOST_CALL in i.attributes:
            read, results = [types.get(o, "") for o in i.operands], made.get(i.name, i.type)
            yield from ((TO_HOST, num_bytes_of(o)) for o in read if _is_on_device(o))
            yield from ((FROM_HOST, num_bytes_of(o)) for o in _ELEMENT.findall(results) if _is_on_device(o))
        if not _CROSSERS.fullmatch(i.opcode):
            continue
        result, operands = made.get(i.name, i.type), [types.get(o, "") for o in i.operands]
        on_device = sum(num_bytes_of(o) for o in operands if "[]" not in o and not _HOST.search(o))
        if _HOST.search(result) and on_device:
            yield TO_HOST, on_device
        elif not _HOST.search(result) and any(_HOST.search(o) for o in operands):
            yield FROM_HOST, num_bytes_of(result)


_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")


def num_bytes_of(type_text: str) -> int:
    """Bytes of an array, or of all arrays in a tuple, without tokens and `u32[]`: a permute's bookkeeping, or
    negligible."""
    total = 0
    for letters, bits, dims in _ARRAY.findall(type_text):
        if (letters, bits, dims) != ("u", "32", "") and letters != "token":
            size = prod(int(n) for n in dims.split(",") if n)
            total += -(-size * (int(bits) if bits else 8) // 8)
    return total


def collective_of(
    kind: str, i: Instruction, num_bytes: int, count: int, mesh: Mapping[str, int]
) -> HloCollective:
    ids = np.arange(prod(mesh.values())).reshape(tuple(mesh.values()))
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", i.attributes)
    groups = _pairs(pairs[1]) if pairs else _groups(i.attributes, ids.size)
    coordinates = np.stack(np.unravel_index(groups, ids.shape))
    differs = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    axes = tuple(a for a, d in zip(mesh, differs, strict=True) if d)
    return HloCollective(kind, axes, max(1, len(i.operands)), num_bytes, count)


_EXPLICIT = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")


def _groups(attributes: str, num_devices: int) -> np.ndarray:
    """[groups, members]: the device numbers of each group."""
    if found := _IOTA.search(attributes):
        rows, shape, order = (_ints(part or "") for part in found.groups())
        devices = np.arange(prod(shape)).reshape(shape)
        return devices.transpose(order or range(len(shape))).reshape(rows)
    if found := _AXES.search(attributes):
        return _over_axes(*found.groups())
    found = _EXPLICIT.search(attributes)
    rows = [_ints(row) for row in re.findall(r"\{([\d,]+)\}", found[1])] if found else []
    return np.array(rows or [range(num_devices)])


def _over_axes(axes: str, device_ids: str | None, members: str) -> np.ndarray:
    """Groups over some axes of a mesh, or over parts of them: `name:(before)size` is the factor `size` of
    an axis, minor to factors with the product `before`."""
    sizes = {name: int(n) for name, n in re.findall(r"([^\s=,]+)=(\d+)", axes)}
    devices = np.array(_ints(device_ids)) if device_ids else np.arange(prod(sizes.values()))
    split: dict[str, list[int]] = {name: [1, n] for name, n in sizes.items()}
    wanted = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"([^\s:,]+)(?::\((\d+)\)(\d+))?", members)
    ]
    for name, before, size in wanted:
        split[name] = sorted({*split[name], before, before * size})
    places = {(name, cut): None for name, cuts in split.items() for cut in cuts[:-1]}
    shape = [b // a for cuts in split.values() for a, b in pairwise(cuts)]
    order = list(places)
    inner = [
        order.index((name, cut))
        for name, before, size in wanted
        for cut in split[name]
        if before <= cut < before * size
    ]
    outer = [k for k in range(len(shape)) if k not in inner]
    num_members = prod(shape[k] for k in inner)
    return devices.reshape(shape).transpose(*outer, *inner).reshape(-1, num_members)


def _pairs(text: str) -> np.ndarray:
    """[pairs, (source, target)]: device numbers."""
    return np.array([_ints(pair) for pair in re.findall(r"\{(\d+,\d+)", text)])


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]
