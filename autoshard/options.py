"""The options of a user: one value for `search`, `parallelize` and the command line.

Each function has the options as keywords, with their types and defaults. `among` picks them out of a function's keywords or
the command line's, and `Options.of` makes one value of them. Everything behind the public functions takes that value.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autoshard.cost_model.errors import InputError
from autoshard.pins import Pins
from autoshard.progress import Progress

AUTO = "auto"
"""The value of `stages=` that searches for the best number of stages, or one program, however long that takes."""

NEVER, IN_DOUBT, ALWAYS = "never", "auto", "always"
"""The values of `verify=`: no plan is compiled; each one that may exceed its cap, where the compiler is there; each one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A user's options, as `search` and `parallelize` document them; None leaves the choice to the search."""

    cluster: Any = None
    memory: str | int | None = None
    mesh: Sequence[int] | None = None
    pin: Pins | None = None
    state: str | Sequence[str] | None = None
    donate: str | Sequence[str] | None = None
    remat: str | None = None
    stages: int | str | None = None
    schedule: str | None = None
    microbatches: int | None = None
    executor: str | None = None
    offload: Sequence[str] | str | None = None
    plan: Any = None
    like: Any = None
    time_limit_s: float | None = None
    verify: str = IN_DOUBT
    target_config: Any = None
    devices: Sequence[Any] | None = None
    static_argnums: int | Iterable[int] | None = None
    static_argnames: str | Iterable[str] | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise InputError(f"wanted a positive number of seconds, got time_limit_s={self.time_limit_s!r}")

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> "Options":
        """The options among a function's keywords, of types that a file can hold: NumPy's whole numbers as Python's."""
        given = {name: value for name, value in among(keywords).items() if _says(value)}
        for name in ("stages", "microbatches"):
            if not isinstance(given.get(name, ""), str):
                given[name] = int(given[name])
        if "mesh" in given:
            given["mesh"] = tuple(map(int, given["mesh"]))
        return cls(**given)

    @property
    def num_stages(self) -> int | None:
        """The number of stages that the user asks for; None to search it."""
        return self.stages if isinstance(self.stages, int) else None


def _says(value: Any) -> bool:
    """True if an option is given: no pins at all are none."""
    return value is not None and not (isinstance(value, Mapping) and not value)


def among(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The options among keywords, as they are."""
    return {f.name: keywords[f.name] for f in fields(Options) if f.name in keywords}
