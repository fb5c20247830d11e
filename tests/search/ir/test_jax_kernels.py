"""cuDNN's attention, traced for GPUs that are not here."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir._jax_kernels import cudnn_for
from autoshard.search.ir.trace import trace

FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
HOPPER = (9, 0)


def attended(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True, implementation="cudnn")


def gradients(*arrays: Any) -> Any:
    return jax.grad(lambda *xs: jnp.sum(attended(*xs).astype(jnp.float32)), range(len(arrays)))(*arrays)


def arrays(heads: int = 4, channels: int = 64, dtype: Any = jnp.bfloat16, bias: bool = False) -> list[Any]:
    shapes = [(2, 16, n, channels) for n in (4, heads, heads)] + [(1, 4, 16, 16)] * bias
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def kernels(*args: Any) -> list[str]:
    with cudnn_for(HOPPER):
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


def test_tracing_leaves_jax_as_it_was():
    kernels(*arrays())
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.eval_shape(attended, *arrays())


def test_another_thread_meets_jax_as_it_is():
    with cudnn_for(HOPPER), ThreadPoolExecutor(1) as threads:
        failed = threads.submit(jax.eval_shape, attended, *arrays()).exception()
    assert isinstance(failed, RuntimeError)
