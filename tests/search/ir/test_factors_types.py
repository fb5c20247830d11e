"""Rules against JAX's own: its explicit-sharding type checker says how results are sharded.

For every assignment of mesh axes to factors, the operands get the specs that the rule implies. JAX may refuse
(it is stricter: it never guesses); where it accepts, the results must be sharded as the rule says.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import jax
import pytest
from hypothesis import given
from jax._src.core import ShardingTypeError
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.search.ir.factors import Rule
from autoshard.search.ir.factors.rule import Dims, Kind
from tests.search.ir.test_factors_cases import CASES, Equation, equation
from tests.search.ir.test_factors_split import dots, reshapes

pytestmark = pytest.mark.devices

MESH = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)

Assignment = dict[str, int]
"""Mesh axis to factor."""


def assignments(rule: Rule) -> Iterator[Assignment]:
    """All of them, over splittable factors of operands (JAX makes new dims whole) that the sizes divide."""
    carried = {f for dims in rule.operands for dim in dims for f in dim}
    factors = [f for f in sorted(carried) if rule.factors[f].kind != Kind.UNSPLITTABLE]
    for choice in product([None, *factors], repeat=len(MESH.axis_names)):
        chosen = {axis: f for axis, f in zip(MESH.axis_names, choice, strict=True) if f is not None}
        counts = {f: 2 ** list(chosen.values()).count(f) for f in chosen.values()}
        if chosen and all(rule.factors[f].size % n == 0 for f, n in counts.items()):
            yield chosen


def partitions(dims: Dims, rule: Rule, assignment: Assignment) -> tuple[tuple[str, ...], ...] | None:
    """The mesh axes of each dim; None if a minor factor is split under a major one that is not."""
    result = []
    for dim in dims:
        axes: list[str] = []
        complete = True
        for f in dim:
            here = [axis for axis, factor in assignment.items() if factor == f]
            if here and not complete:
                return None
            complete = complete and 2 ** len(here) == rule.factors[f].size
            axes += here
        result.append(tuple(axes))
    return tuple(result)


def infer(eqn: Equation, specs: list[P], params: dict[str, Any]) -> list[P] | None:
    """The result specs that JAX infers, or None if it refuses."""
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(MESH, spec))
        for aval, spec in zip(eqn.in_avals, specs, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(MESH):
        try:
            trace = jax.make_jaxpr(lambda *xs: eqn.primitive.bind(*xs, **params))(*shapes)
        except (ShardingTypeError, TypeError, ValueError, NotImplementedError):
            return None
        except IndexError:  # JAX 0.12 trips over a split dimension that is merged between sizes of one
            assert eqn.primitive.name == "reshape"
            return None
    return [aval.sharding.spec for aval in trace.out_avals]


def as_partitions(spec: P) -> tuple[tuple[str, ...], ...]:
    return tuple(
        () if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec.partitions
    )


def accepted(eqn: Equation) -> Iterator[tuple[Assignment, Any, Any]]:
    """The assignments that JAX accepts: how it shards the results, and how the rule does."""
    rule = eqn.rule
    for assignment in assignments(rule):
        operands = [partitions(dims, rule, assignment) for dims in rule.operands]
        results = [partitions(dims, rule, assignment) for dims in rule.results]
        if None in operands or None in results:
            continue
        inferred = infer(eqn, [P(*o) for o in operands], _with_out_sharding(eqn, results, assignment))
        if inferred is not None:
            yield assignment, [as_partitions(spec) for spec in inferred], results


def _with_out_sharding(eqn: Equation, results: list[Any], assignment: Assignment) -> dict[str, Any]:
    """A contraction over a mesh axis is ambiguous to JAX until it is told that the result is partial."""
    summed = {axis for axis, f in assignment.items() if eqn.rule.factors[f].kind == Kind.SUM}
    if not summed or eqn.primitive.name not in ("dot_general", "reduce_sum"):
        return eqn.params
    return {**eqn.params, "out_sharding": NamedSharding(MESH, P(*results[0], unreduced=summed))}


REFUSED = {case for case in CASES if case.startswith(("conv-grouped", "conv-depthwise"))} | {
    *(
        "conv-transposed-kernel-gradient",
        "conv-batch-groups",
        "reshape-both",
        "reshape-gcd",
        "reshape-permuted",
    ),
    *("gather-points", "scatter-points", "broadcast-scalar", "iota"),
}
"""Cases of which JAX 0.11 or 0.12 may accept no assignment."""

MISTAKEN = {"conv-kernel-gradient"}
"""JAX gives a convolution its left operand's spec by position, even where `dimension_numbers` permute it."""


@pytest.mark.parametrize("case", [case for case in CASES if case not in MISTAKEN])
def test_results_are_sharded_as_jax_infers(case: str):
    found = list(accepted(equation(case)))
    assert found or case in REFUSED
    for assignment, inferred, results in found:
        assert inferred == results, assignment


@given(eqn=dots())
def test_any_dot_general(eqn: Equation):
    for assignment, inferred, results in accepted(eqn):
        assert inferred == results, assignment


@given(eqn=reshapes())
def test_any_reshape(eqn: Equation):
    for assignment, inferred, results in accepted(eqn):
        assert inferred == results, assignment


LOOSER = {"select_n", "select_n-scalar", "float-to-int", "reduce_max", "reduce_min", "dynamic_update_slice"}
"""Where JAX (for some only 0.11) passes partial sums on and we do not: predicates and indices cannot be
partial, rounding and maxima are not linear."""


@pytest.mark.parametrize("case", [case for case in CASES if case not in LOOSER])
def test_additive_where_jax_passes_partial_sums_on(case: str):
    eqn = equation(case)
    inferred = infer(eqn, [P(unreduced={"x"})] * len(eqn.in_avals), eqn.params)
    if inferred and any(spec.unreduced for spec in inferred):
        assert eqn.rule.is_additive
