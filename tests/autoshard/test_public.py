"""The package as its user meets it: which names it has, how they call themselves, and what a type checker knows of them."""

import inspect
import json
import pickle
import subprocess
import sys
import traceback
import typing

import pytest

import autoshard
from autoshard import public
from autoshard.cost_model.cluster_file import json_schema

USERS_FILE = """
from typing import assert_type

import jax

import autoshard


class State: ...


@autoshard.parallelize
def bare(state: State, batch: jax.Array) -> tuple[State, float]:
    return state, 0.0


@autoshard.parallelize(memory="70GiB", mesh=(2, 4))
def with_options(state: State, *, batch: jax.Array) -> tuple[State, float]:
    return state, 0.0


class Trainer:
    @autoshard.parallelize(static_argnames="mode")
    def step(self, state: State, mode: str = "train") -> State:
        return state


def plain(state: State, batch: jax.Array) -> float:
    return 0.0


def create(key: jax.Array) -> State:
    return State()


def right(state: State, batch: jax.Array, key: jax.Array) -> None:
    assert_type(bare(state, batch), tuple[State, float])
    assert_type(with_options(state, batch=batch), tuple[State, float])
    assert_type(Trainer().step(state, mode="test"), State)
    assert_type(autoshard.parallelize(plain, like=bare)(state, batch), float)
    assert_type(bare.init(create, key, args=(batch,)), State)
    assert_type(bare.plan, autoshard.Plan)
    plan = autoshard.search(plain, state, batch, cluster="8xCPU")
    assert_type(plan, autoshard.Plan)
    assert_type(autoshard.Plan.load("plan.json"), autoshard.Plan)
    assert_type(autoshard.choices(plain, state, batch, plan="plan.json", name="w"), tuple[str, ...])


def wrong(state: State, batch: jax.Array) -> None:
    bare(state)  # wrong
    with_options(state, batch)  # wrong
    Trainer().step(3)  # wrong
    autoshard.parallelize(memroy="1GiB")  # wrong
    autoshard.parallelize(plain, mesh="8")  # wrong
    bare.plans  # wrong
    autoshard.serach  # wrong
"""


@pytest.mark.devices
def test_a_type_checker_knows_a_step_by_its_own_signature(tmp_path):
    (tmp_path / "train.py").write_text(USERS_FILE)
    command = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "train.py"]
    found = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    errors = [one for one in json.loads(found.stdout)["generalDiagnostics"] if one["severity"] == "error"]
    lines = {one["range"]["start"]["line"] for one in errors}
    assert lines == {i for i, line in enumerate(USERS_FILE.splitlines()) if line.endswith("# wrong")}, errors


def test_the_package_names_what_it_loads_later():
    assert autoshard.__all__ == public.__all__ == sorted(public.__all__, key=lambda n: (n.islower(), n))
    assert not set(autoshard.__all__) - set(dir(autoshard))


OF_CLUSTERS = {"Cluster", "Device", "Link", "MixedCluster"}


@pytest.mark.parametrize("name", public.__all__)
def test_a_public_name_says_that_it_comes_from_the_package(name):
    value = getattr(autoshard, name)
    module = value.__module__ if name in OF_CLUSTERS else "autoshard"
    assert (value.__module__, value.__qualname__) == (module, name)
    assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize("name", sorted(OF_CLUSTERS))
def test_the_fields_of_a_cluster_are_described_in_its_schema(name):
    described = json_schema()["$defs"][name]["properties"].values()
    assert all(field.get("description") or "$ref" in field for field in described)


def test_an_error_is_called_by_its_public_name_in_a_traceback():
    with pytest.raises(autoshard.InputError) as caught:
        autoshard.parallelize(3)
    said, *_ = traceback.format_exception_only(caught.value)
    assert said.startswith("autoshard.InputError: parallelize wants a function")


def annotated(value):
    """The types that a class or a function names: of its fields, properties, arguments and results."""
    if not inspect.isclass(value):
        return list(typing.get_type_hints(value, localns=vars(public)).values())
    found = [t for c in value.__mro__ if is_ours(c) for t in inspect.get_annotations(c).values()]
    for name, member in inspect.getmembers_static(value):
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            found += typing.get_type_hints(inspect.unwrap(function), localns=vars(public)).values()
    return found


def is_ours(value):
    return value.__module__.partition(".")[0] == "autoshard"


def classes_of(annotation):
    """The classes of this package in a type, such as `A` and `B` in `tuple[A, ...] | B`."""
    if inspect.isclass(annotation) and is_ours(annotation):
        return {annotation}
    return {c for part in typing.get_args(annotation) for c in classes_of(part)}


@pytest.mark.parametrize("name", public.__all__)
def test_each_type_that_a_public_name_gives_or_takes_is_public_too(name):
    met = {c for annotation in annotated(getattr(autoshard, name)) for c in classes_of(annotation)}
    assert not {c.__qualname__ for c in met} - set(autoshard.__all__)


def test_each_error_of_the_family_is_public():
    def family(error):
        return {error.__name__}.union(*map(family, error.__subclasses__()))

    assert family(autoshard.AutoshardError) <= set(autoshard.__all__)
