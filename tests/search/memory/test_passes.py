"""What recomputation is estimated to take is what a step takes longer that was rewritten to do it."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.compute import pass_s_per_byte
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Site
from autoshard.search.ir.trace import trace
from autoshard.search.memory.residuals import Residuals, residuals
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.solver.pbqp import Labels
from autoshard.search.space.warm_starts import for_rewritten_step
from autoshard.search.step_problem import StepProblem
from tests import zoo

CLUSTER = parse_cluster("8xA100-80GB")
"""Its compiler stores a tanh."""

PRICES = (0.0, 3e-12, 1e-11)

MODELS = {
    "vit": lambda: zoo.make_vit(num_layers=3, hidden=512, heads=8, image=128, patch=16, batch=1024),
    "mixer": lambda: zoo.make_mixer(num_layers=1, channels=256, token_ffn=128, channel_ffn=512, batch=1024),
    "resnet": lambda: zoo.make_resnet(image=128, batch=256),
    "unet": lambda: zoo.make_unet(stage_features=(64, 128), image=64, batch=256),
}


def solved(step) -> tuple[StepProblem, MeshProblem, Labels, tuple[Residuals, ...]]:
    step_problem = StepProblem.of(step, (), CLUSTER.device)
    on_mesh = step_problem.on(CLUSTER, (8,))
    labels = on_mesh.solve(on_mesh.pinned({}), 1 << 62, 5.0).labels
    parts = residuals(on_mesh.memory.costed, step_problem.live_ranges.fusion, labels)
    return step_problem, on_mesh, labels, parts


@pytest.mark.parametrize(
    "model", ["mixer", "resnet", *(pytest.param(m, marks=pytest.mark.slow) for m in ("vit", "unet"))]
)
def test_a_rewritten_step_takes_as_much_longer_as_estimated(model):
    case = MODELS[model]()
    step = trace(case.step, *case.abstract_args())
    step_problem, on_mesh, labels, parts = solved(step)
    plain_s = on_mesh.memory.costed.compute_s(labels)
    for price in PRICES:
        sites = frozenset[Site]().union(*(part.recomputed(price) for part in parts))
        more_s = sum(part.seconds(sites) - part.seconds(frozenset()) for part in parts)
        rewritten = StepProblem.of(step, (), CLUSTER.device, sites, known=step_problem.traced_program)
        again = rewritten.on(CLUSTER, (8,), on_mesh.memory.costed.resharder)
        again_s = again.memory.costed.compute_s(for_rewritten_step(on_mesh, labels, again)) - plain_s
        assert more_s == pytest.approx(again_s, abs=0.02 * plain_s)


LAYERS, WIDTH, BATCH = 4, 512, 1 << 16


def activated(w, x):
    def loss(w):
        y = x
        for i in range(LAYERS):
            y = y + jax.nn.gelu(y @ w[i, 0]) @ w[i, 1]
        return jnp.mean(y**2)

    return w - 0.1 * jax.grad(loss)(w)


def test_a_tanh_that_only_a_gradient_reads_costs_nothing_to_recompute():
    """The kernel that reads it reads what it is made of, too. The product of both is an array in either phase."""
    shapes = ((LAYERS, 2, WIDTH, WIDTH), (BATCH, WIDTH))
    step = trace(activated, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    *_, (part,) = solved(step)
    pass_s = BATCH * WIDTH * 4 / 8 * pass_s_per_byte(CLUSTER.device)
    op_of = {site: n for n, site in enumerate(part.sites) if part.is_stored[n]}
    tanhs = [i for i, op in enumerate(step.graph.ops) if op.name == "tanh"]
    assert len(tanhs) == LAYERS
    for i in tanhs:
        kept_s = [part.problem.keep_s[v] for v, op in enumerate(part.problem.maker) if op == op_of[i,]]
        assert part.problem.op_s[op_of[i,]] == 0
        assert kept_s == [pytest.approx(2 * pass_s)]
    recomputed = part.recomputed(0.0)
    assert {(i,) for i in tanhs} <= recomputed
    assert part.seconds(recomputed) <= part.seconds(frozenset()) - 2 * LAYERS * pass_s * 0.99
