"""Statistics that a step reports, written so that microbatches can make their part of them.

A step may report the largest activation of a layer, or the standard deviation of its activations, which no gradient depends
on. Such numbers are combined over microbatches, exactly: sums are added up, maxima reduced, and functions of them are
computed once, after the last microbatch. Two forms prevent that, and are rewritten here, before the batch is followed:

* sums of powers of the distance from a mean, which need the mean before the sum (`moments`);
* square roots, quotients and the like in the body of a loop, which would run for each microbatch (`fission`).
"""

from collections.abc import Callable

from autoshard.search.ir.graph import Graph
from autoshard.search.memory.batch_states import BatchSplit
from autoshard.search.memory.fission import with_loops_cut, without_unread_results
from autoshard.search.memory.moments import with_moments


def with_statistics_apart(graph: Graph, follow: Callable[[Graph], BatchSplit]) -> Graph:
    """The graph with its statistics in a form that microbatches can combine.

    Args:
      graph: the step's.
      follow: walks over a graph, not strictly.

    Raises:
      NotSplittableError: an op needs all examples at once.
    """
    graph = without_unread_results(graph)
    graph = with_moments(graph, follow(graph))
    while (cut := with_loops_cut(graph, follow(graph))) is not graph:
        graph = cut
    return graph
