"""The probes that calibration times, with the times that the cost model predicts for them.

A *probe* is one small program that runs many times on every device at once. As in training, the devices share
their power, their host and, if simulated, their cores. A probe has a *group*, the probes that fit one set of a
cluster's numbers (see `calibration.fit`), and `model_s`, the seconds that the cost model predicts for one round.
`measure` holds its program.

Besides its own kernel, a round has small kernels: the loop's counter, and the one that passes the result on. The
number of these was read from programs compiled by XLA:GPU; each counts as a launch.

Sizes range from launch-bound kernels to a saturated device. The ladder does not depend on the machine's speed;
`measure.measure_all` leaves out the probes that would take too long on a slow one.
"""

from dataclasses import dataclass
from itertools import product

from autoshard.cost_model import compute
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.compute import kernel_s
from autoshard.cost_model.units import format_bytes

KIB, MIB = 2**10, 2**20

FLOAT32_BYTES = 4

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
"""Bytes per element of the dtypes of timed matrix products; "float8" is float8_e4m3fn."""

VECTOR_ADDS = 64
"""Multiply-adds per element of a `VectorProbe`: 128 FLOP for 8 bytes, so that arithmetic outweighs memory on every
preset except the L4. At sustained rates the ordinary cores of an H100 do 16 FLOP in the time of a byte, an L4's 79."""


@dataclass(frozen=True, slots=True)
class LaunchProbe:
    """An almost empty kernel, in a chain of such kernels."""

    group: str = "launch"

    def model_s(self, cluster: Cluster) -> float:
        return cluster.device.launch_s

    def __str__(self) -> str:
        return "launch"


@dataclass(frozen=True, slots=True)
class StreamProbe:
    """A memory-bound kernel on float32 arrays.

    Attributes:
      kind: "scale" (x = c x), "triad" (x = a + c x) or "sum" (x[0] = sum(x)).
      num_bytes: size of one array.
    """

    kind: str
    num_bytes: int
    group: str = "memory"

    @property
    def num_passes(self) -> int:
        """Number of reads and writes of whole arrays."""
        return {"sum": 1, "scale": 2, "triad": 3}[self.kind]

    def model_s(self, cluster: Cluster) -> float:
        num_small = {"sum": 3, "scale": 1, "triad": 1}[self.kind]
        seconds = kernel_s(cluster.device, self.num_passes * self.num_bytes)
        return float(seconds) + num_small * cluster.device.launch_s

    def __str__(self) -> str:
        return f"{self.kind} of {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True)
class VectorProbe:
    """A kernel bound by the ordinary cores: `VECTOR_ADDS` multiply-adds per float32."""

    num_bytes: int
    group: str = "vector"

    def model_s(self, cluster: Cluster) -> float:
        flops = 2.0 * VECTOR_ADDS * self.num_bytes / FLOAT32_BYTES
        return float(kernel_s(cluster.device, 2 * self.num_bytes, flops)) + cluster.device.launch_s

    def __str__(self) -> str:
        return f"multiply-adds on {format_bytes(self.num_bytes)}"


