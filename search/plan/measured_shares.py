"""Measures the shares of a full assignment: the dims that each mesh axis splits, by FLOPs and by bytes.

Only products with weights in the forward phase count, as experts count them. A weight is a value that no example
reaches. A loop of such a product belongs to the weight, or to the activations alone. A loop of the weight that both
other arrays have is a stack of weights: experts. A loop of the activations alone runs over examples, positions or
features. Dimensions are followed from the arguments through the ops, by factors.

A step without such products, for instance one of elementwise ops alone, is measured by all ops that examples reach.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from autoshard.search.ir.factors.contraction import RULES as PRODUCTS
from autoshard.search.ir.graph import Phase, Role
from autoshard.search.ir.spec import AXIS_NAMES, PARTIAL
from autoshard.search.memory.copies import SCOPE, is_recomputed
from autoshard.search.plan.decisions import node_names
from autoshard.search.plan.named_sums import LOOK_UP
from autoshard.search.plan.values import Collective
from autoshard.search.plan.work_shares import AxisUse, WorkShares
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp, FlatProgram
from autoshard.search.problem.reshard_paths import ReshardPaths

RECOMPUTED = (SCOPE, "rematted_computation")
"""Parts of the scopes of ops that the plan, or the step itself, recomputes."""

DIGITS = 4
"""Decimal digits of a share in a plan's file."""


class Dim(IntEnum):
    """The kind of index of a dimension. If dimensions meet in one loop, the largest value holds."""

    UNKNOWN = 0
    FEATURES = 1
    POSITIONS = 2
    EXAMPLES = 3


Dims = tuple[Dim, ...]


def measured_shares(
    costed: CostedGraph, chosen: Sequence[int], collectives: Iterable[Collective] = ()
) -> WorkShares:
    """The shares of a full assignment of strategies.

    Args:
      costed: the step on its mesh, as it runs: in microbatches, and with recomputed ops.
    """
    measured = _Measured(costed, ReshardPaths(costed, chosen), _Followed.of(costed.graph.folded.program))
    return WorkShares(
        axes=tuple(measured.use(axis, collectives) for axis in measured.split_axes),
        model_flops=measured.model_flops(),
        recomputed=_share(measured.recomputed_flops(), measured.flops(Phase.FORWARD)),
        runs=measured.runs(),
    )


def _share(part: float, whole: float) -> float:
    return round(part / whole, DIGITS) if whole else 0.0


# --- the kinds of dimensions


@dataclass(frozen=True, eq=False)
class _Followed:
    """Per value of a program, the kinds of its dimensions, and the parameters that it is made of.

    Attributes:
      dims: per value, the kind of each dimension.
      weights: per value that no example reaches, the numbers of the parameters that it is made of.
    """

    dims: Mapping[int, Dims]
    weights: Mapping[int, frozenset[int]]

    @classmethod
    def of(cls, program: FlatProgram) -> "_Followed":
        """Follows a program; twice if it has loops, because a loop's values depend on later ones."""
        dims, weights, reached = dict[int, Dims](), dict[int, frozenset[int]](), set[int]()
        for _ in range(2 if program.loops else 1):
            for op in program.ops:
                if op.phase is Phase.UPDATE and op.name != "input":
                    continue
                made = _argument_dims(program, op) if op.name == "input" else _result_dims(op, dims)
                dims |= zip(op.results, made, strict=True)
                if _is_example(program, op) or (op.name != "input" and not reached.isdisjoint(op.operands)):
                    reached.update(op.results)
                else:
                    weights |= dict.fromkeys(op.results, _roots(program, op, weights))
        return cls(dims, {v: roots for v, roots in weights.items() if v not in reached})


def _is_example(program: FlatProgram, op: FlatOp) -> bool:
    return op.name == "input" and program.step.arguments[op.number].role in (Role.BATCH, Role.KEY)


def _argument_dims(program: FlatProgram, op: FlatOp) -> list[Dims]:
    rank = len(program.values[op.results[0]].shape)
    is_batch = program.step.arguments[op.number].role is Role.BATCH
    return [(Dim.EXAMPLES, *[Dim.POSITIONS] * (rank - 1))[:rank] if is_batch else (Dim.FEATURES,) * rank]


