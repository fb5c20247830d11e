"""Residuals of a loop that wait on the host, slice by slice.

A loop stacks up the residuals of its iterations. If such a stack waits on the host, each iteration of the forward loop sends
its slice there, and each iteration of the backward loop fetches its slice:

    for t in steps:            c, r = f(c, x[t]);  host[t] = to_host(r)
    for t in reversed(steps):  r = to_device(host[t]);  g = b(g, r)

The stack is never on the device. Its copies hide behind the other work of an iteration.

The site of a residual is that of its op in the forward loop's body. The loop's own site stands for its carries, which no op
of the same iteration makes. (ZeRO-Infinity, Rajbhandari et al. 2021, offloads what lies between checkpointed layers.)
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from autoshard.search.ir.graph import Atom, Graph, Op, Site, Step, Value, verify
from autoshard.search.memory.loop_pairs import Loop, loop_pairs
from autoshard.search.memory.offload import MIN_BYTES, SCOPE, to_device, to_host
from autoshard.search.memory.written import Written


def may_leave_loop(graph: Graph, site: Site) -> bool:
    """True if a site of a step's outermost graph is that of a loop's carries or of an op in a loop's body, whose stacks a
    backward loop reads."""
    return site[0] in loop_pairs(graph) and (len(site) == 1 or (len(site) == 4 and site[1:3] == ("jaxpr", 0)))


def in_loops(graph: Graph, sites: Iterable[Site]) -> frozenset[Site]:
    """Those of the sites whose values are stacked by a loop."""
    return frozenset(site for site in sites if may_leave_loop(graph, site))


def loops_offloaded(step: Step, traced: Graph, sites: Collection[Site]) -> Step:
    """The step with stacks of its loops on the host.

    Args:
      step: a step, which may recompute values.
      traced: the graph before any rewrite, in which the sites are.
      sites: of carries and ops of loops (`may_leave_loop`).

    Returns:
      The given step if there are no sites.
    """
    if not sites:
        return step
    values, ops = list(step.graph.values), list(step.graph.ops)
    maker = {v: i for i, op in enumerate(ops) for v in op.outputs}
    pairs = loop_pairs(step.graph)
    for f in sorted({site[0] for site in sites}):
        place = maker[traced.ops[f].outputs[0]]
        inner = set(_stacked_values(traced.ops[f], f, sites))
        stacks = _stacks(step.graph, ops[place], inner, pairs.get(place, []))
        for v in stacks:
            values[v] = replace(values[v], is_on_host=True)
        for i in (place, *pairs.get(place, [])):
            ops[i] = (_sending if i == place else _fetching)(ops[i], stacks)
    graph = replace(step.graph, values=tuple(values), ops=tuple(ops))
    verify(graph)
    return replace(step, graph=graph)


def _stacked_values(loop: Op, f: int, sites: Collection[Site]) -> Iterator[int]:
    """The values of a loop's body that wait on the host."""
    (body,), (num_consts, num_carry) = loop.bodies["jaxpr"], loop.loop_counts
    if (f,) in sites:
        yield from body.inputs[num_consts : num_consts + num_carry]
    for site in sites:
        if len(site) > 1 and site[0] == f:
            yield from body.ops[site[-1]].outputs


def _stacks(graph: Graph, loop: Op, inner: Collection[int], backward: Collection[int]) -> frozenset[int]:
    """The stacks of large values that only backward loops read, slice by slice."""
    elsewhere = {v for i, op in enumerate(graph.ops) if i not in backward for v in op.operands} | {
        *graph.made
    }
    for b in backward:
        elsewhere |= {a for a in graph.ops[b].inputs[: sum(graph.ops[b].loop_counts)] if isinstance(a, int)}
    stacks = (
        out
        for y, out, value in Loop.of(loop).ys
        if y in inner and value.num_bytes >= MIN_BYTES * value.shape[0]
    )
    return frozenset(v for v in stacks if v not in elsewhere)


def _sending(op: Op, stacks: Collection[int]) -> Op:
    """A forward loop that sends slices of stacks to the host."""
    loop = Loop.of(op)
    written = Written(loop.body.values, SCOPE)
    written.ops += loop.body.ops
    ys = list[tuple[Atom, int, Value]]()
    for y, out, value in loop.ys:
        if out in stacks and isinstance(y, int):
            like = next((o for o in loop.body.ops if y in o.outputs), op)
            y, value = written.write(to_host, [y], like), replace(value, is_on_host=True)
            written.values[y] = replace(written.values[y], is_on_host=True)
        ys.append((y, out, value))
    loop.ys = ys
    loop.body = replace(loop.body, values=tuple(written.values), ops=tuple(written.ops))
    return loop.put_together()


def _fetching(op: Op, stacks: Collection[int]) -> Op:
    """A backward loop that fetches slices of stacks from the host, first of all."""
    loop = Loop.of(op)
    written = Written(loop.body.values, SCOPE)
    there = dict[Atom, Atom]()
    for outer, inner in loop.xs:
        if outer in stacks:
            written.values[inner] = replace(written.values[inner], is_on_host=True)
            there[inner] = written.write(to_device, [inner], op)
    for one in loop.body.ops:
        written.ops.append(
            replace(one, inputs=tuple(there.get(a, a) if isinstance(a, int) else a for a in one.inputs))
        )
    outputs = tuple(there.get(a, a) if isinstance(a, int) else a for a in loop.body.outputs)
    loop.ys = [
        (y, out, value) for y, (_, out, value) in zip(outputs[len(loop.inits) :], loop.ys, strict=True)
    ]
    values = tuple(written.values)
    loop.body = replace(loop.body, values=values, ops=tuple(written.ops), outputs=outputs)
    return loop.put_together()
