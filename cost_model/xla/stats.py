"""Memory and traffic of a compiled program, in numbers that `verify` compares and that add up over programs."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost_model.xla import hlo
from autoshard.cost_model.xla.compiler import Compiled

Traffic = tuple[int, int]
"""(Arrays moved, bytes per device) in one step."""


@dataclass(frozen=True, slots=True)
class CompiledStats:
    """The memory and the traffic of a compiled program, per device.

    Attributes:
      argument_bytes: size of the arguments.
      fresh_output_bytes: size of the results that reuse no argument's buffer.
      temporary_bytes: peak of all other buffers on the device.
      host_bytes: size of all buffers in host memory.
      collectives: traffic by kind and mesh axes.
      host_copies: traffic by direction, `hlo.TO_HOST` and `hlo.FROM_HOST`.
    """

    argument_bytes: int
    fresh_output_bytes: int
    temporary_bytes: int
    host_bytes: int
    collectives: Mapping[tuple[str, tuple[str, ...]], Traffic]
    host_copies: Mapping[str, Traffic]

    @classmethod
    def of(cls, compiled: Compiled, mesh: Mapping[str, int]) -> "CompiledStats":
        """The numbers of one compiled program.

        Args:
          compiled: the compiler's answer.
          mesh: the size of each mesh axis by name, outermost first.
        """
        return cls(
            compiled.argument_bytes,
            compiled.output_bytes - compiled.alias_bytes,
            compiled.temporary_bytes,
            compiled.host_bytes,
            hlo.totals(hlo.collectives(compiled.text, mesh)),
            _by_direction(hlo.host_copies(compiled.text)),
        )

    @property
    def peak_bytes(self) -> int:
        """Peak of the device memory."""
        return self.argument_bytes + self.fresh_output_bytes + self.temporary_bytes


def _by_direction(copies: tuple[hlo.HostCopy, ...]) -> dict[str, Traffic]:
    found = {}
    for direction in (hlo.TO_HOST, hlo.FROM_HOST):
        own = [c for c in copies if c.direction == direction]
        if own:
            found[direction] = (sum(c.count for c in own), sum(c.count * c.num_bytes for c in own))
    return found
