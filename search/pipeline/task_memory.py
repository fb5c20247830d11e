"""The kernels of a stage's programs: the temporaries of each program, and its collectives.

A task runs for each part of the batch that a replica has. Work that runs once in a step is shared by the replicas.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.ir.graph import Op, Site
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.part_kernels import PartKernels, Runs, length_of
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.plan.collective_totals import EqualCollectives
from autoshard.search.plan.schedule import TaskKind
from autoshard.search.plan.stage_programs import StageProgram, StagePrograms


@dataclass(frozen=True, eq=False)
class ProgramKernels:
    """The kernels of a replica's device, by program.

    Attributes:
      intra_op: the strategies of a replica's devices.
      step: the step in parts, cut as the programs are.
      programs: the programs of its stages.
    """

    intra_op: IntraOp
    step: PipelineStep
    programs: StagePrograms

    def temporary_bytes(self, program: StageProgram, limit_bytes: float) -> float:
        """The peak of a program's temporaries: buffers that are neither its operands nor its results."""
        needed = self._of_program.temporary_bytes(program, limit_bytes)
        is_task = program in self.programs.tasks.values()
        return needed if is_task else needed / self.programs.num_replicas

    def collectives(self, program: StageProgram) -> Iterator[EqualCollectives]:
        """A program's collectives in a step, between a replica's devices."""
        once, names = program in self.programs.epilogue, AXIS_NAMES[len(self.intra_op.mesh_shape)]
        for kernel, what, count, share in self._of_program.collectives(program):
            own = share / self.programs.num_replicas
            axes, num = tuple(names[a] for a in what.axes), count if once else count * own
            yield EqualCollectives(
                what.kind, axes, num, count * own * what.num_bytes, own * kernel.time.seconds
            )

    @cached_property
    def _of_program(self) -> PartKernels[StageProgram]:
        return PartKernels(
            self.intra_op, self.intra_op.device_of_tasks, self.step, self._of_site(), is_program=True
        )

    def _of_site(self) -> dict[Site, dict[StageProgram, Runs]]:
        found: dict[Site, dict[StageProgram, int]] = {}
        for program in self.programs.programs:
            first = self.programs.tasks.get((program.stage, TaskKind.FORWARD))
            again = set(first.graph.ops) if first is not None and first is not program else set[Op]()
            for op in program.graph.ops:
                site = self.step.site_of(op)
                if site is None or op in again:
                    continue
                runs = found.setdefault(site, {})
                runs[program] = runs.get(program, 0) + int(op.params.get("length", 1))
        return {
            site: {program: Runs(num, length_of(self.step, site)) for program, num in runs.items()}
            for site, runs in found.items()
        }
