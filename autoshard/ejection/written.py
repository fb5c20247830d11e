"""A program printed as Python: a line for each equation, a function for each body of a loop or a branch.

Variables are named by the primitive that makes them and a number; arguments by their paths. A comment says where a run of
lines comes from: the name scope and the line of the user's code.
"""

import itertools
import keyword
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from autoshard.ejection import source
from autoshard.ejection.constants import constant, printed, stored
from autoshard.ejection.equations import SEVERAL, TEMPLATES, expression
from autoshard.ejection.source import UnwritableError
from autoshard.search.ir import _jax

INDENT = "    "

MAX_PLAIN = 2**31
"""Python integers from here on do not adapt to the type of an array: JAX takes them for 32-bit ones."""

_OURS = frozenset({"sharding_constraint", "optimization_barrier"})
"""Primitives that the plan has put in; the user's code has no line for them."""

MAX_NAMED = 3
"""Equations that a message names."""


@dataclass(frozen=True, slots=True)
class PrintedProgram:
    """A printed program.

    Attributes:
      lines: the body of a function of the flat arguments.
      unwritten: the equations that have no source, each with the reason and its line; without them the lines do not run.
      stored: by name, the arrays that the lines read from `CONSTANTS`.
    """

    lines: tuple[str, ...]
    unwritten: tuple[str, ...]
    stored: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    @property
    def fault(self) -> str:
        """A sentence that names the first equations without a source; empty if all have one."""
        if not self.unwritten:
            return ""
        first = ", ".join(dict.fromkeys(self.unwritten[:MAX_NAMED]))
        return f"no public call of JAX was found for {len(self.unwritten)} equations: {first}"


def written(
    call: _jax.JittedCall, arguments: Sequence[str], resting: Sequence[PartitionSpec]
) -> PrintedProgram:
    """Prints a program.

    Args:
      call: the program.
      arguments: a name for each flat argument.
      resting: the spec of each flat argument.
    """
    body = _jax.open_jaxpr(call.jaxpr)
    there = (resting[i] for i in call.operands)
    printer = _Printer(taken=frozenset(arguments), resting=dict(zip(body.invars, there, strict=True)))
    lines = tuple(printer.function_body(call.jaxpr, [arguments[i] for i in call.operands]))
    return PrintedProgram(lines, tuple(printer.unwritten), printer.stored)


