"""Tracebacks of errors that reach users: the user's frames, then the error; all frames where JAX's switch says so."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cost_model.errors import InputError
from autoshard.tracebacks import boundary

OWN = str(Path(__file__))
W, X = jnp.ones((4, 4)), jnp.ones((8, 5))


def mismatched(w, x):
    return w @ x


def failing(w, x):
    return w, {}["missing"]


def frames(error):
    return traceback.extract_tb(error.__traceback__)


@pytest.mark.parametrize(
    ("call", "innermost"),
    [
        (lambda: autoshard.parallelize(mismatched)(W, X), "mismatched"),
        (lambda: autoshard.search(mismatched, W, X, cluster="8xCPU"), "mismatched"),
        (lambda: autoshard.parallelize(failing)(W, X), "failing"),
        (lambda: autoshard.parallelize(mismatched).init(lambda: mismatched(W, X), args=(X,)), "mismatched"),
        (lambda: autoshard.search(mismatched, W, X, cluster="8xGPU"), "<lambda>"),
        (lambda: autoshard.parallelize(mismatched).plan, "<lambda>"),
        (lambda: autoshard.parallelize(mismatched, plan="missing.json"), "<lambda>"),
        (lambda: autoshard.parallelize(mismatched, mesch=(8,)), "<lambda>"),
    ],
)
def test_errors_show_the_users_frames_alone(call, innermost):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    assert {frame.filename for frame in frames(caught.value)} == {OWN}
    assert frames(caught.value)[-1].name == innermost
    text = "".join(traceback.format_exception(caught.value))
    assert "direct cause" not in text
    assert "During handling" not in text


def test_all_frames_are_shown_where_jax_shows_them():
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(InputError) as caught:
            autoshard.parallelize(mismatched)(W, X)
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert any("parallelized.py" in frame.filename for frame in frames(caught.value))
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_fault_that_is_no_users_keeps_its_trace():
    def broken(*_):
        raise AssertionError

    own = type(broken)(broken.__code__, {**globals(), "__name__": "autoshard.broken"})
    with pytest.raises(AssertionError) as caught:
        boundary(own)()
    assert [frame.name for frame in frames(caught.value)][-2:] == ["called", "broken"]
