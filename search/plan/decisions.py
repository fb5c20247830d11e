"""Strategies as text, and text as strategies.

The name of a decision is that of its subject. An argument's name is its pytree path. A group's name is that of its
largest op: phase, scope and primitive, with `*` for numbers if it represents several. Its text lists the specs that
this op reads and makes. A copy's name adds the phase that reads it. All strategies of a node have texts, so a text is
read by looking it up. A text that is not among them is refused, and the message lists some that are.

Names follow from the step and its pins, never from the plan's decisions. So the step for which a plan is read has the
names of the step that was searched, even if several ops share a name and are numbered in program order. Arguments that
are decided together, and their copies, are written one by one. If an edited plan gives them different texts, they are
decided apart (`apart`), and all other names stay.

Decisions may be edited, or deleted to be searched again. If some contradict one another, `search.plan.reconciliation`
says which give way.
"""

import difflib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.memo import memo
from autoshard.cost_model.units import format_bytes
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import AXIS_NAMES, PARTIAL, WHOLE, Spec, format_spec, parse_spec
from autoshard.search.memory.host_updates import updatable
from autoshard.search.memory.offload import MIN_BYTES, may_rest_on_host
from autoshard.search.plan.edits import Decision
from autoshard.search.plan.names import scoped_name, unique
from autoshard.search.plan.resting_places import ON_HOST, UPDATED, is_on_host, without_place
from autoshard.search.plan.text_table import LINES_OF_A_LIST, plural
from autoshard.search.plan.values import Decisions, Sharding
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp, ReadPhase
from autoshard.search.problem.op_groups import OpGroup
from autoshard.search.problem.strategies import port_specs
from autoshard.search.problem.strategy_graph import Maker, Port, StrategyGraph

ARGUMENT, EDITED = 1, 2
"""Firmness of decisions: of an argument, and of an edit; others are looser."""

SPEC = re.compile(r"\b(?:jax\.)?(?:sharding\.)?P(?:artitionSpec)?\(((?:[^()]|\([^()]*\))*)\)")
"""A spec in a text, by any of its names."""

_KINDS = {"arguments": "argument", "ops": "op", "copies": "copy"}
"""The tables of a plan's decisions, with the subject of a name in each."""


def node_names(graph: StrategyGraph) -> tuple[tuple[str, ...], ...]:
    """Per node, the names of its decision: one, or one for each argument whose specs or copies it decides."""
    seen: dict[str, int] = {}
    names: list[tuple[str, ...]] = []
    for group in graph.groups:
        largest = _largest(graph, group)
        names.append(_arguments(graph, largest) or (unique(_class_name(graph, largest), seen),))
    for copy in graph.copies:
        of_arguments = tuple(_copy_name(a, copy.phase) for a in _arguments(graph, copy.maker[0]))
        names.append(of_arguments or (unique(_copy_name(_maker_name(graph, copy.maker), copy.phase), seen),))
    return tuple(names)


def hosted(step: Step, decisions: Sharding, place: str) -> frozenset[int]:
    """The arguments that a plan rests in the host's memory.

    Raises:
      PlanError: an argument cannot rest there.
    """
    may, found = may_rest_on_host(step), set[int]()
    for i, argument in enumerate(step.arguments):
        is_there = step.graph.values[step.graph.inputs[i]].is_on_host
        if not is_there and is_on_host(decisions.arguments.get(argument.name, "")):
            if i not in may:
                raise PlanError(
                    f"{place}: {argument.name} cannot rest on the host: it is neither state of the step nor a frozen "
                    f"weight, is another result of it as it was, or takes less than {format_bytes(MIN_BYTES)}. Leave out "
                    f"{ON_HOST!r}"
                )
            found.add(i)
    return frozenset(found)


