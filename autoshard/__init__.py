"""autoshard: training steps written for one device, run fastest on many.

`parallelize` decorates a step, `search` plans it without any device, `emit` writes a plan into a program,
`verify` compiles that program and compares; a `Plan` can be printed, saved, edited and loaded.
"""

# ruff: noqa: F403, F405  (names come from `autoshard.public`, when they are asked for)

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

import autoshard.cost_model as _cost_model
import autoshard.executors as _executors
import autoshard.search as _search

for _package in (_cost_model, _executors, _search):
    _file = _Path(_package.__file__ or "?")
    if _file.resolve().parents[1] != _Path(__file__).resolve().parents[1]:
        raise ImportError(
            f"autoshard needs its own package {_package.__name__!r}, but {_file} shadows it: rename that file, or put its "
            "folder later on sys.path"
        )

__version__ = "0.1.0"

__all__ = [
    "AutoshardError",
    "AutoshardWarning",
    "Cluster",
    "ClusterError",
    "Collective",
    "CompilerError",
    "Decisions",
    "Estimates",
    "InfeasibleError",
    "InputError",
    "MixedCluster",
    "Parallelized",
    "Plan",
    "PlanError",
    "Program",
    "Verification",
    "emit",
    "parallelize",
    "search",
    "verify",
]

if TYPE_CHECKING:
    from autoshard.public import *


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autoshard import public  # JAX comes with it

    return getattr(public, name)


def __dir__() -> list[str]:
    return ["__version__", *__all__]
