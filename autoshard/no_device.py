"""Planning needs no device, and takes none from others."""

import jax


def use_no_device() -> None:
    """Keeps JAX to the CPU, unless the user names a platform."""
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
