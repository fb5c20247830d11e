"""Estimates of variants of the step.

A variant is a number of microbatches and some arguments in host memory. Microbatches divide the memory of activations; each
of them gathers parameters anew. Arguments in host memory leave the device, and are copied. Every variant is a step of its
own, with its own shardings and its own recomputation, so to search one takes seconds. They are estimated from the fastest
uncapped strategies of the undivided step:

    memory   = arguments on the device + undivided temporaries + activations / microbatches
    seconds  = the uncapped step + those that microbatches add + visible copies + recomputation

Recomputation must save the memory beyond the cap. Its seconds are those of the cheapest candidate of the undivided step that
saves so much, or of a part of it. A variant for which no candidate saves enough has no estimate; those that need less memory
come first.

Each search of a variant corrects the estimates of the others. A miss in one microbatch corrects the memory of activations.
A miss in several shows undivided temporaries: gathered weights and gradients, which are as large in each microbatch.
Seconds of recomputation are corrected, and a variant that needs no less memory has no estimate any more. If something
fitted, its microbatches' seconds are corrected. These are estimates, not bounds: they order variants, and end the search if
none promises a faster plan. The certificate of a plan says nothing of other variants.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.cost_model.cluster import Cluster
from autoshard.search.memory.fetches import WINDOW
from autoshard.search.problem.live_ranges import Resident
from autoshard.search.space.found import Found
from autoshard.search.space.rewrites import HIDING_SHARE, VISIBLE_SHARE, UncappedSolution

OF_A_BATCH = frozenset({Resident.RESIDUALS, Resident.TEMPORARIES})
"""Residents of memory that shrink with the number of examples."""

SECOND_ADDS = 0.13
"""Smallest share of the step that the second microbatch adds. It orders variants until one is solved. Source: it adds
0.13 of the uncapped step of a Llama and 0.5 to 0.7 of a GPT's, a mixture of experts' and a U-Net's on 8 H100s
(`benchmarks.experts`)."""

SLOPE_SHARE = 1 / 3
"""Each of many microbatches is taken to add at least this share of the seconds that each of few adds. Source: each of 8
adds 0.39 to 1.1 times as much as the second one, of twelve models on 8 H100s and on 2 V100s (`benchmarks.experts`) and
a Llama of 16B parameters."""

FORWARD_SHARE = 1 / 3
"""Share of a step that its forward phase takes. Derived: a product has two products of its size in the backward phase."""

MISSES_BY = 0.1
"""Share of the cap by which a variant is taken to miss it, if it is only proven to miss it. Source: a choice of ours;
estimates of memory err by 10 to 30%."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A step before recomputation.

    Attributes:
      microbatches: their number.
      kinds: the kinds of arguments in host memory.
    """

    microbatches: int
    kinds: tuple[str, ...] = ()

    def needs_no_less_than(self, other: "Variant") -> bool:
        """True if the variant has no more microbatches than another one and no arguments in host memory besides its."""
        return self.microbatches <= other.microbatches and set(self.kinds) <= set(other.kinds)


@dataclass(frozen=True, slots=True)
class Saving:
    """Recomputation in the undivided step: the bytes that it saves and the seconds that it takes."""

    num_bytes: float
    seconds: float


@dataclass(eq=False)
class Variants:
    """The estimates of all variants.

    Attributes:
      cluster: the cluster that will run the step.
      cap_bytes: the memory cap.
      undivided_s: seconds of the uncapped step.
      batch_bytes: the activations of the undivided step at its peak.
      held_bytes: all other memory there.
      argument_bytes: memory of arguments there that may rest on the host, by kind, split over all devices.
      fetched_bytes: memory on the device for the copies of hosted arguments, by kind.
      savings: possible recomputation.
      added_s: seconds that each microbatch of few added, by kinds in host memory.
      hosted_s: seconds of the uncapped step in one microbatch, by kinds in host memory.
      excess: needed memory of activations over its estimate.
      undivided_bytes: memory besides the arguments that microbatches do not divide.
      slowness: seconds of recomputation over their estimate.
      too_large: the variants of which nothing fitted.
    """

    cluster: Cluster
    cap_bytes: float
    undivided_s: float
    batch_bytes: float
    held_bytes: float
    argument_bytes: Mapping[str, float]
    fetched_bytes: Mapping[str, float]
    savings: Sequence[Saving] = ()
    added_s: dict[tuple[str, ...], float] = field(default_factory=dict)
    hosted_s: dict[tuple[str, ...], float] = field(default_factory=dict)
    excess: float = 1.0
    undivided_bytes: float = 0.0
    slowness: float = 1.0
    too_large: list[Variant] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        uncapped: UncappedSolution,
        cap_bytes: float,
        shard_bytes: Mapping[str, Sequence[float]],
    ) -> "Variants":
        """The variants of a step with these fastest uncapped strategies.

        Args:
          uncapped: the strategies.
          cap_bytes: the memory cap.
          shard_bytes: memory of each argument that may rest on the host, split over all devices, by kind. Under a cap,
            copies of arguments on several devices go first.
        """
        peak = uncapped.on_mesh.predicted(uncapped.labels, math.inf).least
        resting_bytes = {str(resident): num_bytes for resident, num_bytes in peak.residents}
        batch_bytes = sum(num_bytes for resident, num_bytes in peak.residents if resident in OF_A_BATCH)
        argument_bytes = {
            kind: min(sum(parts), resting_bytes.get(kind, 0.0)) for kind, parts in shard_bytes.items()
        }
        copies_bytes = sum(resting_bytes.get(kind, 0.0) - n for kind, n in argument_bytes.items())
        return cls(
            uncapped.on_mesh.memory.costed.resharder.mesh.cluster,
            cap_bytes,
            uncapped.cost_s,
            batch_bytes,
            peak.num_bytes - batch_bytes - copies_bytes,
            argument_bytes,
            {kind: WINDOW * max(parts, default=0.0) for kind, parts in shard_bytes.items()},
        )

    def under(self, cap_bytes: float) -> "Variants":
        """The estimates under a lower cap."""
        return replace(
            self,
            cap_bytes=cap_bytes,
            added_s=dict(self.added_s),
            hosted_s=dict(self.hosted_s),
            too_large=[*self.too_large],
        )

    def assume_recomputation(self, working_bytes: float) -> None:
        """Takes it that the forward phase can be recomputed, to be used where no candidate is known.

        Args:
          working_bytes: lower bound on the memory besides the arguments.
        """
        saved_bytes = max(0.0, self.batch_bytes - working_bytes)
        self.savings = [Saving(saved_bytes, FORWARD_SHARE * self.undivided_s)]

    def missed(self, variant: Variant, nearest: Found | None) -> None:
        """Notes that nothing fitted, and the strategies that came nearest, if any were found."""
        self.too_large.append(variant)
        needed_bytes = nearest.peak.num_bytes if nearest else (1 + MISSES_BY) * self.cap_bytes
        activation_bytes = needed_bytes - self._argument_bytes(variant)
        batch_bytes = self._least_batch_bytes(variant)
        if variant.microbatches == 1:
            excess = max(activation_bytes, 0.0) / max(batch_bytes, 1.0)
            self.excess = excess if nearest else max(self.excess, excess)
        else:
            undivided_bytes = activation_bytes - self.excess * batch_bytes
            self.undivided_bytes = max(self.undivided_bytes, undivided_bytes)
        if nearest is None:
            return
        most = max(self.savings, key=lambda one: (one.num_bytes, -one.seconds), default=None)
        if nearest.step_problem.sites and most and most.seconds > 0:
            again_s = nearest.cost_s - self._uncapped_s(variant)
            self.slowness = max(self.slowness, again_s / most.seconds)

    def took(self, variant: Variant, seconds: float) -> None:
        """Notes the seconds of a variant's uncapped step."""
        if variant.microbatches > 1:
            added_s = max(0.0, seconds - self._undivided_s(variant))
            self.added_s[variant.kinds] = added_s / (variant.microbatches - 1)
        else:
            self.hosted_s[variant.kinds] = seconds

    def seconds(self, variant: Variant, slack: float = 0.0) -> float:
        """Estimated seconds of the best plan; infinite if nothing seems to fit.

        Args:
          variant: the variant.
          slack: share of the cap by which the estimated memory may be too large.
        """
        if any(variant.needs_no_less_than(one) for one in self.too_large):
            return math.inf
        share = self.excess / variant.microbatches
        needed_bytes = (
            self._argument_bytes(variant) + self._undivided_bytes(variant) + share * self.batch_bytes
        )
        missing_bytes = needed_bytes - (1 + slack) * self.cap_bytes
        return self._uncapped_s(variant) + self.slowness * self._recomputation_s(missing_bytes, share)

    def _recomputation_s(self, missing_bytes: float, share: float) -> float:
        """Seconds of recomputation that saves so much: of a part of it, if all would save more.

        Args:
          missing_bytes: bytes to save.
          share: memory of the variant's activations over the undivided step's.
        """
        if missing_bytes <= 0:
            return 0.0
        enough = (one for one in self.savings if share * one.num_bytes >= missing_bytes)
        parts_s = (one.seconds * missing_bytes / (share * one.num_bytes) for one in enough)
        return min(parts_s, default=math.inf)

    def _uncapped_s(self, variant: Variant) -> float:
        more = SLOPE_SHARE * (variant.microbatches - 2) + 1 if variant.microbatches > 1 else 0.0
        of_others_s = min(self.added_s.values(), default=SECOND_ADDS * self.undivided_s)
        added_s = self.added_s.get(variant.kinds, of_others_s)
        return self._undivided_s(variant) + more * added_s

    def _undivided_s(self, variant: Variant) -> float:
        """Estimated seconds of the uncapped step in one microbatch, copies included. They are no less than with fewer
        kinds in host memory."""
        if not variant.kinds:
            return self.undivided_s
        fewer = (seconds for kinds, seconds in self.hosted_s.items() if set(kinds) <= set(variant.kinds))
        copied_s = 2 * float(self.cluster.host_link.copy_s(self._moved_bytes(variant)))
        visible_s = max(VISIBLE_SHARE * copied_s, copied_s - HIDING_SHARE * self.undivided_s)
        return max((self.undivided_s + visible_s, *fewer))

    def _argument_bytes(self, variant: Variant) -> float:
        """Memory besides activations."""
        fetched_bytes = max((self.fetched_bytes.get(kind, 0.0) for kind in variant.kinds), default=0.0)
        return self.held_bytes - self._moved_bytes(variant) + fetched_bytes

    def _moved_bytes(self, variant: Variant) -> float:
        return sum(self.argument_bytes.get(kind, 0.0) for kind in variant.kinds)

    def _least_batch_bytes(self, variant: Variant) -> float:
        """First estimate of the memory of activations with the most recomputation."""
        most_bytes = max((one.num_bytes for one in self.savings), default=0.0)
        return (self.batch_bytes - most_bytes) / variant.microbatches

    def least_bytes(self, variant: Variant) -> float:
        """Estimated memory with the most recomputation."""
        activation_bytes = self._undivided_bytes(variant) + self.excess * self._least_batch_bytes(variant)
        return self._argument_bytes(variant) + activation_bytes

    def _undivided_bytes(self, variant: Variant) -> float:
        """Memory that several microbatches do not divide. For one it is a part of the activations."""
        return self.undivided_bytes if variant.microbatches > 1 else 0.0
