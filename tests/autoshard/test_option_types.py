"""Options of a wrong type are refused where they are written, each by one sentence."""

import inspect
from dataclasses import fields
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import autoshard
from autoshard import InputError, PlanError, api, option_types, pipeline_request
from autoshard.options import Options

WRONG = [
    ("verify", True, "wanted verify as 'never', 'auto' or 'always', got True"),
    ("verify", "yes", "wanted verify as 'never', 'auto' or 'always', got 'yes'"),
    ("mesh", 8, "wanted a mesh as sizes of its axes, such as (2, 4), got 8"),
    ("mesh", (2.0, 4), "wanted a mesh as sizes of its axes, such as (2, 4), got (2.0, 4)"),
    ("mesh", (True, 8), "got (True, 8)"),
    ("mesh", {"data": 8}, "got {'data': 8}"),
    ("mesh", np.ones((2, 2), int), "wanted a mesh as sizes of its axes, such as (2, 4), got array"),
    ("mesh", np.array(8), "wanted a mesh as sizes of its axes, such as (2, 4), got array(8)"),
    ("pin", [("w", jax.P())], "wanted pin as specs by pytree path, such as {'w': P('data')}, or a plan, got [('w'"),
    ("pin", {0: jax.P()}, "wanted pin as specs by pytree path"),
    ("pin", "w", "wanted pin as specs by pytree path"),
    ("state", True, "wanted state as the pytree path of an argument, or several, got True"),
    ("state", ("w", 0), "got ('w', 0)"),
    ("state", {"w": 0}, "wanted state as the pytree path of an argument, or several, got {'w': 0}"),
    ("remat", True, 'wanted remat="never", or nothing to have it searched, got True'),
    ("stages", "2", "wanted stages as a whole number, or 'auto' to have it searched, got '2'"),
    ("stages", True, "got True"),
    ("stages", np.ones(2), "wanted stages as a whole number"),
    ("schedule", 1, "wanted schedule as the name of one, such as '1f1b', got 1"),
    ("microbatches", "2", "wanted microbatches as a whole number, got '2'"),
    ("microbatches", 2.0, "wanted microbatches as a whole number, got 2.0"),
    ("microbatches", np.float32(2), "wanted microbatches as a whole number"),
    ("microbatches", True, "wanted microbatches as a whole number, got True"),
    ("executor", ["spmd"], "wanted executor as the name of one, such as 'spmd'"),
    ("offload", True, "wanted offload=\"never\", or names of what rests on the host in a tuple"),
    ("offload", (1,), "got (1,)"),
    ("time_limit_s", "60", "wanted time_limit_s as a number of seconds, got '60'"),
    ("time_limit_s", True, "wanted time_limit_s as a number of seconds, got True"),
    ("memory", [], "wanted memory as text with a unit, such as '70GiB', or a whole number of bytes, got []"),
    ("memory", True, "got True"),
    ("progress", True, "wanted progress as a function that takes a line, such as print, got True"),
]  # fmt: skip

WRONG_AT_THE_DECORATOR = [
    ("cluster", 8, "wanted a cluster as '<count>x<GPU>', a JSON file or a Cluster, got 8"),
    ("donate", 1, "wanted donate as the pytree path of an argument, or several, got 1"),
    ("devices", 4, "wanted devices as different devices of JAX in a list, such as jax.devices()[:4], got 4"),
    ("devices", [], "got []"),
    ("devices", "cpu", "got 'cpu'"),
    ("devices", [0, 1], "got [0, 1]"),
    ("devices", jax.devices()[:1] * 2, "wanted devices as different devices of JAX"),
    ("plan", 3, "wanted plan as a plan or its file, got 3"),
    ("like", 3, "wanted like as a parallelized step, or its plan (of one program) or that one's file, got 3"),
    ("like", len, "got <built-in function len>"),
    ("static_argnums", "0", "wanted static_argnums as the position of an argument, or several, got '0'"),
    ("static_argnames", 0, "wanted static_argnames as the name of an argument, or several, got 0"),
]


def train_step(w, x):
    return w


def refused(call, said):
    with pytest.raises(InputError) as raised:
        call()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "value", "said"), WRONG + WRONG_AT_THE_DECORATOR)
def test_the_decorator_refuses_a_wrong_type(name, value, said):
    refused(lambda: autoshard.parallelize(**{name: value}), said)
    refused(lambda: autoshard.parallelize(train_step, **{name: value}), said)


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_search_refuses_a_wrong_type(name, value, said):
    w = jax.ShapeDtypeStruct((8, 8), "float32")
    refused(lambda: autoshard.search(train_step, w, w, cluster="8xCPU", **{name: value}), said)


