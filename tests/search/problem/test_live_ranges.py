"""Live ranges reckoned by hand, and against what an execution of the program still needs."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.graph import Role
from autoshard.search.ir.trace import trace
from autoshard.search.problem.flat_program import ReadPhase
from autoshard.search.problem.live_ranges import ARGUMENTS, Resident
from autoshard.search.problem.strategies import CopySource
from autoshard.search.step_problem import StepProblem

DEVICE = parse_cluster("1xH100-80GB").device


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


W, X = array(128, 128), array(256, 128)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def problem(step, *args) -> StepProblem:
    return StepProblem.of(trace(step, *args), (), DEVICE)


def names(found: StepProblem) -> list[str]:
    return [op.name for op in found.graph.folded.program.ops]


def own(found: StepProblem) -> dict[int, tuple[Resident, int, int]]:
    """By the position of the op that made it: what an array is, and from where to where it lives. Copies and what arrives
    are left out."""
    first = len(found.graph.groups)
    return {
        i.position: (i.resident, i.start, i.end) for i in found.items if i.port.node < first and not i.source
    }


def copies(found: StepProblem, position: int, phase: ReadPhase) -> dict[CopySource | None, tuple]:
    """By how it is come by: what the copy of this op's result for a phase is, and from where to where it lives."""
    op_class = found.graph.folded.class_of[position]
    node = found.graph.copy_of[op_class, 0, phase].node
    return {i.copy_source: (i.resident, i.start, i.end) for i in found.items if i.port.node == node}


# --- a step of five ops


def squared(w, x):
    return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


SQUARED = [
    "input",
    "input",
    "dot_general",
    "mul",
    "broadcast_in_dim",
    "mul",
    "dot_general",
    "transpose",
    "sub",
]


def test_a_step_of_plain_gradient_descent():
    """The new weights lie where the old ones did; what is computed on the fly keeps what it is computed from."""
    found = problem(squared, W, X)
    assert names(found) == SQUARED
    assert own(found) == {
        0: (Resident.PARAMETERS, 0, 8),
        1: (Resident.BATCH, 0, 8),
        2: (Resident.RESIDUALS, 2, 5),
        5: (Resident.TEMPORARIES, 5, 6),
        6: (Resident.GRADIENTS, 6, 8),
    }


def test_a_result_that_is_not_state_is_an_array_of_its_own():
    def step(w, x):
        return squared(w, x).astype(jnp.bfloat16)

    found = problem(step, W, X)
    assert names(found) == [*SQUARED, "convert_element_type", "output"]
    assert own(found)[9] == (Resident.TEMPORARIES, 9, 10)


def test_bytes_are_of_the_whole_value():
    by_position = {i.position: i.num_bytes for i in problem(squared, W, X).items if not i.source}
    assert by_position == {0: 4 * 128 * 128, **dict.fromkeys((1, 2, 5), 4 * 256 * 128), 6: 4 * 128 * 128}


def test_what_nobody_reads_is_not_there():
    found = problem(lambda x: lax.top_k(x, 2)[0] * 2.0, X)
    assert names(found) == ["input", "top_k", "mul", "output"]
    assert [(i.start, i.end) for i in found.items if i.position == 1 and not i.source] == [(1, 2)]


def test_arguments_are_there_from_beginning_to_end_read_or_not():
    found = problem(lambda x, unread: x + 1.0, X, X)
    assert own(found) == {0: (Resident.BATCH, 0, 3), 1: (Resident.BATCH, 0, 3), 2: (Resident.RESIDUALS, 2, 3)}


def test_new_state_that_is_read_as_well_lies_where_the_old_state_did():
    def step(w, x):
        new = squared(w, x)
        return new, jnp.sum(new, 0)

    found = problem(step, W, X)
    assert names(found) == [*SQUARED, "reduce_sum", "output"]
    assert sorted(own(found)) == [0, 1, 2, 5, 6, 9]


# --- what an array is


