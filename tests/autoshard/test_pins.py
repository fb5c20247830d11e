"""Pins by path: one argument, several by a folded path, or a subtree; the one that says most decides."""

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import InputError
from autoshard.pins import allowed, pinned
from autoshard.search.ir.trace import trace


def step(state, batch):
    return jax.tree.map(lambda w: w + batch["x"].sum() + batch["y"].sum(), state)


MATRIX = jax.ShapeDtypeStruct((16, 8), "float32")
STATE = {
    "params": {"blocks": [{"w": MATRIX, "b": MATRIX} for _ in range(3)], "head": {"w": MATRIX}},
    "momentum": {"blocks": [{"w": MATRIX, "b": MATRIX} for _ in range(3)], "head": {"w": MATRIX}},
}
BATCH = {"x": jax.ShapeDtypeStruct((24, 8), "float32"), "y": jax.ShapeDtypeStruct((24,), "float32")}
STEP = trace(step, STATE, BATCH)
NAMES = [a.name for a in STEP.arguments]


def specs(pin):
    """The spec of each pinned argument, by path."""
    return dict(pinned(STEP, pin, 8).specs)


@pytest.mark.parametrize(
    ("path", "start", "part"),
    [
        ("state", "state", ""),
        ("batch", "batch", ""),
        ("state['params']", "state['params']", ""),
        ("['params']", "state['params']", ""),
        ("state['momentum']['blocks'][1]", "state['momentum']['blocks'][1]", ""),
        ("['params']['blocks'][1]", "state['params']['blocks'][1]", ""),
        ("['params']['blocks'][*]", "state['params']['blocks']", ""),
        ("['params'|'momentum']['head']", "state", "['head']"),
        ("['blocks'][*]", "state", "['blocks']"),
    ],
)
def test_a_pin_may_name_a_subtree(path, start, part):
    wanted = [name for name in NAMES if name.startswith(start) and part in name]
    assert specs({path: "P('data')"}) == dict.fromkeys(wanted, jax.P("data"))


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_pin_that_says_most_of_a_path_decides(is_turned):
    pin = {
        "state": "P()",
        "state['params']": "P('data')",
        "['params']['blocks'][*]": "P(None, 'data')",
        "['params']['blocks'][1]": "P('data', None)",
        "['blocks'][*]['b']": "P('model')",
        "state['params']['blocks'][2]['b']": jax.P(None, "model"),
    }
    found = specs(dict(reversed(pin.items())) if is_turned else pin)
    assert found.pop("state['params']['head']['w']") == jax.P("data")
    assert found.pop("state['params']['blocks'][2]['b']") == jax.P(None, "model")
    assert found.pop("state['params']['blocks'][1]['w']") == jax.P("data", None)
    for name, spec in found.items():
        of_weights = jax.P(None, "data") if "params" in name else jax.P()
        assert spec == (jax.P("model") if name.endswith("['b']") else of_weights)
    assert len(found) == len([n for n in NAMES if "state" in n]) - 3


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        (
            {"['blocks'][1]": "P()"},
            r"matches state\['momentum'\]\['blocks'\]\[1\], state\['params'\]\['blocks'\]\[1\]\. Name one of them",
        ),
        (
            {"state['parms']": "P()"},
            r"matches no argument \(did you mean state\['params'\] or ",
        ),
        (
            {"['params']['blocks'][9]['w']": "P()"},
            r"did you mean state\['params'\]\['blocks'\]\[\d\]\['w'\] or state\['params'\]",
        ),
        ({"stat": "P()"}, r"pin 'stat' matches no argument \(did you mean state\?\)"),
        (
            {"optimizer": "P()"},
            r"pin 'optimizer' matches no argument; they are named like state\['momentum'\]",
        ),
        (
            {"state['params']": "P()", "['params']": "P('data')"},
            r"pin .* says P\('data'\) of .* says P\(\)\. Keep one",
        ),
    ],
)
def test_a_path_that_names_nothing_or_too_much(pin, said):
    with pytest.raises(InputError, match=said):
        pinned(STEP, pin, 8)


def test_a_later_call_keeps_the_pins_of_a_subtree_that_it_allows():
    later = trace(
        step,
        STATE,
        {"x": jax.ShapeDtypeStruct((24, 8), "float32"), "y": jax.ShapeDtypeStruct((3,), "float32")},
    )
    kept, lost = allowed(
        later, {"batch": "P('data')", "['params']": "P()", "['params']['head']": "P('data')"}, (8,)
    )
    assert kept["batch['x']"] == kept["state['params']['head']['w']"] == "P('data')"
    assert kept["state['params']['blocks'][0]['w']"] == "P()"
    assert "batch['y']" not in kept
    assert lost == ("batch['y'] of shape (3,) does not split as P('data')",)


def test_a_subtree_rests_as_it_is_pinned():
    plan = autoshard.search(
        step, STATE, BATCH, cluster="8xCPU", mesh=(8,), pin={"state": "P()", "batch": "P('data')"}
    )
    assert set(plan.decisions.arguments.items()) == {
        (name, "P()" if name.startswith("state") else "P('data')") for name in NAMES
    }


def test_a_spec_of_too_many_dimensions_names_the_leaf():
    with pytest.raises(InputError, match=r"batch\['y'\] of shape \(24,\) cannot rest as P\(None, 'data'\)"):
        autoshard.search(step, STATE, BATCH, cluster="8xCPU", mesh=(8,), pin={"batch": "P(None, 'data')"})


@pytest.mark.devices
def test_a_mistyped_argument_to_donate_is_near_another():
    parallel = autoshard.parallelize(lambda state, batch: state, donate="batsch['x']")
    with pytest.raises(
        InputError, match=r"donate=.* is no argument of <lambda> \(did you mean batch\['x'\] or "
    ):
        parallel(
            jax.tree.map(lambda x: jnp.zeros(x.shape), STATE), {"x": jnp.ones((24, 8)), "y": jnp.ones(24)}
        )
