"""Equal things share a number, whichever object they are."""

from autoshard.search.problem.numbering import Numbering


def test_equal_things_get_the_number_of_the_first():
    numbering = Numbering[tuple[int, ...]]()
    first, other, again = (1, 2), (3,), tuple([1, 2])
    assert [numbering.of(thing) for thing in (first, other, again, other, first)] == [0, 1, 0, 1, 0]


def test_an_object_that_is_gone_lends_its_place_to_none():
    numbering = Numbering[tuple[int, ...]]()
    assert [numbering.of((n, n)) for n in range(100)] == [*range(100)]
