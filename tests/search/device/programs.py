"""Kernels small enough to reckon by hand, and random programs of them, loops in loops included."""

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from autoshard.search.device.kernel_times import KernelTime
from autoshard.search.device.lowering import Buffer, Communication, Kernel, Loops, Lowered
from autoshard.search.problem.live_ranges import Resident


def buffer(num_bytes, loops=(), is_argument=False, resident=Resident.TEMPORARIES, origin=None):
    return Buffer(num_bytes, resident, is_argument, loops, origin)


def kernel(position, reads, makes, time_s=1.0, loops=(), workspace=0.0, after=()):
    return Kernel(
        position,
        tuple(reads),
        tuple(makes),
        after,
        None,
        workspace,
        KernelTime(time_s, time_s),
        loops,
    )


def collective(
    position,
    reads,
    makes,
    num_bytes=8.0,
    time_s=1.0,
    kind="all-gather",
    axes=(0,),
    dtype="float32",
    loops=(),
    after=(),
):
    what = Communication(kind, axes, num_bytes, dtype)
    return Kernel(position, tuple(reads), tuple(makes), after, what, 0.0, KernelTime(time_s, time_s), loops)


def needed(kernels: tuple[Kernel, ...], k: int) -> set[int]:
    """The kernels that one waits for."""
    made_by = {b: n for n, made in enumerate(kernels) for b in made.makes}
    return {made_by[b] for b in kernels[k].reads if b in made_by} | set(kernels[k].after)


def assert_all_run_once(lowered: Lowered, order: Sequence[int]) -> None:
    """Asserts that every kernel runs once, after all that it waits for, and every collective ends once, after it began."""
    collectives = {k for k, one in enumerate(lowered.kernels) if one.collective is not None}
    assert sorted(k for k in order if k >= 0) == list(range(len(lowered.kernels)))
    assert sorted(~k for k in order if k < 0) == sorted(collectives)
    for k in range(len(lowered.kernels)):
        ended = [~n if n in collectives else n for n in needed(lowered.kernels, k)]
        assert all(order.index(n) < order.index(k) for n in ended)
    assert all(order.index(k) < order.index(~k) for k in collectives)


_NESTS = st.lists(
    st.recursive(st.none(), lambda nest: st.lists(nest, min_size=1, max_size=4), max_leaves=5),
    min_size=1,
    max_size=4,
)
"""A kernel is None, a loop the list of what is in it."""
_BYTES = st.integers(0, 20).map(float)
_KINDS = st.sampled_from((None, None, "all-reduce", "all-gather", "from host"))


@st.composite
def programs(draw) -> Lowered:
    """Kernels that read what was made before them: in their loop, around it, or stacked by a loop that is over."""
    arguments = draw(st.lists(_BYTES, max_size=2))
    buffers = [buffer(num_bytes, is_argument=True) for num_bytes in arguments]
    made_in: list[Loops] = [() for _ in buffers]
    kernels: list[Kernel] = []
    for position, loops in enumerate(_loops_of(draw(_NESTS), (), 0)):
        readable = [b for b, made in enumerate(buffers) if _is_readable(made.loops, made_in[b], loops)]
        reads = draw(st.lists(st.sampled_from(readable), max_size=3, unique=True)) if readable else []
        makes = range(len(buffers), len(buffers) + draw(st.integers(0, 2)))
        for _ in makes:
            is_stacked = bool(loops) and draw(st.booleans())
            resident = draw(st.sampled_from((Resident.TEMPORARIES, Resident.RESIDUALS)))
            buffers.append(buffer(draw(_BYTES), loops[1:] if is_stacked else loops, resident=resident))
            made_in.append(loops)
        after = (draw(st.integers(0, position - 1)),) if position and draw(st.booleans()) else ()
        kind, time_s = draw(_KINDS), float(draw(st.integers(0, 5)))
        if kind is None:
            kernels.append(kernel(position, reads, makes, time_s, loops, draw(_BYTES), after))
        else:
            kernels.append(collective(position, reads, makes, 8.0, time_s, kind, loops=loops, after=after))
    return Lowered(tuple(kernels), tuple(buffers))


def _loops_of(nest: list, around: Loops, start: int) -> Iterator[Loops]:
    """Per kernel of a nest that begins at a position: the loops that it is in, inner ones first."""
    for part in nest:
        size = _num_kernels(part)
        yield from [around] if part is None else _loops_of(part, ((start, start + size), *around), start)
        start += size


def _num_kernels(nest: list | None) -> int:
    return 1 if nest is None else sum(map(_num_kernels, nest))


def _is_readable(lies_in: Loops, made_in: Loops, loops: Loops) -> bool:
    """Whether a kernel in these loops may read what lies in some and was made in some: what a loop stacks, after it only."""
    is_around = loops[len(loops) - len(lies_in) :] == lies_in
    stacked_by = made_in[: len(made_in) - len(lies_in)]
    return is_around and not set(stacked_by) & set(loops)
