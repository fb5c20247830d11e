"""Compilation of fewer blocks: a model's equal blocks are compiled a few times, and the rest is extrapolated.

A compiler's time grows with the program, and a program of 32 layers tells little that one of 5 does not. So `verify`
compiles the shortened step of `autoshard.verification.shorten`, and, for each of its stacks, that step with one block
less. The first program's statistics, plus the differences for the missing blocks, are those of the whole. Bytes and
counts of collectives, arguments, results and host copies follow exactly. The peak follows as far as the scheduler treats
every block alike: it is an estimate, and is reported as one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard.cost_model.xla.stats import CompiledStats, Traffic
from autoshard.search.ir.graph import Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.result import SearchResult
from autoshard.verification.omitted_memory import omitted_bytes
from autoshard.verification.records import Extent
from autoshard.verification.shorten import NotShortened, ShortPrograms, shorten

FIXED_OPS = 4_000
"""Cost of starting one more compilation, in ops of an unrolled step. Source: measured on two cores, a Megatron GPT of
hidden size 1024 for 64 H100s: 35 s of processor time with 2,718 ops and 55 s with 12,218. The line through both has a
fixed cost of 14,000 ops. The value is lower, as memory grows with the ops too and the fixed part compiles the same
kernels."""


def is_long(step: Step) -> bool:
    """Whether a step takes so long to compile that two shorter programs could be faster."""
    return len(step.graph.ops) > FIXED_OPS


def to_compile(step: Step, sharding: StepSharding) -> ShortPrograms | Extent:
    """The shortened step; or, if that is not faster to compile, an extent of the whole step. The extent has a reason if
    the step cannot be shortened."""
    cut = shorten(step, sharding)
    if isinstance(cut, NotShortened):
        return Extent(reason=cut.reason)
    programs = [step for step, _ in (cut.short, *cut.less)]
    is_less = sum(map(_cost_ops, programs)) < _cost_ops(step)
    return cut if is_less else Extent()


def _cost_ops(step: Step) -> int:
    return FIXED_OPS + len(step.graph.ops)


def omitted(found: SearchResult, cut: ShortPrograms) -> tuple[int, ...]:
    """Bytes per device by which the cap of each shortened program is lower than the whole one's, arguments aside."""
    whole = found.whole
    return omitted_bytes(whole.on_mesh.memory.costed, whole.on_mesh.live_ranges, whole.chosen, cut.left_out)


def kept_blocks(cut: ShortPrograms) -> tuple[int, ...]:
    """Number of blocks in each of the programs."""
    kept = cut.num_blocks - sum(cut.missing)
    return kept, *(kept - 1 for _ in cut.less)


def extrapolated(cut: ShortPrograms, short: CompiledStats, less: Sequence[CompiledStats]) -> CompiledStats:
    """The whole program's statistics from those of the shortened ones."""

    def whole(values: Iterable[int]) -> int:
        first, *others = values
        return max(0, round(cut.extrapolate(first, others)))

    def traffic(records: Sequence[Mapping[Any, Traffic]]) -> dict[Any, Traffic]:
        keys = dict.fromkeys(key for one in records for key in one)
        of = {key: [one.get(key, (0, 0)) for one in records] for key in keys}
        return {key: (whole(c for c, _ in found), whole(b for _, b in found)) for key, found in of.items()}

    programs = (short, *less)
    return CompiledStats(
        argument_bytes=whole(n.argument_bytes for n in programs),
        fresh_output_bytes=whole(n.fresh_output_bytes for n in programs),
        temporary_bytes=whole(n.temporary_bytes for n in programs),
        host_bytes=whole(n.host_bytes for n in programs),
        collectives=traffic([n.collectives for n in programs]),
        host_copies=traffic([n.host_copies for n in programs]),
    )
