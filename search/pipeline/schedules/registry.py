"""Schedules by name: the families, the number of stages that each puts on a worker, and errors that say which numbers
fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.cost_model.errors import InputError
from autoshard.search.pipeline.schedules.chimera import check_chimera, chimera
from autoshard.search.pipeline.schedules.circular import check_circular, circular
from autoshard.search.pipeline.schedules.dualpipe_v import check_dualpipe_v, dualpipe_v
from autoshard.search.pipeline.schedules.gpipe import gpipe
from autoshard.search.pipeline.schedules.interleaved import check_interleaved, interleaved_one_f_one_b
from autoshard.search.pipeline.schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from autoshard.search.pipeline.schedules.zb_v import zb_v
from autoshard.search.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from autoshard.search.plan.schedule import Schedule

VIRTUAL_STAGES = 2
"""Stages of a worker in a family that leaves their number open, if nobody chooses it. Source: the families' definitions;
with one, interleaved 1F1B is 1F1B, and a circular pipeline is GPipe."""


@dataclass(frozen=True, slots=True)
class Family:
    """Schedules of one kind, for any number of workers and microbatches.

    Attributes:
      build: makes a schedule from numbers of workers and microbatches that `check` accepts.
      stages_per_worker: number of stages of each worker; None if the caller chooses it, at least two.
      check: raises an InputError if there is no schedule for some numbers of workers and microbatches; None if there
        always is.
      splits_backward: whether weight gradients are tasks of their own.
      is_mirrored: whether the stages of a worker are as far from the first stage as from the last one.
    """

    build: Callable[..., Schedule]
    stages_per_worker: int | None = 1
    check: Callable[[int, int], None] | None = None
    splits_backward: bool = False
    is_mirrored: bool = False

    @property
    def shares_workers(self) -> bool:
        """Whether a worker holds several stages."""
        return self.stages_per_worker != 1 or self.is_mirrored

    @property
    def copies(self) -> int:
        """Number of workers that hold each stage, and share its microbatches."""
        return 2 if self.is_mirrored and self.stages_per_worker == 1 else 1

    @property
    def stages_each(self) -> int:
        """Number of stages of each worker, if nobody chooses it."""
        return self.stages_per_worker or VIRTUAL_STAGES

    def suits(self, num_workers: int, num_microbatches: int) -> bool:
        """Whether there is a schedule for these numbers."""
        try:
            if self.check is not None:
                self.check(num_workers, num_microbatches)
        except InputError:
            return False
        return True

    def stages_of_workers(self, num_stages: int, num_workers: int) -> list[tuple[int, ...]]:
        """By worker, its stages."""
        if self.is_mirrored:
            return [(w, num_stages - 1 - w) for w in range(num_workers)]
        return [tuple(range(w, num_stages, num_workers)) for w in range(num_workers)]


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpipe": Family(gpipe),
        "1f1b": Family(one_f_one_b),
        "eager-1f1b": Family(eager_one_f_one_b),
        "interleaved-1f1b": Family(interleaved_one_f_one_b, None, check_interleaved),
        "circular": Family(circular, None, check_circular),
        "zb-h1": Family(zb_h1, splits_backward=True),
        "zb-h2": Family(zb_h2, splits_backward=True),
        "zb-v": Family(zb_v, 2, splits_backward=True, is_mirrored=True),
        "dualpipe-v": Family(dualpipe_v, 2, check_dualpipe_v, splits_backward=True, is_mirrored=True),
        "chimera": Family(chimera, 1, check_chimera, is_mirrored=True),
    }
)

APART = tuple(name for name, family in FAMILIES.items() if not family.shares_workers)
"""The families with one stage on each worker. One cut suits all of them."""


def num_workers(schedule: str, num_stages: int) -> int:
    """Number of groups of devices. Invalid numbers are the schedule's to refuse."""
    family = FAMILIES.get(schedule)
    return max(num_stages // (1 if family is None else family.stages_each), 1)


def check_name(name: str) -> None:
    """That there is such a family.

    Raises:
      InputError: there is none.
    """
    if name not in FAMILIES:
        raise InputError(
            f"no schedule is called {name!r}. Choose one of {', '.join(FAMILIES)}", section="a-wrong-name"
        )


def build_schedule(name: str, num_stages: int, num_microbatches: int, num_workers: int) -> Schedule:
    """A family's schedule for so many stages on so many workers.

    Example:
      >>> [" ".join(map(str, tasks)) for tasks in build_schedule("1f1b", 2, 2, 2).workers]
      ['F0.0 F0.1 B0.0 B0.1', 'F1.0 B1.0 F1.1 B1.1']

    Raises:
      InputError: no such family, or it cannot be built for these numbers; says which would do.
    """
    check_numbers(name, num_stages, num_microbatches, num_workers)
    family = FAMILIES[name]
    if family.stages_per_worker is None:
        return family.build(num_workers, num_microbatches, num_stages // num_workers)
    return family.build(num_workers, num_microbatches)


def check_numbers(name: str, num_stages: int, num_microbatches: int, num_workers: int) -> None:
    """That a family's schedule may be had for these numbers.

    Raises:
      InputError: no such family, or none for these numbers; says which would do.
    """
    check_name(name)
    for what, count in (("stages", num_stages), ("microbatches", num_microbatches), ("workers", num_workers)):
        if count < 1:
            raise InputError(f"schedule {name!r} wants at least one of {what}, got {count}")
    family = FAMILIES[name]
    per_worker, rest = divmod(num_stages, num_workers)
    if family.stages_per_worker is None:
        if rest or per_worker < 2:
            raise InputError(
                f"schedule {name!r} wants two or more stages on each worker, as many on all; got {num_stages} stages on "
                f"{num_workers} workers. Use {2 * num_workers} stages, or schedule '1f1b'"
            )
    elif num_stages != family.stages_per_worker * num_workers:
        raise InputError(
            f"schedule {name!r} wants {family.stages_per_worker} x {num_workers} stages on {num_workers} workers, got "
            f"{num_stages}. Use {family.stages_per_worker * num_workers} stages"
        )
    if family.check is not None:
        family.check(num_workers, num_microbatches)
