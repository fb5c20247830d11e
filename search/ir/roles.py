"""The roles of a step's arguments.

A floating-point state leaf that the forward or backward phase reads and the update phase replaces is a parameter. One that
only the update phase reads is optimizer state. *Frozen* are weights, tables and masks that the step reads and does not
change, whichever way they come:

* as state that comes back as it was: an untrained subtree, or variables of an `nnx.Module` outside of its optimizer. Adding
  zeros changes nothing (`identities`); `optax.set_to_zero` does that.
* as arguments that no result replaces and that hold no examples (`examples`).
* as arguments that the user declares as state (`state=`) and that no result replaces.

Other arguments that no result replaces are the batch. So are scalars, which come with each call. Scalars that come back are
state, changed or not, and so are integers that the step changes. A random key is a key.
"""

from collections.abc import Set as AbstractSet

from autoshard.search.ir import _jax
from autoshard.search.ir.examples import read_whole, reading_phases
from autoshard.search.ir.graph import Graph, Phase, Role
from autoshard.search.ir.state import Successors


def roles(graph: Graph, found: Successors, held: AbstractSet[int] = frozenset()) -> tuple[Role, ...]:
    """The role of each argument.

    Args:
      graph: the step's graph, with phases.
      found: the arguments that results replace.
      held: arguments that are state even if no result replaces them.
    """
    new = {i: graph.outputs[o] for o, i in found.pairs}
    read_in = reading_phases(graph)
    given = [
        i for i, v in enumerate(graph.inputs) if i not in new and i not in held and graph.values[v].shape
    ]
    frozen = read_whole(graph, given)
    made_in = {v: op.phase for op in graph.ops for v in op.outputs}
    new_phase = {i: made_in.get(atom) for i, atom in new.items() if isinstance(atom, int)}

    def role(i: int, v: int) -> Role:
        value = graph.values[v]
        if _jax.is_key_dtype(value.dtype):
            return Role.KEY
        if i not in new and i not in held:
            return Role.FROZEN if i in frozen else Role.BATCH
        if new.get(i, v) == v:
            return Role.FROZEN if value.shape else Role.STATE
        if not _jax.is_inexact(value.dtype):
            return Role.STATE
        if read_in[v] <= {Phase.UPDATE}:
            return Role.OPTIMIZER_STATE
        return Role.PARAMETER if new_phase.get(i) is Phase.UPDATE else Role.STATE

    return tuple(role(i, v) for i, v in enumerate(graph.inputs))
