"""Phases: forward, backward, update.

Name stacks decide first: `transpose(...)` is backward, `jvp(...)` alone is forward. Dataflow decides for other ops: an op
that depends on the backward phase is update, the rest is forward. A loop whose body takes gradients, such as one over
microbatches, is forward itself; its body's ops have their own phases, and its readers are update. If the loop depends on
another gradient, it is update.
"""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.search.ir.graph import Graph, Op, Phase


def takes_gradient(op: Op) -> bool:
    """True if a loop or branch takes a gradient inside its body and is no part of a gradient itself."""
    return _named_phase(op.scope) is None and any(
        _named_phase(inner.scope) is Phase.BACKWARD or takes_gradient(inner)
        for bodies in op.bodies.values()
        for body in bodies
        for inner in body.ops
    )


def with_phases(graph: Graph) -> Graph:
    """The graph with a phase per op. Without any named op or gradient, every op is forward. Else names decide first. An
    unnamed op is update if it depends on the backward phase, or on arguments alone and feeds no other phase."""
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
    """The graph with these phases."""
    return replace(graph, ops=tuple(map(_in_phase, graph.ops, phases)))


def _in_phase(op: Op, phase: Phase | None) -> Op:
    """An op in a phase. The ops of a body have its op's phase, except ops named backward (a gradient inside)."""
    assert phase is not None
    inside = op.with_bodies(lambda b: _in_phases(b, [_body_phase(o.scope, phase) for o in b.ops]))
    return replace(inside, phase=phase)


def _body_phase(scope: str, outer: Phase) -> Phase:
    named = _named_phase(scope)
    return Phase.BACKWARD if Phase.BACKWARD in (named, outer) and outer is not Phase.UPDATE else outer


def _named_phase(scope: str) -> Phase | None:
    if "transpose(" in scope or "rematted_computation" in scope:
        return Phase.BACKWARD
    return Phase.FORWARD if "jvp(" in scope else None
