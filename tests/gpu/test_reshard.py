"""Every reshard path compiles to the collectives that it is priced with, to the byte, where little divides.

Products are made in one spec and brought to another, all pairs of specs in one program, which is compiled once.
"""

from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla._jax import module_bytes
from autoshard.cost_model.xla.process import Compiler, compile_apart
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.search.ir.graph import Value
from autoshard.search.ir.sharding import ReshardPath
from autoshard.search.ir.spec import AXIS_NAMES, PARTIAL, Spec, partition_spec
from autoshard.search.problem.reshard import SLICE, Resharder

from .compiled import COLLECTIVES_ALONE

MESH, NAMES = (4, 3), AXIS_NAMES[2]
SHAPE = (1007, 1024)
"""Of 1007 rows, 4 devices hold 252, padded, which 3 more cut evenly, 84 each; of 1024 columns they hold 256, which 3 more do
not."""

ITEMSIZE = 4

_DEVICES = AbstractMesh(MESH, NAMES, axis_types=(AxisType.Auto,) * len(NAMES))


def test_paths_compile_as_they_are_priced():
    cluster = parse_cluster(f"{prod(MESH)}xH100-80GB")
    paths = _paths(Resharder(MeshModel(cluster, MESH)))
    lowered = jax.jit(_reshards(paths)).trace([_operands(source) for source, _ in paths])
    module = module_bytes(lowered.lower(lowering_platforms=("cuda",)))
    answer = compile_apart(module, cluster, compiler=Compiler(flags=COLLECTIVES_ALONE))
    found = CompiledStats.of(answer, dict(zip(NAMES, MESH, strict=True))).collectives
    sums_bytes = ITEMSIZE * len(paths)  # each product ends in a scalar, reduced over any axes
    assert {key: moved for key, (_, moved) in found.items()} == pytest.approx(_priced(paths), abs=sums_bytes)


def _paths(resharder: Resharder) -> list[tuple[Spec, ReshardPath]]:
    """From every spec to every other that can be asked for."""
    value = Value(SHAPE, np.dtype("float32"))
    specs, seconds = resharder.specs(len(SHAPE)), resharder.seconds(value)
    return [
        (source, resharder.chain(value, source, target))
        for (i, source), (j, target) in product(enumerate(specs), repeat=2)
        if np.isfinite(seconds[i, j]) and source != target and PARTIAL not in target
    ]


def _reshards(paths: list[tuple[Spec, ReshardPath]]):
    """A program that makes a product for each path and takes it along."""

    def taken(x, source, path):
        # As plans are spelled out: what is partial over both axes is left to its first step.
        made = [source] if source.count(PARTIAL) <= 1 else []
        for spec in (*made, *(step.after for step in path if step.is_constrained)):
            x = jax.lax.with_sharding_constraint(x, NamedSharding(_DEVICES, partition_spec(spec, NAMES)))
        return x

    def reshards(operands):
        return [jnp.exp(taken(x @ w, *path)).sum() for (x, w), path in zip(operands, paths, strict=True)]

    return reshards


def _operands(source: Spec) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Of a product whose terms are split over the axes that are partial."""
    depth, terms = prod(MESH), tuple(a for a, d in zip(NAMES, source, strict=True) if d == PARTIAL)
    left, right = NamedSharding(_DEVICES, P(None, terms)), NamedSharding(_DEVICES, P(terms))
    return (
        jax.ShapeDtypeStruct((SHAPE[0], depth), jnp.float32, sharding=left),
        jax.ShapeDtypeStruct((depth, SHAPE[1]), jnp.float32, sharding=right),
    )


def _priced(paths: list[tuple[Spec, ReshardPath]]) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes by kind and axes."""
    total: dict[tuple[str, tuple[str, ...]], float] = {}
    for _, path in paths:
        for step in path:
            key = step.kind, tuple(NAMES[a] for a in step.axes)
            if step.kind != SLICE:
                total[key] = total.get(key, 0.0) + step.num_bytes
    return total


def test_what_is_looked_up_in_split_rows_is_scattered_as_planned():
    """By constraints alone the compiler reduces it whole, or gathers the table."""

    def step(params, tokens):
        def loss_fn(params):
            return jnp.mean(jnp.tanh(jnp.tanh(params["table"][tokens]) @ params["w"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: 0.99 * w - 0.1 * g, params, grads), loss

    params = {"table": (49152, 1024), "w": (1024, 1024)}
    args = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in params.items()}
    tokens = jax.ShapeDtypeStruct((48, 512), jnp.int32)
    pins = {"params['table']": P("model"), "tokens": P("data")}
    plan = autoshard.search(step, args, tokens, cluster="12xA100-40GB", mesh=(4, 3), pin=pins)
    assert plan.decisions.ops["forward gather"].endswith("P('data', unreduced={'model'})")
    proof = autoshard.verify(step, args, tokens, plan=plan)
    assert not proof.differing
    assert "reduce-scatter" in {c.kind for c in proof.collectives}
