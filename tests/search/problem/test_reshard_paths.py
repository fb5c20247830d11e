"""How values travel: each path leads from what the maker's strategy says to what the reader's does."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cost_model.hardware import parse_cluster
from search.ir.spec import PARTIAL
from search.ir.trace import trace
from search.mesh_problem import MeshProblem, StepProblem
from search.problem.flat_program import ReadPhase, read_phase
from search.problem.reshard_paths import ReshardPaths
from search.problem.strategies import port_specs
from search.problem.strategy_graph import Port

MESH = (2, 4)
NUM_DRAWS = 20


def step(weights, x):
    """Layers alike whose products are read in both phases, ops of two results, one that reads a value twice, a loop."""

    def loss(weights):
        h = x
        for w in weights:
            z = h @ w
            h = h + z * jnp.tanh(z)
        least, places = lax.sort((h, 2 * h), num_keys=1)
        last, (before, twice) = lax.scan(lambda c, w: (c @ w, (c, 2 * c)), h, jnp.stack(weights))
        gram = lax.dot_general(h, h, (((1,), (1,)), ((), ())))
        return gram.mean() + (least * places).mean() + last.mean() + (before * twice).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


ARGS = [jax.ShapeDtypeStruct((256, 256), "float32")] * 3, jax.ShapeDtypeStruct((64, 256), "float32")


@pytest.fixture(scope="module")
def problem() -> MeshProblem:
    cluster = parse_cluster("8xH100-80GB")
    return StepProblem.of(trace(step, *ARGS), (), cluster.device).on(cluster, MESH)


def drawn(problem, rng):
    """A strategy for each node, any of those that those before it leave possible."""
    chosen: list[int] = []
    costs_s = [cost.copy() for cost in problem.node_cost_s]
    for node, cost_s in enumerate(costs_s):
        chosen.append(int(rng.choice(np.flatnonzero(np.isfinite(cost_s)))))
        for edge in problem.edges:
            if edge.u == node:
                costs_s[edge.v] += edge.cost_s[chosen[node]]
            if edge.v == node:
                costs_s[edge.u] += edge.cost_s[:, chosen[node]]
    return tuple(chosen)


def spec_at(paths, port):
    return tuple(port_specs(port, paths.costed.strategies[port.node])[paths.chosen[port.node]])


def walked(path, value, here):
    """All specs that a value has on a path; each step's bytes are the larger of what a device holds before and after it."""

    def held(spec):
        return value.num_bytes / prod(n for d, n in zip(spec, MESH, strict=True) if d >= 0)

    specs = [here, *(step.after for step in path)]
    for before, step in zip(specs, path, strict=False):
        assert step.num_bytes == max(held(before), held(step.after))
    return specs


@pytest.mark.parametrize("seed", range(NUM_DRAWS))
def test_paths_join_what_makes_a_value_to_what_reads_it(problem, seed):
    chosen = drawn(problem.problem, np.random.default_rng(seed))
    paths = ReshardPaths(problem.memory.costed, chosen)
    for i, op in enumerate(paths.program.ops):
        for operand, v in enumerate(op.operands):
            if paths.program.values[v].shape:
                check_operand(paths, i, operand)


def check_operand(paths, i, operand):
    op, class_of = paths.program.ops[i], paths.folded.class_of
    v, phase = op.operands[operand], read_phase(op)
    value, (made_at, result) = paths.program.values[v], paths.maker[v]
    maker = class_of[made_at], result
    stored, copy = (paths.graph.copy_of.get((*maker, p)) for p in (ReadPhase.REST, phase))
    made = spec_at(paths, paths.graph.ports[*maker, True])
    resting = made if stored is None else spec_at(paths, Port(stored.node, ()))
    assert walked(paths.to_rest(v), value, made)[-1] == resting

    wanted = spec_at(paths, paths.graph.ports[class_of[i], operand, False])
    reshard = paths.to_reader(i, operand)
    specs = walked(reshard.path, value, resting)
    assert specs[-1] == wanted or PARTIAL in wanted
    if copy is not None and wanted != made:
        assert spec_at(paths, Port(copy.node, ())) in specs
    assert reshard.phase in (("", phase.value) if copy is not None and copy.kept_from else ("",))