@dataclass(eq=False)
class _Printer:
    """Prints jaxprs; holds the names of their variables."""

    names: dict[Any, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    taken: frozenset[str] = frozenset()
    unwritten: list[str] = field(default_factory=list)
    num_readers: dict[Any, int] = field(default_factory=dict)
    resting: dict[Any, Any] = field(default_factory=dict)
    borrowed: set[Any] = field(default_factory=set)
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    place: str = ""

    def function_body(self, jaxpr: Any, arguments: Sequence[str]) -> Iterator[str]:
        """The lines of a body whose arguments have these names, with its `return`."""
        yield from self.run(jaxpr, arguments)
        results = tuple(self.atom(v) for v in _jax.open_jaxpr(jaxpr).outvars)
        yield f"return {source.sequence(results)}"

    def run(self, jaxpr: Any, arguments: Sequence[str], num_borrowed: int = 0) -> Iterator[str]:
        """The lines of a body's equations. The first arguments may be variables of the function around it, which keep their
        values."""
        variables, contents = _jax.jaxpr_consts(jaxpr)
        body = _jax.open_jaxpr(jaxpr)
        for v, content in zip(variables, contents, strict=True):
            self.names[v] = self.fresh("constant")
            yield from self.assigned(self.names[v], content)
        self.names.update(zip(body.invars, arguments, strict=True))
        self.borrowed.update(body.invars[:num_borrowed])
        self.num_readers.update(_num_readers(body))
        for eqn in body.eqns:
            yield from self.comment(eqn)
            yield from self.equation(eqn)

    def comment(self, eqn: Any) -> Iterator[str]:
        if eqn.primitive.name in _OURS:
            return
        place = " ".join(
            filter(None, (str(eqn.source_info.name_stack), _jax.short_source_line(eqn.source_info)))
        )
        if place and place != self.place:
            self.place = place
            yield f"# {place}"

    def equation(self, eqn: Any) -> Iterator[str]:
        name = eqn.primitive.name
        try:
            match name:
                case "scan":
                    yield from self.scan(eqn)
                case "while":
                    yield from self.while_loop(eqn)
                case "cond":
                    yield from self.switch(eqn)
                case "shard_map":
                    yield from self.shard_map(eqn)
                case _ if name in _jax.CALLS:
                    yield from self.call(eqn)
                case _:
                    yield from self.operation(eqn)
        except UnwritableError as e:
            line = _jax.source_line(eqn.source_info)
            self.unwritten.append(f"{name} ({e})" + f" at {line}" * bool(line))
            for v in eqn.outvars:
                self.names.setdefault(v, "unwritten")

    def operation(self, eqn: Any) -> Iterator[str]:
        name = eqn.primitive.name
        if name == "sharding_constraint":
            yield from self.constraint(eqn)
            return
        made = expression(name, self.operands(eqn), eqn.params)
        results = [self.result(v, name) for v in eqn.outvars]
        target = _targets(results) if name in SEVERAL or len(results) > 1 else results[0]
        yield f"{target} = {made}"

    def constraint(self, eqn: Any) -> Iterator[str]:
        """A constraint. It keeps the name of a value that nothing else reads, and is left out where an argument rests so."""
        (operand,), (result,) = eqn.invars, eqn.outvars
        name = self.atom(operand)
        is_own = not _is_literal(operand) and self.num_readers[operand] == 1 and operand not in self.borrowed
        self.names[result] = name if is_own else self.fresh(f"{name}_resharded")
        if not is_own or self.resting.get(operand) != eqn.params["sharding"].spec:
            yield f"{self.names[result]} = {expression(eqn.primitive.name, [name], eqn.params)}"

    def operands(self, eqn: Any) -> list[str]:
        """An equation's operands. A literal of an operator is a Python number, if another operand fixes its type."""
        types = {str(v.aval.dtype) for v in eqn.invars if not _is_literal(v)}
        is_typed = eqn.primitive.name in TEMPLATES and len(types) == 1
        return [self.atom(v, is_typed and str(v.aval.dtype) in types) for v in eqn.invars]

    def atom(self, v: Any, is_typed: bool = False) -> str:
        """A variable's name, or a literal's source."""
        if not _is_literal(v):
            return self.names[v]
        content = np.asarray(v.val, v.aval.dtype)
        is_wide = content.dtype.kind in "iu" and not -MAX_PLAIN <= content < MAX_PLAIN
        if not is_typed or is_wide or content.dtype.kind == "c":
            return printed(content)
        plain = source.numbers(str(content[()]))
        return f"({plain})" if plain.startswith("-") else plain

    def assigned(self, name: str, content: Any) -> Iterator[str]:
        """The assignment of a constant array."""
        try:
            code = constant(content)
            if code is None:
                code, self.stored[name] = stored(content, name)
            yield f"{name} = {code}"
        except UnwritableError as e:
            self.unwritten.append(f"a constant array of shape {np.shape(content)} ({e})")

    def call(self, eqn: Any) -> Iterator[str]:
        """A call's body in its place."""
        jaxpr = eqn.params[_jax.CALLS[eqn.primitive.name]]
        operands = self.operands(eqn)
        yield from self.run(jaxpr, operands, len(operands))
        for v, inner in zip(eqn.outvars, _jax.open_jaxpr(jaxpr).outvars, strict=True):
            self.names[v] = self.atom(inner)

    def scan(self, eqn: Any) -> Iterator[str]:
        params, jaxpr = eqn.params, eqn.params["jaxpr"]
        num_consts, num_carry = _jax.scan_counts(params)
        operands = [self.atom(v) for v in eqn.invars]
        inner = _jax.open_jaxpr(jaxpr).invars[num_consts:]
        name, carry_name, xs_name = self.fresh("body"), self.fresh("carry"), self.fresh("xs")
        arguments = [self.fresh("c" if i < num_carry else "x") for i in range(len(inner))]
        carry, xs = arguments[:num_carry], arguments[num_carry:]
        lines = [*_unpacked(carry, carry_name), *_unpacked(xs, xs_name)]
        lines += self.run(jaxpr, [*operands[:num_consts], *arguments], num_consts)
        results = [self.atom(v) for v in _jax.open_jaxpr(jaxpr).outvars]
        lines.append(
            f"return {source.sequence(tuple(results[:num_carry]))}, {source.sequence(tuple(results[num_carry:]))}"
        )
        yield from _function(name, [carry_name, xs_name], lines)
        made = [self.result(v, "scanned") for v in eqn.outvars]
        given = source.sequence(tuple(operands[num_consts : num_consts + num_carry]))
        over = source.sequence(tuple(operands[num_consts + num_carry :]))
        how = "".join(
            f", {key}={source.text(params[key])}"
            for key, usual in (("reverse", False), ("unroll", 1), ("_split_transpose", False))
            if params.get(key, usual) != usual
        )
        target = f"{_nested(made[:num_carry])}, {_nested(made[num_carry:])}"
        yield f"{target} = lax.scan({name}, {given}, {over}, length={params['length']}{how})"

    def while_loop(self, eqn: Any) -> Iterator[str]:
        params, operands = eqn.params, [self.atom(v) for v in eqn.invars]
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        start = operands[num_cond + num_body :]
        consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
        functions = []
        for key, own in zip(("cond_jaxpr", "body_jaxpr"), consts, strict=True):
            name, carry_name = self.fresh(key.removesuffix("_jaxpr")), self.fresh("carry")
            carry = [self.fresh("c") for _ in start]
            lines = [*_unpacked(carry, carry_name), *self.run(params[key], [*own, *carry], len(own))]
            results = [self.atom(v) for v in _jax.open_jaxpr(params[key]).outvars]
            lines.append(f"return {results[0] if key == 'cond_jaxpr' else source.sequence(tuple(results))}")
            functions.append(name)
            yield from _function(name, [carry_name], lines)
        made = _targets([self.result(v, "looped") for v in eqn.outvars])
        yield f"{made} = lax.while_loop({functions[0]}, {functions[1]}, {source.sequence(tuple(start))})"

    def switch(self, eqn: Any) -> Iterator[str]:
        index, *operands = [self.atom(v) for v in eqn.invars]
        names = []
        for branch in eqn.params["branches"]:
            names.append(self.fresh("branch"))
            arguments = [self.fresh("b") for _ in operands]
            yield from _function(names[-1], arguments, list(self.function_body(branch, arguments)))
        made = _targets([self.result(v, "chosen") for v in eqn.outvars])
        yield f"{made} = lax.switch({', '.join((index, source.sequence(tuple(names)), *operands))})"

    def shard_map(self, eqn: Any) -> Iterator[str]:
        params, operands = eqn.params, [self.atom(v) for v in eqn.invars]
        name = self.fresh("on_shards")
        arguments = [self.fresh("s") for _ in operands]
        yield from _function(name, arguments, list(self.function_body(params["jaxpr"], arguments)))
        specs = (f"{key}={source.text(tuple(params[key]))}" for key in ("in_specs", "out_specs"))
        axes = sorted(_jax.manual_axes(params))
        manual = f"axis_names={{{', '.join(map(source.text, axes))}}}, check_vma={params['check_vma']}"
        how = f"mesh=mesh, {', '.join(specs)}, {manual}"
        made = _targets([self.result(v, "mapped") for v in eqn.outvars])
        yield f"{made} = jax.shard_map({name}, {how})({', '.join(operands)})"

    def result(self, v: Any, primitive: str) -> str:
        """A new name for a variable; `_` for one that is not read."""
        if v not in self.num_readers:
            return "_"
        self.names[v] = self.fresh(primitive)
        return self.names[v]

    def fresh(self, stem: str) -> str:
        """A name that is not in use."""
        stem = identifier(stem)
        numbers = itertools.count(self.counts.get(stem, 0) + 1)
        self.counts[stem] = next(n for n in numbers if f"{stem}_{n}" not in self.taken)
        return f"{stem}_{self.counts[stem]}"


def identifier(path: str) -> str:
    """A path or a primitive's name as an identifier."""
    name = re.sub(r"\W+", "_", path).strip("_") or "x"
    return f"{name}_" if keyword.iskeyword(name) else f"x_{name}" if name[0].isdigit() else name


def _num_readers(body: Any) -> Counter[Any]:
    """By variable, how often a body's equations and results read it."""
    read = itertools.chain(*(eqn.invars for eqn in body.eqns), body.outvars)
    return Counter(v for v in read if not _is_literal(v))


def _is_literal(v: Any) -> bool:
    return isinstance(v, _jax.Literal)


def _function(name: str, arguments: Sequence[str], lines: Sequence[str]) -> Iterator[str]:
    yield f"def {name}({', '.join(arguments)}):"
    yield from (f"{INDENT}{line}" for line in lines)


def _unpacked(names: Sequence[str], whole: str) -> list[str]:
    return [f"{_targets(names)} = {whole}"] if names else []


def _targets(names: Sequence[str]) -> str:
    return f"({names[0]},)" if len(names) == 1 else ", ".join(names) if names else "_"


def _nested(names: Sequence[str]) -> str:
    return source.sequence(tuple(names)) if names else "_"