def updated_there(
    step: Step, decisions: Sharding, on_host: frozenset[int], cluster: Cluster, place: str
) -> frozenset[int]:
    """The arguments that a plan has the host update.

    Raises:
      PlanError: one that the host cannot update, or a cluster that does not say how fast its hosts are.
    """
    named = {i: step.arguments[i].name for i in sorted(on_host)}
    asked = {i: name for i, name in named.items() if decisions.arguments[name].endswith(UPDATED)}
    if asked and not cluster.host_update_bytes_per_s:
        raise PlanError(
            f"{place}: {next(iter(asked.values()))} is to be updated on the host, and {cluster.name} does not say how fast "
            f"its hosts are. Say it (host_memory_bandwidth_per_node, host_cores_per_node), or leave out {UPDATED!r}"
        )
    may = updatable(step, on_host) if asked else frozenset[int]()
    for name in (name for i, name in asked.items() if i not in may):
        raise PlanError(
            f"{place}: {name} cannot be updated on the host: its new value takes more than elementwise ops on arrays of "
            f"its shape, such as a norm or a product. Leave out {UPDATED!r}"
        )
    return frozenset(asked)


def apart(step: Step, decisions: Sharding) -> tuple[tuple[str | None, ...], ...]:
    """Per argument, the decisions of a plan for it and for its copies. No node can decide arguments together that
    differ in these."""
    return tuple(
        (
            decisions.arguments.get(a.name),
            *(decisions.copies.get(_copy_name(a.name, phase)) for phase in ReadPhase),
        )
        for a in step.arguments
    )


def _arguments(graph: StrategyGraph, op_class: int) -> tuple[str, ...]:
    """The names of the arguments that a class represents; none for other classes."""
    if graph.folded.op(op_class).name != "input":
        return ()
    program = graph.folded.program
    arguments = (program.step.arguments[program.ops[i].number] for i in graph.folded.members[op_class])
    return tuple(name for argument in arguments for name in argument.names)


def _copy_name(of: str, phase: ReadPhase) -> str:
    return f"{of} -> {phase}"


def _maker_name(graph: StrategyGraph, maker: Maker) -> str:
    op_class, result = maker
    num_results = len(graph.folded.op(op_class).results)
    return _class_name(graph, op_class) + (f"[{result}]" if num_results > 1 else "")


def _class_name(graph: StrategyGraph, op_class: int) -> str:
    op = graph.folded.op(op_class)
    if op.name == "output":
        return graph.folded.program.step.results[op.number]
    if op.op is None:
        return f"{op.phase} {op.name}"
    return f"{op.phase} {scoped_name(op.op, graph.folded.sizes[op_class] > 1)}"


def _largest(graph: StrategyGraph, group: OpGroup) -> int:
    """The class that represents a group: the largest of those with most of the group's loops, and of equal ones the
    first."""

    def size(op_class: int) -> tuple[int, int, int]:
        factors = graph.folded.op(op_class).rule.factors
        num_loops = sum((op_class, i) in group.factor_of for i in range(len(factors)))
        return num_loops, prod(f.size for f in factors), -op_class

    return max(group.op_classes, key=size)


