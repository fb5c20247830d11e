"""The kernels of a part of a step that runs by itself: their temporaries, their times, and their collectives.

The kernels of the whole step are known (`search.device`). A part has those whose ops are in it; of a loop over layers,
the whole body. Operands that other parts make lie there already, and results that other parts read are handed on:
neither counts here. The other buffers come and go in the orders in which the compiler would run these kernels by
themselves.

A part may have one layer of a loop. Then it has no loop: it hands on the results of the body, and no stack of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.search.device.lowering import TRANSFERS, Buffer, Communication, Kernel, Loops, Lowered
from autoshard.search.device.prediction import Prediction
from autoshard.search.device.workspace import SLICED_WORKSPACE_BYTES
from autoshard.search.ir.graph import Op, Site
from autoshard.search.pipeline.flat_sites import outermost, positions_of_loop
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.layout_copies import with_copies
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.workspaces import WORKSPACE_BYTES


@dataclass(frozen=True, eq=False)
class PartKernels[Part]:
    """The kernels of a replica's device, by the part of the step that runs them.

    Attributes:
      intra_op: the strategies of a replica's devices.
      device: the prediction of one of them in the whole step.
      step: the step in parts, cut like these.
      of_site: by op of the step, or of its loop's body, the parts that run it.
      is_program: whether each part is a program of its own.
    """

    intra_op: IntraOp
    device: Prediction
    step: PipelineStep
    of_site: "Mapping[Site, Mapping[Part, Runs]]"
    is_program: bool

    def temporary_bytes(self, part: Part, limit_bytes: float) -> float:
        """The peak of a part's temporaries: buffers that it neither gets nor hands on.

        Args:
          limit_bytes: the memory that the compiler's scheduler may use for it.
        """
        lowered, runs = self._lowered, self._runs
        own = {k: runs[k][part] for k in range(len(runs)) if part in runs[k]}
        if not own:
            return 0.0
        has_scheduler = self.device.has_scheduler
        cut = _AlonePart(lowered, own, self._loop, self._stacks, has_scheduler, self.is_program)
        alone = with_copies(cut.alone, cut.handed) if self.is_program else cut.alone
        peak = Prediction(alone, limit_bytes, has_scheduler, alone).peak
        return peak.num_bytes + cut.early_bytes

    def kernels(self, part: Part) -> "Iterator[tuple[Kernel, float]]":
        """A part's kernels, each with the share of its runs in the step that the part has."""
        for kernel, parts in zip(self._lowered.kernels, self._runs, strict=True):
            if part in parts:
                yield kernel, parts[part].num / parts[part].whole

    def collectives(self, part: Part) -> "Iterator[tuple[Kernel, Communication, float, float]]":
        """A part's collectives: of each, its kernel, the message, their number in the step, and this part's share of
        them."""
        live_ranges = self.intra_op.on_mesh.live_ranges
        for kernel, parts in self._collectives:
            what = kernel.collective
            if part not in parts or what is None:
                continue
            runs, count = parts[part], self.ops[kernel.position].count
            is_moved_out = len(live_ranges.loops_at[kernel.position]) > len(kernel.loops)
            if is_moved_out:  # a stack as a whole, before its loop
                count //= runs.whole
            yield kernel, what, float(count), runs.num / runs.whole

    @property
    def all_collectives(self) -> Iterator[Kernel]:
        """The collectives of all parts, and of none."""
        return (kernel for kernel, _ in self._collectives)

    @property
    def ops(self) -> tuple[FlatOp, ...]:
        """The ops of the flat program."""
        return self.intra_op.step_problem.graph.folded.program.ops

    def site_of(self, kernel: Kernel) -> Site:
        """The op of the step, or of its loop's body, whose kernel it is."""
        return outermost(self.ops[kernel.position], self.step.loop)

    @property
    def _lowered(self) -> Lowered:
        return self.device.lowered

    @cached_property
    def _stacks(self) -> frozenset[int]:
        """The kernels that only stack a result of a loop's body."""
        kernels = enumerate(self._lowered.kernels)
        return frozenset(
            k
            for k, one in kernels
            if self.ops[one.position].name == "stack" and len(one.reads) == len(one.makes) == 1
        )

    @cached_property
    def _loop(self) -> Loops:
        """The loop over parts of the batch. A part of the step runs one of its iterations."""
        return (positions_of_loop(self.intra_op.step_problem.graph.folded.program, self.step.loop),)

    @cached_property
    def _runs(self) -> "list[Mapping[Part, Runs]]":
        """By kernel, the parts that run it."""
        return self._runs_of(self._lowered)

    @cached_property
    def _collectives(self) -> "tuple[tuple[Kernel, Mapping[Part, Runs]], ...]":
        """The collectives before the compiler combines them, with the parts that run them. A combined one may be of
        several parts: each of its members takes a share of it."""
        apart = self.device.apart
        joined = {b: kernel for kernel in self._lowered.kernels for b in kernel.makes}
        return tuple(
            (_shared(kernel, joined[kernel.makes[0]]), runs)
            for kernel, runs in zip(apart.kernels, self._runs_of(apart), strict=True)
            if kernel.collective is not None and kernel.collective.kind not in TRANSFERS
        )

    def _runs_of(self, lowered: Lowered) -> "list[Mapping[Part, Runs]]":
        """By kernel, the parts that run it. A kernel of no part, such as an addition to a sum, belongs to the parts of
        its operands."""
        found: list[Mapping[Part, Runs]] = []
        of_buffer: dict[int, Mapping[Part, Runs]] = {}
        for kernel in lowered.kernels:
            runs = self.of_site.get(self.site_of(kernel), {})
            if not runs:
                read = (of_buffer.get(b, {}) for b in kernel.reads)
                runs = {part: Runs(1, 1) for each in read for part in each}
            found.append(runs)
            of_buffer |= dict.fromkeys(kernel.makes, runs)
        return found


