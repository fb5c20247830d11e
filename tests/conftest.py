"""Eight simulated CPU devices, on every machine alike; XLA optimises little, so that tests do not wait for it."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
