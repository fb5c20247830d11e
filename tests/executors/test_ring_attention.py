"""A ring of devices has one device's attention, forward and backward, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import build
from autoshard.executors.kernels import on_shards
from autoshard.search.driver import find
from autoshard.search.ir._jax import bind
from autoshard.search.ir.attention import blocks
from autoshard.search.ir.attention.layout import KEY, QUERY, Dims
from autoshard.search.ir.attention.op import BACKWARD, FORWARD
from autoshard.search.ir.attention.ring import ring_over
from autoshard.search.ir.graph import Graph, Op
from autoshard.search.ir.trace import trace
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.options import Options
from autoshard.search.problem.attention_blocks import BlockLoops
from autoshard.search.problem.rings import Attention
from tests.attentions import (
    MASKS,
    by_hand,
    by_softmax,
    drawn,
    gradients,
    layer_shapes,
    layer_step,
    named,
    shapes,
)

RTOL, NOISE = 1e-9, 1e-12
"""Tolerance, as a share of the largest element and absolute: some steps of rounding."""


@pytest.fixture(autouse=True)
def compiled_anew():
    """jaxlib 0.12 hangs, aborts or returns wrong numbers if it loads a ring of simulated devices from its cache of programs,
    so these programs are not kept (`tests.simulated.keep_programs`)."""
    before_s = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", np.inf)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before_s)


def arrays_of(op: Op) -> tuple[list[Dims], list[Dims]]:
    """The dimensions of an op's operands and results."""
    layout = op.params["layout"]
    read, made = [layout.query, layout.key, layout.value], [layout.output, layout.statistics]
    if op.name != FORWARD:
        read, made = [*read, *made, layout.output_gradient], [*layout.gradients]
    return [*read, *layout.operands], made


def in_ring(graph: Graph, mesh, axes, over_groups=None):
    """The graph as a function, whose attentions run on shards of the sequence, and of query heads that share keys."""

    def split(dim):
        return axes if {QUERY, KEY} & {*dim} else over_groups if dim == ("g0",) else None

    def spec(dims: Dims) -> PartitionSpec:
        return PartitionSpec(*map(split, dims))

    def run(*inputs):
        env = dict(zip(graph.inputs, inputs, strict=True)) | dict(graph.constants)
        for op in graph.ops:
            read = [env[a] if isinstance(a, int) else a.val for a in op.inputs]
            if op.name in (FORWARD, BACKWARD):
                values = [graph.value(a) for a in op.inputs]
                specs = tuple([spec(dims) for dims in arrays] for arrays in arrays_of(op))
                results = on_shards(op, values, read, specs, [()] * len(op.outputs), mesh)
            else:
                results = bind(op.primitive, read, op.params)
            env |= dict(zip(op.outputs, results, strict=True))
        return [env[a] for a in graph.outputs]

    return jax.jit(run)


CASES = {
    "two devices": (by_softmax(), (2,), 32),
    "in zigzag": (by_softmax(), (4,), 64),
    "three devices": (by_hand(), (3,), 48),
    "an odd part": (by_softmax(), (4,), 36),
    "of two axes": (by_softmax(), (2, 4), 64),
    **{name: (by_softmax(mask), (4,), 64) for name, mask in MASKS.items() if name != "causal"},
}


SLOW = frozenset(CASES) - {"in zigzag", "packed"}
"""Cases with a cheaper one beside them."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_a_ring_has_one_devices_numbers(case, monkeypatch):
    form, shape, length = CASES[case]
    monkeypatch.setattr(blocks, "MAX_BLOCK", 16)
    names = ("data", "model")[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, names, devices=devices, axis_types=(AxisType.Auto,) * len(shape))
    with jax.enable_x64():
        arrays = drawn(shapes(2, length, 4, 2, 4), seed=len(case))
        step = blockwise(trace(gradients(form), *arrays))
        assert step is not None
        ours = in_ring(step.graph, mesh, names)(*arrays)
        for one, whole in zip(ours, jax.tree.leaves(jax.jit(gradients(form))(*arrays)), strict=True):
            np.testing.assert_allclose(one, whole, rtol=RTOL, atol=NOISE + RTOL * np.abs(whole).max())


@pytest.mark.pure
def test_a_causal_mask_is_dealt_in_zigzag_where_its_pieces_are_even():
    (op,) = named(blockwise(trace(gradients(by_softmax()), *shapes(2, 64, 4, 2, 4))).graph, FORWARD)
    scores = op.params["scores"]
    assert [ring_over(scores, ("data",), n, 64).is_zigzag for n in (1, 2, 4, 8)] == [False, True, True, True]
    assert not ring_over(scores, ("data",), 4, 36).is_zigzag


@pytest.mark.slow
def test_query_heads_that_share_keys_are_split_too():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.enable_x64():
        arrays = drawn(shapes(2, 64, 4, 2, 4))
        step = blockwise(trace(gradients(by_softmax()), *arrays))
        ours = in_ring(step.graph, mesh, ("data",), "model")(*arrays)
        for one, whole in zip(ours, jax.tree.leaves(jax.jit(gradients(by_softmax()))(*arrays)), strict=True):
            np.testing.assert_allclose(one, whole, rtol=RTOL, atol=NOISE + RTOL * np.abs(whole).max())


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "mesh"), [(1, (8,)), (2, (2, 4))], ids=["ring", "heads and ring"])
def test_a_searched_plan_trains_as_one_device_does(heads, mesh, monkeypatch):
    """Only scores cost something here: the blocks of a short sequence hide no messages, and are launches alone."""
    monkeypatch.setattr(Attention, "_send_s", lambda self, num_bytes: 0.0)
    monkeypatch.setattr(BlockLoops, "seconds", lambda self, *rates: 1e-6 * self.num_seen * self.num_scores)
    function = layer_step(by_softmax(), heads, heads)
    with jax.enable_x64():
        shapes_of = layer_shapes(1, 256, heads, heads, 8, "float64")
        step = blockwise(trace(function, *shapes_of))
        found = find(step, parse_cluster("8xH100-80GB"), Options(2**40, mesh))
        assert "collective-permute" in {one.kind for one in found.plan.estimates.collectives}
        program = build(found.step, found.sharding, jax.devices())
        arrays = jax.tree.map(
            lambda s: jax.random.normal(jax.random.key(s.size), s.shape, s.dtype), shapes_of
        )
        whole = jax.jit(function)(*arrays)
        ours = program.fn(*jax.device_put(jax.tree.map(jnp.copy, arrays), program.shardings))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=RTOL, atol=NOISE + RTOL * np.abs(other).max())
