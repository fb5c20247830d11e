"""A plan against what XLA's GPU compiler makes of it."""
