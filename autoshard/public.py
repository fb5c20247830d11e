"""The public names of `autoshard`, which needs JAX; it is imported when the first of these names is accessed."""

# ruff: noqa: F401

from autoshard.api import AutoshardWarning, Parallelized, emit, parallelize, search, verify
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import (
    AutoshardError,
    ClusterError,
    CompilerError,
    InfeasibleError,
    InputError,
    PlanError,
)
from autoshard.cost_model.mixed_cluster import MixedCluster
from autoshard.executors.jit import Program
from autoshard.search.plan.plan import Collective, Decisions, Estimates, Plan
from autoshard.verification.result import Verification
