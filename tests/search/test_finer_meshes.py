"""Meshes of three axes: tried unasked where communication costs enough, and certified only where something is proven."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from cost_model.hardware import parse_cluster
from search import driver
from search.ir.trace import trace
from search.options import Options
from tests.search.chain import chain
from tests.zoo import make_dlrm

WIDTH, BATCH, CAP = 2048, 1 << 17, 70 << 30
STEP = trace(
    chain,
    [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 6,
    jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32),
)
SLOW, FAST = parse_cluster("64xA100-80GB-Ethernet"), parse_cluster("8xH100-80GB")


def found(cluster=SLOW, **options):
    said = list[str]()
    plan = driver.find(STEP, cluster, Options(CAP, **options), said.append).plan
    return plan, [line for line in said if line.count("x") == 2 and line.startswith("mesh")]


def test_a_split_of_the_best_mesh_is_found_where_it_is_faster():
    plan, tried = found()
    assert 1 <= len(tried) <= 2
    assert tuple(plan.decisions.mesh) == ("replica", "data", "model")
    shape = tuple(plan.decisions.mesh.values())
    assert plan.estimates.step_s < 0.95 * found(mesh=(8, 8))[0].estimates.step_s
    assert plan.estimates.step_s == pytest.approx(found(mesh=shape)[0].estimates.step_s, rel=0.01)


def test_what_does_not_fit_on_a_split_of_the_best_mesh_is_made_to():
    """Two axes fit as they are; three are faster, under this cap where something is computed again, or split further."""
    cap = int(0.27 * 2**30)
    best, on_two, on_three = (
        driver.find(STEP, SLOW, Options(cap, mesh=mesh)).plan for mesh in (None, (8, 8), (2, 4, 8))
    )
    assert on_three.estimates.step_s < 0.9 * on_two.estimates.step_s
    assert best.estimates.step_s <= 1.005 * on_three.estimates.step_s
    assert best.estimates.peak_bytes <= cap


def test_what_only_recomputes_is_not_tried_where_the_plain_step_gains_nothing():
    """What goes through its batch in parts is: it communicates more."""
    cluster, said = parse_cluster("16xL4"), list[str]()
    roomy_bytes = driver.find(STEP, cluster, Options(CAP)).plan.estimates.peak_bytes
    found = []
    for share in (0.6, 0.4):
        said.clear()
        plan = driver.find(STEP, cluster, Options(int(share * roomy_bytes)), said.append).plan
        found.append(
            (bool(plan.decisions.retention), plan.decisions.microbatches > 1, said.count("mesh 2x2x4"))
        )
    assert found == [(True, False, 1), (True, True, 2)]


def test_what_is_certified_is_certified_of_the_meshes_that_are_named():
    plan, _ = found()
    for shape in plan.meshes:
        asked = found(mesh=shape)[0]
        assert asked.estimates.step_s >= (1 - plan.gap) * plan.estimates.step_s * (1 - 1e-9), shape
    own = tuple(plan.decisions.mesh.values())
    assert ("where it lies, nothing is proven" in str(plan)) == (own not in plan.meshes)


def test_none_is_tried_where_communication_costs_little():
    plan, tried = found(FAST)
    assert not tried
    assert all(len(shape) < 3 for shape in plan.meshes)


def test_they_are_found_where_little_is_communicated_too():
    """Embedding tables on 12 devices: a twentieth of the step is communication."""
    case = make_dlrm(table_rows=(4_000_000, 1_000_000, 100_000), embed_dim=128, num_dense=13, batch=1024 * 12)
    step, cluster = trace(case.step, *case.abstract_args()), parse_cluster("12xA100-40GB")
    best, on_two, on_three = (
        driver.find(step, cluster, Options(30 << 30, mesh=mesh)).plan.estimates.step_s
        for mesh in (None, (4, 3), (2, 2, 3))
    )
    assert on_three < 0.985 * on_two
    assert best <= 1.005 * on_three


@pytest.mark.parametrize("options", [{"mesh": (8, 8)}, {"pins": {"x": P("data")}}])
def test_none_is_tried_where_axes_are_named(options):
    plan, tried = found(**options)
    assert not tried
    assert len(plan.decisions.mesh) < 3