@dataclass(frozen=True, eq=False)
class DecisionCodec:
    """The texts of a costed strategy graph: the name of every node, and the text of every strategy."""

    costed: CostedGraph

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes."""
        return AXIS_NAMES[self.costed.resharder.num_axes]

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh axes."""
        return dict(zip(self.axis_names, self.costed.resharder.mesh.shape, strict=True))

    @cached_property
    def names(self) -> tuple[tuple[str, ...], ...]:
        """Per node, the names under which a plan decides it."""
        return node_names(self.costed.graph)

    def text(self, node: int, strategy: int) -> str:
        """The text of a strategy."""
        return self.texts(node)[strategy]

    def texts(self, node: int) -> list[str]:
        """The texts of all strategies of a node; no two are equal."""
        graph, strategies = self.costed.graph, self.costed.strategies[node]
        if strategies.copy_sources:
            specs = self._spec_texts(strategies.assignment)
            return [f"{way} {spec}" for way, spec in zip(strategies.copy_sources, specs, strict=True)]
        op_class = _largest(graph, graph.groups[node])
        op = graph.folded.op(op_class)
        operands = [self._specs(graph.ports[op_class, i, False]) for i in range(len(op.operands))]
        results = [self._specs(graph.ports[op_class, r, True]) for r in range(len(op.results))]
        seen: dict[str, int] = {}
        texts: list[str] = []
        for strategy in range(len(strategies)):
            read = ", ".join(column[strategy] for column in operands)
            made = ", ".join(column[strategy] for column in results)
            text = f"{read} -> {made}" if read and not op.is_boundary else made + self._where(op)
            texts.append(unique(text, seen))
        return texts

    def _where(self, op: FlatOp) -> str:
        program = self.costed.graph.folded.program
        if op.name != "input" or not program.values[op.results[0]].is_on_host:
            return ""
        is_updated = any(program.ops[u].is_host_update for u in program.uses.get(op.results[0], ()))
        return ON_HOST + UPDATED * is_updated

    def _specs(self, port: Port) -> list[str]:
        return self._spec_texts(port_specs(port, self.costed.strategies[port.node]))

    def _spec_texts(self, specs: np.ndarray) -> list[str]:
        return [self._spec_text(tuple(spec)) for spec in specs.tolist()]

    @memo
    def _spec_text(self, spec: Spec) -> str:
        return format_spec(spec, self.axis_names)

    def decisions(self, strategies: Sequence[int]) -> Decisions:
        """The decisions of a full assignment. A group with one strategy has none."""
        tables: dict[str, dict[str, str]] = {kind: {} for kind in _KINDS}
        for node, names in enumerate(self.names):
            kind = self._kind(node)
            if kind != "ops" or len(self.costed.strategies[node]) > 1:
                tables[kind] |= dict.fromkeys(names, self.text(node, strategies[node]))
        in_order = (name for a in self.costed.graph.folded.program.step.arguments for name in a.names)
        arguments = {name: tables["arguments"][name] for name in in_order}
        return Decisions(self.mesh, arguments, tables["ops"], tables["copies"])

    def allowed(
        self, decisions: Sharding, place: str, edited: Collection[Decision] = ()
    ) -> tuple[np.ndarray, ...]:
        """Per node, the strategies that a plan's decisions leave; all of them if there is no decision.

        After an edit, for example of the arguments on the host, other decisions may have lost their op. These are
        ignored.

        Raises:
          PlanError: a decision is not possible, or names nothing in this step.
        """
        for kind, name in self.unknown(decisions):
            if not edited or (kind, name) in edited:
                raise PlanError(f"{place}: {name!r} names no {_KINDS[kind]} of this step")
        allowed: list[np.ndarray] = []
        for node, names in enumerate(self.names):
            table = getattr(decisions, self._kind(node))
            texts = {table.get(name) for name in names}
            assert len(texts) == 1, f"{names} are decided together, and of them the plan says {texts}"
            (text,) = texts
            allowed.append(self._all(node) if text is None else self._meant(node, text, place))
        return tuple(allowed)

    def _all(self, node: int) -> np.ndarray:
        return np.arange(len(self.costed.strategies[node]))

    def _kind(self, node: int) -> str:
        """The table of the plan that holds a node's decision."""
        graph = self.costed.graph
        if node >= len(graph.groups):
            return "copies"
        return "arguments" if graph.folded.op(graph.groups[node].op_classes[0]).name == "input" else "ops"

    def unknown(self, decisions: Sharding) -> tuple[Decision, ...]:
        """The decisions that name nothing in this step."""
        known = {(self._kind(node), name) for node, names in enumerate(self.names) for name in names}
        named = ((kind, name) for kind in _KINDS for name in getattr(decisions, kind))
        return tuple(decision for decision in named if decision not in known)

    def _meant(self, node: int, text: str, place: str) -> np.ndarray:
        """The strategies that a decision leaves to its node."""
        name = self.names[node][0]
        if self._kind(node) == "arguments":
            return self.resting(node, self.parse(without_place(text), name, place), name, place)
        return np.array([self._lookup(node, name, text, place)])

    def firmness(self, decisions: Sharding, edited: Collection[Decision]) -> dict[int, int]:
        """Per node that a plan decides, the firmness of its decision, for `reconciled`."""
        found: dict[int, int] = {}
        for node, names in enumerate(self.names):
            kind = self._kind(node)
            if names[0] in getattr(decisions, kind):
                is_edited = any((kind, name) in edited for name in names)
                found[node] = EDITED if is_edited else ARGUMENT if kind == "arguments" else 0
        return found

    def text_of(self, node: int, decisions: Sharding) -> str:
        """The text of a plan's decision for a node."""
        return getattr(decisions, self._kind(node))[self.names[node][0]]

    def parse(self, text: str, name: str, place: str) -> Spec:
        """A spec in a plan. The message of an error has the decision's name."""
        try:
            return parse_spec(SPEC.sub(r"P(\1)", text), self.axis_names)
        except PlanError as e:
            raise PlanError(f"{place}: {name}: {e}") from e

    def resting(self, node: int, wanted: Spec, name: str, place: str) -> np.ndarray:
        """The strategies of an argument's node in which it rests in a spec."""
        graph = self.costed.graph
        op_class = graph.groups[node].op_classes[0]
        specs = port_specs(graph.ports[op_class, 0, True], self.costed.strategies[node])
        shape = graph.folded.program.values[graph.folded.op(op_class).results[0]].shape
        empty = {d for d, size in enumerate(shape) if size == 0}  # a spec of these splits nothing
        spared = tuple(WHOLE if d in empty else d for d in self._spared(wanted))
        found = np.flatnonzero((specs == np.array(spared)).all(axis=1))
        if not len(found) or max(wanted) >= len(shape):
            raise PlanError(
                f"{place}: {name} of shape {shape} cannot rest as {format_spec(wanted, self.axis_names)} on the mesh "
                f"{self.mesh}: {_why_not(wanted, shape)}"
            )
        return found

    def _spared(self, spec: Spec) -> Spec:
        """A spec without axes of size one, which split nothing."""
        sizes = self.costed.resharder.mesh.shape
        return tuple(d if size > 1 else WHOLE for d, size in zip(spec, sizes, strict=True))

    def _lookup(self, node: int, name: str, text: str, place: str) -> int:
        texts, wanted = self.texts(node), self._written_alike(text, name, place)
        if wanted not in texts:
            shown = "; ".join(texts[:LINES_OF_A_LIST])
            more = f"; ... All {len(texts)}: autoshard show PLAN TARGET --choices {shlex.quote(name)}"
            raise PlanError(
                f"{place}: {name!r} cannot be {text!r}. Possible are: {shown}{more * (len(texts) > LINES_OF_A_LIST)}"
            )
        return texts.index(wanted)

    def _written_alike(self, text: str, name: str, place: str) -> str:
        """A strategy's text with its specs in our spelling, so that equal specs are equal text."""

        def alike(found: re.Match[str]) -> str:
            return format_spec(self._spared(self.parse(found[0], name, place)), self.axis_names)

        spaced = re.sub(r"\s*(->|,)\s*", lambda mark: " -> " if mark[1] == "->" else ", ", text)
        return re.sub(r"\s+", " ", SPEC.sub(alike, spaced)).strip()

    def choices(self, name: str, place: str, kept: Sequence[np.ndarray] | None = None) -> tuple[str, ...]:
        """All possible texts of a decision.

        Args:
          kept: per node, the strategies that the plan's executor supports; by default all.

        Raises:
          PlanError: nothing is decided under this name.
        """
        named = {name: node for node, names in enumerate(self.names) for name in names}
        if name not in named:
            near = difflib.get_close_matches(name, named, n=LINES_OF_A_LIST, cutoff=0.0)
            raise PlanError(
                f"{place}: {name!r} names no decision of this step. Near it are: {'; '.join(near)}",
                section="a-wrong-name",
            )
        texts = self.texts(named[name])
        left = range(len(texts)) if kept is None else map(int, kept[named[name]])
        return tuple(texts[strategy] for strategy in left)


def _why_not(spec: Spec, shape: tuple[int, ...]) -> str:
    """The reason why an argument cannot rest in a spec."""
    if (wanted := max(spec) + 1) > len(shape):
        return f"it has {plural(len(shape), 'dimension')}, and the spec is for {wanted}"
    if PARTIAL in spec:
        return "an argument rests as it is, not as terms of a sum. Leave out unreduced"
    return "a dimension does not divide evenly. Choose another dimension or mesh"


def allowed_by_pins(codec: DecisionCodec, pins: Mapping[str, Spec]) -> dict[int, np.ndarray]:
    """Per node of a pinned argument, the strategies in which it rests as pinned."""
    graph = codec.costed.graph
    allowed: dict[int, np.ndarray] = {}
    for i, argument in enumerate(graph.folded.program.step.arguments):
        if argument.name in pins:
            node = graph.node_of[graph.folded.class_of[i]]
            allowed[node] = codec.resting(node, pins[argument.name], argument.name, "pin")
    return allowed
