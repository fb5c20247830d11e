"""Ops that are decided by one choice.

An elementwise chain between two matrix products has, for every sensible plan, one layout: its ops' factors are the same
loops. So light ops (elementwise, broadcasts, reductions, reshapes, transposes) are joined along the values that they
pass, the largest first, and their factors are unified; a *group* then has one factor list and one decision. Heavy ops
(`FoldedProgram.is_heavy`), ops with loops that cannot be split, and boundaries stand alone.

Two groups join only when that adds no loop: the union must have as many splittable factors as the larger of the two. A
rotary table shared by queries and keys does not tie their heads together; layer-norm statistics join the activations
that they normalise. The update phase never joins the others, so that a parameter can be updated in another layout than
it is used in (ZeRO; Rajbhandari et al. 2020).

A large sum, such as the gradient of a bias that all rows of an attention share, ends its group, unless its reader meets
the group's other values again, as a statistic does. Inside a group the sum could only be all-reduced; between two groups
it may be scattered. The compiler scatters it, too.

*Sums* are the one case where partial results should travel further: the gradient of a value read by three products is
the sum of three products, reduced once, not thrice. Additive ops that are fed by contractions alone form groups of
their own, with one factor more: splitting it over an axis means that everything in the group is partial over it.

The sums of a loop, such as the gradients of microbatches, are such groups too: an accumulator and the ops that lead to
it. Its terms need be no contractions; a bias's gradient is a sum of rows. They stay terms of a sum until the loop ends,
and the sum is reduced once, by its readers behind the loop. XLA moves the all-reduce of a loop's sum out of the loop,
and makes it a reduce-scatter where a part is needed (measured on XLA:GPU).
"""

from dataclasses import dataclass
from math import prod

from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import Phase, Value
from autoshard.search.problem.flat_program import ADDITIONS, BARRIER
from autoshard.search.problem.folding import Dependency, FoldedProgram

MOVED = ADDITIONS | {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "expand_dims",
    "reduce_sum",
    "reshape",
    "squeeze",
    "transpose",
}
"""Ops over which XLA moves an all-reduce to the place where a loop adds it up, as long as they keep all elements apart.
Source: XLA, `while_loop_all_reduce_code_motion.cc`; of several all-reduces that are added, it first makes one."""

MIN_DECIDED_BYTES = 1 << 16
"""Smaller values need no decision of their own: resharding them is all latency, keeping them costs nothing."""

Loop = tuple[int, int]
"""A factor of a class: (class, index into its rule's factors)."""


@dataclass(frozen=True, slots=True, eq=False)
class OpGroup:
    """Classes under one decision.

    Attributes:
      op_classes: ascending.
      sizes: the extents of the group's splittable factors, ordered by first use.
      factor_of: which of them each class's factor is; factors that cannot be split are absent.
      is_sum: whether its values may be partial (see the module).
    """

    op_classes: tuple[int, ...]
    sizes: tuple[int, ...]
    factor_of: dict[Loop, int]
    is_sum: bool


def op_groups(folded: FoldedProgram) -> tuple[OpGroup, ...]:
    """Partitions the classes into groups, ordered by first class."""
    sums = _sum_classes(folded) | _accumulation_classes(folded)
    joiner, ending = _Joiner(folded), list[Dependency]()
    for dependency in sorted(
        folded.dependencies, key=lambda k: (-_dependency_size(folded, k), k.producer, k.consumer, k.operand)
    ):
        u, v = dependency.producer, dependency.consumer
        both_sums = u in sums and v in sums
        neither = (
            not sums & {u, v} and folded.is_light[u] and folded.is_light[v] and _phases_meet(folded, u, v)
        )
        if neither and _is_large_sum(folded, dependency):
            ending.append(dependency)
        elif u != v and (both_sums or neither):
            joiner.join(dependency)
    for dependency in ending:
        if joiner.find_class(dependency.producer) == joiner.find_class(dependency.consumer):
            joiner.join(dependency)
    return joiner.groups(sums)


def _is_large_sum(folded: FoldedProgram, dependency: Dependency) -> bool:
    """Whether a dependency passes on a sum that devices may hold in parts."""
    rule = folded.op(dependency.producer).rule
    kept = {f for dim in rule.results[dependency.result] for f in dim}
    is_sum = any(f.kind is Kind.SUM and f.size > 1 and i not in kept for i, f in enumerate(rule.factors))
    return is_sum and _made(folded, dependency).num_bytes >= MIN_DECIDED_BYTES


