"""The arguments' lines, whole and by hand: what is merged, what is named, and what is left out."""

from autoshard.search.plan.argument_lines import argument_lines

SPLIT, OTHER, WHOLE = "P(None, 'model')", "P('data')", "P()"


def lines(arguments: dict[str, str]) -> list[str]:
    title, *rest = argument_lines(arguments)
    assert title == f"arguments ({len(arguments)} arrays)"
    return rest


def test_what_many_replicated_ones_have_in_common_is_their_last_name():
    """A number is no name, nor is the box that a framework puts its values in."""
    replicated = ["p['a']['bias']", "p['b']['c']['bias']", "p['d'][0]", "p['e']['scale'].value"]
    assert lines(dict.fromkeys(replicated, WHOLE) | {"p['w']": OTHER}) == [
        "  P('data')  1x  p['w']",
        "  P()        4x  2 bias, 1 d, 1 scale",
    ]


def test_of_many_last_names_some_are_listed():
    """Each at a depth of its own, so that no two are one line."""
    replicated = [f"p{"['x']" * depth}['{name}']" for depth, name in enumerate("abcdefg")]
    assert lines(dict.fromkeys(replicated, WHOLE)) == ["  P()  7x  1 a, 1 b, 1 c, 1 d and 3 more"]


def test_attributes_are_merged_as_keys_are():
    assert lines({"p.a.kernel": SPLIT, "p.b.kernel": SPLIT, "p.c.bias.value": WHOLE}) == [
        "  P(None, 'model')  2x  p.a|b.kernel",
        "  P()               1x  p.c.bias",
    ]


def test_numbers_are_ranges_unless_they_are_all_that_occur():
    arguments = {f"p[{n}].w": SPLIT for n in (0, 1, 3)} | {"p[2].w": OTHER}
    assert lines(arguments | {f"p[{n}].v": WHOLE for n in range(3)}) == [
        "  P(None, 'model')  3x  p[0-1,3].w",
        "  P('data')         1x  p[2].w",
        "  P()               3x  p[0-2].v",
    ]
    assert lines(dict.fromkeys(arguments, SPLIT)) == ["  P(None, 'model')  4x  p[*].w"]


def test_a_number_that_occurs_alone_is_said():
    assert lines({"p[3].w": SPLIT, "q": SPLIT}) == [
        "  P(None, 'model')  1x  p[3].w",
        "  P(None, 'model')  1x  q",
    ]


def test_of_many_names_some_are_listed():
    assert lines({f"p['{name}']": SPLIT for name in "abcdefgh"}) == [
        "  P(None, 'model')  8x  p['a'|'b'|'c'|'d'|...]"
    ]


def test_of_many_lines_the_first_are_shown_and_the_rest_counted():
    assert lines({f"a{n}": f"P({n})" for n in range(20)}) == [
        *(f"  {f'P({n})':5}  1x  a{n}" for n in range(16)),
        "  ... and 4 more arrays",
    ]


def test_the_most_common_come_first_and_what_is_replicated_last():
    arguments = {"a": OTHER} | {f"p['{n}']": WHOLE for n in "xyz"} | {f"q['{n}']": SPLIT for n in "uv"}
    assert [line.split("  ")[1] for line in lines(arguments)] == [SPLIT, OTHER, WHOLE]


def test_a_model_its_followers_and_the_others():
    arguments = dict.fromkeys(("p['a']", "p['b']", "p['c']", "o.mu['a']", "o.mu['b']"), SPLIT)
    assert lines(arguments | {"o.mu['c']": OTHER, "step": WHOLE, "rate": WHOLE}) == [
        "  p (3); 2 sharded alike in o.mu",
        "    P(None, 'model')  3x  ['a'|'b'|'c']",
        "  o.mu (1, sharded differently)",
        "    P('data')  1x  ['c']",
        "  others (2)",
        "    P()  2x  step|rate",
    ]


def test_of_two_that_repeat_each_other_the_parameters_are_the_model():
    leaves = [f"{tree}['{leaf}']" for tree in ("mu", "params") for leaf in "ab"]
    assert lines(dict.fromkeys(leaves, SPLIT))[0] == "  params (2); 2 sharded alike in mu"


def test_neighbours_in_a_list_do_not_follow_each_other():
    leaves = [f"p[{n}]['{leaf}']" for n in range(2) for leaf in "ab"]
    assert lines(dict.fromkeys(leaves, SPLIT)) == ["  P(None, 'model')  4x  p[*]['a'|'b']"]


def test_what_has_other_leaves_follows_nobody():
    arguments = dict.fromkeys([f"p['{n}']" for n in "abc"] + [f"q['{n}']" for n in "abd"], SPLIT)
    assert not any("alike" in line for line in lines(arguments))


def test_what_contains_itself_does_not_follow_itself():
    chain = ["p['a']", "p['c']['a']", "p['c']['c']['a']"]
    assert lines(dict.fromkeys(chain, SPLIT)) == [f"  P(None, 'model')  1x  {path}" for path in chain]
