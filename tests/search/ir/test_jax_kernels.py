"""cuDNN's attention, traced for GPUs that are not here."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.errors import InputError
from autoshard.search.ir._jax_kernels import cudnn_of
from autoshard.search.ir.trace import trace

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
HOPPER, AMPERE = (9, 0), (8, 0)


def attended(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True, implementation="cudnn")


def gradients(*arrays: Any) -> Any:
    return jax.grad(lambda *xs: jnp.sum(attended(*xs).astype(jnp.float32)), range(len(arrays)))(*arrays)


def arrays(heads: int = 4, channels: int = 64, dtype: Any = jnp.bfloat16, bias: bool = False) -> list[Any]:
    shapes = [(2, 16, n, channels) for n in (4, heads, heads)] + [(1, 4, 16, 16)] * bias
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def kernels(*args: Any, capability: tuple[int, int] = HOPPER) -> list[str]:
    with cudnn_of("cuda", capability):
        step = trace(gradients, *args)
    return [op.primitive.name for op in step.graph.ops if op.primitive.name in (FORWARD, BACKWARD)]


@pytest.mark.parametrize(
    "kind", [{}, {"heads": 2}, {"dtype": jnp.float16}, {"bias": True}, {"channels": 256}], ids=str
)
def test_attention_is_traced_with_its_gradient_for_gpus_that_are_not_here(kind: dict[str, Any]):
    assert kernels(*arrays(**kind)) == [FORWARD, BACKWARD]


def test_jax_refuses_a_dtype_that_cudnn_has_no_attention_for():
    with pytest.raises(NotImplementedError, match="got float32"):
        kernels(*arrays(dtype=jnp.float32))


def test_an_older_gpu_is_refused_what_a_newer_one_was_traced_for():
    step = jax.jit(attended)  # which JAX would trace once
    with cudnn_of("cuda", HOPPER):
        trace(step, *arrays(channels=256))
    with cudnn_of("cuda", AMPERE), pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        trace(step, *arrays(channels=256))


def test_attention_of_cudnn_on_cpus_is_refused_by_its_line():
    with cudnn_of("cpu", None), pytest.raises(InputError) as caught:
        trace(attended, *arrays())
    line = attended.__code__.co_firstlineno + 1
    assert str(caught.value).startswith(
        f"cuDNN's attention at tests/search/ir/test_jax_kernels.py:{line} runs on NVIDIA GPUs only, not on CPUs. "
    )


def test_tracing_leaves_jax_as_it_was():
    step = jax.jit(attended)
    with cudnn_of("cuda", HOPPER):
        jax.eval_shape(step, *arrays())
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.eval_shape(step, *arrays())
