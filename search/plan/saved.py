"""What plans of all kinds have in common: a file each, and the step that they were made for."""

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.whole_file import write_whole
from autoshard.search.ir.graph import Step
from autoshard.search.plan.json_file import read_file
from autoshard.search.problem.fingerprint import fingerprint


class SavedPlan(ABC):
    """A plan that is kept as JSON."""

    __slots__ = ()

    step: str
    fingerprint: str

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; the same plan gives the same values in the same order."""

    @classmethod
    @abstractmethod
    def from_json(cls, data: Any, place: str = "plan") -> Self:
        """A plan from JSON-ready values.

        Raises:
          PlanError: a key is missing or of the wrong type; names it.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON: the file is whole or not there.

        Raises:
          InputError: the path cannot be written.
        """
        write_whole(Path(path), json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", "the plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
          InputError: no such file, or it cannot be read.
          PlanError: not JSON, or not a plan of this schema; says where.
        """
        return cls.from_json(read_file(path), str(path))

    def check_is_for(self, step: Step, place: str) -> None:
        """That it was made for this step.

        Raises:
          PlanError: it was made for another one.
        """
        if self.fingerprint != (own := fingerprint(step)):
            raise PlanError(
                f"{place} was made for another step (its {self.step!r} has fingerprint {self.fingerprint}, this "
                f"{step.name!r} has {own}). Search again for this one"
            )
