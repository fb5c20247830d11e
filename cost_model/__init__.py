"""The description of the hardware, and the time that computation and communication take on it."""
