"""Paths of arguments: folded ones read as they are printed, and the same leaf found under another name."""

import re

import pytest

from autoshard.search.plan.argument_lines import argument_lines
from autoshard.search.plan.argument_paths import Counterparts, ending_in, unfolded

LAYERS = [f"p['blocks'][{i}]['{name}']" for i in range(12) for name in ("w1", "w2", "bias")]
OTHERS = ["p.head.kernel", "p.tail.kernel", "m.head.kernel", "s.step.value", "p['a|b']", "p['layer_1-2']"]
NAMES = [*LAYERS, *OTHERS]


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("p.head.kernel", ["p.head.kernel"]),
        ("head.kernel", ["p.head.kernel", "m.head.kernel"]),
        (".head.kernel", ["p.head.kernel", "m.head.kernel"]),
        ("kernel", ["p.head.kernel", "p.tail.kernel", "m.head.kernel"]),
        ("ernel", []),
        ("s.step", ["s.step.value"]),
        ("['layer_1-2']", ["p['layer_1-2']"]),
        ("[3]['bias']", ["p['blocks'][3]['bias']"]),
        ("['a|b']", ["p['a|b']"]),
    ],
)
def test_a_path_may_leave_its_beginning_out(path, wanted):
    assert list(ending_in(path, NAMES)) == wanted


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("['blocks'][*]['w*']", r"p\['blocks'\]\[\d+\]\['w\d'\]"),
        ("p['blocks'][0-1,10]['w1'|'bias']", r"p\['blocks'\]\[(0|1|10)\]\['(w1|bias)'\]"),
        ("['blocks'][*]['w*'|'bias']", r"p\['blocks'\].*"),
        ("p.head|tail.kernel", r"p\.(head|tail)\.kernel"),
        ("head|tail.kernel", r".\.(head|tail)\.kernel"),
        ("m|s.head.kernel", r"m\.head\.kernel"),
        ("['blocks'][12-20]['w*']", "nothing"),
        ("['blocks']['w*']", "nothing"),
    ],
)
def test_a_folded_path_stands_for_those_that_it_shows(path, wanted):
    assert list(unfolded(path, NAMES)) == [name for name in NAMES if re.fullmatch(wanted, name)]


def test_what_is_printed_is_read_as_what_it_was_printed_of():
    """Each line of a summary, by its own title, and by all that lies so."""
    specs = {name: f"P({i % 3})" if "w" in name else "P('data')" for i, name in enumerate(LAYERS)}
    read = {}
    for line in argument_lines(specs)[1:]:
        spec, _, path = re.split(r"\s{2,}", line.strip())
        read |= dict.fromkeys(unfolded(path, LAYERS), spec)
    assert read == specs


STATE = {
    "state.params['head']['kernel']": (4, 8),
    "state.params['body'][0]['kernel']": (4, 8),
    "state.mu['head']['kernel']": (4, 8),
    "state.mu['body'][0]['kernel']": (4, 8),
    "state.opt[0]": (3,),
    "batch": (16,),
}


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("state.params['head']['kernel']", (4, 8), ["state.params['head']['kernel']"]),
        ("params['head']['kernel']", (4, 8), ["state.params['head']['kernel']"]),
        ("variables['params']['body'][0]['kernel']", (4, 8), ["state.params['body'][0]['kernel']"]),
        (
            "net['head']['kernel']",
            (4, 8),
            ["state.params['head']['kernel']", "state.mu['head']['kernel']"],
        ),
        ("net.head.kernel.value", (4, 8), ["state.params['head']['kernel']", "state.mu['head']['kernel']"]),
        ("params['head']['kernel']", (8, 4), []),
        ("params['tail']['kernel']", (4, 8), []),
        ("other[0]", (3,), []),
        ("batch", (16,), ["batch"]),
        ("batch", (8,), []),
    ],
)
def test_a_leaf_is_found_under_another_name(name, shape, wanted):
    assert list(Counterparts(STATE).of(name, shape)) == wanted


def test_where_shapes_are_not_known_paths_tell():
    unknown = Counterparts(dict.fromkeys(STATE))
    assert unknown.of("params['head']['kernel']", (1, 2)) == ("state.params['head']['kernel']",)