@dataclass(frozen=True, slots=True)
class ProductProbe:
    """A matrix product, [batch, m, k] by [batch, k, n], and a kernel that touches its result."""

    dtype: str
    m: int
    k: int
    n: int
    batch: int = 1

    @property
    def group(self) -> str:
        return self.dtype

    @property
    def result_dtype(self) -> str:
        """The dtype that training uses for the result: float8 products are summed in a wider dtype."""
        return "bfloat16" if self.dtype == "float8" else self.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of both operands and the result."""
        read = (self.m * self.k + self.k * self.n) * ITEM_BYTES[self.dtype]
        return self.batch * (read + self.m * self.n * ITEM_BYTES[self.result_dtype])

    def model_s(self, cluster: Cluster) -> float:
        device = cluster.device
        sizes = compute.Product(self.batch, self.m, self.n, self.k)
        seconds = compute.product_s(device, sizes, self.num_bytes, device.peak_flops_per_s(self.dtype))
        return float(seconds) + device.launch_s

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{self.dtype} product {batch}{self.m} x {self.k} x {self.n}"


@dataclass(frozen=True, slots=True)
class CollectiveProbe:
    """A collective over axes of the mesh (nodes, devices of a node), and a kernel that touches its result.

    Attributes:
      kind: XLA's name of the collective.
      axes: (1,) inside a node, (0,) between nodes, (0, 1) over all devices.
      num_bytes: per device, the larger of input and output.
    """

    kind: str
    axes: tuple[int, ...]
    num_bytes: int

    @property
    def group(self) -> str:
        return "intra" if self.axes == (1,) else "inter"

    def model_s(self, cluster: Cluster) -> float:
        mesh = MeshModel(cluster, (cluster.num_nodes, cluster.devices_per_node))
        return float(mesh.time_s(self.kind, self.axes, self.num_bytes)) + cluster.device.launch_s

    def __str__(self) -> str:
        where = {(1,): "inside a node", (0,): "between nodes", (0, 1): "over all"}[self.axes]
        return f"{self.kind} of {format_bytes(self.num_bytes)} {where}"


@dataclass(frozen=True, slots=True)
class HostCopyProbe:
    """A copy between a device and pinned memory of its host; all devices copy at once."""

    to_host: bool
    num_bytes: int
    group: str = "host_link"

    def model_s(self, cluster: Cluster) -> float:
        link = cluster.host_link
        return link.latency_s + self.num_bytes / link.sustained_bytes_per_s

    def __str__(self) -> str:
        return f"{format_bytes(self.num_bytes)} {'to' if self.to_host else 'from'} the host"


type Probe = LaunchProbe | StreamProbe | VectorProbe | ProductProbe | CollectiveProbe | HostCopyProbe


@dataclass(frozen=True, slots=True)
class Timing:
    """A probe and the seconds that one round of it took."""

    probe: Probe
    seconds: float


# --- the ladders


_SHAPES = (
    (128, 128, 128, 1),
    (256, 256, 256, 1),
    (512, 512, 512, 1),
    (1024, 1024, 1024, 1),
    (2048, 2048, 2048, 1),
    (4096, 4096, 4096, 1),
    (8192, 8192, 8192, 1),
    (16, 4096, 4096, 1),
    (8192, 768, 3072, 1),
    (16384, 2048, 8192, 1),
    (1024, 64, 1024, 96),
)
"""(m, k, n, batch): squares, a skinny product, MLPs of models of width 768 and 2048, attention with heads of 64."""

_QUICK_SHAPES = ((128, 128, 128, 1), (512, 512, 512, 1), (2048, 2048, 2048, 1), (1024, 128, 512, 1))

_SCARCE_SHAPES = ((256, 256, 256, 1), (1024, 1024, 1024, 1), (2048, 2048, 2048, 1), (4096, 4096, 4096, 1))
"""Shapes for dtypes that few steps use: float64 and float8."""

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def ladder(cluster: Cluster, quick: bool) -> tuple[Probe, ...]:
    """All probes for a cluster of this form, small ones first in each group.

    Args:
      cluster: the nearest preset with the attached devices' nodes; its nodes and dtypes decide the probes.
      quick: whether to use fewer and smaller probes, for a first look or a test.
    """
    probes: list[Probe] = [LaunchProbe()]
    sizes = (
        (64 * MIB,) if quick else (128 * MIB, 256 * MIB, 512 * MIB)
    )  # larger than the caches: 50 MB on H100
    probes += [StreamProbe(kind, size) for size, kind in product(sizes, ("scale", "triad", "sum"))]
    probes += [VectorProbe(size) for size in ((MIB, 4 * MIB) if quick else (MIB, 8 * MIB, 64 * MIB))]
    probes += [
        ProductProbe(dtype, *shape) for dtype in _dtypes(cluster, quick) for shape in _shapes(dtype, quick)
    ]
    probes += _collectives(cluster, quick)
    sizes = (MIB, 16 * MIB) if quick else (64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    probes += [HostCopyProbe(to_host, size) for size, to_host in product(sizes, (True, False))]
    return tuple(probes)


def _dtypes(cluster: Cluster, quick: bool) -> tuple[str, ...]:
    if quick:
        return ("float32", "bfloat16")
    has_float8 = "float8" in dict(cluster.device.flops_per_s)
    return ("float32", "bfloat16", "float16", "float64", *(("float8",) if has_float8 else ()))


def _shapes(dtype: str, quick: bool) -> tuple[tuple[int, int, int, int], ...]:
    if quick:
        return _QUICK_SHAPES
    return _SCARCE_SHAPES if dtype in ("float64", "float8") else _SHAPES


def _collectives(cluster: Cluster, quick: bool) -> list[Probe]:
    axes: list[tuple[int, ...]] = [(1,)] if cluster.devices_per_node > 1 else []
    if cluster.num_nodes > 1:
        axes += [(0,), (0, 1)] if cluster.devices_per_node > 1 else [(0,)]
    sizes = (64 * KIB, 4 * MIB) if quick else (4 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB, 128 * MIB)
    return [CollectiveProbe(kind, over, size) for over in axes for kind, size in product(_KINDS, sizes)]
