"""A step prepared for the search: everything that does not depend on a mesh.

The flat program, its op classes and groups, the strategy graph and the live ranges. `StepProblem.on` puts it on a mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoshard.cost_model.cluster import Cluster, Device
from autoshard.cost_model.collectives import MeshModel
from autoshard.search.device.prediction import MARGIN
from autoshard.search.ir.graph import Site, Step
from autoshard.search.memory.loop_offload import in_loops, loops_offloaded
from autoshard.search.memory.offload import Offloaded, offloaded
from autoshard.search.memory.recompute import recomputed
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.plan.decisions import DecisionCodec
from autoshard.search.problem.costs import price
from autoshard.search.problem.equivalence import folded_like
from autoshard.search.problem.flat_program import FlatProgram, flatten
from autoshard.search.problem.folding import FoldedProgram, fold, separate
from autoshard.search.problem.fusion import Fusion, expensive_itemsize
from autoshard.search.problem.kernels import Kernels, kernels
from autoshard.search.problem.live_ranges import LiveRange, LiveRanges
from autoshard.search.problem.memory_rows import Memory
from autoshard.search.problem.op_groups import op_groups
from autoshard.search.problem.reshard import Resharder
from autoshard.search.problem.strategy_graph import StrategyGraph, strategy_graph
from autoshard.search.problem.streams import Hiding
from autoshard.search.problem.traffic import Traffic
from autoshard.search.problem.workspaces import workspaces
from autoshard.search.solver.clock import PROCESSOR, SearchClock

OP_S = 1e-4
"""Nominal seconds to prepare a step, per op. Source: `benchmarks/nominal_seconds.py`."""

STRATEGY_S = 4.5e-6
"""Nominal seconds to put a step on a mesh, per strategy."""


@dataclass(frozen=True, eq=False)
class StepProblem:
    """A prepared step: everything that does not depend on the mesh.

    Attributes:
      traced: the step as it was traced, in microbatches or undivided.
      marks: per argument, its pin. Arguments with different pins are in different equivalence classes.
      known: the traced step's folded program, if it was made before.
      sites: ops of the traced step that are recomputed in the backward phase.
      hosted: arguments that rest in host memory.
      updated: those of them that the host updates.
      offloaded_sites: ops whose results are offloaded to the host until the backward phase.
      rewritten: the step with this recomputation and offloading.
      graph: the strategy graph.
      kernels: its kernels.
      live_ranges: the values that it stores.
      items: all arrays that are ever in a device's memory.
      host_items: all arrays that are ever in host memory.
      clock: the clock that counts the work for the step.
    """

    traced: Step
    marks: tuple[str, ...]
    known: FoldedProgram | None
    sites: frozenset[Site]
    hosted: frozenset[int]
    updated: frozenset[int]
    offloaded_sites: frozenset[Site]
    rewritten: Offloaded
    graph: StrategyGraph
    kernels: Kernels
    live_ranges: LiveRanges
    items: tuple[LiveRange, ...]
    host_items: tuple[LiveRange, ...]
    clock: SearchClock

    @classmethod
    def of(
        cls,
        step: Step,
        marks: Sequence[str],
        device: Device,
        sites: frozenset[Site] = frozenset(),
        hosted: frozenset[int] = frozenset(),
        offloaded_sites: frozenset[Site] = frozenset(),
        decided: Sequence[Any] = (),
        known: FoldedProgram | None = None,
        clock: SearchClock = PROCESSOR,
        like: FoldedProgram | None = None,
        as_run: Callable[[FlatProgram], FlatProgram] = lambda program: program,
        updated: frozenset[int] = frozenset(),
    ) -> "StepProblem":
        """Prepares a step for a device.

        Args:
          step: the traced step, in microbatches or undivided.
          marks: per argument, its pin. Arguments with different pins are in different equivalence classes.
          device: the device that it will run on.
          sites: ops to recompute in the backward phase.
          hosted: arguments to rest in host memory.
          offloaded_sites: ops of the forward phase whose results are offloaded until the backward phase.
          decided: per argument, its decision in a plan. Arguments of different decisions are separated; ops are not.
          known: the traced step's folded program, if it was made before.
          clock: the clock of its searches.
          like: the folded program of the shortened step. This step is folded accordingly.
          as_run: makes the flat program that runs, if it is not one program.
          updated: arguments in host memory that the host updates.
        """
        stacked = in_loops(step.graph, offloaded_sites)
        residuals = frozenset(v for (i,) in offloaded_sites - stacked for v in step.graph.ops[i].outputs)
        again = loops_offloaded(recomputed(step, sites), step.graph, stacked)
        rewritten = offloaded(again, hosted, residuals, updated)
        program = as_run(flatten(rewritten.step))
        folded = fold(program, marks) if like is None else folded_like(program, like)
        folded = separate(folded, decided) if decided else folded
        groups = op_groups(folded)
        fusion, graph = Fusion(folded, expensive_itemsize(device)), strategy_graph(folded, groups)
        live_ranges = LiveRanges(graph, fusion)
        items = live_ranges.items(), live_ranges.host_items()
        clock.spend(OP_S * len(folded.program.ops))
        given = step, tuple(marks), known, sites, hosted, updated, offloaded_sites
        return cls(*given, rewritten, graph, kernels(fusion, groups), live_ranges, *items, clock)

    def on_devices(self, device: Device) -> "StepProblem":
        """The prepared step on another kind of device, which stores other values."""
        fusion = Fusion(self.graph.folded, expensive_itemsize(device))
        live_ranges = LiveRanges(self.graph, fusion)
        self.clock.spend(OP_S * len(self.graph.folded.program.ops))
        return replace(
            self,
            kernels=kernels(fusion, self.graph.groups),
            live_ranges=live_ranges,
            items=live_ranges.items(),
            host_items=live_ranges.host_items(),
        )

    @cached_property
    def has_transfers(self) -> bool:
        """True if arrays are copied to or from the host."""
        return any(op.is_transfer for op in self.graph.folded.program.ops)

    @property
    def step(self) -> Step:
        """The step that runs: the traced step with its recomputation and offloading."""
        return self.graph.folded.program.step

    @cached_property
    def traffic(self) -> Traffic:
        """Communication that no op waits for."""
        return Traffic(self.graph)

    @cached_property
    def traced_program(self) -> FoldedProgram:
        """The folded program of the traced step, before recomputation and offloading."""
        if not (self.sites or self.hosted or self.offloaded_sites):
            return self.graph.folded
        return self.known or fold(flatten(self.traced), self.marks)

    def on(
        self, cluster: Cluster, shape: tuple[int, ...], resharder: Resharder | None = None
    ) -> "MeshProblem":
        """The problem on one mesh. A given resharder shares its known costs."""
        costed = price(self.graph, self.kernels, resharder or Resharder(MeshModel(cluster, shape)))
        memory = Memory(costed, self.items, workspaces(self.graph.folded, cluster.device), MARGIN)
        host = Memory(costed, self.host_items)
        self.clock.spend(STRATEGY_S * sum(map(len, costed.strategies)))
        hiding = Hiding(costed, self.traffic)
        return MeshProblem(memory, host, self.live_ranges, hiding, DecisionCodec(costed), self.clock)