def test_arguments_by_their_roles():
    def step(params, moments, statistics, scale, x, key):
        def loss(params):
            y = jnp.tanh((x + jax.random.normal(key, x.shape)) @ params["w"]) * scale
            return jnp.mean((y - statistics["mean"]) ** 2), jnp.mean(y, 0)

        gradients, mean = jax.grad(loss, has_aux=True)(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
        return params, moments, {"mean": 0.9 * statistics["mean"] + 0.1 * mean}

    found = problem(step, {"w": W}, {"w": W}, {"mean": array(128)}, array(128), X, KEY)
    roles = [a.role for a in found.step.arguments]
    assert roles == [Role.PARAMETER, Role.OPTIMIZER_STATE, Role.STATE, Role.FROZEN, Role.BATCH, Role.KEY]
    kinds = [own(found)[n][0] for n in range(6)]
    assert [kind.value for kind in kinds] == [
        "parameters",
        "optimizer_state",
        "other_state",
        "frozen_weights",
        "batch",
        "other_state",
    ]
    assert {own(found)[n][1:] for n in range(6)} == {(0, len(names(found)) - 1)}
    assert set(kinds) == ARGUMENTS


def test_others_by_the_phases_that_make_and_read_them():
    found = problem(squared, W, X)
    made = [op.results[0] for op in found.graph.folded.program.ops]
    for position, (resident, _, _) in own(found).items():
        if position > 1:
            assert found.live_ranges.resident(made[position]) is resident


def test_a_residual_may_be_read_through_a_view():
    """The forward phase transposes a product; the backward phase reads that."""

    def step(params, x):
        gradients = jax.grad(lambda params: jnp.sum(((x @ params[0]).T @ params[1]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    found = problem(step, (W, X), X)
    product = names(found).index("dot_general")
    assert names(found)[product + 1] == "transpose"
    assert own(found)[product][0] is Resident.RESIDUALS
    made = found.graph.folded.program.ops[product].results[0]
    assert found.live_ranges.resident(made) is Resident.RESIDUALS


# --- copies


def test_what_is_computed_on_the_fly_is_an_array_once_it_is_resharded():
    """The transpose of a product, which both phases multiply with."""

    def step(w, x):
        return w - jax.grad(lambda w: jnp.sum(((y := x @ w).T @ jnp.sin(y)) ** 2))(w)

    found = problem(step, W, X)
    assert names(found)[2:7] == ["dot_general", "transpose", "sin", "cos", "dot_general"]
    assert 3 not in own(found)
    assert copies(found, 3, ReadPhase.BACKWARD) == {
        CopySource.FRESH: (Resident.TEMPORARIES, 10, 10),
        CopySource.KEPT: (Resident.RESIDUALS, 7, 10),
    }


def test_copies_are_there_from_where_they_are_made_to_their_last_reader():
    """What two products read in the forward phase, and their gradients in the backward phase, has a copy in either."""

    def step(w, v, x):
        def loss(params):
            y = jnp.tanh(x @ params[0])
            return jnp.sum((y @ params[1]) ** 2)

        return jax.tree.map(lambda p, g: p - g, (w, v), jax.grad(loss)((w, v)))

    found = problem(step, W, W, X)
    wanted = ["dot_general", "tanh", "one_minus_square", "dot_general", "mul"]
    wanted += ["broadcast_in_dim", "mul", "dot_general", "transpose", "dot_general", "mul", "dot_general"]
    assert names(found)[3:15] == wanted
    assert own(found)[4] == (
        Resident.RESIDUALS,
        4,
        13,
    )  # the tanh, whose square a kernel of the backward phase takes
    assert copies(found, 4, ReadPhase.BACKWARD) == {
        CopySource.FRESH: (Resident.TEMPORARIES, 10, 10),
        CopySource.KEPT: (Resident.RESIDUALS, 7, 10),
    }
    assert copies(found, 2, ReadPhase.BACKWARD) == {  # x, which is there in any case
        CopySource.FRESH: (Resident.TEMPORARIES, 14, 14),
        CopySource.KEPT: (Resident.RESIDUALS, 4, 14),
    }


def test_where_a_copy_is_the_source_s_own_array_it_keeps_that_longer():
    """A partial product comes to rest before both phases read it; twice the output is read by two products."""
    found = problem(squared_twice, W, X)
    wanted = ["dot_general", "dot_general", "mul", "broadcast_in_dim", "mul", "dot_general", "transpose"]
    assert names(found)[2:9] == wanted
    assert own(found)[2] == (Resident.RESIDUALS, 2, 2)
    at_rest = Resident.RESIDUALS, 2, 7
    assert copies(found, 2, ReadPhase.REST) == {CopySource.SAME: at_rest, CopySource.FRESH: at_rest}
    assert copies(found, 2, ReadPhase.BACKWARD) == {
        CopySource.FRESH: (Resident.TEMPORARIES, 7, 7),
        CopySource.KEPT: (Resident.RESIDUALS, 4, 7),
    }
    assert own(found)[6] == (Resident.TEMPORARIES, 6, 7)
    both = copies(found, 6, ReadPhase.BACKWARD)
    assert both[CopySource.FRESH] == (Resident.TEMPORARIES, 7, 9)
    assert both[CopySource.SAME] == (Resident.TEMPORARIES, 8, 9)


def squared_twice(w, x):
    return w - jax.grad(lambda w: jnp.sum(((x @ w) @ w) ** 2))(w)


# --- loops


def deep(weights, x):
    def loss(weights):
        return jnp.sum(lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0] ** 2)

    return weights - jax.grad(loss)(weights)


DEEP = problem(deep, array(4, 128, 128), X)


def test_stacks_are_there_from_their_loop_s_beginning_and_what_it_reads_until_its_end():
    assert DEEP.graph.folded.program.loops == ((3, 9), (13, 21))
    assert [n for n, name in enumerate(names(DEEP)) if name == "stack"] == [7, 8, 20]
    assert [own(DEEP)[n] for n in (7, 8, 20)] == [
        (Resident.RESIDUALS, 3, 20),
        (Resident.RESIDUALS, 3, 20),
        (Resident.GRADIENTS, 13, 21),
    ]


def test_the_copy_of_what_a_loop_reads_is_there_for_all_of_the_loop():
    """The weights are gathered again before the backward phase's loop, which reads a part in every turn."""
    assert names(DEEP)[13] == "slice"
    assert DEEP.graph.folded.program.ops[13].operands == DEEP.graph.folded.program.ops[0].results
    assert copies(DEEP, 0, ReadPhase.BACKWARD) == {
        CopySource.FRESH: (Resident.TEMPORARIES, 13, 20),
        CopySource.KEPT: (Resident.RESIDUALS, 9, 20),
    }


def nested(w, v, x):
    """The inner loop reads what the outer one makes, and what is made before both."""

    def outer(y, _):
        z = y @ w

        def inner(u, _):
            return jnp.tanh(u @ v) + z, u

        last, every = lax.scan(inner, y, None, length=3)
        return last, jnp.sum(every, 0)

    return lax.scan(outer, x, None, length=2)


def test_copies_are_not_there_before_their_value():
    """What the inner loop leaves is read at the outer one's beginning, of the next turn."""
    found = problem(nested, W, W, X)
    outer, inner = (n for n, name in enumerate(names(found)) if name == "carry")
    (left,) = found.graph.folded.program.ops[inner].results
    assert outer in found.graph.folded.program.uses[left]
    for item in found.items:
        if names(found)[item.position] not in ("input", "stack"):
            assert item.position <= item.start


# --- what is resharded for one reader


def arriving(found: StepProblem, position: int) -> list[tuple[Resident, int, int]]:
    """What an op reads in another spec than it is there: what that is, and from where to where it lives."""
    return [(i.resident, i.start, i.end) for i in found.items if i.source and i.position == position]


def entered(w, x):
    return lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=3)[0]


def test_what_a_loop_reads_whole_is_there_until_it_ends():
    found = problem(entered, W, X)
    (loop,) = found.graph.folded.program.loops
    enters = [n for n, name in enumerate(names(found)) if name == "enter"]
    assert [arriving(found, n) for n in enters] == [[(Resident.TEMPORARIES, n, loop[1] - 1)] for n in enters]
    assert enters


def activated(w, v, x):
    """What is added is computed on the fly, where its square is."""
    return (x @ w + jnp.exp(v)) ** 2


def test_what_is_read_to_be_computed_on_the_fly_is_there_until_it_is_read():
    found = problem(activated, W, array(128), X)
    product, exp, add, square = map(names(found).index, ("dot_general", "exp", "add", "integer_pow"))
    assert arriving(found, product) == [(Resident.TEMPORARIES, product, product)] * 2
    assert arriving(found, exp) == [(Resident.TEMPORARIES, exp, square)]
    assert arriving(found, add) == [(Resident.TEMPORARIES, add, square)]
    assert arriving(found, square) == []  # of one group with the addition


def test_what_several_read_on_the_fly_at_a_time_arrives_once():
    found = problem(lambda w, v, x: (x @ w + jnp.exp(v) * jnp.sin(v)) ** 2, W, array(128), X)
    exp, sin, square = map(names(found).index, ("exp", "sin", "integer_pow"))
    assert arriving(found, exp) + arriving(found, sin) == [(Resident.TEMPORARIES, min(exp, sin), square)]


def read_twice(w, x):
    """A loop reads the weight, and so does its turned form before the loop."""
    turned = jnp.flip(w)
    return lax.scan(lambda y, _: (jnp.tanh(y @ w) @ turned, None), x, None, length=3)[0]


def test_the_larger_array_counts_of_two_readers_that_have_theirs_at_a_time():
    found = problem(read_twice, W, X)
    (loop,) = found.graph.folded.program.loops
    both = [i for i in found.items if i.source and i.others]
    assert {(i.start <= loop[0], i.end, len(i.others)) for i in both} == {(True, loop[1] - 1, 1)}


# --- a law


def needed(found: StepProblem) -> dict[int, set[int]]:
    """By array: the positions at which it is needed when all loops take two turns. A carry reads at a turn's end what lies
    where it does itself."""
    program, sources = found.graph.folded.program, found.live_ranges.fusion.sources
    turns = list(executed(program, 0, len(program.ops)))
    made: dict[int, int] = {}
    there: dict[int, set[int]] = {}
    for time, position in enumerate(turns):
        for v in program.ops[position].operands:
            if program.maker[v][0] > position:
                continue
            for array_read in sources[v] & made.keys():
                there[array_read] |= set(turns[made[array_read] : time + 1])
        for v in program.ops[position].results:
            made[v] = time
            there.setdefault(v, set()).add(position)
    return there


def executed(program, start: int, end: int):
    """Positions in the order in which they run."""
    inside = [loop for loop in program.loops if start <= loop[0] and loop[1] <= end and loop != (start, end)]
    outermost = {a: b for a, b in sorted(inside, key=lambda loop: loop[1] - loop[0])}
    position = start
    while position < end:
        if position in outermost:
            turn = list(executed(program, position, outermost[position]))
            yield from turn * 2
            position = outermost[position]
        else:
            yield position
            position += 1


@pytest.mark.parametrize(
    "found",
    [problem(squared, W, X), problem(squared_twice, W, X), DEEP, problem(nested, W, W, X)],
    ids=["squared", "twice", "deep", "nested"],
)
def test_an_array_is_there_as_long_as_it_is_needed(found):
    """Those that have no copies; state is written where the old state was, which is there in any case."""
    copied = {found.graph.folded.members[c.maker[0]][0] for c in found.graph.copies}
    compared = 0
    for v, positions in needed(found).items():
        position = found.graph.folded.program.maker[v][0]
        if (
            position in own(found)
            and position not in copied
            and names(found)[position] not in ("input", "stack")
        ):
            _, start, end = own(found)[position]
            assert (start, end) == (min(positions), max(positions)), names(found)[position]
            assert positions == set(range(start, end + 1))
            compared += 1
    assert compared > 1


def convolved_twice(v, w, x):
    def loss(v, w):
        y = jax.lax.conv_general_dilated(x, v, (1, 1), "SAME")
        return (jax.lax.conv_general_dilated(jnp.tanh(y), w, (1, 1), "SAME") ** 2).sum()

    dv, dw = jax.grad(loss, (0, 1))(v, w)
    return v - dv, w - dw


def test_a_convolution_reads_a_transposed_copy_of_an_argument_until_the_argument_s_last_use():
    """The backward phase reads the second kernel, too; its copy is there once."""
    found = problem(convolved_twice, array(8, 8, 3, 3), array(8, 8, 3, 3), array(4, 8, 16, 16))
    program, all_names = found.graph.folded.program, names(found)
    seen_through = found.live_ranges.fusion.seen_through
    convolutions = [i for i, name in enumerate(all_names) if name == "conv_general_dilated"]
    for number, kernel in enumerate(("first", "second")):
        (v,) = program.ops[number].results
        reads = [i for i in convolutions if seen_through(program.ops[i].operands[1]) == v]
        ranges = [
            item
            for item in found.items
            if item.position in reads and item.num_bytes == program.values[v].num_bytes
        ]
        same = [
            item for item in ranges if item.copy_source in (None, CopySource.SAME) and item.source is None
        ]
        assert len(same) == len(reads) == number + 1, kernel
        assert [item.start for item in same] == reads
        assert same[-1].end == max(program.uses[v])
        assert all(before.end + 1 == after.start for before, after in pairwise(same))
