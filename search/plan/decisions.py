"""Strategies in words, and words as strategies.

A plan names a decision by what it decides. An argument's key is its pytree path. A group's is its largest
op, named by phase, scope and primitive, numbers replaced by `*` where it stands for several; its value lists
the specs that this op reads and makes. A copy's key adds the phase that it serves. Words are made for all
strategies of a node, so reading a value is looking it up, and what is not among them is refused with what would
have been accepted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from cost_model.errors import PlanError
from search.ir.spec import AXIS_NAMES, Spec, format_spec, parse_spec
from search.plan.plan import Decisions
from search.problem.costs import CostedGraph
from search.problem.strategies import port_specs
from search.problem.strategy_graph import StrategyGraph

_TRANSFORM = re.compile(r"(?:transpose|jvp|vmap|remat|checkpoint)\(([^()]*)\)")


def node_names(graph: StrategyGraph) -> tuple[str, ...]:
    """One unique name per node; an argument's node is named by its first member."""
    seen: dict[str, int] = {}
    names = []
    for node, group in enumerate(graph.groups):
        names.append(
            _unique(_group_name(graph, node, max(group.op_classes, key=lambda k: _weight(graph, k))), seen)
        )
    for copy in graph.copies:
        maker = graph.folded.op(copy.maker[0])
        base = _class_name(graph, copy.maker[0]) + (f"[{copy.maker[1]}]" if len(maker.results) > 1 else "")
        names.append(_unique(f"{base} -> {copy.phase}", seen))
    return tuple(names)


def _unique(name: str, seen: dict[str, int]) -> str:
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name} #{seen[name]}"


def _group_name(graph: StrategyGraph, node: int, op_class: int) -> str:
    op = graph.folded.op(op_class)
    if op.name == "input":
        return graph.folded.program.step.arguments[op.site[0]].name
    if op.name == "output":
        return graph.folded.program.step.results[op.site[0]]
    return _class_name(graph, op_class)


def _class_name(graph: StrategyGraph, op_class: int) -> str:
    op = graph.folded.op(op_class)
    if op.name == "input":
        return re.sub(r"\d+", "*", graph.folded.program.step.arguments[op.site[0]].name)
    scope = op.op.scope if op.op is not None else ""
    while _TRANSFORM.search(scope):
        scope = _TRANSFORM.sub(r"\1", scope)
    scope = "/".join(filter(None, scope.split("/")))
    if len(graph.folded.members[op_class]) > 1:
        scope = re.sub(r"\d+", "*", scope)
    return f"{op.phase} {scope + '/' if scope else ''}{op.name}"


def _weight(graph: StrategyGraph, op_class: int) -> tuple[int, int, int]:
    """How well an op stands for its group: the most loops, then the largest, then the first."""
    op = graph.folded.op(op_class)
    splittable = sum(
        (op_class, i) in graph.groups[graph.node_of[op_class]].factor_of for i in range(len(op.rule.factors))
    )
    return splittable, prod(f.size for f in op.rule.factors), -op_class


