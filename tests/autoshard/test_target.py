"""The step and its arguments, as a TARGET makes them."""

from autoshard.target import target

ATTENDING = """
import jax
import jax.numpy as jnp

def attended(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")

def make():
    x = jax.ShapeDtypeStruct((2, 16, 4, 64), jnp.bfloat16)
    return attended, (jax.eval_shape(attended, x),)
"""


def test_a_target_makes_shapes_with_attention_of_cudnn(tmp_path):
    (train := tmp_path / "train.py").write_text(ATTENDING)
    with target(f"{train}:make") as (_, (state,)):
        assert state.shape == (2, 16, 4, 64)
