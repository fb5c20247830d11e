"""The order of arrays' dimensions in memory, and the ops that need them in another order.

XLA gives every array an order of its dimensions. A product writes `(batch, rows, columns)`, in the order of its result;
elementwise ops and transposes read their operands in any order, for free. Two cases need another array:

* A product with batch dimensions reads its left operand as `(batch, rows, sums)` and its right one as `(batch, sums,
  columns)`. cuBLAS transposes a matrix by itself. But where rows, columns or sums are several dimensions, a reshape
  makes them one, and XLA does not look through it (`DotDecomposer`, `TransposeFolding`). Such an operand is written out
  in that order, once for every order that products need. Examples are the probabilities of grouped heads, whose rows
  are a group's heads and the queries, and the gradient of their scores. A plain loop, such as float32 in groups of less
  than eight takes, writes all these orders at once (`multi_output_fusion.cc`): the arrays of the backward phase exist
  from the forward phase on.
* An elementwise op may read results of two products in different orders. Then the later one's is first written out in
  the order of the earlier's, in the type that it has there (`GpuLayoutAssignment` follows the products from the first
  on). An example is the gradient of those probabilities, in float32, where the softmax has the order of its scores.

Only values that follow products have an order here: all others are taken to be in the order that is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.search.problem.flat_program import FlatOp, FlatProgram

PRODUCT = "dot_general"

LEAST_TILED, LEAST_TILED_OF_MANY, MANY_TILED = 16, 8, 64 * 128
"""Least extent of each of the two innermost dimensions that XLA transposes in tiles; for large ones, the least extent
of each and their least product. Source: XLA, `xla/service/gpu/ir_emission_utils.h`, kMinDimensionToTransposeTiled and
those below it."""

LEAST_LOOPED_BYTES = 4
"""Smallest element, in bytes, that a plain loop writes in another order. Source: compiled programs; grouped heads in
bfloat16 do not."""

Order = tuple[int, ...]
"""Dimensions of a value, the outermost first; those of a single element are left out."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A value's order in memory.

    Attributes:
      maker: the position of the product that it follows.
      order: the order of the dimensions that are known.
    """

    maker: int
    order: Order

    def agrees(self, other: "Layout") -> bool:
        """Whether both put the dimensions that they share in one order."""
        shared = set(self.order) & set(other.order)
        return [d for d in self.order if d in shared] == [d for d in other.order if d in shared]


@dataclass(frozen=True, eq=False)
class Layouts:
    """The layouts of a program's values.

    Attributes:
      program: the flat program.
      of: by value that follows a product, its layout.
      transposed: values that are written out in the order of others.
      across: values of which maxima are taken over dimensions that are not innermost.
    """

    program: FlatProgram
    of: dict[int, Layout]
    transposed: frozenset[int]
    across: frozenset[int]

    def written_out(self, op: FlatOp, operand: int) -> Order | None:
        """The order in which a product has an operand written out, as dimensions of the value that the operand is a
        transpose of; None if it reads the operand itself."""
        v = op.operands[operand]
        order = product_order(op, operand, self.program.values[v].shape)
        if order is None or v not in self.of or self.of[v].order == order:
            return None
        while (maker := self.program.ops[self.program.maker[v][0]]).name == "transpose":
            assert maker.op is not None
            order, v = tuple(maker.op.params["permutation"][d] for d in order), maker.operands[0]
        return order

    def is_tiled(self, v: int, wanted: Order, part: Sequence[int], itemsize: int) -> bool:
        """Whether a value is written out in another order tile by tile, as far as is known; if not, in a plain loop.

        XLA takes tiles unless one of the innermost dimensions, which change places, is short (`ir_emission_utils.cc`,
        `GetDescriptionForTiledTransposeEmitter`), and packs elements of less than four bytes into them.

        Args:
          v: the value.
          wanted: the order.
          part: the shape of a device's part of it.
          itemsize: bytes of an element of the written array.
        """
        lies = self.of[v].order if v in self.of else ()
        before, after = ([d for d in order if part[d] > 1] for order in (lies, wanted))
        is_known = bool(before) and set(before) == set(after) and before[-1] != after[-1]
        if not is_known or itemsize < LEAST_LOOPED_BYTES:
            return True
        rows, columns = _innermost(before, after, part), _innermost(after, before, part)
        least = min(rows, columns)
        return least >= LEAST_TILED or (least >= LEAST_TILED_OF_MANY and rows * columns >= MANY_TILED)


def layouts(program: FlatProgram) -> Layouts:
    """Follows the products of a program."""
    found: dict[int, Layout] = {}
    transposed: set[int] = set()
    for i, op in enumerate(program.ops):
        if op.name == PRODUCT:
            found[op.results[0]] = Layout(i, large(program.values[op.results[0]].shape))
        elif op.op is not None and len(op.results) == 1 and (known := _followed(program, op, found)):
            if len(known) == 1:
                (found[op.results[0]],) = known.values()
                continue
            first = min(known.values(), key=lambda layout: (layout.maker, -len(layout.order)))
            transposed |= {v for v, layout in known.items() if not layout.agrees(first)}
            order = max((layout.order for layout in known.values() if layout.agrees(first)), key=len)
            found[op.results[0]] = Layout(first.maker, order)
    across = {op.operands[0] for op in program.ops if op.name == "reduce_max" and _is_across(op, found)}
    return Layouts(program, found, frozenset(transposed), frozenset(across))


def product_order(op: FlatOp, operand: int, shape: Sequence[int]) -> Order | None:
    """The order that a product needs of an operand of this shape, maybe a device's part; None if it transposes it by
    itself."""
    first, free, sums = _parts(op, operand, shape)
    if not first or max(len(sums), len(free)) < 2:
        return None
    return (*first, *free, *sums) if operand == 0 else (*first, *sums, *free)


def batch_first(op: FlatOp, operand: int, shape: Sequence[int], order: Order) -> Order | None:
    """The order in which a product with batch dimensions has an operand of a known order written out; None where it
    reads the operand itself. Rows and columns may change places, but the batch has to come first."""
    first, free, sums = _parts(op, operand, shape)
    wanted, transposed = (*first, *free, *sums), (*first, *sums, *free)
    if operand == 1:
        wanted, transposed = transposed, wanted
    is_transposed = max(len(sums), len(free)) < 2 and order == transposed
    return None if not first or order == wanted or is_transposed else wanted


def _innermost(order: Sequence[int], other: Sequence[int], shape: Sequence[int]) -> int:
    """The extent of the innermost dimensions of an order that are next to one another in another, too."""
    place, extent = {d: at for at, d in enumerate(other)}, shape[order[-1]]
    for outer, inner in zip(reversed(order[:-1]), reversed(order), strict=False):
        if place[outer] + 1 != place[inner]:
            break
        extent *= shape[outer]
    return extent


def _parts(op: FlatOp, operand: int, shape: Sequence[int]) -> tuple[Order, Order, Order]:
    """The dimensions of a product's operand: those of the batch, those that stay, and those that are summed over."""
    assert op.op is not None
    summed, batch = (sides[operand] for sides in op.op.params["dimension_numbers"])
    there = large(shape)
    free = tuple(d for d in there if d not in summed and d not in batch)
    return tuple(d for d in batch if d in there), free, tuple(d for d in summed if d in there)


