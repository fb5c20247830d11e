"""Strategies against brute force: every way to lay mesh axes over factors that splits what it touches evenly enough."""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Value
from autoshard.search.ir.spec import PARTIAL, WHOLE
from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import ReadPhase, flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.op_groups import OpGroup, op_groups
from autoshard.search.problem.reshard import Resharder
from autoshard.search.problem.strategies import (
    ALL_PARTIAL,
    MAX_LABELS,
    NONE,
    CopySource,
    Strategies,
    _copy_strategies,
    all_strategies,
    group_strategies,
    port_specs,
    shards_over,
)
from autoshard.search.problem.strategy_graph import STUCK, Copy, Port, strategy_graph

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def group(*sizes: int, is_sum: bool = False) -> OpGroup:
    return OpGroup((0,), sizes, {(0, f): f for f in range(len(sizes))}, is_sum)


def found(*args) -> set[tuple[int, ...]]:
    strategies = group_strategies(*args).assignment.tolist()
    assert len(set(map(tuple, strategies))) == len(strategies)
    return set(map(tuple, strategies))


# --- of a group


@st.composite
def groups(draw):
    """A group with ports of plain and compound dimensions."""
    sizes = draw(st.lists(st.sampled_from((2, 3, 4, 6, 8, 31, 32, 33, 64)), min_size=1, max_size=3))
    factors = st.lists(st.sampled_from(range(len(sizes))), min_size=1, max_size=2, unique=True).map(tuple)
    dims = draw(st.lists(factors, max_size=2))
    return group(*sizes, is_sum=draw(st.booleans())), (Port(0, tuple(dims)),)


