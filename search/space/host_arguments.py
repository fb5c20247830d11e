"""The arguments of a step that may rest in host memory: those that the user names, and those that the search may try."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError, closest
from autoshard.cost_model.units import format_bytes
from autoshard.search.ir.graph import Role, Step
from autoshard.search.memory.offload import MIN_BYTES, may_rest_on_host
from autoshard.search.mesh_problem import ROUNDING, MeshProblem
from autoshard.search.options import OFFLOADED, RESIDUALS, Options

MOVED_SHARE = 0.05
"""Share of the cap that arguments must take for their offloading to be tried. Source: a choice of ours."""


@dataclass(frozen=True, eq=False)
class HostArguments:
    """The arguments of a step that may rest in host memory.

    Attributes:
      step: the traced step.
      cluster: the cluster that will run it.
      options: the cap, and the user's wishes.
    """

    step: Step
    cluster: Cluster
    options: Options

    @cached_property
    def asked_for(self) -> frozenset[int]:
        """The arguments that the user wants on the host.

        Raises:
          InputError: the step has no such argument, or the cluster no such memory.
        """
        kinds = self.options.offload if isinstance(self.options.offload, tuple) else ()
        if kinds and not self.cluster.host_bytes_per_node:
            raise InputError(
                f"offload={kinds} wants memory on the host, and {self.cluster.name} has none that can be pinned "
                "(host_memory_per_node is 0). Leave offload out"
            )
        for kind in (k for k in kinds if k != RESIDUALS):
            if not self.of_kinds([kind]):
                raise InputError(
                    f"offload={kinds}: {self.step.name} has no {self._called(kind)} that can rest on the host, of "
                    f"{format_bytes(MIN_BYTES)} or more and handed on by nothing but its own new values. A batch cannot; a "
                    "frozen weight that looks like one is named by state=. Leave it out, or "
                    f"name some of {(*OFFLOADED, RESIDUALS)} or the path of an argument{self._such_as()}"
                )
        return self.of_kinds(kinds)

    def check_room(self, on_meshes: Sequence[MeshProblem]) -> None:
        """Checks that the host has room for the arguments that the user wants there.

        Raises:
          InfeasibleError: no mesh leaves enough room on the host.
        """
        pins = self.options.pins or {}
        least_bytes, limit_bytes = min(
            (one.host.least_bytes(one.pinned(pins)), one.host_limit_bytes) for one in on_meshes
        )
        if self.asked_for and least_bytes > limit_bytes:
            raise InfeasibleError(
                f"offload={self.options.offload} needs {format_bytes(least_bytes)} of host memory for each device of "
                f"{self.cluster.name} at the least, and the host has {format_bytes(limit_bytes)} for each device. Offload "
                "less, use more nodes, or say how much memory they have (host_memory_per_node)"
            )

    def of_kinds(self, kinds: Sequence[str]) -> frozenset[int]:
        """The arguments with some roles or under some paths."""
        roles = {OFFLOADED.get(kind) for kind in kinds}
        inside = tuple(kind + end for kind in kinds for end in (".", "["))
        names = {i: self.step.arguments[i].name for i in self._may_rest}
        is_named = {i for i, name in names.items() if name in kinds or name.startswith(inside)}
        return frozenset(i for i, role in self._may_rest.items() if role in roles or i in is_named)

    def is_worth_moving(self, arguments: frozenset[int]) -> bool:
        """True if the arguments take a share of the cap even in as many parts as there are devices."""
        return self.least_bytes(arguments) > MOVED_SHARE * self.options.memory_bytes

    def least_bytes(self, arguments: frozenset[int]) -> float:
        """Bytes per device of arguments that are split over all devices."""
        return sum(self._num_bytes[i] for i in arguments) / self.cluster.num_devices

    def shard_bytes(self, role: Role) -> tuple[float, ...]:
        """Bytes per device of each argument with a role that may rest on the host, split over all devices."""
        may_rest = (i for i, own in self._may_rest.items() if own is role)
        return tuple(self._num_bytes[i] / self.cluster.num_devices for i in may_rest)

    def is_too_much(self, hosted: frozenset[int], working_bytes: float) -> bool:
        """True if the arguments on the device leave no room for the work, even if all devices share them."""
        there = (num_bytes for i, num_bytes in enumerate(self._num_bytes) if i not in hosted)
        held_bytes = sum(there) / self.cluster.num_devices
        return held_bytes + working_bytes > (1 + ROUNDING) * self.options.memory_bytes

    @cached_property
    def _may_rest(self) -> dict[int, Role]:
        return may_rest_on_host(self.step)

    @cached_property
    def _num_bytes(self) -> tuple[int, ...]:
        """Bytes by argument, with those that it represents."""
        values = self.step.graph.values
        return tuple(a.repeats * values[v].num_bytes for v, a in self.step.inputs)

    def _called(self, kind: str) -> str:
        """A kind as the user named it; an unknown name with those that are close to it."""
        if kind in OFFLOADED:
            return kind
        known = [*OFFLOADED, RESIDUALS, *(argument.name for argument in self.step.arguments)]
        return f"argument {kind!r}{closest(kind, [name for name in known if name != kind])}"

    def _such_as(self) -> str:
        """The path of an argument that `offload` may name, if there is one."""
        first = next(iter(self._may_rest), None)
        return "" if first is None else f", such as {self.step.arguments[first].name}"
