"""The compiler's door to JAX's internals: a program lowered without devices, as bytes, and bytes compiled.

Beyond JAX's public surface, all in JAX 0.11 and 0.12: a client can be made that is none of JAX's backends; a lowered
module can be written as bytecode; compile-only devices' client compiles a module that it is given.
"""

import io
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client  # type: ignore[attr-defined]
from jaxlib.mlir import ir


def lower(fn: Any, args: Sequence[Any]) -> Any:
    """A jitted function over an abstract mesh, lowered for GPUs; none of JAX's backends is started.

    JAX asks for a default device even where the mesh has none, and to find one it starts every platform that is
    installed: a GPU's, with its memory, or the complaints of one that has no driver. So it is given a device of a CPU
    client that nobody else has. A mesh that the user has set (`jax.set_mesh`) is not the program's.
    """
    device = xla_client.make_cpu_client().local_devices()[0]
    with jax.set_mesh(None), jax.default_device(device):
        return fn.trace(*args).lower(lowering_platforms=("cuda",))


def module_bytes(lowered: Any) -> bytes:
    """A lowered program (`jax.jit(f).lower(...)`) as bytecode; the names and source lines of its ops are in it."""
    written = io.BytesIO()
    lowered.compiler_ir().operation.write_bytecode(file=written)
    return written.getvalue()


def compile_module(module: bytes, devices: Sequence[Any], cuda_folder: str) -> tuple[str, Any]:
    """Compiles what `module_bytes` gave for compile-only devices: the optimised HLO, and its memory statistics.

    Does what `lowered.compile()` does for a program over these devices in this order, shardings all given, but that the
    assembler and the linker are those in `cuda_folder`.
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
