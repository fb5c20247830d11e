"""Compiles programs as they are emitted, with the options that they carry, for A100s that are not there; prints their names.

Run by `test_emitted` as `python -m tests.gpu.emitted_programs`, in a process of its own, as `compiled` is.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import autoshard
from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import Program
from tests.gpu.compile_only import compile_only_devices

CLUSTER = parse_cluster("4xA100-80GB")

IN_PARTS = {"stages": 2, "microbatches": 2}


WIDTH = 64
APART = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 2
STACKED = jax.ShapeDtypeStruct((2, WIDTH, WIDTH), jnp.float32)
BATCH = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)


def layer(x: Any, w: Any) -> tuple[Any, None]:
    return jnp.tanh(x @ w), None


def unrolled(params: Any, x: Any) -> Any:
    return layer(layer(x, params[0])[0], params[1])[0]


def looped(params: Any, x: Any) -> Any:
    return jax.lax.scan(layer, x, params)[0]


def trained(model: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent on the model's mean square."""

    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.mean(model(params, x) ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    return step


def emitted(model: Callable[..., Any], params: Any, **options: Any) -> Iterator[Program]:
    """What becomes of a plan under a cap that is far below the device's memory."""
    step, args = trained(model), (params, BATCH)
    plan = autoshard.search(step, *args, cluster=CLUSTER, memory="1GiB", **options)
    programs = autoshard.emit(step, *args, plan=plan, devices=compile_only_devices(CLUSTER))
    yield from (programs,) if isinstance(programs, Program) else programs


def of_every_kind() -> Iterator[Program]:
    """One program, a program for each stage, and one for all stages."""
    yield from emitted(unrolled, APART, stages=1)
    yield from emitted(unrolled, APART, **IN_PARTS, schedule="1f1b", executor="mpmd")
    yield from emitted(looped, STACKED, **IN_PARTS, schedule="gpipe", executor="spmd")


if __name__ == "__main__":
    for program in of_every_kind():
        program.fn.trace(*program.args).lower(lowering_platforms=("cuda",)).compile()
        print(program.name)
