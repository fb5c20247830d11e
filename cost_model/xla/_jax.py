"""The compiler's only access to JAX's internals: lowers a program without devices, writes it as bytes, compiles bytes.

It relies on four facts outside JAX's public API, true of JAX 0.11 and 0.12. A client can exist outside JAX's backends.
A lowered module can be written as bytecode. The client of compile-only devices compiles a given module. JAX keeps a set of
the primitives that it refuses to lower without devices.
"""

import contextlib
import io
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler, dispatch
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jaxlib.mlir import ir


def lower(fn: Any, args: Sequence[Any]) -> Any:
    """A jitted function over an abstract mesh, lowered for GPUs without starting any of JAX's backends.

    JAX asks for a default device even if the mesh has none. To find one it starts every installed platform: a GPU's, which
    allocates memory, or one without a driver, which prints warnings. So the default device here belongs to a private CPU
    client. A mesh that the user has set (`jax.set_mesh`) does not apply.
    """
    device = xla_client.make_cpu_client().local_devices()[0]
    with jax.set_mesh(None), jax.default_device(device), _attention_without_devices():
        return fn.trace(*args).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def _attention_without_devices() -> Generator[None]:
    """A context in which JAX lowers cuDNN's attention without devices. It asks for them to partition it; executors apply it
    to each device's shards, where nothing is left to partition."""
    kernels = {
        p
        for p in dispatch.prim_requires_devices_during_lowering
        if p.name.startswith("dot_product_attention")
    }
    dispatch.prim_requires_devices_during_lowering -= kernels
    try:
        yield
    finally:
        dispatch.prim_requires_devices_during_lowering |= kernels


def module_bytes(lowered: Any) -> bytes:
    """A lowered program (`jax.jit(f).lower(...)`) as bytecode that includes the names and source lines of its ops."""
    written = io.BytesIO()
    lowered.compiler_ir().operation.write_bytecode(file=written)
    return written.getvalue()


def compile_module(module: bytes, devices: Sequence[Any], cuda_folder: str) -> tuple[str, Any]:
    """Compiles the bytecode of `module_bytes` for compile-only devices: the optimised HLO, and its memory statistics.

    Equals `lowered.compile()` of a program over these devices in this order with all shardings given, except that the
    assembler and the linker come from `cuda_folder`.
    """
    options = compiler.get_compile_options(1, len(devices), np.arange(len(devices)).reshape(1, -1))
    options.executable_build_options.debug_options.xla_gpu_cuda_data_dir = cuda_folder
    with mlir.make_ir_context():
        executable = devices[0].client.compile(
            ir.Module.parse(module),
            executable_devices=xla_client.DeviceList(tuple(devices)),
            compile_options=options,
        )
    text = "\n\n".join(one.to_string() for one in executable.hlo_modules())
    return text, executable.get_compiled_memory_stats()
