"""One sweep of the inter-op dynamic programming: the least latency of the stages behind each cut.

Stages stand in order along the cluster's devices, each on a part of a node or on whole nodes. With

    F[p][s, k]    the least latency of running layers k, k+1, ... on devices p, p+1, ... in s stages,

F[P][0, L] = 0 for all P devices, and for p < P

    F[p][s, k] = min over options o that may stand at p, ending at e, and over ends j of the first stage:
                 latency(o, k, j) + transfer(e, j) + F[e][s-1, j],

where two limits bound the first stage: its memory with the microbatches in flight that s-1 stages behind it cause, and
the limit on the slowest stage. For each option and k, the allowed ends j are all those up to some last one, and the
latency of a run is a difference of prefix sums. So the inner minimum is that of a range. A sparse table of ranges whose
lengths are powers of two has it: the work is that of devices x options x layers x stages, not layers squared.

Entries that no better plan has are dropped on the way: F[p][s, k] if fewer stages take no more time (they leave more
memory to the stages in front), or if its sum with the least latency of the layers in front exceeds a limit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.pipeline.stage_costs import TOLERANCE, Array, ClusterNode, StageTable, Submesh


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The devices at which options may begin, such that other options can take all devices before and behind.

    Attributes:
      options: by first device, the options that may begin there; none at most devices if options take many.
      ends: by first device, the end of each of them.
    """

    options: tuple[Array, ...]
    ends: tuple[Array, ...]

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.options)

    @classmethod
    def of(cls, nodes: Sequence[ClusterNode], table: StageTable) -> "Places":
        """All places on nodes in a row."""
        starts = np.concatenate([[0], np.cumsum([node.num_devices for node in nodes])])
        found: list[list[tuple[int, int]]] = [[] for _ in range(int(starts[-1]))]
        alike = 0
        for i in reversed(range(len(nodes))):
            alike = alike + 1 if i + 1 < len(nodes) and nodes[i] == nodes[i + 1] else 1
            for o, option in enumerate(table.options):
                if option.kind == nodes[i].kind and option.submesh.num_nodes <= alike:
                    for offset in _offsets(option.submesh, nodes[i].num_devices):
                        first = int(starts[i]) + offset
                        found[first].append((o, first + option.submesh.size))
        found = _joined_up(found)
        return cls(
            tuple(np.array([o for o, _ in here], int) for here in found),
            tuple(np.array([end for _, end in here], int) for here in found),
        )


