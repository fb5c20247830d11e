"""Phases: forward, backward, update.

They come from name stacks: `transpose(...)` is backward, `jvp(...)` alone is forward. Where a name stack says nothing,
dataflow decides: what depends on the backward phase is update, the rest is forward. A loop that takes gradients in its body,
as one over microbatches, is both: it stands in the forward phase, its body's ops in their own, and what depends on it is
update, as it is itself behind another gradient.
"""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.search.ir.graph import Graph, Op, Phase


def takes_gradient(op: Op) -> bool:
    """Whether a loop or branch that is no part of a gradient takes one."""
    return _named_phase(op.scope) is None and any(
        _named_phase(inner.scope) is Phase.BACKWARD or takes_gradient(inner)
        for bodies in op.bodies.values()
        for body in bodies
        for inner in body.ops
    )


def with_phases(graph: Graph) -> Graph:
    """Names first; then what depends on the backward phase, or on arguments alone and feeds no named op, is
    update."""
    phases = [_named_phase(op.scope) for op in graph.ops]
    training = {i for i, op in enumerate(graph.ops) if phases[i] is None and takes_gradient(op)}
    if not (any(phases) or training):
        return _in_phases(graph, [Phase.FORWARD] * len(phases))
    after: dict[int, Phase] = {}
    for i, op in enumerate(graph.ops):
        before = {after[v] for v in op.operands if v in after}
        if phases[i] is None and before & {Phase.BACKWARD, Phase.UPDATE}:
            phases[i] = Phase.UPDATE
        elif phases[i] is None and (Phase.FORWARD in before or i in training):
            phases[i] = Phase.FORWARD
        phase = phases[i]
        if phase is not None:
            is_both = i in training and phase is Phase.FORWARD
            after.update(dict.fromkeys(op.outputs, Phase.BACKWARD if is_both else phase))
    needed = {
        v
        for op, p in zip(graph.ops, phases, strict=True)
        if p not in (None, Phase.UPDATE)
        for v in op.operands
    }
    for i, op in reversed(list(enumerate(graph.ops))):
        if phases[i] is None:
            phases[i] = Phase.UPDATE if needed.isdisjoint(op.outputs) else Phase.FORWARD
            needed.update(op.operands if phases[i] is Phase.FORWARD else ())
    return _in_phases(graph, phases)


def _in_phases(graph: Graph, phases: Sequence[Phase | None]) -> Graph:
    """The graph with a phase per op; a body stands in its op's phase, but for ops named backward (a gradient
    inside)."""
    ops: list[Op] = []
    for op, phase in zip(graph.ops, phases, strict=True):
        assert phase is not None
        bodies = {
            key: tuple(_in_phases(b, [_body_phase(o.scope, phase) for o in b.ops]) for b in bodies)
            for key, bodies in op.bodies.items()
        }
        ops.append(replace(op, phase=phase, bodies=bodies))
    return replace(graph, ops=tuple(ops))


def _body_phase(scope: str, outer: Phase) -> Phase:
    named = _named_phase(scope)
    return Phase.BACKWARD if Phase.BACKWARD in (named, outer) and outer is not Phase.UPDATE else outer


def _named_phase(scope: str) -> Phase | None:
    if "transpose(" in scope or "rematted_computation" in scope:
        return Phase.BACKWARD
    return Phase.FORWARD if "jvp(" in scope else None
