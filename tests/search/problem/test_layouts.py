"""In which order XLA:GPU writes what products make and read, by the shapes in its compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.layouts import PRODUCT, Layouts, batch_first, layouts, product_order

BATCH, ROWS, GROUPS, HEADS, DEPTH = 2, 64, 4, 8, 16


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


Q, K = array(BATCH, ROWS, GROUPS, HEADS, DEPTH), array(BATCH, ROWS, GROUPS, DEPTH)


def softmax(scores):
    return jax.nn.softmax(scores.astype(jnp.float32), -1).astype(scores.dtype)


def grouped(q, k, v):
    return jnp.einsum("bkgts,bskd->btkgd", softmax(jnp.einsum("btkgd,bskd->bkgts", q, k)), v)


def plain(q, k, v):
    return jnp.einsum("bhts,bshd->bthd", softmax(jnp.einsum("bthd,bshd->bhts", q, k)), v)


def found(attention, *args) -> Layouts:
    def step(*args):
        return jax.grad(lambda *args: jnp.sum(attention(*args).astype(jnp.float32) ** 2), (0, 1, 2))(*args)

    return layouts(flatten(trace(step, *args)))


def written_out(of: Layouts) -> list[list[int]]:
    """The shapes of what products have written out, as they lie."""
    shapes = []
    for op in of.program.ops:
        for operand in range(2) if op.name == PRODUCT else ():
            if of.written_out(op, operand) is not None:
                shape = of.program.values[op.operands[operand]].shape
                order = product_order(op, operand, of.program.values[op.operands[operand]].shape)
                assert order is not None
                shapes.append([shape[d] for d in order])
    return shapes


def test_the_probabilities_of_grouped_heads_are_written_out_once_for_each_product():
    """As XLA does: for the values (b, k, s, g, t), for their gradient (b, k, g, t, s), and the gradient of the scores as
    (b, k, t, g, s) beside the (b, k, s, t, g) that it lies in."""
    rows, heads = ROWS, HEADS
    large = [shape[2:] for shape in written_out(found(grouped, Q, K, K)) if shape.count(rows) == 2]
    assert sorted(large) == sorted([[rows, heads, rows], [heads, rows, rows], [rows, heads, rows]])


def test_heads_of_their_own_are_read_as_they_lie():
    of = found(plain, *[array(BATCH, ROWS, HEADS, DEPTH)] * 3)
    assert written_out(of) == []
    assert not of.transposed
    assert not of.across


def test_where_two_products_meet_the_later_one_is_written_in_the_order_of_the_earlier_one_s():
    """As XLA does: the gradient of the probabilities, in float32, beside the scores that lie as (b, k, s, t, g)."""
    of = found(grouped, Q, K, K)
    (turned,) = of.transposed
    value, (maker, _) = of.program.values[turned], of.program.maker[turned]
    assert value.shape == (BATCH, GROUPS, HEADS, ROWS, ROWS)
    assert value.dtype == jnp.float32
    assert of.program.ops[maker].name == "convert_element_type"
    assert of.program.ops[of.program.maker[of.program.ops[maker].operands[0]][0]].name == PRODUCT


def test_the_maxima_of_grouped_heads_run_across_their_scores():
    assert len(found(grouped, Q, K, K).across) == 1


@pytest.mark.parametrize(
    ("left", "right", "summed", "batch", "wanted"),
    [
        ((2, 3, 5), (5, 7), ((2,), (0,)), ((), ()), [None, None]),  # a layer's
        ((2, 3, 5), (2, 3, 7), ((0, 1), (0, 1)), ((), ()), [None, None]),  # its gradient's
        ((2, 3, 5), (2, 5, 7), ((2,), (1,)), ((0,), (0,)), [None, None]),  # a batch of matrices'
        ((2, 3, 5, 7), (3, 7, 4), ((3,), (1,)), ((1,), (0,)), [(1, 0, 2, 3), None]),  # several rows
        ((3, 7, 4), (2, 3, 5, 7), ((1,), (3,)), ((0,), (1,)), [None, (1, 3, 0, 2)]),  # several columns
        ((2, 3, 5, 7), (2, 5, 3), ((1, 2), (2, 1)), ((0,), (0,)), [(0, 3, 1, 2), (0, 2, 1)]),  # several sums
        ((2, 3, 5, 1), (2, 5, 4), ((2,), (1,)), ((0,), (0,)), [None, None]),  # a row of one element is none
        ((1, 3, 5, 7), (1, 7, 4), ((3,), (1,)), ((0,), (0,)), [None, None]),  # nor is a batch
    ],
)
def test_a_product_of_batches_wants_one_order_where_a_side_is_several_dimensions(
    left, right, summed, batch, wanted
):
    def step(x, y):
        return jax.lax.dot_general(x, y, (summed, batch))

    program = flatten(trace(step, array(*left), array(*right)))
    (op,) = [op for op in program.ops if op.name == PRODUCT]
    shapes = [program.values[v].shape for v in op.operands]
    assert [product_order(op, operand, shape) for operand, shape in enumerate(shapes)] == wanted


ROW_MAJOR = (0, 1, 2, 3)


def wanted(subscripts: str, operand: int) -> tuple[int, ...] | None:
    """The order in which the product of an einsum wants an operand that lies row by row."""
    heads = array(BATCH, ROWS, HEADS, DEPTH)
    scores = array(BATCH, HEADS, ROWS, ROWS)
    left, right = (scores if "hts" in s else heads for s in subscripts.split("->")[0].split(","))
    program = flatten(trace(lambda a, b: jnp.einsum(subscripts, a, b), left, right))
    (op,) = (op for op in program.ops if op.name == PRODUCT)
    assert program.ops[program.maker[op.operands[operand]][0]].name == "input"
    return batch_first(op, operand, program.values[op.operands[operand]].shape, ROW_MAJOR)


def test_a_product_wants_its_batch_first_and_may_change_rows_and_columns():
    """As XLA does of arguments: queries (b, h, t, d), keys (b, h, d, s) and values (b, h, s, d), but scores as they are."""
    queries, keys = (wanted("bthd,bshd->bhts", operand) for operand in range(2))
    assert queries == (0, 2, 1, 3)
    assert keys == (0, 2, 3, 1)
    op = PRODUCT_OF_HEADS
    assert batch_first(op, 0, (BATCH, ROWS, HEADS, DEPTH), (0, 2, 1, 3)) is None
    assert batch_first(op, 0, (BATCH, ROWS, HEADS, DEPTH), (0, 2, 3, 1)) is None
    assert batch_first(op, 0, (1, ROWS, HEADS, DEPTH), (1, 2, 3)) == (2, 1, 3)
    assert batch_first(op, 0, (1, ROWS, 1, DEPTH), (1, 3)) is None  # no batch


def _product_of_heads():
    heads = [array(BATCH, ROWS, HEADS, DEPTH)] * 2
    program = flatten(trace(lambda q, k: jnp.einsum("bthd,bshd->bhts", q, k), *heads))
    return next(op for op in program.ops if op.name == PRODUCT)


PRODUCT_OF_HEADS = _product_of_heads()


def test_a_maximum_of_a_number_reads_no_array_and_has_no_layout():
    program = flatten(trace(lambda x: x * jax.lax.reduce_max(2.0, axes=()), array(BATCH, ROWS)))
    assert any(op.name == "reduce_max" and not op.operands for op in program.ops)
    assert not layouts(program).across
