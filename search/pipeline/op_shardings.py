"""The sharding that a solution for the whole step decides for single ops, wherever they stand in other graphs.

A pipeline's programs consist of ops of the step, or of parts of such ops. The decisions for an op, and for the ops
inside it, hold in a program, too; only the op's place is another one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.search.ir.graph import Op, Site
from autoshard.search.ir.sharding import OperandReshard, Place, StepSharding
from autoshard.search.ir.spec import Spec
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.stages import is_barrier


@dataclass(frozen=True, eq=False)
class OpShardings:
    """The specs and operand reshards of a solution, by op of the step. Their places are relative to the op.

    Attributes:
      step: the step in parts.
      whole: the solution's sharding of the step with its loop.
      specs: by op, the specs of its values.
      reshards: by op, the reshards of its operands.
    """

    step: PipelineStep
    whole: StepSharding
    specs: Mapping[Site, list[tuple[Place, tuple[Spec, ...]]]]
    reshards: Mapping[Site, list[tuple[Place, OperandReshard]]]

    @classmethod
    def of(cls, intra_op: IntraOp, step: PipelineStep) -> "OpShardings":
        """The sharding of a solution for the step that `step` takes apart."""
        whole = intra_op.sharding
        depth = len((step.loop, "jaxpr", 0)) + 1
        return cls(step, whole, _by_op(whole.specs, depth), _by_op(whole.reshards, depth))

    def on(self, ops: Sequence[Op]) -> StepSharding:
        """The sharding of a graph that consists of these ops."""
        specs: dict[Place, tuple[Spec, ...]] = {}
        reshards: dict[Place, OperandReshard] = {}
        for i, op in enumerate(ops):
            if (site := self.step.site_of(op)) is not None:
                specs |= self._moved(op, i, self.specs.get(site, ()))
                reshards |= self._moved(op, i, self.reshards.get(site, ()))
        return replace(self.whole, specs=specs, reshards=reshards)

    def _moved[T](self, op: Op, i: int, decisions: Iterable[tuple[Place, T]]) -> dict[Place, T]:
        """The decisions for an op at its new index. A barrier may have fewer results than in the step."""
        if not is_barrier(op):
            return {(what, (i, *rest), n): decision for (what, rest, n), decision in decisions}
        number = {place[2]: n for n, v in enumerate(op.outputs) if (place := self.step.place_of(v))}
        return {(what, (i,), number[n]): decision for (what, _, n), decision in decisions if n in number}


def _by_op[T](places: Mapping[Place, T], depth: int) -> dict[Site, list[tuple[Place, T]]]:
    found: dict[Site, list[tuple[Place, T]]] = {}
    for (what, site, n), decisions in places.items():
        found.setdefault(site[:depth], []).append(((what, site[depth:], n), decisions))
    return found
