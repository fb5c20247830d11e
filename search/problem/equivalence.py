"""Correspondence of ops between flat programs, where a step was shortened or stands beside one that was.

A pass that rewrites a step copies the `search.ir.graph.Likes` of an op to all ops that it makes of it. So the ops of
two flat programs correspond, those of a whole step and of the step that stands for it, if both are rewritten by the
same passes. Two ops correspond if the ops that they were made of do, if their primitives and phases are equal, and if
they are the n-th such ops in their blocks. A value that enters a loop or that it carries corresponds as its maker does,
because its place depends on the number of layers.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from autoshard.search.ir.graph import Equivalence, Site, walk
from autoshard.search.problem.flat_program import FlatOp, FlatProgram
from autoshard.search.problem.folding import FoldedProgram, fold, partitioned


def places(program: FlatProgram) -> tuple[Hashable, ...]:
    """Per op, the key that it shares with its counterparts in other blocks; None where it has none. An op at which a
    value enters a loop or is carried by it has its name and its maker's key."""
    arguments = program.step.arguments
    found: list[Hashable] = [
        arguments[op.number].place
        if op.name == "input"
        else (None if equivalence is None or equivalence.place is None else (equivalence.place, what))
        for op, equivalence, what in _described(program)
    ]
    for i, op in enumerate(program.ops):
        if op.is_boundary and found[i] is None and found[made_by := _handed_on_by(program, i)] is not None:
            found[i] = op.name, found[made_by]
    return tuple(found)


def blocks(program: FlatProgram) -> tuple[int | None, ...]:
    """Per op, its block among those of a stack whose ops have places; None where it is in none."""
    return tuple(
        None if equivalence is None or equivalence.place is None else equivalence.block
        for _, equivalence, _ in _described(program)
    )


def _handed_on_by(program: FlatProgram, i: int) -> int:
    """The op that makes the value that a boundary passes on; one of several makers where loops' bodies exchange the
    value."""
    seen = set[int]()
    while i not in seen and program.ops[i].is_boundary and program.ops[i].operands:
        seen.add(i)
        i = program.maker[program.ops[i].operands[0]][0]
    return i


def folded_like(program: FlatProgram, short: FoldedProgram) -> FoldedProgram:
    """A whole step's program folded as the program of the step that stands for it. Ops without a counterpart there are
    folded as in the whole program."""
    of_argument = {name: a.name for a in short.program.step.arguments for name in a.names}
    class_of = dict(zip(_representatives(short.program, of_argument), short.class_of, strict=True))
    own = fold(program).class_of
    classes: dict[tuple[bool, int], list[int]] = {}
    for at, stands in enumerate(_representatives(program, of_argument)):
        key = (False, class_of[stands]) if stands in class_of else (True, own[at])
        classes.setdefault(key, []).append(at)
    return partitioned(program, tuple(tuple(classes[key]) for key in sorted(classes)))


def _representatives(program: FlatProgram, of_argument: Mapping[str, str]) -> list[Hashable]:
    """Per op, a name that is equal in all programs for an op and for the ops for which it stands."""
    arguments, results = program.step.arguments, program.step.results
    seen = Counter[Hashable]()
    found: list[Hashable] = []
    unnamed: list[int] = []
    for op, equivalence, what in _described(program):
        if op.name == "input":
            found.append(("input", of_argument[arguments[op.number].name]))
        elif op.name == "output":
            found.append(("output", results[op.number]))
        elif equivalence is None and op.is_boundary and op.operands:
            made_by = program.maker[op.operands[0]][0]
            unnamed += [len(found)] * (made_by >= len(found))
            name = what[:-1], op.rule, found[made_by] if made_by < len(found) else None
            seen[op.operands[0], name] += 1
            found.append((name, seen[op.operands[0], name]))
        else:
            block = -1 if equivalence is None else equivalence.block
            name = equivalence and equivalence.representative, what, op.rule
            seen[block, name] += 1
            found.append((name, seen[block, name]))
    for i in unnamed:
        made_by = program.maker[program.ops[i].operands[0]][0]
        found[i] = (found[i], found[made_by])
    return found


def _described(
    program: FlatProgram,
) -> Iterator[tuple[FlatOp, Equivalence | None, tuple[Hashable, ...]]]:
    """Each op with its `Equivalence`, and a key that tells it from the other ops made of the same one."""
    known: Mapping[Site, Equivalence] = {
        (*path, i): op.equivalence
        for path, graph in walk(program.step.graph)
        for i, op in enumerate(graph.ops)
        if op.equivalence is not None
    }
    for op in program.ops:
        is_constant = op.is_boundary and not op.operands
        is_of_no_op = is_constant or op.name in ("input", "output")
        ends = () if is_of_no_op else range(1, len(op.site) + 1, 3)
        end = next((end for end in reversed(ends) if op.site[:end] in known), 0)
        read = op.operand_places[0][2] if op.operand_places else None
        rest = op.site[end:] if end else ()
        yield op, known.get(op.site[:end]), (rest, op.name, op.phase, read)