def _is_across(op: FlatOp, found: dict[int, Layout]) -> bool:
    assert op.op is not None
    layout = found.get(op.operands[0]) if op.operands else None
    if layout is None:
        return False
    axes = [d for d in layout.order if d in op.op.params["axes"]]
    return list(layout.order[len(layout.order) - len(axes) :]) != axes


def _followed(program: FlatProgram, op: FlatOp, found: dict[int, Layout]) -> dict[int, Layout]:
    """By operand: the layout of an op's result if it follows that operand's."""
    known: dict[int, Layout] = {}
    for v in op.operands:
        if v not in found:
            continue
        place = placed(program, op, v)
        if place is not None:
            known[v] = Layout(found[v].maker, tuple(place[d] for d in found[v].order if d in place))
    return known


def placed(program: FlatProgram, op: FlatOp, v: int) -> dict[int, int] | None:
    """An operand's dimensions in the result; None where an op does not keep them."""
    assert op.op is not None
    shape, result = program.values[v].shape, program.values[op.results[0]].shape
    if op.name == "transpose":
        return {d: at for at, d in enumerate(op.op.params["permutation"])}
    if op.name == "broadcast_in_dim":
        return dict(enumerate(map(int, op.op.params["broadcast_dimensions"])))
    if op.name in ("reshape", "squeeze", "expand_dims"):
        return _kept(shape, result)
    if op.name.startswith("reduce_") and "axes" in op.op.params:
        return {d: at for at, d in enumerate(d for d in range(len(shape)) if d not in op.op.params["axes"])}
    is_alike = len(shape) == len(result) and all(n in (1, m) for n, m in zip(shape, result, strict=True))
    return {d: d for d in range(len(shape))} if is_alike else None


def _kept(shape: Sequence[int], result: Sequence[int]) -> dict[int, int] | None:
    """The dimensions of a reshape's operand in its result, if it only adds or drops dimensions of one element; else
    None."""
    before, after = large(shape), large(result)
    if [shape[d] for d in before] != [result[d] for d in after]:
        return None
    return dict(zip(before, after, strict=True))


def large(shape: Sequence[int]) -> Order:
    """The dimensions of more than one element."""
    return tuple(d for d, n in enumerate(shape) if n > 1)
