"""Python source: it makes the value that it was written for."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.ejection import source
from autoshard.ejection.equations import expression

NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "P": P}


@pytest.mark.parametrize(
    "value",
    [
        P("data", None),
        P(None, ("data", "model")),
        P(),
        (1, 2.5, None, True),
        (1,),
        'it\'s "quoted"\n',
        lax.GatherScatterMode.CLIP,
        lax.Precision.HIGHEST,
        lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)),
        -float("inf"),
    ],
)
def test_the_source_of_a_value_makes_it(value):
    assert eval(source.text(value), NAMES) == value


def test_dtypes_and_numbers_of_numpy_have_sources():
    assert eval(source.text(np.dtype("bfloat16")), NAMES) == jnp.bfloat16
    assert eval(source.text(np.dtype(bool)), NAMES) == jnp.bool_
    assert eval(source.text(np.int64(3)), NAMES) == 3
    assert np.isnan(eval(source.text(float("nan")), NAMES))


def test_a_key_dtype_has_no_source():
    with pytest.raises(source.UnwritableError, match="dtype key"):
        source.dtype(jax.eval_shape(lambda: jax.random.key(0)).dtype)


@pytest.mark.parametrize(
    "line",
    [
        "x = lax.gather(a, b, dims=lax.D(first=(0, 1), second=()), sizes=(1, 2), mode=lax.M.CLIP, fill_value=0.0, flag=1)",
        "return (aaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbb, cccccccccccccccccccccc, ddddddddddddddddddd)",
        "x = jax.shard_map(on_shards, mesh=mesh, in_specs=(P('data', 'model'), P('data')), out_specs=(P(),))(aaaaaaa, b)",
        "x = a + b",
    ],
)
def test_a_broken_line_says_the_same_and_is_not_too_long(line):
    lines = source.broken(line, "")
    whole = "def f():\n" + "\n".join(f"    {one}" for one in lines)
    assert ast.dump(ast.parse(whole)) == ast.dump(ast.parse(f"def f():\n    {line}"))
    assert max(map(len, lines)) <= source.MAX_WIDTH


def test_a_call_without_operands_has_its_keywords_only():
    assert expression("axis_index", (), {"axis_name": "data"}) == 'lax.axis_index(axis_name="data")'
