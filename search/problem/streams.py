"""The communication that computation hides.

A device computes on one stream and communicates on another. Collectives whose results nothing needs immediately run
while it computes, and cost only the time that computation does not cover: gathers of state, reductions of gradients and
the like (`search.problem.traffic`). Those between one activation and the next cost in full.

The hidden time is determined value by value, so that a plan's time remains a sum over nodes and edges, which the solver
can bound. A value's collective has

* its *window*: the computation between the value's maker and its reader (`search.problem.windows`), of the kind that
  XLA puts beside it (`search.problem.traffic`);
* its *share* of all computation of that kind. Shares are by size: a parameter with a third of all elements gets a third
  of the time. A share beyond the window goes to the others. Several legs of one value share one share; a later leg has
  the rest that the others leave.

A value may travel in several legs: over one axis when the update returns it, over another when it is read. Legs must
not have the same share twice, but an edge knows only the value's specs at its two ends. That is nearly enough. After
the forward phase, the value was gathered over every axis over which it is whole, and its gradient reduced over these at
the least. On the other axes, either the examples are split or the parameter's reader; an edge cannot know which. Across
nodes the former is assumed, inside of nodes the latter. In the forward phase, a leg before other legs leaves them the
time that they may take.

So a plan that splits all parameters alike, as experts' plans do, hides as much as the streams would. Where some values
travel and others do not, the shares of the latter are not lent to the former, and the real step is faster than the
estimate.

Computation is taken at its fastest, as if it were split over all devices. A collective takes some of the device from
the computation beside it: hiding it is not free. Copies to and from the host are not part of this
(`search.device.prediction`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.cost_model.collectives import SCHEDULED_RATIO
from autoshard.cost_model.compute import kernel_s
from autoshard.search.ir.spec import PARTIAL, WHOLE
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.kernels import FusedKernel
from autoshard.search.problem.reshard import SLICE, Handling
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.strategies import port_specs
from autoshard.search.problem.strategy_graph import Maker, ReshardEdge
from autoshard.search.problem.traffic import Hideable, HideableKind, Part, Pool, Traffic
from autoshard.search.solver.pbqp import Labels

CONTENTION = 0.1
"""Slowdown of the computation beside a collective, as a share of the hidden collective's time: NCCL's kernels take some
of the multiprocessors and of the memory's rate. Source: assumed."""

MAX_WINDOWS = 6
"""Different windows of one edge that are told apart. Source: a choice of ours; a stack's differ by a layer each."""