def _shared(kernel: Kernel, joined: Kernel) -> Kernel:
    """A collective with its share of the combined one's time, by bytes."""
    assert kernel.collective is not None
    assert joined.collective is not None
    share = kernel.collective.num_bytes / max(joined.collective.num_bytes, 1.0)
    return replace(kernel, time=joined.time * share)


def length_of(step: PipelineStep, site: Site) -> int:
    """How often the step runs the body of an op."""
    op: Op = step.step.graph.ops[site[0]]
    if len(site) > 1:
        op = op.bodies["jaxpr"][0].ops[int(site[3])]
    return int(op.params.get("length", 1))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a loop's body in a part and in the step; one of one for kernels outside of loops.

    Attributes:
      num: runs in the part.
      whole: runs in the step.
      is_within: whether each run reads and writes its layer inside of stacks that lie outside of the part. Then the
        part hands on no stacks, and adds none to others.
      rounds: number of times that the part runs through layers, other ones each time.
    """

    num: int
    whole: int
    is_within: bool = False
    rounds: int = 1

    @property
    def is_opened(self) -> bool:
        """True if a loop of the step is none in the part."""
        return self.num == 1 < self.whole


class _AlonePart:
    """Kernels of a part by themselves, with the buffers that they read and make.

    A layer of a sum is copied out of the sum's stack before the layer's term is added. If the loop's counter alone says
    which layer, the compiler's scheduler takes this copy for a transfer and hides it behind the whole body. Then all
    these copies are live at the end of the body, and all terms, too, if the body has no collectives to hide behind
    additions.

    Attributes:
      alone: the kernels.
      early_bytes: bytes of such copies.
      handed: the buffers of `alone` that other parts make or read.
    """

    def __init__(
        self,
        lowered: Lowered,
        own: Mapping[int, Runs],
        around: Loops,
        stacks: frozenset[int],
        has_scheduler: bool,
        is_program: bool,
    ) -> None:
        kernels = lowered.kernels
        opened = {
            kernels[k].loops[-2] for k, runs in own.items() if runs.is_opened and len(kernels[k].loops) > 1
        }
        self.left_out = frozenset((*around, *opened))
        same = {
            kernels[k].makes[0]: kernels[k].reads[0]
            for k, runs in own.items()
            if k in stacks and runs.is_opened
        }
        elsewhere = (kernel for k, kernel in enumerate(kernels) if k not in own)
        handed_on = {same.get(b, b) for kernel in elsewhere for b in kernel.reads}
        self.lowered, self.own, self.around, self.is_program = lowered, own, around, is_program
        self.added = {
            k for k in stacks & own.keys() if own[k].is_within and handed_on.isdisjoint(kernels[k].makes)
        }
        self.early = {k for k in self.added if has_scheduler and own[k].rounds == 1 and not own[k].is_opened}
        self.early_bytes = sum(map(self._layer_bytes, self.early))
        talking = {kernels[k].loops for k in own if kernels[k].collective is not None}
        self.late = {k for k in self.early if kernels[k].loops not in talking}
        left = self._in_order(kernels, own, stacks - self.late)
        self.number = {k: n for n, k in enumerate(left)}
        read = {same.get(b, b) for k in left for b in kernels[k].reads}
        maker = {b: k for k in left for b in kernels[k].makes}
        buffers = sorted(read | maker.keys())

        def here(b: int) -> Buffer:
            buffer = lowered.buffers[b]
            loops = self._inside(buffer.loops)
            if b not in maker or b in handed_on:
                return replace(buffer, num_bytes=0.0, loops=loops)
            one = own[maker[b]]
            is_stack = len(loops) < len(self._inside(kernels[maker[b]].loops))
            share = one.num / one.whole if is_stack else 1.0
            if one.is_within and maker[b] in stacks:
                share = 0.0
            return replace(buffer, num_bytes=share * buffer.num_bytes, loops=loops)

        self.buffer = {b: n for n, b in enumerate(buffers)}
        alone = [self._kernel(k, own[k], same) for k in left]
        self.alone = Lowered(tuple(alone), tuple(map(here, buffers)))
        self.handed = frozenset(self.buffer[b] for b in buffers if b not in maker or b in handed_on)

    @staticmethod
    def _in_order(kernels: Sequence[Kernel], own: Mapping[int, Runs], stacks: frozenset[int]) -> list[int]:
        """The part's kernels in order. A stack is written as soon as its operand is made; without a loop there is
        none."""
        maker = {b: k for k in own for b in kernels[k].makes}
        behind: dict[int, list[int]] = {}
        for k in own:
            if (
                k in stacks
                and not own[k].is_opened
                and (made_by := maker.get(kernels[k].reads[0])) is not None
            ):
                behind.setdefault(made_by, []).append(k)
        written = {k for each in behind.values() for k in each}
        first = [k for k in own if k not in written and not (k in stacks and own[k].is_opened)]
        return [k for one in first for k in (one, *behind.get(one, ()))]

    def _kernel(self, k: int, runs: Runs, same: Mapping[int, int]) -> Kernel:
        kernel = self.lowered.kernels[k]
        after = self._beside(kernel) if k in self.late else kernel.after
        return replace(
            kernel,
            workspace_bytes=self._workspace(kernel, runs)
            + (self._layer_bytes(k) if k in self.added - self.early else 0.0),
            reads=tuple(dict.fromkeys(self.buffer[same.get(b, b)] for b in kernel.reads)),
            makes=tuple(self.buffer[b] for b in kernel.makes),
            after=tuple(self.number[a] for a in after if a in self.number),
            loops=self._inside(kernel.loops),
            sliced=tuple(self.buffer[same.get(b, b)] for b in kernel.sliced if b in kernel.reads),
            turned=tuple(
                replace(
                    copy,
                    buffer=self.buffer[same.get(copy.buffer, copy.buffer)],
                    num_parts=runs.num if copy.is_part and not runs.is_opened else 1,
                )
                for copy in kernel.turned
            ),
        )

    def _beside(self, kernel: Kernel) -> list[int]:
        """The other kernels of the body."""
        kernels = self.lowered.kernels
        return [k for k in self.number if kernels[k].loops == kernel.loops and k not in self.late]

    def _workspace(self, kernel: Kernel, runs: Runs) -> float:
        """The workspace of a kernel in the part, with the layers that are copied for it. A product does not read a
        layer in place if only the run knows its index. Nor does a program of one microbatch read its part of the batch
        in place: it gets the index as an operand, and has no loop over microbatches."""
        if self.is_program and kernel.sliced and not self._inside(kernel.loops):
            return min(kernel.workspace_bytes, WORKSPACE_BYTES)
        copied = [b for b in kernel.sliced if runs.is_within and (runs.rounds > 1 or self._is_residual(b))]
        copies = sum(self.lowered.buffers[b].num_bytes for b in copied) / runs.whole
        is_sliced = kernel.workspace_bytes == SLICED_WORKSPACE_BYTES and not runs.is_opened
        if is_sliced and (not kernel.sliced or len(copied) < len(kernel.sliced)):
            return kernel.workspace_bytes + copies
        return min(kernel.workspace_bytes, WORKSPACE_BYTES) + copies

    def _is_residual(self, b: int) -> bool:
        return not set(self.around).isdisjoint(self.lowered.buffers[b].loops)

    def _layer_bytes(self, k: int) -> float:
        """The bytes of one layer of a kernel's stack."""
        (b,) = self.lowered.kernels[k].makes
        return self.lowered.buffers[b].num_bytes / self.own[k].whole

    def _inside(self, loops: Loops) -> Loops:
        return tuple(loop for loop in loops if loop not in self.left_out)
