"""What calling a step through `parallelize` costs beside its jitted function: a ratio of medians.

A state of 200 tiny arrays, so that the call itself is all there is to measure. Both ways alternate, so that
the machine's mood hits both alike. In NNX's style, 200 variables of a module are changed in place, through `parallelize` and
through `nnx.jit` with the same shardings.

    python benchmarks/overhead.py
"""

import statistics
import time

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import autoshard  # noqa: E402

NUM_LEAVES = 200
NUM_CALLS = 100
NUM_ROUNDS = 25


def step(state, batch):
    def loss(params):
        return sum(jnp.sum(p * batch) for p in params.values())

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


class Model(nnx.Module):
    def __init__(self):
        self.weights = nnx.Dict({f"p{i:03}": nnx.Param(jnp.ones(8)) for i in range(NUM_LEAVES)})


def step_in_place(model, batch):
    value, grads = nnx.value_and_grad(lambda m: sum(jnp.sum(p[...] * batch) for p in m.weights.values()))(
        model
    )
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), nnx.state(grads)))
    return value


def seconds_per_call(call, state, batch) -> tuple[float, dict]:
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        state, _ = call(state, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / NUM_CALLS, state


def functional() -> tuple[list[float], float]:
    """Ratios of a step that returns its state, and seconds of a direct call."""
    wrapped = autoshard.parallelize(step)
    batch = jnp.ones(8)
    state, _ = wrapped({f"p{i:03}": jnp.ones(8) for i in range(NUM_LEAVES)}, batch)
    direct = wrapped._last.program.fn
    batch = jax.device_put(batch, wrapped._last.program.shardings[1])
    ratios = []
    for _ in range(NUM_ROUNDS):
        through_s, state = seconds_per_call(wrapped, state, batch)
        direct_s, state = seconds_per_call(direct, state, batch)
        ratios.append(through_s / direct_s)
    return ratios, direct_s


def in_place() -> tuple[list[float], float]:
    """Ratios of a step that changes a module, and seconds of a call through `nnx.jit`."""
    batch, calls = jnp.ones(8), {}
    for name, jit in (("ours", autoshard.parallelize), ("theirs", nnx.jit(donate_argnums=0))):
        model, call = Model(), jit(step_in_place)
        call(model, batch)
        calls[name] = (call, model)
    ours, theirs = calls["ours"][1], calls["theirs"][1]
    nnx.update(theirs, jax.tree.map(jnp.copy, nnx.state(ours)))
    batch = jax.device_put(batch, jax.tree.leaves(nnx.state(ours))[0].sharding)

    def timed(call, model):
        return seconds_per_call(lambda model, batch: (model, call(model, batch)), model, batch)[0]

    ratios = []
    for _ in range(NUM_ROUNDS):
        through_s, direct_s = timed(*calls["ours"]), timed(*calls["theirs"])
        ratios.append(through_s / direct_s)
    return ratios, direct_s


def main() -> None:
    for name, measured in (("jax.jit", functional), ("nnx.jit, in place", in_place)):
        ratios, direct_s = measured()
        print(f"{NUM_LEAVES} leaves, {direct_s * 1e6:.0f} us per call through {name}")
        print(f"through parallelize / that: median {statistics.median(ratios):.3f}, of {NUM_ROUNDS} rounds")


if __name__ == "__main__":
    main()