@given(groups(), MESHES, st.booleans())
@example((group(33, 2), (Port(0, ((0, 1),)),)), (2,), False)
@example((group(33, 2), (Port(0, ((0,), (1,))),)), (2,), False)
def test_every_even_enough_layout_is_a_strategy_and_no_other(case, mesh, must_divide):
    """Padded may be a thirty-second; nothing of what must be even, and none of a dimension of several factors. What an axis
    of size one could do is the same whatever it is said to."""
    of, ports = case
    compound = [dim for port in ports for dim in port.dims if len(dim) > 1]
    minor, even = {f for dim in compound for f in dim[1:]}, {dim[0] for dim in compound}
    wanted = set()
    for strategy in product(range(ALL_PARTIAL, len(of.sizes)), repeat=len(mesh)):
        parts = {
            f: prod(n for g, n in zip(strategy, mesh, strict=True) if g == f) for f in strategy if f >= 0
        }
        left_over = {f: -(-of.sizes[f] // n) * n - of.sizes[f] for f, n in parts.items()}
        is_even_enough = all(
            rest == 0 if must_divide or f in even else rest / of.sizes[f] <= 1 / 32
            for f, rest in left_over.items()
        )
        splits_by_one = any(f != NONE and n == 1 for f, n in zip(strategy, mesh, strict=True))
        if splits_by_one or minor & set(parts) or (ALL_PARTIAL in strategy and not of.is_sum):
            continue
        if is_even_enough:
            wanted.add(strategy)
    assert found(of, ports, mesh, must_divide) == wanted


def over_three_axes(places, alone) -> set[tuple[int, ...]]:
    """What is tried where some places are taken by neighbouring axes together only."""
    every = product(places, repeat=3)
    return {s for s in every if alone.issuperset(s) or s[0] == s[1] or s[1] == s[2]}


def test_of_many_factors_the_smaller_are_split_over_neighbouring_axes_together():
    """On three axes five places have 125 layouts: NONE and four factors, or three where all may be partial."""
    sizes = (64, 8, 512, 16, 128, 32)
    places = {NONE, *range(len(sizes))}
    some = found(group(*sizes), (), (2, 2, 2), True)
    assert some == over_three_axes(places, {NONE, 0, 2, 4, 5})
    sums = found(group(*sizes, is_sum=True), (), (2, 2, 2), True)
    assert sums == over_three_axes({ALL_PARTIAL, *places}, {ALL_PARTIAL, NONE, 0, 2, 4})
    few = found(group(*sizes[:4]), (), (2, 2, 2), True)
    assert few == set(product({NONE, *range(4)}, repeat=3))
    assert len(few) == 125 <= MAX_LABELS


@given(groups(), st.booleans())
def test_a_mesh_that_splits_an_axis_allows_what_the_other_does(case, must_divide):
    of, ports = case
    joined = {(a, a, b) for a, b in found(of, ports, (4, 3), must_divide)}
    assert joined <= found(of, ports, (2, 2, 3), must_divide)


def test_a_group_without_loops_is_computed_alike_everywhere():
    assert group_strategies(group(), (), (2, 4), True).assignment.tolist() == [[NONE, NONE]]


def test_factors_of_one_size_are_split_in_their_order():
    strategies = group_strategies(group(8, 8), (), (2,), True).assignment.tolist()
    assert strategies == [[NONE], [0], [1]]


# --- what they say


def test_a_port_s_spec_is_the_dimension_that_begins_with_the_factor():
    port = Port(0, ((1,), (STUCK,), (), (0, 2)), partial_over=(3,))
    assignment = np.array([[NONE, NONE], [0, 1], [1, 0], [2, 3], [3, 3], [ALL_PARTIAL, 1]])
    wanted = [[WHOLE, WHOLE], [3, 0], [0, 3], [WHOLE, PARTIAL], [PARTIAL, PARTIAL], [PARTIAL, 0]]
    assert port_specs(port, Strategies(assignment)).tolist() == wanted


def test_a_copy_s_strategy_is_its_spec():
    assignment = np.array([[0, WHOLE], [1, 1]])
    strategies = Strategies(assignment, (CopySource.SAME, CopySource.FRESH))
    assert port_specs(Port(3, ()), strategies).tolist() == assignment.tolist()
    assert len(strategies) == 2


@given(groups(), MESHES)
def test_specs_split_what_the_assignment_splits(case, mesh):
    """A dimension is cut into as many parts as the axes that its first factor is given to."""
    of, (port,) = case
    strategies = group_strategies(of, (port,), mesh, False)
    for assigned, spec in zip(
        strategies.assignment.tolist(), port_specs(port, strategies).tolist(), strict=True
    ):
        for axis, (factor, d) in enumerate(zip(assigned, spec, strict=True)):
            last = [n for n, dim in enumerate(port.dims) if dim[0] == factor]
            assert d == (last[-1] if last else PARTIAL if factor == ALL_PARTIAL else WHOLE), axis


@given(groups(), MESHES, st.sets(st.integers(0, 2)))
def test_a_loop_nest_is_cut_into_as_many_parts_as_the_axes_on_its_factors_have_devices(case, mesh, factors):
    of, ports = case
    strategies = group_strategies(of, ports, mesh, False)
    wanted = [
        prod(n for f, n in zip(row, mesh, strict=True) if f in factors)
        for row in strategies.assignment.tolist()
    ]
    assert shards_over(frozenset(factors), strategies, mesh).tolist() == wanted


# --- of a copy


def copies(kept: bool, source: list, *readers: list) -> list[tuple[tuple[int, ...], CopySource]]:
    """A copy's strategies, where its source and its readers have these specs."""
    made = [Strategies(np.array(specs), (CopySource.FRESH,) * len(specs)) for specs in (source, *readers)]
    ports = [Port(n, ()) for n in range(len(made))]
    value = Value((8, 8), jnp.dtype("float32"))
    forward = tuple(ports[1:2]) if kept else ()
    copy = Copy(9, (0, 0), value, ReadPhase.BACKWARD, ports[0], tuple(ports[1:]), forward, 1)
    strategies = _copy_strategies(copy, made)
    return list(zip(map(tuple, strategies.assignment.tolist()), strategies.copy_sources, strict=True))


def test_a_copy_lies_as_its_source_or_as_a_reader_wants_it():
    assert copies(False, [[0], [WHOLE]], [[1], [0]], [[WHOLE]]) == [
        ((WHOLE,), CopySource.SAME),
        ((0,), CopySource.SAME),
        ((WHOLE,), CopySource.FRESH),
        ((0,), CopySource.FRESH),
        ((1,), CopySource.FRESH),
    ]


def test_what_is_kept_lies_as_the_forward_phase_had_it():
    kept = [s for s, source in copies(True, [[0]], [[1]], [[WHOLE]]) if source is CopySource.KEPT]
    assert kept == [(1,)]


def test_no_copy_is_partial():
    assert copies(True, [[PARTIAL, 0], [0, 0]], [[PARTIAL, PARTIAL], [WHOLE, 1]]) == [
        ((0, 0), CopySource.SAME),
        ((WHOLE, 1), CopySource.FRESH),
        ((0, 0), CopySource.FRESH),
        ((WHOLE, 1), CopySource.KEPT),
    ]


# --- of a whole graph


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
def test_arguments_and_results_of_a_step_divide_evenly_and_every_node_has_its_strategies(shape):
    """100 over 8 is padded by four, which is little enough of a product, and too much for an argument."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), jnp.max(x @ w, 1)

    args = jax.ShapeDtypeStruct((64, 1020), jnp.float32), jax.ShapeDtypeStruct((1020, 64), jnp.float32)
    whole = fold(flatten(trace(step, *args)))
    graph = strategy_graph(whole, op_groups(whole))
    made = all_strategies(graph, Resharder(MeshModel(parse_cluster("8xH100-80GB"), shape)))
    assert len(made) == graph.num_nodes
    padded = set()
    for node, of in enumerate(graph.groups):
        ports = tuple(p for p in graph.ports.values() if p.node == node)
        is_border = graph.folded.op(of.op_classes[0]).name in ("input", "output")
        assert set(map(tuple, made[node].assignment.tolist())) == found(of, ports, shape, is_border)
        for row in made[node].assignment.tolist():
            parts = [prod(n for f, n in zip(row, shape, strict=True) if f == g) for g in range(len(of.sizes))]
            if any(size % n for size, n in zip(of.sizes, parts, strict=True)):
                padded.add(is_border)
    assert padded == {False}
    for copy in graph.copies:
        assert made[copy.node].copy_sources
        assert made[copy.node].assignment.shape[1] == len(shape)
