"""Ops that are decided by one choice.

An elementwise chain between two matrix products has, for every sensible plan, one layout: its ops' factors
are the same loops. So light ops (elementwise, broadcasts, reductions, reshapes, transposes) are joined along
the values that they pass, the largest first, and their factors are unified; a *cluster* then has one factor
list and one decision. Heavy ops (`Folded.is_heavy`), ops with loops that cannot be split, and boundaries
stand alone.

Two clusters join only when that adds no loop: the union must have as many splittable factors as the larger of
the two. A rotary table shared by queries and keys does not tie their heads together; layer-norm statistics
join the activations that they normalise. The update phase never joins the others, so that a parameter can be
updated in another layout than it is used in (ZeRO; Rajbhandari et al. 2020).

*Sums* are the one case where partial results should travel further: the gradient of a value read by three
products is the sum of three products, reduced once, not thrice. Additive ops that are fed by contractions
alone form clusters of their own, with one factor more: splitting it over an axis means that everything in the
cluster is partial over it.
"""

from dataclasses import dataclass
from math import prod

from search.ir.factors import Kind
from search.ir.graph import Phase
from search.problem.folding import Folded, Link

Loop = tuple[int, int]
"""A factor of a kind: (kind, index into its rule's factors)."""


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Kinds under one decision.

    Attributes:
      kinds: ascending.
      sizes: the extents of the cluster's splittable factors, ordered by first use.
      factor_of: which of them each kind's factor is; factors that cannot be split are absent.
      is_sum: whether its values may be partial (see the module).
    """

    kinds: tuple[int, ...]
    sizes: tuple[int, ...]
    factor_of: dict[Loop, int]
    is_sum: bool


def clusters(folded: Folded) -> tuple[Cluster, ...]:
    """Partitions the kinds into clusters, ordered by first kind."""
    sums = _sum_kinds(folded)
    joiner = _Joiner(folded)
    for link in sorted(
        folded.links, key=lambda k: (-_link_size(folded, k), k.producer, k.consumer, k.operand)
    ):
        u, v = link.producer, link.consumer
        both_sums = u in sums and v in sums
        neither = (
            not sums & {u, v} and _is_light(folded, u) and _is_light(folded, v) and _phases_meet(folded, u, v)
        )
        if u != v and (both_sums or neither):
            joiner.join(link)
    return joiner.clusters(sums)


def _link_size(folded: Folded, link: Link) -> int:
    value = folded.op(link.producer).results[link.result]
    return prod(folded.program.values[value].shape)


def _is_light(folded: Folded, kind: int) -> bool:
    op = folded.op(kind)
    stuck = any(f.kind is Kind.UNSPLITTABLE and f.size > 1 for f in op.rule.factors)
    return not (op.is_boundary or folded.is_heavy[kind] or stuck)


def _phases_meet(folded: Folded, u: int, v: int) -> bool:
    return (folded.op(u).phase is Phase.UPDATE) == (folded.op(v).phase is Phase.UPDATE)


def _sum_kinds(folded: Folded) -> set[int]:
    """Additive kinds fed by contractions alone, that a sum of several operands is among or downstream of."""
    carriers: set[int] = set()
    sources = {k for k, heavy in enumerate(folded.is_heavy) if heavy}
    additive = [
        k for k in range(len(folded.members)) if folded.op(k).rule.is_additive and _is_light(folded, k)
    ]
    changed = True
    while changed:
        fed = {
            k
            for k in additive
            if k not in carriers
            and len(folded.op(k).operands) > 0
            and all(
                link.producer in carriers or link.producer in sources for link in folded.links_into.get(k, ())
            )
        }
        carriers |= fed
        changed = bool(fed)
    kept = {k for k in carriers if len(folded.op(k).operands) > 1}
    grew = True
    while grew:
        feeding = {
            link.producer for k in kept for link in folded.links_into.get(k, ()) if link.producer in carriers
        } - kept
        kept |= feeding
        grew = bool(feeding)
    return kept


class _Joiner:
    """Union-find over the factors of kinds, with the kinds' own union-find beside it."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.loop_root: dict[Loop, Loop] = {}
        self.loop_kinds: dict[Loop, set[int]] = {}
        self.kind_root = list(range(len(folded.members)))
        self.members: dict[int, list[int]] = {k: [k] for k in range(len(folded.members))}
        self.loops: dict[int, set[Loop]] = {}
        for k in range(len(folded.members)):
            own = {(k, i) for i, f in enumerate(folded.op(k).rule.factors) if f.size > 1}
            self.loops[k] = own
            for loop in own:
                self.loop_root[loop] = loop
                self.loop_kinds[loop] = {k}

    def find(self, loop: Loop) -> Loop:
        while self.loop_root[loop] != loop:
            self.loop_root[loop] = self.loop_root[self.loop_root[loop]]
            loop = self.loop_root[loop]
        return loop

    def find_kind(self, kind: int) -> int:
        while self.kind_root[kind] != kind:
            self.kind_root[kind] = self.kind_root[self.kind_root[kind]]
            kind = self.kind_root[kind]
        return kind

    def join(self, link: Link) -> None:
        """Joins the two clusters that the link connects, if their loops agree on its dimensions."""
        pairs = self._pairs(link)
        if pairs is None:
            return
        a, b = self.find_kind(link.producer), self.find_kind(link.consumer)
        roots = sorted({(self.find(p), self.find(q)) for p, q in pairs if self.find(p) != self.find(q)})
        touched = [r for pair in roots for r in pair]
        if len(set(touched)) < len(touched):
            return
        if any(self.loop_kinds[p] & self.loop_kinds[q] for p, q in roots):
            return
        if a != b and len(self.loops[a]) + len(self.loops[b]) - len(roots) > max(
            len(self.loops[a]), len(self.loops[b])
        ):
            return
        self._merge(a, b, roots)

    def _merge(self, a: int, b: int, roots: list[tuple[Loop, Loop]]) -> None:
        for p, q in roots:
            self.loop_root[q] = p
            self.loop_kinds[p] |= self.loop_kinds.pop(q)
            self.loops[a].discard(q)
            self.loops[b].discard(q)
            self.loops[a].add(p)
        if a != b:
            self.kind_root[b] = a
            self.members[a] += self.members.pop(b)
            self.loops[a] |= self.loops.pop(b)

    def _pairs(self, link: Link) -> list[tuple[Loop, Loop]] | None:
        """The loops that meet on each dimension of the link's value; None when they differ."""
        made = self.folded.op(link.producer).rule
        read = self.folded.op(link.consumer).rule
        pairs = []
        for out, into in zip(made.results[link.result], read.operands[link.operand], strict=True):
            u = [(link.producer, f) for f in out if made.factors[f].size > 1]
            v = [(link.consumer, f) for f in into if read.factors[f].size > 1]
            if [made.factors[f].size for _, f in u] != [read.factors[f].size for _, f in v]:
                return None
            pairs += zip(u, v, strict=True)
        return pairs

    def clusters(self, sums: set[int]) -> tuple[Cluster, ...]:
        made = []
        for root in sorted(self.members, key=lambda r: min(self.members[r])):
            kinds = tuple(sorted(self.members[root]))
            made.append(self._cluster(kinds, kinds[0] in sums))
        return tuple(made)

    def _cluster(self, kinds: tuple[int, ...], is_sum: bool) -> Cluster:
        loops = [(k, i) for k in kinds for i, f in enumerate(self.folded.op(k).rule.factors) if f.size > 1]
        stuck = {self.find(loop) for loop in loops if self._factor(loop).kind is Kind.UNSPLITTABLE}
        index: dict[Loop, int] = {}
        for loop in loops:
            root = self.find(loop)
            if root not in stuck:
                index.setdefault(root, len(index))
        sizes = tuple(self._factor(root).size for root in index)
        factor_of = {loop: index[self.find(loop)] for loop in loops if self.find(loop) in index}
        return Cluster(kinds, sizes, factor_of, is_sum)

    def _factor(self, loop: Loop):
        return self.folded.op(loop[0]).rule.factors[loop[1]]