@pytest.mark.parametrize(
    ("face", "options", "said"),
    [
        (autoshard.emit, {"plan": 3}, "wanted plan as a plan or its file, got 3"),
        (autoshard.emit, {"plan": "nowhere.json"}, "nowhere.json"),
        (autoshard.emit, {"plan": "nowhere.json", "state": True}, "wanted state as the pytree path"),
        (autoshard.emit, {"plan": "nowhere.json", "devices": 4}, "wanted devices as different devices"),
        (autoshard.verify, {"plan": 3}, "wanted plan as a plan or its file, got 3"),
        (autoshard.emit, {"plan": None}, "wanted plan as a plan or its file, got None"),
        (
            autoshard.emit,
            {"plan": "p.json", "microbatches": 2},
            "emit has no option 'microbatches', and train_step no",
        ),
        (autoshard.verify, {"plan": "p.json", "timeout_s": "9"}, "wanted timeout_s as a number of seconds"),
        (autoshard.verify, {"plan": "p.json", "full": "no"}, "wanted full as True or False, got 'no'"),
        (
            autoshard.verify,
            {"plan": "p.json", "target_config": 3},
            "wanted target_config as a text or its file",
        ),
        (
            autoshard.verify,
            {"plan": "p.json", "timeout": 3},
            r"no option 'timeout' \(did you mean 'timeout_s'\?\)",
        ),
        (
            autoshard.choices,
            {"plan": "p.json", "name": 3},
            "wanted name as the name of a decision in the plan",
        ),
    ],
)
def test_emit_and_verify_refuse_wrong_types(face, options, said):
    with pytest.raises((InputError, PlanError), match=said):
        face(train_step, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mesh", [2, 4]),
        ("mesh", np.array([2, 4])),
        ("mesh", (np.int64(2), 4)),
        ("mesh", range(1, 3)),
        ("pin", {"w": "P('data')"}),
        ("pin", {}),
        ("state", ["w"]),
        ("state", {"w"}),
        ("stages", "auto"),
        ("stages", np.int32(2)),
        ("microbatches", np.int64(2)),
        ("offload", "never"),
        ("offload", ["parameters"]),
        ("offload", ()),
        ("memory", 1e9),
        ("memory", np.int64(1 << 30)),
        ("time_limit_s", 60),
        ("time_limit_s", np.float32(0.5)),
        ("plan", Path("plan.json")),
        ("like", "plan.json"),
        ("cluster", Path("node.json")),
        ("devices", tuple(jax.devices()[:2])),
        ("devices", np.array(jax.devices())),
        ("static_argnums", -1),
        ("static_argnums", (0, np.int64(1))),
        ("static_argnames", ("w",)),
        ("progress", print),
    ],
)
def test_all_forms_of_a_right_type_pass(name, value):
    option_types.check(**{name: value})


def test_each_option_of_the_decorator_may_be_left_out():
    options = inspect.signature(autoshard.parallelize).parameters.keys() - {"step"}
    option_types.check(**dict.fromkeys(options))


@pytest.mark.parametrize(
    "face",
    [
        autoshard.parallelize,
        autoshard.search,
        autoshard.emit,
        autoshard.verify,
        autoshard.choices,
        autoshard.explain,
    ],
)
def test_each_option_of_a_public_function_has_a_type(face):
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    options = {p.name for p in inspect.signature(face).parameters.values() if p.kind is keyword_only}
    assert options <= option_types.OPTION_TYPES.keys()


def test_type_checkers_see_the_options_of_the_decorator():
    options = inspect.signature(autoshard.parallelize).parameters.keys() - {"step"}
    assert api.Keywords.__annotations__.keys() == options


def test_the_options_are_those_of_the_functions():
    given = {f.name for f in fields(Options)}
    faces = autoshard.search, autoshard.parallelize
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    assert given == {
        p.name for f in faces for p in inspect.signature(f).parameters.values() if p.kind is keyword_only
    }


def test_numbers_of_numpy_are_python_s_in_a_plan():
    two = np.int64(2)
    options = Options.of({"stages": two, "microbatches": two, "mesh": np.array([2, 4])})
    assert (options.num_stages, options.microbatches, options.mesh) == (2, 2, (2, 4))
    assert {type(one) for one in (options.stages, options.microbatches, *options.mesh)} == {int}


@pytest.mark.parametrize("seconds", [0, -1, -0.5, float("nan")])
@pytest.mark.parametrize("face", [autoshard.parallelize, partial(autoshard.search, cluster="8xCPU")])
def test_a_time_limit_is_positive(face, seconds):
    refused(
        lambda: face(train_step, time_limit_s=seconds),
        f"wanted a positive number of seconds, got time_limit_s={seconds}",
    )


def test_nothing_pinned_is_no_pin():
    assert Options.of({"pin": {}, "verify": None}) == Options()


def test_the_jit_executor_is_one_program_without_a_pipeline():
    assert not pipeline_request.are_allowed(Options(executor="jit"))
    assert not pipeline_request.are_allowed(Options(executor="jit", stages=1))
    with pytest.raises(
        InputError, match="executor='jit' is one program, without a pipeline, and stages='auto'"
    ):
        pipeline_request.are_allowed(Options(executor="jit", stages="auto"))
