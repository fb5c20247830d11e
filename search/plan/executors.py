"""The names of the executors: the values of the option `executor=` and of `plan.executor`."""

from types import MappingProxyType

JIT = "jit"
"""One program under `jax.jit`, without pipeline stages."""

MPMD = "mpmd"
"""A pipeline with a program per stage."""

SPMD = "spmd"
"""A pipeline as one program for all stages."""

EXECUTORS = MappingProxyType(
    {JIT: "one program, no pipeline", MPMD: "a program per stage", SPMD: "one program for all stages"}
)
"""The meaning of each name."""

FORMER_NAMES = MappingProxyType({"a program per stage": MPMD, "one program": SPMD})
"""By a name of earlier versions, the name of today."""