def _joined_up(found: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """By first device, the options with their ends that can be part of a row that takes all devices."""
    reaches_end = [False] * len(found) + [True]
    for p in reversed(range(len(found))):
        reaches_end[p] = any(reaches_end[end] for _, end in found[p])
    joined, is_reached = list[list[tuple[int, int]]](), [True] + [False] * len(found)
    for p, here in enumerate(found):
        joined.append([(o, end) for o, end in here if is_reached[p] and reaches_end[end]])
        for _, end in joined[p]:
            is_reached[end] = True
    return joined


def _offsets(submesh: Submesh, num_devices: int) -> range:
    """The positions on a node at which a submesh may begin; several nodes are taken whole."""
    if submesh.num_nodes == 1:
        return range(num_devices - submesh.devices_per_node + 1)
    return range(int(submesh.devices_per_node == num_devices))


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """F[p], without empty rows.

    Attributes:
      num_stages: [rows], ascending.
      latency_s: [rows, layers + 1].
    """

    num_stages: Array
    latency_s: Array

    @classmethod
    def nothing(cls, num_layers: int) -> "Column":
        """A column without rows."""
        return cls(np.empty(0, int), np.empty((0, num_layers + 1)))

    @classmethod
    def end(cls, num_layers: int) -> "Column":
        """F behind the last device, where no layers are left."""
        latency_s = np.full((1, num_layers + 1), np.inf)
        latency_s[0, -1] = 0.0
        return cls(np.zeros(1, int), latency_s)

    def row(self, num_stages: int) -> Array | None:
        """[layers + 1]: the row for a number of stages; None if there is none."""
        at = int(np.searchsorted(self.num_stages, num_stages))
        is_there = at < len(self.num_stages) and self.num_stages[at] == num_stages
        return self.latency_s[at] if is_there else None

    def without(self, dropped: Array) -> "Column":
        """The column without some entries."""
        latency_s = np.where(dropped, np.inf, self.latency_s)
        alive = np.isfinite(latency_s).any(axis=1)
        return Column(self.num_stages[alive], latency_s[alive])


@dataclass(frozen=True, slots=True, eq=False)
class LatencySweep:
    """The inputs of F.

    Attributes:
      table: costs of runs of layers.
      places: the devices at which options may begin.
      transfer_s: [devices + 1, layers + 1]: seconds of the transfer to each device at each cut.
      lasts: by the number of stages behind, [options, first layer] the end of the longest stage.
      max_stages: largest number of stages; 0 to treat all stages as having none behind them. Then F[p] has one row, of
        0 stages.
    """

    table: StageTable
    places: Places
    transfer_s: Array
    lasts: Callable[[int], Array]
    max_stages: int

    def run(self, drop: Callable[[int, Column], Array]) -> list[Column]:
        """F of all devices, and behind them. `drop` marks the entries of a device's column that need not be kept."""
        num_devices, num_layers = self.places.num_devices, self.table.num_layers
        columns = [Column.nothing(num_layers)] * num_devices + [Column.end(num_layers)]
        arriving = list(columns)
        for p in reversed([p for p in range(num_devices) if len(self.places.options[p])]):
            here = self._column(p, arriving)
            columns[p] = here.without(drop(p, here))
            arriving[p] = Column(columns[p].num_stages, columns[p].latency_s + self.transfer_s[p])
        return columns

    def _column(self, p: int, arriving: Sequence[Column]) -> Column:
        """F[p] with all entries."""
        behind = [arriving[end] for end in self.places.ends[p]]
        num_stages = np.concatenate([[], *(one.num_stages for one in behind)]).astype(int)
        options = np.repeat(self.places.options[p], [len(one.num_stages) for one in behind])
        kept = np.flatnonzero(num_stages < max(self.max_stages, 1))
        kept = kept[np.argsort(num_stages[kept], kind="stable")]
        if not kept.size:
            return Column.nothing(self.table.num_layers)
        num_stages, options = num_stages[kept], options[kept]
        run_s = self.table.latency_s[options]
        values = np.concatenate([one.latency_s for one in behind])[kept] + run_s
        counts, starts = np.unique(num_stages, return_index=True)
        alike = zip(counts.tolist(), np.split(options, starts[1:]), strict=True)
        lasts = np.concatenate([self.lasts(count)[some] for count, some in alike])
        best = _range_minimum(values, lasts) - run_s
        return Column(counts + (self.max_stages > 0), np.minimum.reduceat(best, starts, axis=0))


def _range_minimum(values: Array, lasts: Array) -> Array:
    """[rows, size]: the minimum of `values[row, k+1 : lasts[row, k]+1]` for each k; infinite where that is empty."""
    size = values.shape[-1]
    lengths = lasts - np.arange(size)
    levels = np.maximum(np.frexp(lengths)[1] - 1, 0)
    table = np.empty((int(levels.max()) + 1, *values.shape))
    table[0] = values
    for level in range(len(table) - 1):
        before, longer, width = table[level], table[level + 1], 1 << level
        np.minimum(before[:, :-width], before[:, width:], out=longer[:, :-width])
        longer[:, -width:] = before[:, -width:]
    flat = table.reshape(-1)
    rows = np.arange(len(values))[:, None] * size + levels * values.size
    firsts = np.minimum(np.arange(size) + 1, size - 1)
    seconds = np.clip(lasts - (1 << levels) + 1, 0, size - 1)
    found = np.minimum(flat[rows + firsts], flat[rows + seconds])
    return np.where(lengths > 0, found, np.inf)


def dominated(column: Column) -> Array:
    """The entries that fewer stages reach in no more time."""
    fewer_s = np.minimum.accumulate(column.latency_s, axis=0)
    worse = np.zeros(column.latency_s.shape, bool)
    worse[1:] = column.latency_s[1:] >= fewer_s[:-1] * (1 - TOLERANCE)
    return worse
