"""What the attached devices are, as the name of a cluster."""

from collections.abc import Sequence
from typing import Any

from cost_model.errors import ClusterError

_GPU_NAMES = (
    ("V100-SXM2-16GB", "V100-16GB"),
    ("V100-SXM2-32GB", "V100-32GB"),
    ("V100-SXM3-32GB", "V100-32GB"),
    ("A100-SXM4-40GB", "A100-40GB"),
    ("A100-SXM4-80GB", "A100-80GB"),
    ("A100 80GB", "A100-80GB"),
    ("H100", "H100-80GB"),
    ("H200", "H200"),
    ("B200", "B200"),
    ("L4", "L4"),
)
"""Part of a device kind, as the CUDA driver names it -> the preset."""


def cluster_name(devices: Sequence[Any]) -> str:
    """The preset that describes the attached devices, such as `8xCPU`.

    Raises:
      ClusterError: devices of no known kind.
    """
    first = devices[0]
    if first.platform == "cpu":
        return f"{len(devices)}xCPU"
    for part, preset in _GPU_NAMES:
        if part in first.device_kind:
            return f"{len(devices)}x{preset}"
    raise ClusterError(
        f"no preset describes the attached {first.device_kind!r} devices: pass cluster=, a preset of a similar device or a "
        "JSON file that describes yours"
    )