def _dependency_size(folded: FoldedProgram, dependency: Dependency) -> int:
    return prod(_made(folded, dependency).shape)


def _made(folded: FoldedProgram, dependency: Dependency) -> Value:
    return folded.program.values[folded.op(dependency.producer).results[dependency.result]]


def _phases_meet(folded: FoldedProgram, u: int, v: int) -> bool:
    return (folded.op(u).phase is Phase.UPDATE) == (folded.op(v).phase is Phase.UPDATE)


def _sum_classes(folded: FoldedProgram) -> set[int]:
    """Additive classes fed by contractions alone, that a sum of several operands is among or downstream of. The compiler
    sums up terms before a barrier that others read behind it (XLA:GPU, measured), so no barrier is among them."""
    carriers: set[int] = set()
    sources = {k for k, heavy in enumerate(folded.is_heavy) if heavy}
    additive = [k for k in range(len(folded.members)) if _passes_terms_on(folded, k)]
    changed = True
    while changed:
        fed = {
            k
            for k in additive
            if k not in carriers
            and len(folded.op(k).operands) > 0
            and all(
                dependency.producer in carriers or dependency.producer in sources
                for dependency in folded.dependencies_into.get(k, ())
            )
        }
        carriers |= fed
        changed = bool(fed)
    kept = {k for k in carriers if len(folded.op(k).operands) > 1}
    grew = True
    while grew:
        feeding = {
            dependency.producer
            for k in kept
            for dependency in folded.dependencies_into.get(k, ())
            if dependency.producer in carriers
        } - kept
        kept |= feeding
        grew = bool(feeding)
    return kept


def _passes_terms_on(folded: FoldedProgram, op_class: int) -> bool:
    op = folded.op(op_class)
    return op.rule.is_additive and folded.is_light[op_class] and op.name != BARRIER


def _accumulation_classes(folded: FoldedProgram) -> set[int]:
    """Accumulators whose sums the compiler reduces behind the loop, with the ops that lead to them."""
    accumulators = [k for k in range(len(folded.members)) if folded.op(k).is_accumulator]
    return set().union(*(_accumulation(folded, k) for k in accumulators))


def _accumulation(folded: FoldedProgram, accumulator: int) -> set[int]:
    """An accumulator, and the ops between it and the sums that it adds up; nothing where other ops read these too, or
    where the sums are of several types."""
    found, left, types = {accumulator}, [accumulator], set[str]()
    while left:
        for dependency in folded.dependencies_into[left.pop()]:
            k = dependency.producer
            if k in found:
                continue
            if not _is_read_once(folded, k) or not (_is_moved(folded, k) or _sums(folded, k)):
                return set()
            if _is_moved(folded, k):
                found.add(k)
                left.append(k)
            else:
                types.add(str(_made(folded, dependency).dtype))
    return found if len(types) == 1 else set()


def _is_read_once(folded: FoldedProgram, op_class: int) -> bool:
    program = folded.program
    made = [v for i in folded.members[op_class] for v in program.ops[i].results]
    return all(len(program.uses.get(v, ())) == 1 for v in made)


def _is_moved(folded: FoldedProgram, op_class: int) -> bool:
    """Whether the all-reduces of an op's operands, none of them a number, may be replaced by one of its result."""
    op, values = folded.op(op_class), folded.program.values
    sizes = {prod(values[v].shape) for v in (*op.operands, *op.results)}
    num_operands = 2 if op.name in ADDITIONS else 1
    return op.name in MOVED and len(op.operands) == num_operands and len(sizes) == 1


def _sums(folded: FoldedProgram, op_class: int) -> bool:
    """Whether a class makes the terms of a sum: a contraction, or a sum of rows."""
    is_sum = any(f.kind is Kind.SUM and f.size > 1 for f in folded.op(op_class).rule.factors)
    return folded.is_heavy[op_class] or (folded.is_light[op_class] and is_sum)


