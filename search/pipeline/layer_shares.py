"""The layers' shares of a step: for each op of its flat program, the share of every layer; and the layers of values.

These do not depend on the strategies of a replica's devices. `search.pipeline.layer_costs` prices them.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.search.ir.graph import Role, Site
from autoshard.search.pipeline.flat_sites import IN_BODY, outermost, positions_of_loop
from autoshard.search.pipeline.layers import Layers
from autoshard.search.pipeline.programs import left_for_later
from autoshard.search.problem.flat_program import FlatProgram, ReadPhase, read_phase
from autoshard.search.step_problem import StepProblem

Array = np.ndarray

IN_LOOP = ("forward", "backward", "weight gradient")
"""The parts of the step that run for each microbatch."""

ONCE = "once"
"""The part of the step that runs once."""


@dataclass(frozen=True, eq=False)
class LayerShares:
    """The shares that layers have of a step.

    Attributes:
      step_problem: the step with its loop over parts.
      layers: the layers of this step.
    """

    step_problem: StepProblem
    layers: Layers

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.layers.num_layers

    @property
    def program(self) -> FlatProgram:
        """The step's flat program."""
        return self.step_problem.graph.folded.program

    # --- ops of the flat program

    @cached_property
    def of_op(self) -> list[Array]:
        """By op, the share of each layer. An op without a stage, such as the addition to a sum, has the shares of its first
        operand with known ones."""
        maker = self.program.maker
        found, nowhere = dict[int, Array](), only(0, self.num_layers)
        for i, op in enumerate(self.program.ops):
            if op.name == "input":
                found[i] = only(self._of_argument[op.number], self.num_layers)
            elif (site := outermost(op, self.layers.step.loop)) in self._of_site:
                found[i] = self._of_site[site]
            else:
                read = [maker[v][0] for v in op.operands]
                known = [m for m in read if m in found and found[m] is not nowhere]
                found[i] = found[known[0]] if known else nowhere
        return [found[i] for i in range(len(self.program.ops))]

    @cached_property
    def _of_site(self) -> dict[Site, Array]:
        """By op of the step, the share of each layer."""
        step, found = self.layers.step, dict[Site, Array]()
        for op, layer in self.layers.assigned.of_op.items():
            if (site := step.site_of(op)) is not None:
                share = found.setdefault(site, np.zeros(self.num_layers))
                share[layer] += int(op.params.get("length", 1)) if op.name == "scan" else 1
        return {site: share / share.sum() for site, share in found.items()}

    @cached_property
    def _of_traced(self) -> dict[Site, Array]:
        """By op of the step before copies to and from the host, the share of each layer."""
        origin = self.step_problem.rewritten.origin
        return {(origin[site[0]], *site[1:]): share for site, share in self._of_site.items()}

    def layers_of(self, site: Site) -> frozenset[int]:
        """The layers of an op of the traced step, also of one inside a loop; several if that extends over them."""
        share = self._of_traced.get(site[:IN_BODY])
        return frozenset[int]() if share is None else frozenset(np.flatnonzero(share).tolist())

    @cached_property
    def _of_argument(self) -> list[int]:
        assigned = self.layers.assigned.of_value
        return [assigned.get(v, 0) for v in self.layers.step.step.graph.inputs]

    @cached_property
    def loop(self) -> tuple[int, int]:
        """The positions of the loop over parts."""
        return positions_of_loop(self.program, self.layers.step.loop)

    def is_in_loop(self, i: int) -> bool:
        """Whether an op runs for each microbatch."""
        start, end = self.loop
        return start <= i < end

    def part(self, i: int) -> str:
        """The part of the step to which an op belongs."""
        op = self.program.ops[i]
        if not self.is_in_loop(i):
            return ONCE
        if read_phase(op) is ReadPhase.FORWARD:
            return "forward"
        return "weight gradient" if self.is_later(i) else "backward"

    def is_later(self, i: int) -> bool:
        """True if only weight gradients need an op; for a loop over layers, if that holds in each layer."""
        return outermost(self.program.ops[i], self.layers.step.loop) in self._later

    @cached_property
    def _later(self) -> frozenset[Site | None]:
        step, assigned = self.layers.step, self.layers.assigned
        later = left_for_later(step, assigned)
        return frozenset(map(step.site_of, later)) - {step.site_of(op) for op in assigned.backward - later}

    # --- values of the pipeline

    @cached_property
    def first_reader(self) -> dict[int, int]:
        """By value that the prologue makes, the first layer whose tasks read it."""
        made = {v for op in self.layers.step.prologue for v in op.outputs} - self.layers.step.terms.keys()
        found: dict[int, int] = {}
        for op, layer in self.layers.assigned.of_op.items():
            for v in made.intersection(op.operands):
                found[v] = min(found.get(v, layer), layer)
        return found

    @cached_property
    def read_whole(self) -> frozenset[int]:
        """The values that tasks read and that are the same for all microbatches."""
        step = self.layers.step
        read = {v for op in step.body for v in op.operands}
        constants = {v for v, _ in step.constants}
        return frozenset(v for v in read if not step.is_of_microbatch(v) and v != step.index) - constants

    @cached_property
    def split_arguments(self) -> frozenset[int]:
        """The arguments that lie in as many parts as there are replicas."""
        state = frozenset(
            v for v, argument in self.layers.step.step.inputs if argument.role is not Role.BATCH
        )
        return state - self.read_whole

    @cached_property
    def crossing(self) -> tuple[tuple[int, int, int], ...]:
        """The forward values that later layers read: each with the layer that makes it, and the last that reads it."""
        of_op = self.layers.assigned.of_op
        forward = [op for op in self.layers.step.forward_ops if op in of_op]
        made = {v: of_op[op] for op in forward for v in op.outputs}
        last: dict[int, int] = {}
        for op in forward:
            for v in op.operands:
                if v in made:
                    last[v] = max(last.get(v, 0), of_op[op])
        return tuple((v, made[v], layer) for v, layer in last.items() if layer > made[v])


def only(layer: int, num_layers: int) -> Array:
    """The shares of an op that belongs to one layer."""
    share = np.zeros(num_layers)
    share[layer] = 1.0
    return share
