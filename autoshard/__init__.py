"""autoshard: training steps written for one device, run fastest on many.

`parallelize` decorates a step, `search` plans it without any device, `emit` writes a plan into a program,
`verify` compiles that program and compares; a `Plan` can be printed, saved, edited and loaded.
"""

# ruff: noqa: F403, F405  (names come from `autoshard.public`, when they are asked for)

import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Alternative",
    "Amount",
    "AutoshardError",
    "AutoshardWarning",
    "AxisUse",
    "Candidate",
    "Change",
    "ClassTime",
    "Cluster",
    "ClusterError",
    "Collective",
    "Comparison",
    "CompilerError",
    "Copied",
    "Decisions",
    "Device",
    "Difference",
    "Ejected",
    "Estimated",
    "Estimates",
    "Explanation",
    "Extent",
    "Footprint",
    "InfeasibleError",
    "InputError",
    "Link",
    "Measured",
    "MixedCluster",
    "MoreMemory",
    "Moved",
    "Neighbour",
    "NotSplittableError",
    "OpTime",
    "Outline",
    "Parallelized",
    "PipelineExplanation",
    "PipelineVerification",
    "Place",
    "Plan",
    "PlanError",
    "Profile",
    "Program",
    "ProgramProof",
    "Sharding",
    "Stage",
    "StageEstimates",
    "StageProof",
    "TraceComparison",
    "Verification",
    "WhatIf",
    "WorkShares",
    "choices",
    "eject",
    "emit",
    "explain",
    "parallelize",
    "search",
    "trace_compare",
    "verify",
    "what_if",
]

if TYPE_CHECKING:
    from autoshard.public import *
else:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from autoshard import public  # JAX comes with it

        return getattr(public, name)


class _Face(_ModuleType):
    """This package. Its `search` is the function, also after the import of the subpackage of that name, which Python
    would set here."""

    @property
    def search(self) -> Any:
        from autoshard import public

        return public.search

    @search.setter
    def search(self, subpackage: _ModuleType) -> None:
        pass


_sys.modules[__name__].__class__ = _Face


def __dir__() -> list[str]:
    return ["__version__", *__all__]
