"""The meshes on which stages may stand, and the numbers of parts of the batch that suit them.

All stages have equally many replicas. A stage has 1, 2, 4, ... devices of a node, or whole nodes; a replica has a part of
them, inside a node. All devices together must be able to hold the weights once per replica.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod

from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.meshes import divisors
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes
from autoshard.search.ir.graph import Role, Step
from autoshard.search.memory.microbatches import batch_divisors, batch_halvings
from autoshard.search.pipeline.drafts import Shapes
from autoshard.search.pipeline.pipeline_options import PipelineOptions, stands
from autoshard.search.pipeline.schedules.registry import num_workers
from autoshard.search.pipeline.stage_pins import shapes_for

MAX_MICROBATCHES = 1024
"""Largest number of microbatches of a replica. Source: a choice of ours; schedules have tasks for each of them on each
stage."""


class StageMeshes:
    """The meshes that the stages of a step's pipelines may have, under the options of a search."""

    def __init__(self, step: Step, cluster: AnyCluster, options: PipelineOptions) -> None:
        self.step, self.cluster, self.options = step, cluster, options

    def check(self) -> None:
        """Refuses options that no mesh can meet.

        Raises:
          InputError: stages that share workers would stand on several kinds of nodes.
          InfeasibleError: the state is larger than the memory of all devices.
        """
        if self.options.shares_workers and len(self.cluster.groups) > 1:
            raise self._unlike()
        if not self._may_hold(1):
            raise self._too_large()

    def counts(self) -> list[int]:
        """Numbers of parts, the largest first. If the number of microbatches is given: those of all numbers of replicas, the
        smallest first, as all will be tried."""
        batch, asked = max(batch_divisors(self.step), default=1), self.options.microbatches
        replicas = [n for n, _ in self.all_meshes]
        if asked is not None:
            return [asked * n for n in replicas if batch % (asked * n) == 0 or n == 1]
        return [n for n in batch_halvings(self.step) if any(self.of(n))]

    def of(self, count: int) -> Iterator[tuple[int, Shapes]]:
        """The possible numbers of replicas of a step in a number of parts, each with the meshes of a replica's devices."""
        for num_replicas, shapes in self.all_meshes:
            num_microbatches, rest = divmod(count, num_replicas)
            asked = self.options.microbatches
            if not rest and num_microbatches <= MAX_MICROBATCHES and asked in (None, num_microbatches):
                yield num_replicas, shapes

    @cached_property
    def all_meshes(self) -> tuple[tuple[int, Shapes], ...]:
        """The possible numbers of replicas, each with the meshes of a replica's devices."""
        if self.options.mesh is not None:
            self._check_mesh()
            num_replicas, *shape = self.options.mesh
            return ((num_replicas, (tuple(shape),)),)
        inside = sorted({n for group in self.cluster.groups for n in divisors(group.devices_per_node)})
        shapes_of = {n: [*shapes_for(self.options.pins, self.step, n)] for n in inside}
        found: dict[int, list[tuple[int, ...]]] = {}
        for size, n in product(self._sizes, inside):
            if size % n == 0:
                found.setdefault(size // n, []).extend(shapes_of[n])
        return tuple(
            (num_replicas, tuple(shapes))
            for num_replicas, shapes in sorted(found.items())
            if shapes and self._may_hold(num_replicas) and self._stand_everywhere(num_replicas, tuple(shapes))
        )

    def _stand_everywhere(self, num_replicas: int, shapes: Shapes) -> bool:
        """True if nodes of each kind can hold stages of some of these meshes."""
        sizes = [num_replicas * prod(shape) for shape in shapes]
        may_stand = self.options.may_stand
        return all(any(may_stand(size, group) for size in sizes) for group in self.cluster.groups)

    def _may_hold(self, num_replicas: int) -> bool:
        """True if all devices together can hold the weights once per replica, as copies or gradients, and the rest of the
        state once."""
        weights, rest = self._state_bytes
        caps = self.cluster.caps(self.options.memory_bytes)
        there = sum(g.num_devices * cap for g, cap in zip(self.cluster.groups, caps, strict=True))
        return num_replicas * weights + rest <= self.options.memory_share * there

    @cached_property
    def _state_bytes(self) -> tuple[int, int]:
        return state_bytes(self.step, self.options.hosted)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Possible numbers of devices of a stage, such that the asked number of stages has all devices.

        Raises:
          InputError: there is no such number.
        """
        total, stages = self.cluster.num_devices, self.options.stages
        if self.options.shares_workers and stages is not None:
            size, rest = divmod(total, num_workers(self.options.schedule or "", stages))
            if rest or not size:
                raise self._unequal()
            return (size,)
        groups = self.cluster.groups
        may = [n for n in range(1, total + 1) if any(stands(n, group) for group in groups)]
        if stages is None:
            return tuple(n for n in may if n <= total // 2 or len(groups) > 1)
        reached = [_sums(may, n, total) for n in range(stages + 1)]
        sizes = tuple(n for n in may if total - n in reached[stages - 1])
        if not sizes:
            raise self._unequal()
        return sizes

    def _check_mesh(self) -> None:
        """Refuses a mesh with which the asked number of stages does not have all devices."""
        options, total = self.options, self.cluster.num_devices
        size = prod(options.mesh or ())
        stages = options.stages or total // size
        workers = num_workers(options.schedule or "", stages)
        divides = size in self._sizes and workers * size == total
        if not (divides and self._stand_everywhere(1, ((size,),))):
            raise InputError(
                f"{workers} stages of mesh {options.mesh} take {workers * size} devices, and {self.cluster.name} has {total}"
                f" in {self._nodes}: each takes 1, 2, 4, ... devices of a node, or whole nodes, all of one kind. Ask for "
                "another mesh or number of stages"
            )

    # --- messages

    @property
    def _nodes(self) -> str:
        return " and ".join(f"nodes of {group.devices_per_node}" for group in self.cluster.groups)

    @property
    def _scheduled(self) -> str:
        return f" under {self.options.schedule!r}" if self.options.schedule else ""

    def _unlike(self) -> InputError:
        return InputError(
            f"under {self.options.schedule!r} each worker runs several stages, and all have as many devices of one kind, "
            f"but {self.cluster.name} has several kinds: {self.cluster}. Ask for another schedule"
        )

    def _unequal(self) -> InputError:
        return InputError(
            f"{self.cluster.num_devices} devices in {self._nodes} cannot be split into "
            f"{self.options.stages} stages{self._scheduled}: each takes 1, 2, 4, ... devices of a node, or whole nodes"
            + (", and all as many" if self.options.shares_workers else "")
            + ". Ask for another number of stages, or use other devices"
        )

    def indivisible(self) -> InputError:
        """The error if no number of parts suits the options."""
        return InputError(
            f"the batch of {self.step.name} cannot be split over the replicas of a stage in so many microbatches "
            f"({self.options.microbatches}, mesh {self.options.mesh}). Take another batch size, or leave one of the two out"
        )

    def _too_large(self) -> InfeasibleError:
        return InfeasibleError(
            f"no pipeline of {self.step.name} on {self.cluster.name} fits {format_bytes(self.options.memory_bytes)} a device"
            ": its state alone is more than all devices hold. Allow more memory, or use more devices"
        )


def state_bytes(step: Step, hosted: frozenset[int] = frozenset()) -> tuple[int, int]:
    """Bytes of the weights, and of the rest of the state, without arguments on the host."""
    sizes = {role: 0 for role in Role}
    for n, (v, argument) in enumerate(step.inputs):
        if n not in hosted:
            sizes[argument.role] += step.graph.values[v].num_bytes
    weights = sizes.pop(Role.PARAMETER) + sizes.pop(Role.FROZEN)
    return weights, sum(sizes.values()) - sizes[Role.BATCH]


def _sums(terms: Sequence[int], count: int, most: int) -> frozenset[int]:
    """All sums of a number of terms, up to a limit."""
    found = frozenset({0})
    for _ in range(count):
        found = frozenset(total + term for total in found for term in terms if total + term <= most)
    return found
