"""How values travel: each path leads from what the maker's strategy says to what the reader's does."""

from contextlib import suppress
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.spec import PARTIAL, WHOLE
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.flat_program import ReadPhase, read_phase
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.strategies import CopySource, port_specs
from autoshard.search.problem.strategy_graph import Port
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.step_problem import StepProblem

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


def read_twice(weights, x):
    """Layers whose weights are cast and read twice, in either phase."""

    def loss(weights):
        y = x
        for w in weights:
            cast = w.astype(jnp.bfloat16)
            y = y + jnp.tanh(y @ cast) + jnp.sin((2 * y) @ cast)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_what_is_kept_of_a_phase_that_gathers_a_part_beforehand_is_gathered_once(first):
    """What the forward phase's readers have gathered, in whatever order, is what those of the backward phase read."""
    w, x = (
        jax.ShapeDtypeStruct((1024, 1024), jnp.float32),
        jax.ShapeDtypeStruct((1 << 14, 1024), jnp.bfloat16),
    )
    cluster = parse_cluster("16xL4")
    on_mesh = StepProblem.of(trace(read_twice, [w] * 2, x), (), cluster.device).on(cluster, (2, 2, 4))
    costed = on_mesh.memory.costed
    folded, num_kept = costed.graph.folded, 0
    nodes_of = dict[tuple[int, int], dict[ReadPhase, int]]()
    for copy in costed.graph.copies:
        nodes_of.setdefault(copy.maker, {})[copy.phase] = copy.node
    (cast, _), nodes = next(
        one
        for one in nodes_of.items()
        if len(one[1]) > 1 and folded.op(one[0][0]).name == "convert_element_type"
    )
    forward, backward = nodes[ReadPhase.FORWARD], nodes[ReadPhase.BACKWARD]
    (v,) = folded.op(cast).results
    readers = [(i, folded.program.ops[i]) for i in folded.program.uses[v]]
    made = costed.graph.ports[cast, 0, True]
    is_split = (port_specs(made, costed.strategies[made.node]) == (WHOLE, 0, 1)).all(axis=1)
    is_kept = [s is CopySource.KEPT for s in costed.strategies[backward].copy_sources]
    is_whole = (costed.strategies[backward].assignment == WHOLE).all(axis=1)
    for n, source in [*enumerate(costed.strategies[forward].copy_sources)][first::3]:
        kept = [*on_mesh.pinned({})]
        kept[made.node] = np.flatnonzero(is_split)
        kept[forward] = np.array([n])
        kept[backward] = np.flatnonzero(is_kept & is_whole)
        with suppress(NoFitError):
            labels = on_mesh.solve(kept, 1 << 62, 5.0).labels
            num_kept += source is CopySource.FRESH
            ways = ReshardPaths(costed, labels)
            taken = {ways.to_reader(i, op.operands.index(v)) for i, op in readers}
            assert len({way for way in taken if way.path and way.path[-1].after == (WHOLE,) * 3}) <= 1
    assert num_kept > 1


def doubled(w, momentum, x):
    """The gradient's sum is read in the backward phase and in the update: it is brought to rest for both."""
    doubled, pull = jax.vjp(lambda w: 2.0 * w, w)
    gradient = jax.grad(lambda w: jnp.mean((w @ x.T) ** 2))(doubled)
    return w - 0.1 * pull(gradient)[0], momentum + gradient**2


def test_a_loop_adds_to_its_sum_as_it_is_and_not_as_others_read_it():
    w, x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((1 << 15, 1024), jnp.float32)
    cluster = parse_cluster("16xL4")
    step = microbatched(trace(doubled, w, w, x), 2)
    on_mesh = StepProblem.of(step, (), cluster.device).on(cluster, (2, 8))
    costed = on_mesh.memory.costed
    graph, program = costed.graph, costed.graph.folded.program
    (rest,) = [copy for copy in graph.copies if copy.phase is ReadPhase.REST]
    made = graph.ports[*rest.maker, True]
    kept = [*on_mesh.pinned({})]
    is_partial = (port_specs(made, costed.strategies[made.node]) == PARTIAL).any(axis=1)
    kept[made.node] = np.flatnonzero(is_partial)
    is_fresh = [source is CopySource.FRESH for source in costed.strategies[rest.node].copy_sources]
    kept[rest.node] = np.flatnonzero(is_fresh)
    paths = ReshardPaths(costed, on_mesh.solve(kept, 1 << 62, 5.0).labels)
    sums = [i for i, op in enumerate(program.ops) if op.name == "carry" and op.is_accumulator]
    (v,) = program.ops[sums[0]].results
    assert paths.to_rest(v)
    (added,) = [u for u in program.uses[v] if program.ops[u].name == "add"]
    assert paths.to_reader(added, program.ops[added].operands.index(v)).path == ()
