"""The public names of `autoshard`, which needs JAX; it is imported when the first of these names is accessed.

Users see one package. So a name here says that it comes from `autoshard`: in a `repr`, in a traceback and in a pickled plan,
whatever module defines it. Clusters are an exception: Pydantic reads what their fields mean from the source of the module
that a class says it comes from.
"""

from autoshard.api import choices, eject, emit, explain, parallelize, search, trace_compare, verify
from autoshard.cost_model.cluster import Cluster, Device, Link
from autoshard.cost_model.errors import (
    AutoshardError,
    ClusterError,
    CompilerError,
    InfeasibleError,
    InputError,
    PlanError,
)
from autoshard.cost_model.mixed_cluster import MixedCluster
from autoshard.ejection.eject import Ejected
from autoshard.executors.jit import Program
from autoshard.parallelized import Parallelized
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.plan.comparison import Amount, Comparison
from autoshard.search.plan.differences import Difference
from autoshard.search.plan.explained import Alternative, Change, Estimated, Explanation, MoreMemory
from autoshard.search.plan.explained_pipeline import Neighbour, PipelineExplanation, Place
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.plan import (
    Candidate,
    Collective,
    Decisions,
    Estimates,
    Plan,
    Sharding,
    Stage,
    StageEstimates,
)
from autoshard.search.plan.profile import ClassTime, OpTime, Profile
from autoshard.search.plan.work_shares import AxisUse, WorkShares
from autoshard.sweep.rows import WhatIf
from autoshard.sweep.what_if import what_if
from autoshard.traces.comparison import Measured, TraceComparison
from autoshard.user_warning import AutoshardWarning
from autoshard.verification.pipeline_result import PipelineVerification, ProgramProof, StageProof
from autoshard.verification.result import Copied, Extent, Footprint, Moved, Verification

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

for _name in __all__:
    if "use_attribute_docstrings" not in getattr(globals()[_name], "__pydantic_config__", ()):
        globals()[_name].__module__ = "autoshard"