@dataclass(frozen=True, eq=False)
class Hiding:
    """The communication of a costed graph that computation hides."""

    costed: CostedGraph
    traffic: Traffic

    def hidden_s(self, labels: Labels) -> float:
        """Hidden seconds under a full assignment."""
        at = ((labels[edge.source.node], labels[edge.target.node]) for edge in self.costed.graph.edges)
        hidden = zip(at, self.seconds, strict=True)
        return float(sum(seconds[place] for place, seconds in hidden if isinstance(seconds, np.ndarray)))

    def hidden_once_s(self, labels: Labels) -> float:
        """Hidden seconds under a full assignment, where the reshards that readers of a value share count once, as they
        run."""
        hidden_s, apart_s, once_s = (
            defaultdict[Maker, float](float),
            defaultdict[Maker, float](float),
            self._once_s(labels),
        )
        each = zip(self.costed.graph.edges, self.costed.edges_seconds, self.seconds, strict=True)
        for edge, whole_s, seconds in each:
            at = labels[edge.source.node], labels[edge.target.node]
            apart_s[edge.maker] += float(whole_s[at])
            if isinstance(seconds, np.ndarray):
                hidden_s[edge.maker] += float(seconds[at])
        return sum(s * min(1.0, once_s[m] / apart_s[m]) for m, s in hidden_s.items() if apart_s[m])

    def _once_s(self, labels: Labels) -> Mapping[Maker, float]:
        """By class and result: seconds of all reshards of the values; reshards that several readers share count once."""
        costed, paths, found = (
            self.costed,
            ReshardPaths(self.costed, labels),
            defaultdict[Maker, float](float),
        )
        for v, step, count in paths.steps():
            if step.kind != SLICE:
                made_at, result = paths.maker[v]
                maker = costed.graph.folded.class_of[made_at], result
                combined_bytes = costed.joined_bytes(maker)
                mesh = costed.resharder.mesh
                found[maker] += count * float(
                    mesh.time_s(step.kind, step.axes, step.num_bytes, combined_bytes)
                )
        return found

    @cached_property
    def seconds(self) -> tuple[np.ndarray | float, ...]:
        """Per edge: [strategies of source, strategies of target] hidden seconds; 0.0 where there are none."""
        if self.costed.device.platform == "cpu":  # simulated devices: nothing runs beside anything
            return (0.0,) * len(self.costed.graph.edges)
        costed, traffic = self.costed, self.traffic
        each = zip(costed.graph.edges, costed.edges_seconds, traffic.hideables, self._windows_s, strict=True)
        return tuple(self._of(*one) for one in each)

    def _of(
        self, edge: ReshardEdge, whole_s: np.ndarray, hideables: Sequence[Hideable], windows_s: np.ndarray
    ) -> np.ndarray | float:
        if not hideables or windows_s.max() <= 0:
            return 0.0
        seconds, total_s = np.where(np.isfinite(whole_s), whole_s, 0.0), 0.0
        left_s = self._share_s(hideables[0]) - self._taken_s(edge, hideables[0], seconds) / len(hideables)
        share_s, each_s = np.maximum(left_s, 0.0), seconds / len(hideables)
        for some_s in np.array_split(np.sort(windows_s), min(MAX_WINDOWS, len(hideables))):
            total_s = total_s + len(some_s) * np.minimum(each_s, np.minimum(share_s, some_s.mean()))
        return (1 - CONTENTION) * total_s

    def _share_s(self, hideable: Hideable) -> float:
        """Seconds of a value's share of the computation that may hide it."""
        return self._rates[hideable.pool] * hideable.num_elements

    def _taken_s(self, edge: ReshardEdge, hideable: Hideable, seconds: np.ndarray) -> np.ndarray | float:
        """[strategies of source, strategies of target]: seconds of the shares that other legs of the same values take."""
        lies_s, inside_s, whole_s = self._gathered_s(edge)
        if hideable.is_forward:
            return whole_s - lies_s if self.traffic.goes_on(edge.target.node) else 0.0
        reduced_s = inside_s if hideable.kind is HideableKind.REDUCTION else 0.0
        return np.where(self._reduces(edge), 0.0, reduced_s + np.maximum(lies_s - seconds, 0.0))

    def _gathered_s(self, edge: ReshardEdge) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[strategies of target]: seconds to gather a value that is split over all axes to its spec there, until
        nothing is split across nodes, and until nothing is split."""
        how = self.costed.handling_on(edge)
        (_, target), value = self.costed.kinds(edge), edge.value
        key = ("gathered", target, value.shape, value.itemsize, how.combined_bytes, edge.count)
        return self.costed.resharder.once(key, lambda: self._gathering_s(edge, how))

    def _gathering_s(self, edge: ReshardEdge, how: Handling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        costed, resharder, rank = self.costed, self.costed.resharder, len(edge.value.shape)
        seconds = edge.count * resharder.gathered_s(edge.value, how)
        lies = port_specs(edge.target, costed.strategies[edge.target.node])
        inside, whole = np.where(self._crosses & (lies >= 0), WHOLE, lies), np.where(lies >= 0, WHOLE, lies)
        lies_s, inside_s, whole_s = (seconds[resharder.indices(s, rank)] for s in (lies, inside, whole))
        return lies_s, inside_s, whole_s

    @cached_property
    def _crosses(self) -> np.ndarray:
        """[axes]: whether an axis leads across nodes."""
        mesh = self.costed.resharder.mesh
        return np.array([mesh.group((axis,)).crosses_nodes for axis in range(len(mesh.shape))])

    @cached_property
    def _windows_s(self) -> tuple[np.ndarray, ...]:
        """By edge: seconds of the computation in each reshard's window, in a step."""
        before_s = self._computed_before
        return tuple(
            before_s[windows[:, 0], windows[:, 2]] - before_s[windows[:, 0], windows[:, 1]]
            for windows in self.traffic.windows
        )

    def _reduces(self, edge: ReshardEdge) -> np.ndarray:
        """[strategies of source, strategies of target]: whether partial values are summed on the way."""
        return self.costed.resharder.once(
            ("reduces", *self.costed.kinds(edge)), lambda: self._is_reduced(edge)
        )

    def _is_reduced(self, edge: ReshardEdge) -> np.ndarray:
        source, target = (port_specs(p, self.costed.strategies[p.node]) for p in (edge.source, edge.target))
        return ((source[:, None, :] == PARTIAL) & (target[None, :, :] != PARTIAL)).any(axis=2)

    @cached_property
    def _rates(self) -> dict[Pool, float]:
        """By pool: seconds per element at which all shares together are the pool's computation."""
        counted: dict[Pool, list[tuple[float, float]]] = {pool: [] for pool in self.traffic.pools}
        for hideables, windows_s in zip(self.traffic.hideables, self._windows_s, strict=True):
            for hideable, window_s in zip(hideables, windows_s.tolist(), strict=True):
                if hideable.is_counted:
                    counted[hideable.pool].append((window_s, hideable.num_elements))
        return {pool: _rate(counted[pool], self._total_s(pool)) for pool in counted}

    def _total_s(self, pool: Pool) -> float:
        """Seconds of a pool's computation that can hide collectives.

        XLA's scheduler puts as much of it beside a gather as it believes that the gather takes. Beside reductions it puts
        all there is, too little as a rule.
        """
        is_gather = pool.part in (Part.FORWARD, Part.BACKWARD)
        return float(self._computed_before[self.traffic.pools[pool], -1]) / (
            SCHEDULED_RATIO if is_gather else 1.0
        )

    @cached_property
    def _computed_before(self) -> np.ndarray:
        """[pool; position]: the seconds of computation in a step before it."""
        own_s = self.traffic.runs * self._least_s
        return np.concatenate([np.zeros((len(own_s), 1)), np.cumsum(own_s, axis=1)], axis=1)

    @property
    def _least_s(self) -> np.ndarray:
        """By position: seconds of one run of an op under the strategies that make it fastest."""
        class_of, alone = self.costed.graph.folded.class_of, self.costed.kernels.alone
        found = np.array([self._alone_s[k] if i in alone else 0.0 for i, k in enumerate(class_of)])
        for at, (kernel, share) in self.costed.kernels.of_op.items():
            found[at] = share * self._fused_s[kernel]
        return found

    @cached_property
    def _alone_s(self) -> dict[int, float]:
        """By class of ops that are kernels of their own: seconds of a run, at the least."""
        classes = {self.costed.graph.folded.class_of[i] for i in self.costed.kernels.alone}
        return {k: float(np.min(self.costed.op_seconds(k))) for k in classes}

    @cached_property
    def _fused_s(self) -> dict[FusedKernel, float]:
        """By fused kernel: seconds of a run, at the least."""
        moved = {kernel: self.costed.kernel_bytes(kernel) for kernel in self.costed.kernels.fused}
        return {kernel: float(np.min(kernel_s(self.costed.device, b))) for kernel, b in moved.items()}


def _rate(hideables: Sequence[tuple[float, float]], total_s: float) -> float:
    """Seconds per element at which shares, each no more than its window, add up to the total; infinite if the windows
    together are no more.

    Args:
      hideables: seconds of the window, and elements.
      total_s: seconds to share.
    """
    left_s, elements = total_s, sum(num for _, num in hideables)
    for window_s, num in sorted(hideables, key=lambda hideable: hideable[0] / max(hideable[1], 1.0)):
        if window_s * elements >= left_s * num:
            return left_s / elements if elements else np.inf
        left_s, elements = left_s - window_s, elements - num
    return np.inf
