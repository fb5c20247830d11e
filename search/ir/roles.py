"""What each argument of a step is for.

A state leaf that the forward phase reads and the update makes anew is a parameter, a floating one that only the update reads
is optimizer state.
"""

from collections.abc import Set as AbstractSet

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Graph, Phase, Role
from autoshard.search.ir.state import Successors


def roles(graph: Graph, found: Successors, held: AbstractSet[int] = frozenset()) -> tuple[Role, ...]:
    """What each argument is for.

    Args:
      graph: the step's, with phases.
      found: what replaces what.
      held: arguments that are state whether or not anything replaces them.
    """
    new = {i: graph.outputs[o] for o, i in found.pairs}
    read_in: dict[int, set[Phase]] = {}
    for op in graph.ops:
        for v in op.operands:
            read_in.setdefault(v, set()).add(op.phase)
    made_in = {v: op.phase for op in graph.ops for v in op.outputs}
    new_phase = {i: made_in.get(atom) for i, atom in new.items() if isinstance(atom, int)}

    def role(i: int, v: int) -> Role:
        if _jax.is_key_dtype(graph.values[v].dtype):
            return Role.KEY
        if i not in new and i not in held:
            return Role.BATCH
        if not _jax.is_inexact(graph.values[v].dtype):
            return Role.STATE
        is_changed = new.get(i, v) != v
        phases = read_in.get(v, set())
        if not is_changed or (Phase.FORWARD in phases and new_phase.get(i) is Phase.UPDATE):
            return Role.PARAMETER
        return Role.OPTIMIZER_STATE if phases <= {Phase.UPDATE} else Role.STATE

    return tuple(role(i, v) for i, v in enumerate(graph.inputs))
