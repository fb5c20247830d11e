"""The order of visits: all nodes, neighbours near one another."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver.ordering import cuthill_mckee

GRAPHS = st.integers(1, 8).flatmap(
    lambda num: st.tuples(
        st.just(num),
        st.lists(st.tuples(*[st.integers(0, num - 1)] * 2).filter(lambda pair: pair[0] != pair[1])),
    )
)


@given(GRAPHS)
def test_every_node_is_visited_once(graph):
    num_nodes, pairs = graph
    assert sorted(cuthill_mckee(num_nodes, pairs)) == list(range(num_nodes))


def test_a_path_is_followed_however_it_is_numbered():
    path = [3, 0, 4, 1, 2]
    order = cuthill_mckee(5, [*pairwise(path)])
    assert order in (tuple(path), tuple(reversed(path)))


def test_a_copy_stands_between_what_makes_and_what_reads_it():
    """Ops 0, 1 and 2 in program order; 3 and 4 are copies, numbered last: op, copy, op, copy, op."""
    order = cuthill_mckee(5, [(0, 3), (1, 3), (1, 4), (2, 4)])
    assert order == (0, 3, 1, 4, 2)


def test_nodes_come_by_their_distance_from_the_first():
    square_with_a_tail = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 1)]
    assert cuthill_mckee(5, square_with_a_tail) == (0, 1, 2, 4, 3)


def test_components_follow_one_another():
    assert cuthill_mckee(5, [(0, 2), (1, 3)]) == (4, 0, 2, 1, 3)
