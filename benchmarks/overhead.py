"""What calling a step through `parallelize` costs beside its jitted function: a ratio of medians.

A state of 200 tiny arrays, so that the call itself is all there is to measure. Both ways alternate, so that
the machine's mood hits both alike.

    python benchmarks/overhead.py
"""

import statistics
import time

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402

import autoshard  # noqa: E402

NUM_LEAVES = 200
NUM_CALLS = 400
NUM_ROUNDS = 25


def step(state, batch):
    def loss(params):
        return sum(jnp.sum(p * batch) for p in params.values())

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def seconds_per_call(call, state, batch) -> tuple[float, dict]:
    start = time.perf_counter()
    for _ in range(NUM_CALLS):
        state, _ = call(state, batch)
    jax.block_until_ready(state)
    return (time.perf_counter() - start) / NUM_CALLS, state


def main() -> None:
    wrapped = autoshard.parallelize(step)
    batch = jnp.ones(8)
    state, _ = wrapped({f"p{i:03}": jnp.ones(8) for i in range(NUM_LEAVES)}, batch)
    direct = wrapped._program.fn
    batch = jax.device_put(batch, wrapped._program.shardings[1])
    ratios = []
    for _ in range(NUM_ROUNDS):
        through_s, state = seconds_per_call(wrapped, state, batch)
        direct_s, state = seconds_per_call(direct, state, batch)
        ratios.append(through_s / direct_s)
    print(f"{NUM_LEAVES} leaves, {direct_s * 1e6:.0f} us per direct call")
    print(f"through parallelize / direct: median {statistics.median(ratios):.3f}, of {NUM_ROUNDS} rounds")


if __name__ == "__main__":
    main()
