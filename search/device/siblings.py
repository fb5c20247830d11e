"""XLA makes one kernel of fused kernels that read the same array over the same loops, unless one depends on the other.

(`xla/service/gpu/transforms/multi_output_fusion.cc`.) All results of the kernel are then in memory at once. A softmax
that is recomputed beside the gradient of its scores, which reads those too, is not freed before that gradient is made.
Sums are merged with sums over the same dimensions, and with kernels over the whole summed array. The summed array need
not exist before: the kernel that makes it sums it up as well, so no array is kept for the gradient of a bias. A kernel
that makes an array also writes it in the order in which a product needs it.

Kernels that read different slices of an array stay apart.

A copy to the host needs an array, even if the array's other reader could compute it on the fly. That array is one more
result of the reader's kernel. So an optimizer's new state is in memory all at once.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from autoshard.search.device.lowering import Copies, Kernel, Lowered, renumbered

WINDOW = 64
"""Number of kernels before a kernel among which its siblings are looked for. Source: a choice of ours; siblings share
operands."""

LEAST_BYTES = 1 << 12
"""Smallest array whose readers are merged. Source: a choice of ours; XLA leaves out single numbers."""


def merged(lowered: Lowered) -> Lowered:
    """The program with sibling kernels merged at the place of the last of them."""
    order: list[list[int]] = []
    nests: dict[Hashable, int] = {}
    nest_of = [nests.setdefault(kernel.nest, len(nests)) for kernel in lowered.kernels]
    shareable = [_shareable(lowered, kernel) for kernel in lowered.kernels]
    for k, kernel in enumerate(lowered.kernels):
        order.append([k])
        if kernel.nest is not None:
            _merge_into_last(lowered, order, nest_of, shareable)
    kernels = [_one([lowered.kernels[k] for k in group]) for group in order]
    number = {k: n for n, group in enumerate(order) for k in group}
    return replace(lowered, kernels=tuple(renumbered(kernels, number)))


def _shareable(lowered: Lowered, kernel: Kernel) -> frozenset[Hashable]:
    """The buffers, or slices of them, by which a kernel may become one with another: both read it, or one reads it and the
    other makes it."""
    touched = {*kernel.reads, *kernel.makes}
    large = {b for b in touched if lowered.buffers[b].num_bytes >= LEAST_BYTES}
    return _as_read(kernel, large) | (lowered.copied & touched)


def _as_read(kernel: Kernel, buffers: set[int]) -> frozenset[Hashable]:
    """The buffers; those of which a kernel reads a slice alone, with the slice."""
    slices = dict(kernel.parts)
    return frozenset((b, slices[b]) if b in slices else b for b in buffers)


def _merge_into_last(
    lowered: Lowered, order: list[list[int]], nest_of: Sequence[int], shareable: Sequence[frozenset[Hashable]]
) -> None:
    """Merges siblings into the last group of an order of groups; groups that depend on one of them move behind it."""
    here, group = len(order) - 1, order[-1]
    loops, nest = lowered.kernels[group[0]].loops, nest_of[group[0]]
    shared = set(shareable[group[0]])
    for at in range(here - 1, max(0, here - WINDOW) - 1, -1):
        first = order[at][0]
        if lowered.kernels[first].loops != loops:
            return  # a loop's kernels stay together
        is_near = nest_of[first] == nest and any(not shared.isdisjoint(shareable[k]) for k in order[at])
        if is_near and _are_one(lowered, order[at], group):
            waiting = _waiting(lowered.kernels, order[:here], at)
            if not _waits(lowered.kernels, group, [k for n in waiting for k in order[n]]):
                shared.update(*(shareable[k] for k in order[at]))
                group[:0] = order[at]
                between = [order[n] for n in range(at + 1, here) if n not in waiting]
                order[at : here + 1] = [*between, group, *(order[n] for n in waiting)]
                here = at + len(between)


def _are_one(lowered: Lowered, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether kernels over the same loops become one; a barrier that orders them keeps them apart."""
    if any(not set(one).isdisjoint(lowered.kernels[k].after) for k in other):
        return False
    roots = {lowered.kernels[k].root for k in (*one, *other)} - {None}
    if len(roots) > 1:
        return False
    if _waits(lowered.kernels, other, one):
        return _hands_on(lowered, one, other) or _goes_on(lowered, one, other)
    if any(isinstance(root, Copies) for root in roots):
        return False
    return not _read_by(lowered, one).isdisjoint(_read_by(lowered, other))


def _read_by(lowered: Lowered, some: Sequence[int]) -> set[Hashable]:
    """The large buffers, or slices of them, that some kernels read."""
    kernels = [lowered.kernels[k] for k in some]
    large = [{b for b in kernel.reads if lowered.buffers[b].num_bytes >= LEAST_BYTES} for kernel in kernels]
    return {one for kernel, buffers in zip(kernels, large, strict=True) for one in _as_read(kernel, buffers)}


def _goes_on(lowered: Lowered, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the other kernels all sum or copy, and read results of the one group that are no sums or copies."""
    read = {b for k in other for b in lowered.kernels[k].reads}
    makers = [k for k in one if not read.isdisjoint(lowered.kernels[k].makes)]
    return all(lowered.kernels[k].root for k in other) and not any(lowered.kernels[k].root for k in makers)


def _hands_on(lowered: Lowered, one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the other kernels read an array that the one group makes and that exists only for a copy to the host."""
    read = {b for k in other for b in lowered.kernels[k].reads}
    return any(b in lowered.copied and b in read for k in one for b in lowered.kernels[k].makes)


def _waits(kernels: Sequence[Kernel], one: Sequence[int], for_these: Sequence[int]) -> bool:
    """Whether some kernels depend on others, by a buffer or by an explicit order."""
    made = {b for k in for_these for b in kernels[k].makes}
    return any(
        not (made.isdisjoint(kernels[k].reads) and set(for_these).isdisjoint(kernels[k].after)) for k in one
    )


def _waiting(kernels: Sequence[Kernel], order: Sequence[Sequence[int]], at: int) -> list[int]:
    """The places in an order of the groups that depend on the group at a place."""
    made = {b for k in order[at] for b in kernels[k].makes}
    waited_for = set(order[at])
    found: list[int] = []
    for n in range(at + 1, len(order)):
        members = [kernels[k] for k in order[n]]
        if any(not (made.isdisjoint(m.reads) and waited_for.isdisjoint(m.after)) for m in members):
            found.append(n)
            made.update(b for m in members for b in m.makes)
            waited_for.update(order[n])
    return found


def _one(members: Sequence[Kernel]) -> Kernel:
    first, *others = members
    if not others:
        return first
    makes = tuple(b for m in members for b in m.makes)
    return replace(
        first,
        position=max(m.position for m in members),
        reads=tuple(dict.fromkeys(b for m in members for b in m.reads if b not in makes)),
        parts=(),
        makes=makes,
        after=tuple(dict.fromkeys(n for m in members for n in m.after)),
        time=sum((other.time for other in others), first.time),
    )
