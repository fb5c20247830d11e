"""Rows, profile and peak against sums over everything that is alive, whatever is alive and whatever is chosen."""

from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from autoshard.search.problem.live_ranges import ARGUMENTS, LiveRange, Resident
from autoshard.search.problem.memory_rows import Memory, Origin, Peak
from autoshard.search.problem.strategies import CopySource, port_specs
from autoshard.search.problem.strategy_graph import Port
from autoshard.search.problem.workspaces import WORKSPACE_BYTES
from autoshard.search.step_problem import StepProblem


def step(w, x):
    """Its products' operands are read in both phases, so that they have copies; its weight is updated."""
    return w - 0.1 * jax.grad(lambda w: jnp.sum(((x @ w) @ w) ** 2))(w)


CLUSTER = parse_cluster("8xH100-80GB")
ARGS = jax.ShapeDtypeStruct((128, 128), jnp.float32), jax.ShapeDtypeStruct((1024, 128), jnp.float32)
ON_MESH = StepProblem.of(trace(step, *ARGS), (), CLUSTER.device).on(CLUSTER, (2, 4))
COSTED = ON_MESH.memory.costed
GRAPH = COSTED.graph
OPS = GRAPH.folded.program.ops
OF_GROUPS = sorted(set(GRAPH.ports.values()), key=lambda port: (port.node, port.dims))
OF_COPIES = [Port(copy.node, ()) for copy in GRAPH.copies]

CHOSEN = st.tuples(*(st.integers(0, len(s) - 1) for s in COSTED.strategies))
BYTES = st.integers(0, 20).map(lambda n: 64 * n)
"""Whose eighths add up exactly."""


@st.composite
def live_ranges(draw) -> LiveRange:
    start, end = sorted((draw(st.integers(0, len(OPS) - 1)), draw(st.integers(0, len(OPS) - 1))))
    of_copy = draw(st.booleans())
    port = draw(st.sampled_from(OF_COPIES if of_copy else OF_GROUPS))
    copy_source = draw(st.sampled_from((None, *CopySource))) if of_copy else None
    source = None if of_copy else draw(st.sampled_from((None, *OF_GROUPS)))
    apart = [one for one in OF_GROUPS if source and one.node != source.node]
    if apart:  # a reader in its source's group needs no reshard
        port, others = draw(st.sampled_from(apart)), tuple(draw(st.lists(st.sampled_from(apart), max_size=2)))
    else:
        source, others = None, ()
    resident = draw(st.sampled_from(Resident))
    return LiveRange(port, draw(BYTES), start, end, copy_source, resident, start, source, others)


ITEMS = st.lists(live_ranges(), max_size=6).map(tuple)


def spec(port: Port, chosen) -> tuple[int, ...]:
    return tuple(port_specs(port, COSTED.strategies[port.node]).tolist()[chosen[port.node]])


def local(port: Port, num_bytes: int, chosen) -> float:
    """What a device has of a value on a mesh of 2 x 4: half where the first axis splits it, a quarter where the second."""
    first, second = spec(port, chosen)
    return num_bytes / (2 if first >= 0 else 1) / (4 if second >= 0 else 1)


def held(item: LiveRange, chosen) -> float:
    if (
        item.copy_source is not None
        and COSTED.strategies[item.port.node].copy_sources[chosen[item.port.node]] is not item.copy_source
    ):
        return 0.0
    own_bytes = max(local(port, item.num_bytes, chosen) for port in (item.port, *item.others))
    return max(own_bytes - local(item.source, item.num_bytes, chosen), 0.0) if item.source else own_bytes


def alive(items, at: int) -> list[LiveRange]:
    return [item for item in items if item.start <= at <= item.end]


def total(items, at: int, chosen) -> float:
    return sum(held(item, chosen) for item in alive(items, at))


def without_arriving(items) -> tuple[LiveRange, ...]:
    return tuple(item for item in items if not item.source)


@given(ITEMS, CHOSEN)
def test_the_profile_and_the_rows_are_what_is_alive_at_every_point(items, chosen):
    memory = Memory(COSTED, items)
    profile = memory.profile(chosen)
    assert len(profile) == len(OPS)
    for at in range(len(OPS)):
        row = memory.row(at, chosen)
        assert profile[at] == total(items, at, chosen)
        assert (row.total_bytes(chosen), row.fixed_bytes) == (profile[at], 0.0)
    assert memory.held(chosen).tolist() == [held(item, chosen) for item in items]


@given(ITEMS, CHOSEN, CHOSEN)
def test_a_row_made_for_some_strategies_says_no_more_of_others_than_there_is(items, chosen, others):
    memory = Memory(COSTED, items)
    for at in range(len(OPS)):
        assert memory.row(at, chosen).total_bytes(others) <= total(items, at, others)


@given(ITEMS, CHOSEN, CHOSEN, st.data())
def test_an_expansion_is_exact_where_a_node_differs_or_a_source_and_one_of_its_readers(
    items, chosen, others, data
):
    memory = Memory(COSTED, items)
    pairs = [(p.node, i.source.node) for i in items if i.source for p in (i.port, *i.others)]
    differ = data.draw(st.sampled_from([(), *((n,) for n in range(len(chosen))), *pairs]))
    near = tuple(others[n] if n in differ else label for n, label in enumerate(chosen))
    for at in range(len(OPS)):
        expansion = memory.expansion(at, chosen)
        assert expansion.total_bytes(chosen) == pytest.approx(total(items, at, chosen))
        assert expansion.total_bytes(near) == pytest.approx(total(items, at, near))