@dataclass(frozen=True, eq=False)
class DecisionCodec:
    """The vocabulary of a costed strategy graph: every node's name, every strategy's text."""

    costed: CostedGraph

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return AXIS_NAMES[self.costed.resharder.num_axes]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Per node."""
        return node_names(self.costed.graph)

    def text(self, node: int, strategy: int) -> str:
        """A strategy in words."""
        return self.texts(node)[strategy]

    def texts(self, node: int) -> list[str]:
        """All strategies of a node in words, no two alike."""
        graph, strategies = self.costed.graph, self.costed.strategies[node]
        if strategies.copy_sources:
            specs = self._spec_texts(strategies.assignment)
            return [f"{way} {spec}" for way, spec in zip(strategies.copy_sources, specs, strict=True)]
        op_class = max(graph.groups[node].op_classes, key=lambda k: _weight(graph, k))
        op = graph.folded.op(op_class)
        results = [self._specs(graph.ports[op_class, r, True]) for r in range(len(op.results))]
        if op.is_boundary:
            return [", ".join(column) for column in zip(*results, strict=True)]
        operands = [self._specs(graph.ports[op_class, i, False]) for i in range(len(op.operands))]
        seen: dict[str, int] = {}
        texts = []
        for strategy in range(len(strategies)):
            read, made = (
                ", ".join(column[strategy] for column in columns) for columns in (operands, results)
            )
            texts.append(_unique(f"{read} -> {made}" if read else made, seen))
        return texts

    def _specs(self, port) -> list[str]:
        return self._spec_texts(port_specs(port, self.costed.strategies[port.node]))

    def _spec_texts(self, specs: np.ndarray) -> list[str]:
        rows = [tuple(s) for s in specs.tolist()]
        for spec in rows:
            if spec not in self._text_of:
                self._text_of[spec] = format_spec(spec, self.axis_names)
        return [self._text_of[spec] for spec in rows]

    @cached_property
    def _text_of(self) -> dict[Spec, str]:
        """Memo of `_spec_texts`."""
        return {}

    def decisions(self, strategies: Sequence[int]) -> Decisions:
        """A full assignment in words."""
        graph, program = self.costed.graph, self.costed.graph.folded.program
        arguments: dict[str, str] = {}
        for i, value in enumerate(program.inputs):
            node = graph.node_of[graph.folded.class_of[i]]
            arguments[program.step.arguments[i].name] = (
                self.text(node, strategies[node]) if program.values[value].shape else "P()"
            )
        ops = {
            self.names[node]: self.text(node, strategies[node])
            for node, group in enumerate(graph.groups)
            if graph.folded.op(group.op_classes[0]).name != "input" and len(self.costed.strategies[node]) > 1
        }
        copies = {self.names[c.node]: self.text(c.node, strategies[c.node]) for c in graph.copies}
        mesh = dict(zip(self.axis_names, self.costed.resharder.mesh.shape, strict=True))
        return Decisions(mesh, arguments, ops, copies)

    def allowed(self, decisions: Decisions, place: str) -> tuple[np.ndarray, ...]:
        """Per node: the strategies that a plan's decisions leave; all of them where the plan says nothing.

        Raises:
          PlanError: a decision that is not possible, or that names nothing in this step.
        """
        graph = self.costed.graph
        said = dict(decisions.ops) | dict(decisions.copies)
        unknown = [key for key in said if key not in set(self.names)]
        if unknown:
            raise PlanError(f"{place}: {unknown[0]!r} names no op of this step")
        allowed = [np.arange(len(c)) for c in self.costed.strategies]
        for i, argument in enumerate(graph.folded.program.step.arguments):
            node = graph.node_of[graph.folded.class_of[i]]
            if argument.name in decisions.arguments:
                wanted = self.parse(decisions.arguments[argument.name], argument.name, place)
                allowed[node] = self._resting(node, wanted, argument.name, place)
        for node, name in enumerate(self.names):
            if name in said:
                allowed[node] = self._lookup(node, name, said[name], place)
        return tuple(allowed)

    def parse(self, text: str, name: str, place: str) -> Spec:
        """A spec of the plan, with the decision's name in the message."""
        try:
            return parse_spec(text, self.axis_names)
        except PlanError as e:
            raise PlanError(f"{place}: {name}: {e}") from e

    def _resting(self, node: int, wanted: Spec, name: str, place: str) -> np.ndarray:
        """The strategies of an argument's node that rest it in a spec."""
        graph = self.costed.graph
        port = graph.ports[graph.groups[node].op_classes[0], 0, True]
        found = np.flatnonzero(
            (port_specs(port, self.costed.strategies[node]) == np.array(wanted)).all(axis=1)
        )
        if not len(found):
            shape = graph.folded.program.values[
                graph.folded.op(graph.groups[node].op_classes[0]).results[0]
            ].shape
            mesh = dict(zip(self.axis_names, self.costed.resharder.mesh.shape, strict=True))
            raise PlanError(
                f"{place}: {name} of shape {shape} cannot rest as {format_spec(wanted, self.axis_names)} on the mesh "
                f"{mesh}: a dimension does not divide evenly. Choose another dimension or mesh"
            )
        return found

    def _lookup(self, node: int, name: str, said: str, place: str) -> np.ndarray:
        texts = self.texts(node)
        if said not in texts:
            shown = "; ".join(texts[:6])
            raise PlanError(
                f"{place}: {name!r} cannot be {said!r}. Possible are: {shown}{'; ...' * (len(texts) > 6)}"
            )
        return np.array([texts.index(said)])


def allowed_by_pins(codec: DecisionCodec, pins: Mapping[str, Spec]) -> dict[int, np.ndarray]:
    """Per node of a pinned argument: the strategies that rest it as pinned."""
    graph = codec.costed.graph
    allowed = {}
    for i, argument in enumerate(graph.folded.program.step.arguments):
        if argument.name in pins:
            node = graph.node_of[graph.folded.class_of[i]]
            allowed[node] = codec._resting(node, pins[argument.name], argument.name, "pin")
    return allowed
