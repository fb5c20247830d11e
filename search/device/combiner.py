"""XLA joins collectives of one kind that do not depend on one another: one launch, and all their results at once.

A joined collective has members of one kind, over the same axes, of one dtype and in one loop. Together they have at
most `THRESHOLD_BYTES`; for reduce-scatters, a device keeps at most `JOINED_BYTES` of their results. The joined
collective starts when all its members could, and ends for all of them. So the gathered weights of several layers may be
in memory before they are needed.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.xla.gpu_targets import JOINED_BYTES
from autoshard.search.device.kernel_times import of_collective
from autoshard.search.device.lowering import Communication, Kernel, Lowered, renumbered

THRESHOLD_BYTES = 30 * 2**20
"""Source: XLA, `xla_gpu_all_reduce_combine_threshold_bytes` and the corresponding flag for all-gather."""

JOINED = frozenset({"all-reduce", "all-gather", "reduce-scatter"})


def combined(lowered: Lowered, mesh: MeshModel) -> Lowered:
    """The program with its collectives joined, each kernel after those that it depends on."""
    groups = _groups(lowered.kernels, mesh)
    kernels = [_joined([lowered.kernels[k] for k in g], mesh) for g in groups]
    group_of = {k: n for n, g in enumerate(groups) for k in g}
    kernels = renumbered(kernels, group_of)
    return replace(lowered, kernels=tuple(kernels)).reordered(_sorted(kernels))


def _groups(kernels: Sequence[Kernel], mesh: MeshModel) -> list[list[int]]:
    """Groups of kernel numbers, each of which becomes one kernel, ordered by their first member.

    Sets of groups are bits of an integer. A kernel joins a group unless it depends on it, directly or through groups
    that depend on it by their other members. A kernel that depends on a group in `joined` may gain dependencies when
    that group gains members, so `_closure` looks them up each time.
    """
    made_by = {b: k for k, kernel in enumerate(kernels) for b in kernel.makes}
    waits: list[int] = []
    groups: list[list[int]] = []
    group_waits: list[int] = []
    joined = 0
    total: list[float] = []
    open_group: dict[tuple, int] = {}
    for k, kernel in enumerate(kernels):
        below = 0
        for n in (*(made_by[b] for b in kernel.reads if b in made_by), *kernel.after):
            below |= waits[n]
        key = share = None
        if kernel.collective is not None and kernel.collective.kind in JOINED:
            what, share = kernel.collective, _share(kernel.collective, mesh)
            key = (what.kind, what.axes, what.dtype, kernel.loops)
            below = _closure(below, group_waits, joined)
        g = None if key is None else open_group.get(key)
        if g is None or share is None or below >> g & 1 or total[g] + share > 1:
            g = len(groups)
            groups.append([])
            group_waits.append(0)
            total.append(0.0)
        else:
            joined |= 1 << g
        groups[g].append(k)
        if key is not None and share is not None:
            open_group[key] = g
            group_waits[g] |= below
            total[g] += share
            below |= 1 << g
        waits.append(below)
    return groups


def _share(what: Communication, mesh: MeshModel) -> float:
    """A collective's part of the bytes that may be joined."""
    if what.kind == "reduce-scatter":
        return what.num_bytes / prod(mesh.shape[axis] for axis in what.axes) / JOINED_BYTES
    return what.num_bytes / THRESHOLD_BYTES


def _closure(below: int, group_waits: Sequence[int], joined: int) -> int:
    """These groups and all groups that they depend on."""
    seen = 0
    while waiting := below & joined & ~seen:
        g = waiting.bit_length() - 1
        seen |= 1 << g
        below |= group_waits[g]
    return below


def _joined(members: Sequence[Kernel], mesh: MeshModel) -> Kernel:
    """The one kernel of a group."""
    first, *others = members
    if not others:
        return first
    moved = [m.collective for m in members if m.collective is not None]
    one = replace(moved[0], num_bytes=sum(c.num_bytes for c in moved))
    runs = first.time.seconds / float(mesh.time_s(one.kind, one.axes, moved[0].num_bytes))
    return replace(
        first,
        position=max(m.position for m in members),
        reads=tuple(dict.fromkeys(b for m in members for b in m.reads)),
        makes=tuple(b for m in members for b in m.makes),
        after=tuple(dict.fromkeys(n for m in members for n in m.after)),
        collective=one,
        time=of_collective(mesh, one.kind, one.axes, one.num_bytes) * runs,
    )


def _sorted(kernels: Sequence[Kernel]) -> list[int]:
    """Kernels by their positions, but each ahead of the first one that needs it, as in XLA's depth-first scheduler."""
    made_by = {b: n for n, kernel in enumerate(kernels) for b in kernel.makes}
    needed = [
        dict.fromkeys((*(made_by[b] for b in kernel.reads if b in made_by), *kernel.after))
        for kernel in kernels
    ]
    order = dict[int, None]()
    begun = set[int]()
    for n in sorted(range(len(kernels)), key=lambda n: kernels[n].position):
        waiting = [n]
        while waiting:
            begun.add(top := waiting[-1])
            left = [m for m in reversed(needed[top]) if m not in order]
            assert begun.isdisjoint(left), "joined collectives wait for one another"
            if not left:
                order[waiting.pop()] = None
                begun.discard(top)
            waiting += left
    return [*order]
