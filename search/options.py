"""The options of a search, and the meshes that it tries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod
from types import MappingProxyType
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.meshes import mesh_shapes
from autoshard.search.ir.graph import Role, Step
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.solver.clock import PROCESSOR, Deadline, SearchClock, WorkClock

DEFAULT_TIME_LIMIT_S = 15.0
"""Nominal seconds (`search.solver.clock`) for all meshes together. The part that is not proven by then is the plan's
gap."""

LEAST_SHARE = 0.05
"""Smallest share of a search's time that a later search for the same step gets. Source: derived for the searches of
`autoshard.time_share`, which all end at `LATEST`."""

LATEST = 1.25
"""Multiple of the time limit after which no search for pipelines begins. A search for two forms of attention may take so
long. Source: the promise that a search ends within a quarter of its limit."""

OFFLOADED = MappingProxyType(
    {
        "optimizer_state": Role.OPTIMIZER_STATE,
        "frozen_weights": Role.FROZEN,
        "parameters": Role.PARAMETER,
    }
)
"""Kinds of arguments that may rest in host memory, by the names that users give. The kind that is copied least often comes
first: an optimizer's state comes and goes once a step, frozen weights come for each phase that reads them, parameters come
as often and go once."""

RESIDUALS = "residuals"
"""The name that users give to residuals that are offloaded until the backward phase."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a search.

    Attributes:
      memory_bytes: the cap per device.
      mesh: sizes of the mesh axes, outermost first; None to search the mesh.
      pins: by pytree path, the `PartitionSpec` in which an argument must rest.
      time_limit_s: processor seconds for the solver; None for `DEFAULT_TIME_LIMIT_S`, which count the same work on
        every machine.
      remat: "never" to recompute only the ops that the step itself recomputes; None to search recomputation.
      microbatches: number of microbatches of a step; None to search it.
      offload: kinds of arrays in host memory (`OFFLOADED` and `RESIDUALS`), or pytree paths of arguments or their
        beginnings; "never" for none, None to search offloading.
      nominal_s: nominal seconds of work, if there is no time limit.
      clock: the clock of a search that goes on; None for a new one.
    """

    memory_bytes: int
    mesh: tuple[int, ...] | None = None
    pins: Mapping[str, Any] | None = None
    time_limit_s: float | None = None
    remat: str | None = None
    microbatches: int | None = None
    offload: tuple[str, ...] | str | None = None
    nominal_s: float = DEFAULT_TIME_LIMIT_S
    clock: SearchClock | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise InputError(f"the memory cap must be positive, got {self.memory_bytes} bytes")
        if not self.limit_s > 0:
            raise InputError(f"the time limit must be positive, got {self.limit_s} s")
        if self.remat not in (None, "never"):
            raise InputError(f'wanted remat="never", or nothing to have it searched, got {self.remat!r}')
        if self.microbatches is not None and self.microbatches < 1:
            raise InputError(f"wanted at least 1 microbatch, got {self.microbatches}")
        if isinstance(self.offload, str) and self.offload != "never":
            raise InputError(
                f'wanted offload="never", some of {(*OFFLOADED, RESIDUALS)} or paths of arguments in a tuple, or nothing to '
                f"have it searched, got {self.offload!r}"
            )

    @property
    def limit_s(self) -> float:
        """Seconds for the solver, by the clock that `new_clock` makes."""
        return self.nominal_s if self.time_limit_s is None else self.time_limit_s

    @property
    def is_limited(self) -> bool:
        """True if the user limits the time."""
        return self.time_limit_s is not None

    @property
    def may_recompute(self) -> bool:
        """True if the search may recompute ops."""
        return self.remat != "never"

    @property
    def may_offload_residuals(self) -> bool:
        """True if the search may offload residuals to the host."""
        return self.offload is None or (not isinstance(self.offload, str) and RESIDUALS in self.offload)

    def until(self, deadline: Deadline) -> "Options":
        """The options of another search for the same step, with the seconds that are left, on the deadline's clock.

        Such a search has `LEAST_SHARE` of the limit in any case.
        """
        left_s = max(deadline.left_s, LEAST_SHARE * self.limit_s)
        if self.is_limited:
            return replace(self, time_limit_s=left_s, clock=deadline.clock)
        return replace(self, nominal_s=left_s, clock=deadline.clock)

    def new_clock(self) -> SearchClock:
        """The clock of a search."""
        return self.clock or (PROCESSOR if self.is_limited else WorkClock())


def candidate_shapes(cluster: Cluster, options: Options) -> tuple[tuple[int, ...], ...]:
    """The meshes to try.

    Raises:
      InputError: the requested mesh does not suit the cluster, or no mesh has an axis that a pin names.
    """
    if options.mesh is None:
        return _shapes_with(cluster, named_axes(options.pins or {}))
    if len(options.mesh) not in AXIS_NAMES or min(options.mesh) < 1:
        raise InputError(f"wanted a mesh of 1 to 3 axes of positive size, got {options.mesh}")
    if prod(options.mesh) != cluster.num_devices:
        raise InputError(
            f"the mesh {options.mesh} has {prod(options.mesh)} devices, the cluster {cluster.name} has "
            f"{cluster.num_devices}. Give its axes sizes whose product is {cluster.num_devices}"
        )
    return (tuple(options.mesh),)


def _shapes_with(cluster: Cluster, named: Mapping[str, str]) -> tuple[tuple[int, ...], ...]:
    """The meshes that have all these axes. If the devices are too few to split into so many axes, some have size one."""
    known = AXIS_NAMES[max(AXIS_NAMES)]
    if unknown := sorted(named.keys() - set(known)):
        raise InputError(
            f"pin {named[unknown[0]]!r}: no mesh has an axis {unknown[0]!r}; axes are named {', '.join(map(repr, known))}"
        )
    num_axes = min(n for n, names in AXIS_NAMES.items() if named.keys() <= set(names))
    shapes = mesh_shapes(cluster, max_axes=max(2, num_axes))
    whole = (cluster.num_devices, *[1] * (num_axes - 1))
    return tuple(s for s in shapes if len(s) >= num_axes) or tuple(sorted(set(permutations(whole))))


def pin_marks(step: Step, pins: Mapping[str, Any]) -> list[str]:
    """Per argument, its pin, which keeps it from being decided with others like it. A plan repeats the pins of its search,
    so that both fold the step alike."""
    return [str(pins.get(argument.name, "")) for argument in step.arguments]


def named_axes(pins: Mapping[str, Any]) -> dict[str, str]:
    """The axes that pins name, and for each an argument that is pinned to it."""
    return {axis: name for name, spec in pins.items() for axis in sorted(_axes_of(spec))}


def _axes_of(spec: Any) -> set[str]:
    return {
        a for entry in spec if entry is not None for a in (entry if isinstance(entry, tuple) else (entry,))
    }
