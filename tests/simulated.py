"""Eight simulated CPU devices, on every machine alike; XLA optimises little, so that nobody waits for it."""

from pathlib import Path

import jax

KEPT_FROM_S = 0.1
"""Programs that compile faster are not worth a file."""


def simulate_devices() -> None:
    """Call it before JAX sees any device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)


def keep_programs(folder: Path) -> None:
    """Has JAX keep what it compiles there, for later tests and runs."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_FROM_S)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
