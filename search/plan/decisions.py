"""Labels in words, and words as labels.

A plan names a decision by what it decides. An argument's key is its pytree path. A cluster's is its largest
op, named by phase, scope and primitive, numbers replaced by `*` where it stands for several; its value lists
the specs that this op reads and makes. A copy's key adds the phase that it serves. Words are made for all
labels of a node, so reading a value is looking it up, and what is not among them is refused with what would
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
from search.problem.costs import Priced
from search.problem.strategies import port_specs
from search.problem.strategy_graph import Sketch

_TRANSFORM = re.compile(r"(?:transpose|jvp|vmap|remat|checkpoint)\(([^()]*)\)")


def node_names(sketch: Sketch) -> tuple[str, ...]:
    """One unique name per node; an argument's node is named by its first member."""
    seen: dict[str, int] = {}
    names = []
    for node, cluster in enumerate(sketch.clusters):
        names.append(
            _unique(_cluster_name(sketch, node, max(cluster.kinds, key=lambda k: _weight(sketch, k))), seen)
        )
    for copy in sketch.copies:
        maker = sketch.folded.op(copy.maker[0])
        base = _kind_name(sketch, copy.maker[0]) + (f"[{copy.maker[1]}]" if len(maker.results) > 1 else "")
        names.append(_unique(f"{base} -> {copy.group}", seen))
    return tuple(names)


def _unique(name: str, seen: dict[str, int]) -> str:
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name} #{seen[name]}"


def _cluster_name(sketch: Sketch, node: int, kind: int) -> str:
    op = sketch.folded.op(kind)
    if op.name == "input":
        return sketch.folded.program.step.arguments[op.site[0]].name
    if op.name == "output":
        return sketch.folded.program.step.results[op.site[0]]
    return _kind_name(sketch, kind)


def _kind_name(sketch: Sketch, kind: int) -> str:
    op = sketch.folded.op(kind)
    if op.name == "input":
        return re.sub(r"\d+", "*", sketch.folded.program.step.arguments[op.site[0]].name)
    scope = op.op.scope if op.op is not None else ""
    while _TRANSFORM.search(scope):
        scope = _TRANSFORM.sub(r"\1", scope)
    scope = "/".join(filter(None, scope.split("/")))
    if len(sketch.folded.members[kind]) > 1:
        scope = re.sub(r"\d+", "*", scope)
    return f"{op.phase} {scope + '/' if scope else ''}{op.name}"


def _weight(sketch: Sketch, kind: int) -> tuple[int, int, int]:
    """How well an op stands for its cluster: the most loops, then the largest, then the first."""
    op = sketch.folded.op(kind)
    splittable = sum(
        (kind, i) in sketch.clusters[sketch.node_of[kind]].factor_of for i in range(len(op.rule.factors))
    )
    return splittable, prod(f.size for f in op.rule.factors), -kind


@dataclass(frozen=True, eq=False)
class Words:
    """The vocabulary of a priced sketch: every node's name, every label's text."""

    priced: Priced

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return AXIS_NAMES[self.priced.resharder.num_axes]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Per node."""
        return node_names(self.priced.sketch)

    def text(self, node: int, label: int) -> str:
        """A label in words."""
        return self.texts(node)[label]

    def texts(self, node: int) -> list[str]:
        """All labels of a node in words, no two alike."""
        sketch, choices = self.priced.sketch, self.priced.choices[node]
        if choices.ways:
            specs = self._spec_texts(choices.assignment)
            return [f"{way} {spec}" for way, spec in zip(choices.ways, specs, strict=True)]
        kind = max(sketch.clusters[node].kinds, key=lambda k: _weight(sketch, k))
        op = sketch.folded.op(kind)
        results = [self._specs(sketch.ports[kind, r, True]) for r in range(len(op.results))]
        if op.is_boundary:
            return [", ".join(column) for column in zip(*results, strict=True)]
        operands = [self._specs(sketch.ports[kind, i, False]) for i in range(len(op.operands))]
        seen: dict[str, int] = {}
        texts = []
        for label in range(len(choices)):
            read, made = (", ".join(column[label] for column in columns) for columns in (operands, results))
            texts.append(_unique(f"{read} -> {made}" if read else made, seen))
        return texts

    def _specs(self, port) -> list[str]:
        return self._spec_texts(port_specs(port, self.priced.choices[port.node]))

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

    def decisions(self, labels: Sequence[int]) -> Decisions:
        """A full assignment in words."""
        sketch, program = self.priced.sketch, self.priced.sketch.folded.program
        arguments: dict[str, str] = {}
        for i, value in enumerate(program.inputs):
            node = sketch.node_of[sketch.folded.kind_of[i]]
            arguments[program.step.arguments[i].name] = (
                self.text(node, labels[node]) if program.values[value].shape else "P()"
            )
        ops = {
            self.names[node]: self.text(node, labels[node])
            for node, cluster in enumerate(sketch.clusters)
            if sketch.folded.op(cluster.kinds[0]).name != "input" and len(self.priced.choices[node]) > 1
        }
        copies = {self.names[c.node]: self.text(c.node, labels[c.node]) for c in sketch.copies}
        mesh = dict(zip(self.axis_names, self.priced.resharder.mesh.shape, strict=True))
        return Decisions(mesh, arguments, ops, copies)

    def allowed(self, decisions: Decisions, place: str) -> tuple[np.ndarray, ...]:
        """Per node: the labels that a plan's decisions leave; all of them where the plan says nothing.

        Raises:
          PlanError: a decision that is not possible, or that names nothing in this step.
        """
        sketch = self.priced.sketch
        said = dict(decisions.ops) | dict(decisions.copies)
        unknown = [key for key in said if key not in set(self.names)]
        if unknown:
            raise PlanError(f"{place}: {unknown[0]!r} names no op of this step")
        allowed = [np.arange(len(c)) for c in self.priced.choices]
        for i, argument in enumerate(sketch.folded.program.step.arguments):
            node = sketch.node_of[sketch.folded.kind_of[i]]
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
        """The labels of an argument's node that rest it in a spec."""
        sketch = self.priced.sketch
        port = sketch.ports[sketch.clusters[node].kinds[0], 0, True]
        found = np.flatnonzero((port_specs(port, self.priced.choices[node]) == np.array(wanted)).all(axis=1))
        if not len(found):
            shape = sketch.folded.program.values[
                sketch.folded.op(sketch.clusters[node].kinds[0]).results[0]
            ].shape
            mesh = dict(zip(self.axis_names, self.priced.resharder.mesh.shape, strict=True))
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


def allowed_by_pins(words: Words, pins: Mapping[str, Spec]) -> dict[int, np.ndarray]:
    """Per node of a pinned argument: the labels that rest it as pinned."""
    sketch = words.priced.sketch
    allowed = {}
    for i, argument in enumerate(sketch.folded.program.step.arguments):
        if argument.name in pins:
            node = sketch.node_of[sketch.folded.kind_of[i]]
            allowed[node] = words._resting(node, pins[argument.name], argument.name, "pin")
    return allowed
