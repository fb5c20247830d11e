"""Plans of all kinds have in common: a file each, and when two of them are equal."""

import json
import os
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

from autoshard.cost_model.whole_file import write_whole
from autoshard.search.plan.json_file import read_file, sealed

NO_DECISIONS = frozenset({"step", "jax", "options", "meshes", "estimates", "outline", "seal"})
"""Keys of a plan's file that two equal plans may have different values of."""


class SavedPlan(ABC):
    """A plan that is kept as JSON.

    Two plans are equal if they say to do the same: equal decisions (schedule and stages included) for the same traced step
    on an equal cluster under an equal memory cap. The rest does not count: the time of the search, its options and meshes,
    the estimates, the certified gap, and the version of JAX. Equal plans have equal hashes.
    """

    __slots__ = ()

    step: str
    fingerprint: str
    is_sealed: bool  # whether the estimates are those of the rest: an edit by hand breaks the seal

    @property
    def is_edited(self) -> bool:
        """Whether the estimates may be those of another plan."""
        return not self.is_sealed

    @abstractmethod
    def _values(self) -> dict[str, Any]:
        """The plan as JSON-ready values, without a seal."""

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; the same plan gives the same values in the same order."""
        values = self._values()
        return sealed(values) if self.is_sealed else values

    def _read_from(self, file: dict[str, Any]) -> Self:
        """This plan, sealed only if the file that it was read from is."""
        is_sealed = file.get("seal") == sealed(self._values())["seal"]
        return cast(Self, replace(cast(Any, self), is_sealed=is_sealed))

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
        """Reads a plan that `save` wrote.

        Raises:
          InputError: no such file, or it cannot be read.
          PlanError: not JSON, or not a plan of this schema; says where.
        """
        return cls.from_json(read_file(path), str(path))

    def __eq__(self, other: object) -> bool:
        """Whether both plans say to do the same."""
        return self._decided == other._decided if isinstance(other, SavedPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._decided)

    @property
    def _decided(self) -> str:
        """The part of the plan's file that the program depends on."""
        said = {key: value for key, value in self.to_json().items() if key not in NO_DECISIONS}
        return json.dumps(said, sort_keys=True)