class _Joiner:
    """Union-find over the factors of classes, with the classes' own union-find beside it."""

    def __init__(self, folded: FoldedProgram) -> None:
        self.folded = folded
        self.loop_root: dict[Loop, Loop] = {}
        self.loop_classes: dict[Loop, set[int]] = {}
        self.class_root = list(range(len(folded.members)))
        self.members: dict[int, list[int]] = {k: [k] for k in range(len(folded.members))}
        self.loops: dict[int, set[Loop]] = {}
        for k in range(len(folded.members)):
            own = {(k, i) for i, f in enumerate(folded.op(k).rule.factors) if f.size > 1}
            self.loops[k] = own
            for loop in own:
                self.loop_root[loop] = loop
                self.loop_classes[loop] = {k}

    def find(self, loop: Loop) -> Loop:
        while self.loop_root[loop] != loop:
            self.loop_root[loop] = self.loop_root[self.loop_root[loop]]
            loop = self.loop_root[loop]
        return loop

    def find_class(self, op_class: int) -> int:
        while self.class_root[op_class] != op_class:
            self.class_root[op_class] = self.class_root[self.class_root[op_class]]
            op_class = self.class_root[op_class]
        return op_class

    def join(self, dependency: Dependency) -> None:
        """Joins the two groups that the dependency connects, if their loops agree on its dimensions."""
        pairs = self._pairs(dependency)
        if pairs is None:
            return
        a, b = self.find_class(dependency.producer), self.find_class(dependency.consumer)
        roots = sorted({(self.find(p), self.find(q)) for p, q in pairs if self.find(p) != self.find(q)})
        touched = [r for pair in roots for r in pair]
        if len(set(touched)) < len(touched):
            return
        if any(self.loop_classes[p] & self.loop_classes[q] for p, q in roots):
            return
        if a != b and len(self.loops[a]) + len(self.loops[b]) - len(roots) > max(
            len(self.loops[a]), len(self.loops[b])
        ):
            return
        self._merge(a, b, roots)

    def _merge(self, a: int, b: int, roots: list[tuple[Loop, Loop]]) -> None:
        for p, q in roots:
            self.loop_root[q] = p
            self.loop_classes[p] |= self.loop_classes.pop(q)
            self.loops[a].discard(q)
            self.loops[b].discard(q)
            self.loops[a].add(p)
        if a != b:
            self.class_root[b] = a
            self.members[a] += self.members.pop(b)
            self.loops[a] |= self.loops.pop(b)

    def _pairs(self, dependency: Dependency) -> list[tuple[Loop, Loop]] | None:
        """The loops that meet on each dimension of the dependency's value; None when they differ."""
        made = self.folded.op(dependency.producer).rule
        read = self.folded.op(dependency.consumer).rule
        pairs = []
        for out, into in zip(made.results[dependency.result], read.operands[dependency.operand], strict=True):
            u = [(dependency.producer, f) for f in out if made.factors[f].size > 1]
            v = [(dependency.consumer, f) for f in into if read.factors[f].size > 1]
            if [made.factors[f].size for _, f in u] != [read.factors[f].size for _, f in v]:
                return None
            pairs += zip(u, v, strict=True)
        return pairs

    def groups(self, sums: set[int]) -> tuple[OpGroup, ...]:
        made = []
        for root in sorted(self.members, key=lambda r: min(self.members[r])):
            op_classes = tuple(sorted(self.members[root]))
            made.append(self._group(op_classes, op_classes[0] in sums))
        return tuple(made)

    def _group(self, op_classes: tuple[int, ...], is_sum: bool) -> OpGroup:
        loops = [
            (k, i) for k in op_classes for i, f in enumerate(self.folded.op(k).rule.factors) if f.size > 1
        ]
        stuck = {self.find(loop) for loop in loops if self._factor(loop).kind is Kind.UNSPLITTABLE}
        index: dict[Loop, int] = {}
        for loop in loops:
            root = self.find(loop)
            if root not in stuck:
                index.setdefault(root, len(index))
        sizes = tuple(self._factor(root).size for root in index)
        factor_of = {loop: index[self.find(loop)] for loop in loops if self.find(loop) in index}
        return OpGroup(op_classes, sizes, factor_of, is_sum)

    def _factor(self, loop: Loop):
        return self.folded.op(loop[0]).rule.factors[loop[1]]
