"""An axis of size one splits nothing: a mesh with some is what it is without them."""

import functools

import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import applying, driver
from autoshard.search.options import Options, candidate_shapes
from autoshard.search.plan.plan import Plan
from tests.zoo import traced

PLENTY_BYTES = 1 << 40


@functools.cache
def planned(model: str, cluster: str, mesh: tuple[int, ...]) -> Plan:
    return driver.find(traced(model), parse_cluster(cluster), Options(PLENTY_BYTES, mesh)).plan


@pytest.mark.parametrize("mesh", [pytest.param((1, 16), marks=pytest.mark.slow), (1, 16, 1)])
def test_a_mesh_costs_what_it_costs_without_its_axes_of_size_one(mesh):
    """Slow links between nodes: many small collectives are joined, those over nobody among them, were there any."""
    plain, padded = (planned("gpt_scan", "16xA100-80GB-Ethernet", shape) for shape in ((16,), mesh))
    assert padded.estimates.step_s == pytest.approx(plain.estimates.step_s, rel=0.01)
    large = {name for name, size in padded.decisions.mesh.items() if size > 1}
    assert {axis for c in padded.estimates.collectives for axis in c.axes} <= large
    assert str(padded)


def test_two_axes_beside_one_of_size_one_are_two_axes():
    plain, padded = (planned("mlp", "8xH100-80GB", shape) for shape in ((2, 4), (1, 2, 4)))
    assert padded.estimates.step_s == pytest.approx(plain.estimates.step_s, rel=0.01)


def test_a_decision_may_name_an_axis_of_size_one():
    """By hand, or in a plan whose mesh was edited to have one."""
    step = traced("mlp")
    name = next(
        a.name for a, v in zip(step.arguments, step.abstract_inputs(), strict=True) if len(v.shape) == 2
    )
    plan = planned("mlp", "8xH100-80GB", (8, 1))
    data = plan.to_json()
    data["shardings"][0] |= {"arguments": {name: "P('model', 'data')"}, "ops": {}, "copies": {}}
    again = applying.apply(step, Plan.from_json(data), Cluster.from_json(plan.cluster)).plan
    assert again.decisions.arguments[name] == "P(None, 'data')"


@pytest.mark.parametrize("spec", [P("model"), P("replica", "model")])
def test_one_device_has_all_axes(spec):
    shapes = candidate_shapes(parse_cluster("1xH100-80GB"), Options(1 << 30, pins={"w": spec}))
    assert shapes == ((1,) * (2 if spec == P("model") else 3),)


def test_devices_that_make_no_two_axes_have_one_of_size_one():
    shapes = candidate_shapes(parse_cluster("3xH100-80GB"), Options(1 << 30, pins={"w": P("model")}))
    assert shapes == ((1, 3), (3, 1))


def test_three_axes_are_tried_where_a_pin_names_the_third():
    shapes = candidate_shapes(parse_cluster("16xH100-80GB"), Options(1 << 30, pins={"w": P("replica")}))
    assert shapes
    assert all(len(shape) == 3 for shape in shapes)


def test_a_pin_to_an_axis_of_size_one_says_nothing():
    name = traced("mlp").arguments[0].name
    options = Options(PLENTY_BYTES, (8, 1), {name: P("model")})
    found = driver.find(traced("mlp"), parse_cluster("8xCPU"), options)
    assert found.plan.decisions.arguments[name] == "P()"
