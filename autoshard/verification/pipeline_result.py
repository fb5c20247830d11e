"""A pipeline's compiled programs beside its plan's predictions for each stage, and the verdict.

Each program of a stage is compiled for the stage's devices. The schedule says how often it runs, and which arrays lie on
these devices at its dispatch. A program's peak is the sum of the bytes held at dispatch, its results and its temporaries.
A stage's peak is the highest peak of the programs on its workers. A stage's collectives are those of its programs, each
counted as often as the program runs.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoshard.search.plan.text_table import plural
from autoshard.verification import table
from autoshard.verification.records import Footprint, ProgramProof, StageProof, exit_status


@dataclass(frozen=True, slots=True)
class PipelineVerification:
    """A pipeline's predictions beside the results of XLA's GPU compiler for its stages' programs.

    Attributes:
      step: the step function's name.
      cluster: the cluster's name.
      schedule: the schedule family's name.
      cap_bytes: the plan's cap per device.
      stages: in the order of the forward phase; one for all, where these are one program.
      programs: of all stages, in the order in which they first run.
      num_compiled: number of programs that were compiled; each other one is equal to one of these.
      seconds: duration of the verification, by part.

    Example:
      >>> proof = verify(step, state, batch, plan=pipeline_plan)  # doctest: +SKIP
      >>> proof.fits, proof.stages[0].compiled.peak_bytes  # doctest: +SKIP
      (True, 1503238553)
    """

    step: str
    cluster: str
    schedule: str
    cap_bytes: int
    stages: tuple[StageProof, ...]
    programs: tuple[ProgramProof, ...]
    num_compiled: int
    seconds: Mapping[str, float] = field(compare=False)

    @property
    def predicted(self) -> Footprint:
        """The predicted footprint of the stage that is predicted to need the largest share of its cap."""
        return max(self.stages, key=lambda stage: stage.predicted.peak_bytes / stage.cap_bytes).predicted

    @property
    def _fullest(self) -> StageProof:
        return max(self.stages, key=lambda stage: stage.fullness)

    @property
    def compiled(self) -> Footprint:
        """The compiled footprint of the stage that needs the largest share of its cap as compiled."""
        return self._fullest.compiled

    @property
    def compiled_cap_bytes(self) -> int:
        """The cap of the stage that needs the largest share of its cap as compiled."""
        return self._fullest.cap_bytes

    @property
    def is_one_program(self) -> bool:
        """Whether all stages are one program for all devices."""
        return len(self.stages) == 1

    @property
    def is_extrapolated(self) -> bool:
        """Always false: all different programs were compiled."""
        return False

    @property
    def fits(self) -> bool:
        """Whether all stages keep to their caps as compiled."""
        return all(stage.fits for stage in self.stages)

    @property
    def differences(self) -> tuple[str, ...]:
        """Exceeded caps and wrong predictions, one sentence each."""
        return tuple(
            f"stage {n}: {difference}"
            for n, stage in enumerate(self.stages)
            for difference in stage.differences
        )

    @property
    def exit_status(self) -> int:
        """0 when it fits as predicted, 1 when something differs, 3 when it does not fit."""
        return exit_status(self.fits, self.differences)

    def to_json(self) -> dict[str, Any]:
        """The verification as JSON-ready values, the verdict included."""
        data = asdict(self)
        for stage in data["stages"]:
            stage["collectives"] = [{**c, "axes": list(c["axes"])} for c in stage["collectives"]]
        programs = [{**asdict(one), "peak_bytes": one.peak_bytes} for one in self.programs]
        return data | {
            "stages": list(data["stages"]),
            "programs": programs,
            "fits": self.fits,
            "differences": list(self.differences),
            "exit_status": self.exit_status,
        }

    def __str__(self) -> str:
        stages = "all stages in one program" if self.is_one_program else plural(len(self.stages), "stage")
        others = "; the others are like one of these" if self.num_compiled < len(self.programs) else ""
        return table.text(
            [
                f"step {self.step} on {self.cluster}: {stages}, schedule {self.schedule}",
                f"compiled {self.num_compiled} of {plural(len(self.programs), 'program')}{others}",
            ],
            table.stages(self.stages),
            table.programs(self.programs),
            table.collectives({f"stage {n}: ": one.collectives for n, one in enumerate(self.stages)}),
            table.times(self.seconds),
            table.verdict(self.fits, self.differences),
        )
