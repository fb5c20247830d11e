"""Bounds of the values in a plan's file, as annotations of its dataclasses.

Pydantic reads them where it checks a file and where it describes one. They do not import it, as that takes a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True, slots=True)
class Bounds:
    """Constraints by the names of Pydantic's core schemas, such as `ge`, each with its value."""

    named: tuple[tuple[str, Any], ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), **dict(self.named)}


NOT_EMPTY = Bounds((("min_length", 1),))

Count = Annotated[int, Bounds((("ge", 0),))]
Size = Annotated[int, Bounds((("gt", 0),))]
Number = Annotated[float, Bounds((("ge", 0), ("allow_inf_nan", False)))]
Share = Annotated[float, Bounds((("ge", 0), ("le", 1)))]
Mesh = Annotated[Mapping[str, Size], NOT_EMPTY]
