"""autoshard: training steps written for one device, run fastest on many.

`parallelize` decorates a step, `search` plans it without any device, `emit` writes a plan into a program,
`verify` compiles that program and compares; a `Plan` can be printed, saved, edited and loaded.
"""

from pathlib import Path as _Path

import cost_model as _cost_model
import executors as _executors
import search as _search

for _package in (_cost_model, _executors, _search):
    _file = _Path(_package.__file__ or "?")
    if _file.resolve().parents[1] != _Path(__file__).resolve().parents[1]:
        raise ImportError(
            f"autoshard needs its own package {_package.__name__!r}, but {_file} shadows it: rename that file, or put its "
            "folder later on sys.path"
        )

from autoshard.api import AutoshardWarning, Parallelized, emit, parallelize, search, verify  # noqa: E402
from autoshard.verification.result import Verification  # noqa: E402
from cost_model.cluster import Cluster  # noqa: E402
from cost_model.errors import (  # noqa: E402
    AutoshardError,
    ClusterError,
    CompilerError,
    InfeasibleError,
    InputError,
    PlanError,
)
from executors.jit import Program  # noqa: E402
from search.plan.plan import Collective, Decisions, Estimates, Plan  # noqa: E402

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
