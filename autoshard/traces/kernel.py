"""A kernel or copy that a profiler saw."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """A run of a kernel, or a copy.

    Attributes:
      device: the device on which it ran: the file's host, and the plane or the number of the device.
      name: the kernel's name.
      start_s: seconds on the profiler's clock.
      end_s: seconds on the profiler's clock.
      hlo_op: name of the HLO instruction that launched it; empty in a CUDA graph.
      module: name of its HLO module; empty in a CUDA graph, and of copies that no program made.
    """

    device: str
    name: str
    start_s: float
    end_s: float
    hlo_op: str = ""
    module: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """The kernel among those of its module."""
        return self.hlo_op, self.name


CONTAINERS = ("while", "conditional", "call")
"""HLO instructions that only run others; XLA:CPU has an event for them, around those of the others."""

IS_GPU, HOST_PLANE, STREAM = "/device:GPU:", "/host:CPU", "Stream #"
"""Planes of GPUs, the plane of the host's threads, and the lines of streams, by the start of their names."""


def is_container(hlo_op: str) -> bool:
    """Whether an HLO instruction only runs others."""
    return hlo_op.partition(".")[0] in CONTAINERS
