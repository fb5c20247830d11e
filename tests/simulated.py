"""Eight simulated CPU devices, on every machine alike; XLA optimises little, so that nobody waits for it."""

import jax


def simulate_devices() -> None:
    """Call it before JAX sees any device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)