def _result_dims(op: FlatOp, dims: Mapping[int, Dims]) -> list[Dims]:
    """Per result, the kind of each dimension. Of several factors, such as examples times positions, the first one
    counts."""
    found = _loops(op, dims)
    return [tuple(found[dim[0]] if dim else Dim.UNKNOWN for dim in result) for result in op.rule.results]


def _loops(op: FlatOp, dims: Mapping[int, Dims]) -> dict[int, Dim]:
    """Per factor of an op, its kind."""
    found: defaultdict[int, Dim] = defaultdict(lambda: Dim.UNKNOWN)
    for v, factors in zip(op.operands, op.rule.operands, strict=True):
        for dim, several in zip(dims.get(v, ()), factors, strict=False):
            for n, factor in enumerate(several):
                here = Dim.POSITIONS if n and dim is Dim.EXAMPLES else dim
                found[factor] = max(found[factor], here)
    return found


def _roots(program: FlatProgram, op: FlatOp, weights: Mapping[int, frozenset[int]]) -> frozenset[int]:
    if op.name == "input":
        is_parameter = program.step.arguments[op.number].role in (Role.PARAMETER, Role.FROZEN)
        return frozenset({op.number} if is_parameter else ())
    return frozenset[int]().union(*(weights.get(v, ()) for v in op.operands))


# --- shares


