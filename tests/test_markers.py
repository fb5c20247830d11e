"""Markers say what a test needs, and hold what they say."""

import subprocess

import jax
import pytest


def compile_a_program():
    return jax.jit(lambda x: x + 1)(1.0)


def start_a_process():
    subprocess.run(["true"], check=True)


@pytest.mark.parametrize("act", [compile_a_program, start_a_process])
def test_a_pure_test_neither_compiles_nor_starts_a_process(act):
    with pytest.raises(pytest.fail.Exception, match="or mark it `devices`"):
        act()


@pytest.mark.devices
@pytest.mark.parametrize("act", [compile_a_program, start_a_process])
def test_others_do(act):
    act()


def test_each_test_needs_one_thing(request):
    needs = [
        {"pure", "devices", "compiler"} & {m.name for m in item.iter_markers()}
        for item in request.session.items
    ]
    assert {len(need) for need in needs} == {1}