@given(ITEMS, CHOSEN)
def test_the_peak_is_the_first_of_the_profile_s_highest_points(items, chosen):
    totals = [total(items, at, chosen) for at in range(len(OPS))]
    found = Memory(COSTED, items).peak(chosen)
    assert (found.num_bytes, found.position) == (max(totals), totals.index(max(totals)))
    there = [(item.resident, held(item, chosen)) for item in alive(items, found.position)]
    by_resident = {r: sum(num_bytes for other, num_bytes in there if other is r) for r in Resident}
    assert found.residents == tuple((r, by_resident[r]) for r in Resident if by_resident[r] > 0)


@given(ITEMS, CHOSEN, st.integers(0, 2000))
def test_rows_over_a_limit_are_each_phase_s_highest(items, chosen, limit_bytes):
    totals = [total(items, at, chosen) for at in range(len(OPS))]
    wanted = {}
    for at, op in enumerate(OPS):
        if totals[at] > max(limit_bytes, wanted.get(op.phase, (0.0, 0))[0]):
            wanted[op.phase] = totals[at], at
    found = Memory(COSTED, items).rows_over(chosen, limit_bytes)
    assert [row.name for row in found] == [f"op {at}" for _, at in wanted.values()]
    assert [row.total_bytes(chosen) for row in found] == [highest for highest, _ in wanted.values()]


# --- what must be there whatever is chosen

KEPT = st.tuples(*(st.sets(st.integers(0, len(s) - 1), min_size=1).map(sorted) for s in COSTED.strategies))


@given(ITEMS, KEPT)
def test_what_must_be_held_is_the_least_of_every_node_where_most_must_be(items, kept):
    arrays, all_items, items = [np.array(labels) for labels in kept], items, without_arriving(items)
    each = [min(held(item, {item.port.node: n}) for n in kept[item.port.node]) for item in items]
    least = [
        sum(e for item, e in zip(items, each, strict=True) if item.start <= at <= item.end)
        for at in range(len(OPS))
    ]
    there = alive(items, least.index(max(least)))
    nodes = {item.port.node for item in there}
    wanted = sum(
        min(sum(held(item, {node: n}) for item in there if item.port.node == node) for n in kept[node])
        for node in nodes
    )
    found = Memory(COSTED, all_items).least_bytes(arrays)
    assert found == wanted
    for pick in (min, max):
        chosen = tuple(pick(labels) for labels in kept)
        assert Memory(COSTED, all_items).peak(chosen).num_bytes >= found


def test_where_no_strategy_is_left_nothing_is_enough():
    one = LiveRange(OF_GROUPS[0], 64, 0, 1, None, Resident.BATCH, 0)
    for node in range(len(COSTED.strategies)):
        kept = [np.arange(0 if n == node else len(s)) for n, s in enumerate(COSTED.strategies)]
        for items in ((), (one,)):
            assert Memory(COSTED, items).least_bytes(kept) == inf


# --- the row of a device's peak


@st.composite
def peaks(draw) -> Peak:
    held = []
    for _ in range(draw(st.integers(0, 3))):
        port = draw(st.sampled_from(OF_GROUPS))
        source = tuple(port_specs(port, COSTED.strategies[port.node]).tolist()[0])
        origin = Origin(port, draw(st.sampled_from((None, source, (0, 0), (1, -1)))))
        held.append((origin, float(draw(BYTES))))
    return Peak(float(draw(st.integers(0, 3000))), draw(st.integers(0, len(OPS) - 1)), (), tuple(held))


@given(CHOSEN, CHOSEN, peaks())
def test_a_row_of_a_peak_is_its_arrays_in_their_parts_and_the_rest(chosen, others, peak):
    """Under the strategies that made the peak, no less than it; under others, each array grows and shrinks as its part."""

    def is_there(origin: Origin, labels) -> bool:
        return spec(origin.port, labels) != origin.source

    def held(labels) -> float:
        """The arrays that were there at the peak."""
        there = [(origin, num_bytes) for origin, num_bytes in peak.held if is_there(origin, chosen)]
        sizes = (
            num_bytes / local(one.port, 1, chosen) * local(one.port, 1, labels) * is_there(one, labels)
            for one, num_bytes in there
        )
        return sum(sizes)

    row, rest = Memory(COSTED, ()).row_of(peak, chosen), max(0.0, peak.num_bytes - held(chosen))
    assert row.fixed_bytes == pytest.approx(rest)
    assert row.total_bytes(chosen) == pytest.approx(max(held(chosen), peak.num_bytes))
    assert row.total_bytes(others) == pytest.approx(held(others) + rest)


@pytest.mark.parametrize(
    "chosen", [tuple(0 for _ in COSTED.strategies), tuple(len(s) - 1 for s in COSTED.strategies)]
)
@pytest.mark.parametrize("margin", [0.0, 0.25])
def test_all_of_a_step_s_live_ranges_are_in_its_rows(chosen, margin):
    """All but its arguments have a margin."""
    memory = replace(ON_MESH.memory, margin=margin)
    profile = memory.profile(chosen)
    resting = [item for item in memory.items if item.resident in ARGUMENTS]
    made = [item for item in memory.items if item.resident not in ARGUMENTS]
    assert profile.max() == memory.peak(chosen).num_bytes > 0
    for at in range(len(OPS)):
        product_bytes = WORKSPACE_BYTES if OPS[at].name == "dot_general" else 0
        made_bytes = (1 + margin) * (total(made, at, chosen) + product_bytes)
        assert profile[at] == pytest.approx(total(resting, at, chosen) + made_bytes)
        row = memory.row(at, chosen)
        assert profile[at] == pytest.approx(row.total_bytes(chosen))
        assert row.expansion(chosen).total_bytes(chosen) == pytest.approx(profile[at])