@dataclass(frozen=True, eq=False)
class _Measured:
    """A full assignment, to be measured axis by axis."""

    costed: CostedGraph
    paths: ReshardPaths
    followed: _Followed

    @property
    def _ops(self) -> Iterator[tuple[int, FlatOp, float]]:
        """Per class of ops: its number, its first op, and the FLOPs of all."""
        folded = self.costed.graph.folded
        for op_class, count in enumerate(folded.counts):
            op = folded.op(op_class)
            yield op_class, op, count * op.rule.flops_per_point * op.rule.num_points

    @property
    def split_axes(self) -> tuple[int, ...]:
        """The axes with more than one device."""
        return tuple(a for a, size in enumerate(self.costed.resharder.mesh.shape) if size > 1)

    # --- FLOPs

    @cached_property
    def _products(self) -> tuple[tuple[FlatOp, float], ...]:
        """The model's products and their FLOPs, recomputed ones included."""
        return tuple((op, flops) for _, op, flops in self._ops if op.name in PRODUCTS or op.rule.is_kernel)

    def model_flops(self) -> dict[str, float]:
        """FLOPs of the model's products, by dtype."""
        total: dict[str, float] = {}
        for op, flops in self._products:
            if flops and not _is_recomputed(op):
                dtype = str(self.costed.graph.folded.program.values[op.operands[0]].dtype)
                total[dtype] = total.get(dtype, 0.0) + flops
        return dict(sorted(total.items()))

    def recomputed_flops(self) -> float:
        """FLOPs of the products that the plan recomputes."""
        return sum(flops for op, flops in self._products if is_recomputed(op.op))

    def flops(self, phase: Phase) -> float:
        """FLOPs of the products of a phase."""
        return sum(flops for op, flops in self._products if op.phase is phase)

    def runs(self) -> dict[str, int]:
        """By name in the plan, the largest number of runs of a heavy op."""
        graph, counts = self.costed.graph, self.costed.graph.folded.counts
        return {
            names[0]: max(counts[k] for k in heavy)
            for names, group in zip(node_names(graph), graph.groups, strict=False)
            if (heavy := [k for k in group.op_classes if graph.folded.is_heavy[k]])
        }

    # --- axes

    def use(self, axis: int, collectives: Iterable[Collective]) -> AxisUse:
        """The use of an axis."""
        mesh = self.costed.resharder.mesh
        name = AXIS_NAMES[len(mesh.shape)][axis]
        return AxisUse(
            name,
            mesh.shape[axis],
            **self._loops_split(axis),
            sums_scattered=self._sums_scattered(axis),
            **self._parameters(axis),
            optimizer_state=self._resting(axis, (Role.OPTIMIZER_STATE,)),
            reductions_scattered=_scattered([c for c in collectives if name in c.axes]),
        )

    @cached_property
    def _counted(self) -> tuple[tuple[int, FlatOp, float], ...]:
        """The ops that are counted for the use of an axis. Ops without results, such as prints, are not."""
        made = [one for one in self._ops if one[1].results and not one[1].is_boundary]
        forward = [one for one in made if one[1].phase is Phase.FORWARD]
        products = [one for one in forward if one[1].name in PRODUCTS and self._weight_operands(one[1])]
        weighed = [one for one in products if len(self._weight_operands(one[1])) < len(one[1].operands)]
        reached = [one for one in forward if any(v not in self.followed.weights for v in one[1].operands)]
        return tuple(weighed or reached)

    def _weight_operands(self, op: FlatOp) -> list[int]:
        return [n for n, v in enumerate(op.operands) if self.followed.weights.get(v)]

    def _loops_split(self, axis: int) -> dict[str, float]:
        """FLOPs of the counted ops that an axis splits, by kind of loop."""
        total, split = 0.0, defaultdict[str, float](float)
        for op_class, op, flops in self._counted:
            total += flops
            if (factor := self._factor(op_class, op, axis)) is not None:
                split[self._kind(op, factor)] += flops
        return {kind: _share(flops, total) for kind, flops in sorted(split.items())}

    def _factor(self, op_class: int, op: FlatOp, axis: int) -> int | None:
        """The factor of an op that an axis splits."""
        node = self.costed.graph.node_of[op_class]
        taken = self.costed.strategies[node].assignment[self.paths.chosen[node]][axis]
        factor_of = self.costed.graph.groups[node].factor_of
        own = (f for f in range(len(op.rule.factors)) if factor_of.get((op_class, f)) == taken)
        return next(own, None)

    def _kind(self, op: FlatOp, factor: int) -> str:
        """The kind of a loop: the name of a share."""
        weights = self._weight_operands(op)
        having = [n for n, dims in enumerate(op.rule.operands) if any(factor in dim for dim in dims)]
        is_made = any(factor in dim for dims in op.rule.results for dim in dims)
        if not set(having).isdisjoint(weights):
            is_stack = op.name == "dot_general" and len(having) > 1 and is_made
            return "experts" if is_stack else "weights"
        if factor in {window.factor for window in op.rule.windows}:
            return "rows"
        runs_over = _loops(op, self.followed.dims)[factor]
        return {Dim.EXAMPLES: "examples", Dim.POSITIONS: "positions"}.get(runs_over, "features")

    def _sums_scattered(self, axis: int) -> float:
        """Share of the sums of products over an axis that are scattered along examples or positions."""
        total = scattered = 0.0
        for op_class, op, flops in self._counted:
            (v,) = op.results[:1]
            if op.name in PRODUCTS and self.paths.made(v)[axis] == PARTIAL:
                total += flops
                scattered += flops * self._is_scattered(self.costed.graph.folded.members[op_class][0], axis)
        return _share(scattered, total)

    def _is_scattered(self, position: int, axis: int) -> bool:
        """True if the terms of a sum, or values made of them, are scattered along examples or positions."""
        program, open_, seen = self.paths.program, [self.paths.program.ops[position].results[0]], set[int]()
        while open_:
            v = open_.pop()
            seen.add(v)
            for reader in program.uses.get(v, ()):
                op = program.ops[reader]
                steps = (
                    *self.paths.to_rest(v),
                    *self.paths.to_reader(reader, op.operands.index(v)).path,
                )
                for step in steps:
                    if step.kind == "reduce-scatter" and axis in step.axes and step.after[axis] >= 0:
                        return self._dim(v, step.after[axis]) in (Dim.EXAMPLES, Dim.POSITIONS)
                open_ += [r for r in op.results if r not in seen and self.paths.made(r)[axis] == PARTIAL]
        return False

    def _dim(self, v: int, dim: int) -> Dim:
        dims = self.followed.dims.get(v, ())
        return dims[dim] if dim < len(dims) else Dim.UNKNOWN

    # --- state

    def _arguments(self, roles: Iterable[Role]) -> list[tuple[int, float]]:
        """The arguments with such roles, by number, and their bytes."""
        program = self.paths.program
        return [
            (i, argument.repeats * program.values[v].num_bytes)
            for i, (argument, v) in enumerate(zip(program.step.arguments, program.inputs, strict=True))
            if argument.role in roles
        ]

    def _is_split(self, number: int, axis: int) -> bool:
        """Whether an axis splits an argument at rest."""
        return self.paths.made(self.paths.program.inputs[number])[axis] >= 0

    def _resting(self, axis: int, roles: Iterable[Role]) -> float:
        arguments = self._arguments(roles)
        split = sum(num_bytes for i, num_bytes in arguments if self._is_split(i, axis))
        return _share(split, sum(num_bytes for _, num_bytes in arguments))

    def _parameters(self, axis: int) -> dict[str, float]:
        """Shares of the parameters' bytes."""
        parameters = self._arguments((Role.PARAMETER, Role.FROZEN))
        total = sum(num_bytes for _, num_bytes in parameters)
        split = {i: num_bytes for i, num_bytes in parameters if self._is_split(i, axis)}
        in_place, looked_up, gathered_again = self._read_split(axis)
        gathered = {i: num_bytes for i, num_bytes in split.items() if i in self._read and i not in in_place}
        tables = sum(num_bytes for i, num_bytes in split.items() if i in looked_up)
        again = sum(num_bytes for i, num_bytes in gathered.items() if i in gathered_again)
        return {
            "parameters": _share(sum(split.values()), total),
            "gathered": _share(sum(gathered.values()), total),
            "regathered": _share(again, sum(gathered.values())),
            "tables": _share(tables, total),
        }

    @cached_property
    def _reads(self) -> tuple[tuple[int, int, FlatOp, int], ...]:
        """The reads of weights by products and lookups: the op's position, its class, the op, the operand."""
        folded = self.costed.graph.folded
        return tuple(
            (i, folded.class_of[i], op, n)
            for i, op in enumerate(self.paths.program.ops)
            if op.phase is not Phase.UPDATE and (op.name in PRODUCTS or op.name == LOOK_UP)
            for n in self._weight_operands(op)
        )

    @cached_property
    def _read(self) -> frozenset[int]:
        """The parameters that products and lookups read."""
        return frozenset[int]().union(*(self.followed.weights[op.operands[n]] for _, _, op, n in self._reads))

    def _read_split(self, axis: int) -> tuple[set[int], set[int], set[int]]:
        """The parameters that an axis splits where they are read, where they are looked up, and that the backward phase
        gathers once more over it."""
        in_place, looked_up, again = set[int](), set[int](), set[int]()
        for i, op_class, op, n in self._reads:
            roots = self.followed.weights[op.operands[n]]
            if self.paths.spec(self.costed.graph.ports[op_class, n, False])[axis] >= 0:
                in_place |= roots
                looked_up |= roots if op.name == LOOK_UP else frozenset()
            elif op.phase is Phase.BACKWARD and self._is_gathered_for(i, n, axis):
                again |= roots
        return in_place, looked_up, again

    def _is_gathered_for(self, position: int, operand: int, axis: int) -> bool:
        reshard = self.paths.to_reader(position, operand)
        return reshard.phase == Phase.BACKWARD and any(
            step.kind == "all-gather" and axis in step.axes for step in reshard.path
        )


def _is_recomputed(op: FlatOp) -> bool:
    return op.op is not None and any(part in op.op.scope for part in RECOMPUTED)


def _scattered(collectives: Sequence[Collective]) -> float:
    scattered = sum(c.bytes for c in collectives if c.kind == "reduce-scatter")
    return _share(scattered, scattered + sum(c.bytes for c in collectives if c.kind == "all-reduce"))
