"""What tracing reads off a step: its ops with calls inlined, phases, roles, state pairs, names and source lines."""

import re
from collections import Counter
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.cost_model.errors import InputError
from autoshard.search.ir.factors import has_rule
from autoshard.search.ir.graph import Phase, Role, Step, verify, walk
from autoshard.search.ir.trace import trace, trace_call
from tests import zoo
from tests.extended_dtypes import META, added_as_gradients, float_of, fp8_meta

W = jax.ShapeDtypeStruct((16, 32), jnp.float32)
X = jax.ShapeDtypeStruct((24, 16), jnp.float32)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def sgd(w, x):
    value, grad = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * grad, value


def roles(step: Step) -> dict[str, str]:
    return {a.name: a.role.value for a in step.arguments}


def phases_of(step: Step, primitive: str) -> list[Phase]:
    return [op.phase for op in step.graph.ops if op.name == primitive]


def primitives(step: Step) -> Counter[str]:
    return Counter(op.name for _, graph in walk(step.graph) for op in graph.ops)


def test_products_are_forward_and_backward_and_the_rest_is_update():
    step = trace(sgd, W, X)
    assert phases_of(step, "dot_general") == [Phase.FORWARD, Phase.BACKWARD]
    assert phases_of(step, "sub")[-1] is Phase.UPDATE
    assert phases_of(step, "tanh") == [Phase.FORWARD]


def test_a_step_without_a_gradient_is_all_forward():
    step = trace(lambda w, x: loss(w, x), W, X)
    assert {op.phase for op in step.graph.ops} == {Phase.FORWARD}
    assert roles(step) == {"w": "frozen", "x": "batch"}
    assert step.replaces == (None,)


def test_gradients_are_not_new_parameters():
    assert trace(lambda w, x: jax.grad(loss)(w, x), W, X).replaces == (None,)


def test_running_statistics_are_state_beside_what_the_update_makes():
    def step(params, statistics, batch):
        grads = jax.grad(lambda p: loss(p["w"], batch))(params)
        new = jax.tree.map(lambda s: 0.9 * s + 0.1 * batch.mean(), statistics)
        return jax.tree.map(lambda p, g: p - g, params, grads), new, {"loss": loss(params["w"], batch)}

    traced = trace(step, {"w": W}, {"mean": jax.ShapeDtypeStruct((), "float32")}, X)
    assert traced.replaces == (0, 1, None)


def test_ops_on_arguments_alone_that_feed_the_loss_are_forward():
    def step(w, x):
        scaled = x * 2 + jnp.arange(16)
        grad = jax.grad(lambda w: loss(w, scaled))(w)
        return w - grad, jnp.sum(x)

    traced = trace(step, W, X)
    assert phases_of(traced, "iota") == [Phase.FORWARD]
    assert phases_of(traced, "reduce_sum")[-1] is Phase.UPDATE


def test_roles_of_three_arguments():
    optimizer = optax.adam(1e-3)

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params["w"], batch)
        updates, opt_state = optimizer.update({"w": grads}, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    params = {"w": W}
    traced = trace(step, params, jax.eval_shape(optimizer.init, params), X)
    assert roles(traced) == {
        "params['w']": "parameter",
        "opt_state[0].count": "state",
        "opt_state[0].mu['w']": "optimizer_state",
        "opt_state[0].nu['w']": "optimizer_state",
        "batch": "batch",
    }
    assert traced.replaces == (0, 1, 2, 3, None)


@pytest.mark.parametrize(
    "model",
    [
        *("gpt_linen", "gpt_nnx_optimizer", "gpt_scan", "resnet", "dlrm"),
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("gpt_nnx", "t5")),
    ],
)
def test_every_leaf_of_a_models_state_is_paired(model):
    state, *_ = zoo.MAKERS[model]().abstract_args()
    traced = zoo.traced(model)
    verify(traced.graph)
    num_leaves = len(jax.tree.leaves(state))
    assert traced.replaces[:num_leaves] == tuple(range(num_leaves))
    assert set(traced.replaces[num_leaves:]) == {None}
    assert all(a.role is not Role.BATCH for a in traced.arguments[:num_leaves])


def test_roles_in_a_train_state_with_statistics():
    case = zoo.make_resnet()
    found = roles(trace(case.step, *case.abstract_args()))
    assert found["state.step"] == "state"
    assert found["state.params['stem']['kernel']"] == "parameter"
    assert found["state.opt_state[0].trace['stem']['kernel']"] == "optimizer_state"
    assert found["state.batch_stats['stage0_block0']['BatchNorm_0']['mean']"] == "state"
    assert found["batch['image']"] == "batch"


@pytest.mark.devices
def test_keys_are_told_apart():
    def step(w, x, key):
        return sgd(w, x + jax.random.normal(key, x.shape))

    assert roles(trace(step, W, X, jax.random.key(0)))["key"] == "key"


def test_keyword_arguments_keep_their_names():
    def step(w, *, x, scale):
        return sgd(w, x * scale)

    traced = trace(step, W, x=X, scale=np.float32(2))
    assert [a.name for a in traced.arguments] == ["w", "scale", "x"]
    assert traced.replaces == (0, None)


def test_names_of_results_are_pytree_paths():
    traced = trace(lambda w, x: {"new": [sgd(w, x)[0]], "loss": loss(w, x)}, W, X)
    assert traced.results == ("result['loss']", "result['new'][0]")


def test_source_lines_are_the_users():
    step = trace(sgd, W, X)
    line = loss.__code__.co_firstlineno + 1
    assert f"/{step.graph.ops[0].source}".endswith(f"/test_trace.py:{line}")


def test_calls_are_inlined():
    @jax.custom_vjp
    def clipped(x):
        return x * 2

    clipped.defvjp(lambda x: (x * 2, None), lambda _, g: (g.clip(-1, 1),))

    def step(w, x):
        inner = jax.jit(lambda w: jax.nn.relu(clipped(x @ w)).sum())
        return w - jax.grad(inner)(w)

    traced = trace(step, W, X)
    assert not {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"} & set(primitives(traced))
    assert phases_of(traced, "dot_general") == [Phase.FORWARD, Phase.BACKWARD]


def batched_by_hand(x):
    function = jax.custom_batching.custom_vmap(jnp.sin)
    function.def_vmap(lambda size, is_batched, x: (jnp.sin(x), True))
    return function(x)


def linear(x):
    return jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, g: r * g, jnp.sin(x), x)


def differentiated_under_checkpoint(x):
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),), optimize_remat=True)
    return jax.grad(lambda x: jax.checkpoint(lambda x: function(jnp.sin(x)))(x).sum())(x)


def checkpoints_in_a_loop(x):
    def loss(x):
        return jax.lax.scan(jax.checkpoint(lambda x, _: (jnp.sin(x), None)), x, None, length=2)[0].sum()

    return jax.grad(loss)(x)


def composite(x):
    return jax.lax.composite(lambda x: jnp.sin(x), "user.sin")(x)


@pytest.mark.parametrize(
    "function",
    [batched_by_hand, linear, differentiated_under_checkpoint, checkpoints_in_a_loop, composite],
    ids=lambda function: function.__name__,
)
def test_nothing_hides_in_a_call(function):
    found = primitives(trace(function, X))
    assert found["sin"] >= 1
    assert all(has_rule(name) or name == "scan" for name in found)


def test_a_ragged_product_is_spelt_out_in_dense_ones():
    def step(w, x, sizes):
        return w - jax.grad(lambda w: jax.lax.ragged_dot(x, w, sizes).sum())(w)

    traced = trace(
        step, jax.ShapeDtypeStruct((3, 16, 8), jnp.float32), X, jax.ShapeDtypeStruct((3,), jnp.int32)
    )
    assert "ragged_dot_general" not in primitives(traced)
    assert phases_of(traced, "dot_general") == [Phase.BACKWARD]  # of all groups at once
    assert all(map(has_rule, primitives(traced)))


F32_OF_BF16 = jax.lax.DotAlgorithmPreset.BF16_BF16_F32


@pytest.mark.parametrize(
    ("left", "right", "asked", "made"),
    [
        (jnp.float32, jnp.bfloat16, None, None),
        (jnp.bfloat16, jnp.float32, None, None),
        (jnp.float16, jnp.bfloat16, None, None),
        (jnp.int8, jnp.bfloat16, None, None),
        (jnp.bfloat16, jnp.bfloat16, None, jnp.float32),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, None, jnp.float32),
        (jnp.float32, jnp.float32, F32_OF_BF16, jnp.float32),
        (jnp.float32, jnp.bfloat16, F32_OF_BF16, jnp.float32),
    ],
)
def test_a_product_multiplies_arrays_of_the_types_to_which_jax_lowers_it(left, right, asked, made):
    def step(x, w):
        return jax.lax.dot(x, w, precision=asked, preferred_element_type=made)

    args = jax.ShapeDtypeStruct(X.shape, left), jax.ShapeDtypeStruct(W.shape, right)
    lowered = jax.jit(step).lower(*args).as_text()
    multiplied = re.search(r"dot_general.* : \(tensor<24x16x(\w+)>, tensor<16x32x(\w+)>\)", lowered)
    graph = trace(step, *args).graph
    (product,) = (op for op in graph.ops if op.name == "dot_general")
    assert multiplied
    assert [_in_mlir(graph.value(a).dtype) for a in product.inputs] == list(multiplied.groups())
    changed = [_in_mlir(a.dtype) != to for a, to in zip(args, multiplied.groups(), strict=True)]
    assert len(graph.ops) == 1 + sum(changed)


def _in_mlir(dtype):
    names = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
    return names.get(
        str(dtype), str(dtype).replace("float8_e4m3fn", "f8E4M3FN").replace("float8_e5m2", "f8E5M2")
    )


def test_a_weight_of_another_type_is_converted_once_for_both_phases():
    def step(a, w, x):
        return a - jax.grad(lambda a: jnp.sum(jnp.tanh((x * a) @ w)))(a)

    w = jax.ShapeDtypeStruct(W.shape, jnp.bfloat16)
    graph = trace(step, jax.ShapeDtypeStruct((16,), jnp.float32), w, X).graph
    (made,) = (op.outputs[0] for op in graph.ops if op.name == "convert_element_type")
    products = [op for op in graph.ops if op.name == "dot_general"]
    assert [op.phase for op in products] == [Phase.FORWARD, Phase.BACKWARD]
    assert all(made in op.inputs for op in products)
    assert [op.where for op in graph.ops if op.outputs == (made,)] == [products[0].where]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.vmap(jnp.searchsorted)(x, x[:, :4]),
        lambda x: jnp.nonzero(x, size=4),
        lambda x: jnp.interp(x[0], x[1], x[2]),
        lambda x: jnp.frexp(jnp.ldexp(x, 2)),
        lambda x: jax.lax.custom_root(
            lambda y: y * y - x, x, lambda _, y: jnp.sqrt(y * y), lambda g, y: y / g(1.0)
        ),
        lambda x: jax.lax.scan(lambda c, y: (c + jnp.searchsorted(x[0], y), None), jnp.zeros(8, int), x)[0],
    ],
)
def test_primitives_made_of_others_are_spelt_out(function):
    traced = trace(function, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert all(has_rule(name) or name in ("scan", "while") for name in primitives(traced))


@pytest.mark.parametrize(
    ("collective", "reduction"),
    [
        (jax.lax.psum, "reduce_sum"),
        (jax.lax.pmean, "reduce_sum"),
        (jax.lax.pmax, "reduce_max"),
        (jax.lax.pmin, "reduce_min"),
    ],
)
@pytest.mark.parametrize("is_in_loop", [False, True])
def test_a_collective_over_an_axis_of_vmap_is_a_reduction_at_its_line(collective, reduction, is_in_loop):
    def each(x):
        return x - collective(x, "b")

    def repeated(x):
        return jax.lax.scan(lambda x, _: (each(x), None), x, length=2)[0]

    traced = trace(jax.vmap(repeated if is_in_loop else each, axis_name="b"), X)
    (op,) = [op for _, graph in walk(traced.graph) for op in graph.ops if op.name == reduction]
    assert op.params["axes"] == (0,)
    assert op.source.endswith(f"test_trace.py:{each.__code__.co_firstlineno + 1}")
    assert all(has_rule(name) or name == "scan" for name in primitives(traced))


def test_gradients_of_an_extended_dtype_add_up_as_it_says():
    traced = trace(added_as_gradients, X, X)
    assert [op.name for op in traced.graph.ops] == ["max"]
    assert {value.dtype for value in traced.graph.values} == {np.dtype(np.float32)}


def test_an_argument_of_an_extended_dtype_comes_back_in_it():
    argument = jax.ShapeDtypeStruct((4,), META)
    changed, unchanged = trace(lambda x: fp8_meta(2 * float_of(x)), argument), trace(lambda x: x, argument)
    assert [op.name for op in changed.graph.ops] == ["from_edtype", "mul", "to_edtype"]
    assert unchanged.graph.outputs == unchanged.graph.inputs
    for step in (changed, unchanged):
        assert [step.graph.value(a).dtype for a in (*step.graph.inputs, *step.graph.outputs)] == [META, META]


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_checkpoint_is_recomputed_in_the_backward_phase_behind_a_barrier(prevent_cse):
    def step(w, x):
        layer = jax.checkpoint(lambda w: jnp.sin(jnp.tanh(x @ w)), prevent_cse=prevent_cse)
        value, grad = jax.value_and_grad(lambda w: layer(w).sum())(w)
        return w - grad, value

    traced = trace(step, W, X)
    assert phases_of(traced, "tanh") == [Phase.FORWARD, Phase.BACKWARD]
    assert phases_of(traced, "optimization_barrier") == [Phase.BACKWARD] * prevent_cse
    assert "remat2" not in primitives(traced)
    again = [op for op in traced.graph.ops if op.name == "tanh"][1]
    assert "rematted_computation" in again.scope


def test_loops_keep_their_bodies():
    def step(w, x):
        def layer(x, _):
            y = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
            return jax.lax.while_loop(lambda y: y.sum() > 9.0, lambda y: y / 2, y), None

        return jax.lax.scan(layer, x @ w, None, length=3)[0]

    graph = trace(step, W, X).graph
    (scan,) = (op for op in graph.ops if op.name == "scan")
    assert scan.loop_counts == (0, 1)
    (body,) = scan.bodies["jaxpr"]
    (cond,) = (op for op in body.ops if op.name == "cond")
    (loop,) = (op for op in body.ops if op.name == "while")
    assert [b.ops[-1].name for b in cond.bodies["branches"]] == ["cos", "sin"]
    assert set(loop.bodies) == {"cond_jaxpr", "body_jaxpr"}


def test_a_scan_over_layers_is_two_loops_one_backward():
    case = zoo.make_gpt_scan()
    traced = trace(case.step, *case.abstract_args())
    assert phases_of(traced, "scan") == [Phase.FORWARD, Phase.BACKWARD]


def by_platform(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.tanh)


@pytest.mark.parametrize(("platform", "name"), [("cpu", "sin"), ("cuda", "tanh")])
def test_a_branch_by_platform_is_taken_at_trace(platform, name):
    def step(w, x):
        def loss(w):
            return jax.lax.scan(lambda x, _: (jax.vmap(by_platform)(x), None), x @ w, None, length=2)[0].sum()

        return w - jax.grad(loss)(w)

    found = primitives(trace_call(platform, step, (W, X), {}))
    assert found[name] == 1
    assert not found.keys() & {"cond", "platform_index", "empty2", *({"sin", "tanh"} - {name})}
    assert primitives(trace(step, W, X)).keys() >= {"cond", "platform_index", "sin", "tanh"}


def test_a_platform_without_a_branch():
    line = by_platform.__code__.co_firstlineno + 1
    with pytest.raises(InputError, match=rf"at .*test_trace.py:{line} has no branch for rocm.*default="):
        trace_call("rocm", by_platform, (X,), {})


def test_ops_of_library_functions_have_the_source_line_of_their_call():
    def step(w, x):
        value, grad = jax.value_and_grad(lambda w: jax.nn.relu(x @ w)[jnp.arange(3)].sum())(w)
        return w - grad, value

    graph = trace(step, W, X).graph
    line = step.__code__.co_firstlineno + 1
    assert {op.name: op.source.rpartition(":")[2] for op in graph.ops}.items() >= {
        name: str(line) for name in ("max", "gather", "iota", "select_n", "scatter-add")
    }.items()


def test_an_op_without_a_source_line_is_named_by_its_scope():
    op = trace(sgd, W, X).graph.ops[0]
    assert op.where.startswith("at ")
    assert replace(op, source_info=None).where == "in the scope 'jvp()'"


def test_closed_over_arrays_are_constants():
    table = np.arange(32, dtype=np.float32)
    traced = trace(lambda w, x: sgd(w + table, x), W, X)
    assert [content.shape for _, content in traced.graph.constants] == [(32,)]


def test_dead_code_is_dropped_and_effects_stay():
    def step(w, x):
        jnp.linalg.inv(x.T @ x)
        jax.debug.print("{}", x.sum())
        return sgd(w, x)

    names = primitives(trace(step, W, X))
    assert "lu" not in names
    assert names["debug_print"] + names["debug_callback"] == 1


@pytest.mark.devices
def test_size_zero_and_missing_leaves():
    def step(state, x):
        return {**state, "w": state["w"] - jax.grad(loss)(state["w"], x)}

    traced = trace(step, {"w": W, "none": None, "empty": jnp.zeros((0, 4))}, X)
    assert [a.name for a in traced.arguments] == ["state['empty']", "state['w']", "x"]
    assert traced.replaces == (0, 1)


@pytest.mark.devices
def test_numbers_are_arguments_as_jit_takes_them():
    traced = trace(lambda w, x, rate, is_on: w - rate * is_on * jax.grad(loss)(w, x), W, X, 0.1, True)
    rate, is_on = (traced.graph.values[v] for v in traced.graph.inputs[2:])
    assert (rate.shape, rate.dtype, is_on.dtype) == ((), jnp.float32, jnp.bool_)
    assert traced.graph.values[traced.graph.outputs[0]].dtype == W.dtype
    narrow = trace(lambda x, rate: x * rate, jnp.zeros(3, jnp.bfloat16), 0.1)
    assert narrow.graph.values[narrow.graph.outputs[0]].dtype == jnp.bfloat16


@dataclass
class Unregistered:
    w: object


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("adam", r"argument \[1\] is str 'adam'\. Bind it beforehand"),
        ({"mode": "adam"}, r"argument \[1\]\['mode'\] is str 'adam'\. Take it out of the argument"),
        (Unregistered(W), r"\[1\] is Unregistered .* jax\.tree_util\.register_dataclass\(Unregistered\)"),
        ([Unregistered(W)], r"\[1\]\[0\] is Unregistered .* jax\.tree_util\.register_dataclass\("),
    ],
)
def test_an_argument_that_is_no_array_is_refused_with_a_remedy(argument, said):
    with pytest.raises(InputError, match=rf"every argument leaf must be an array .*{said}"):
        trace(lambda w, options: w, W, argument)


@pytest.mark.parametrize(("wide", "narrow"), [(np.int64, jnp.int32), (np.float64, jnp.float32)])
def test_wide_arrays_are_narrowed_as_jit_does(wide, narrow):
    traced = trace(lambda w, i: w * i[0], W, np.zeros(2, wide))
    assert traced.graph.values[traced.graph.inputs[1]].dtype == narrow


# --- phases by dataflow


def phases_of_body(step: Step, primitive: str) -> list[Phase]:
    """Of the ops inside loops."""
    return [op.phase for path, graph in walk(step.graph) if path for op in graph.ops if op.name == primitive]


def test_a_gradient_inside_a_forward_loop_is_backward_inside():
    def step(w, xs):
        def add(total, x):
            return total + jax.grad(loss)(w, x), None

        grads, _ = jax.lax.scan(add, jnp.zeros_like(w), xs)
        return w - grads

    traced = trace(step, W, jax.ShapeDtypeStruct((3, *X.shape), X.dtype))
    assert phases_of(traced, "scan") == [Phase.FORWARD]
    assert phases_of_body(traced, "dot_general") == [Phase.FORWARD, Phase.BACKWARD]
    assert phases_of_body(traced, "tanh") == [Phase.FORWARD]


def test_what_is_inside_a_backward_loop_is_backward():
    def step(w, x):
        def loss(w):
            return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=2)[0].sum()

        return w - jax.grad(loss)(w)

    traced = trace(step, jax.ShapeDtypeStruct((16, 16), jnp.float32), X)
    forward, backward = (op for op in traced.graph.ops if op.name == "scan")
    assert {op.phase for op in forward.bodies["jaxpr"][0].ops} == {Phase.FORWARD}
    assert {op.phase for op in backward.bodies["jaxpr"][0].ops} == {Phase.BACKWARD}


def test_what_is_inside_an_updates_loop_is_update_even_a_gradient():
    def step(w, x):
        def inner(g, _):
            return g - jax.grad(lambda g: jnp.sum(jnp.exp(g)))(g), None

        return w - jax.lax.scan(inner, jax.grad(loss)(w, x), None, length=2)[0]

    traced = trace(step, W, X)
    assert phases_of(traced, "scan") == [Phase.UPDATE]
    (body,) = (graph for path, graph in walk(traced.graph) if path)
    assert {op.phase for op in body.ops} == {Phase.UPDATE}
    assert any("transpose(" in op.scope for op in body.ops)


@pytest.mark.devices
def test_a_schedule_that_only_the_update_reads_is_update_through_and_through():
    def step(w, x, count):
        rate = jnp.exp(jnp.cos(count))
        return w - rate * jax.grad(loss)(w, x), count + 1

    traced = trace(step, W, X, jnp.float32(0))
    assert phases_of(traced, "cos") == phases_of(traced, "exp") == [Phase.UPDATE]


@pytest.mark.devices
def test_what_feeds_the_loss_through_others_is_forward_even_where_the_update_reads_it():
    def step(w, x, count):
        shift = jnp.exp(jnp.cos(count))
        return w - shift * jax.grad(lambda w: loss(w, x + shift))(w), count + 1

    traced = trace(step, W, X, jnp.float32(0))
    assert phases_of(traced, "cos") == phases_of(traced, "exp") == [Phase.FORWARD]
    assert phases_of(traced, "mul")[-1] is Phase.UPDATE


def test_what_the_forward_phase_makes_is_forward_until_a_gradient_is_read():
    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        new = w - grad
        return new, jnp.exp(value), jnp.cos(jnp.sum(grad)), jnp.tan(value + jnp.sum(new))

    traced = trace(step, W, X)
    assert phases_of(traced, "exp") == [Phase.FORWARD]
    assert phases_of(traced, "cos") == phases_of(traced, "tan") == [Phase.UPDATE]


@pytest.mark.devices
def test_a_loop_of_no_steps_hands_on_its_carry():
    keys = jax.random.split(jax.random.key(0), 0)

    def step(w, x):
        carry, (sums, drawn) = jax.lax.scan(lambda c, k: (c * w, (c.sum(), jax.random.split(k))), x, keys)
        return carry, sums, drawn

    graph = trace(step, jnp.ones(4), jnp.ones(4)).graph
    assert "scan" not in [op.name for op in graph.ops]
    assert [graph.value(a).shape for a in graph.outputs] == [(4,), (0,), (0, 2)]
    assert graph.outputs[0] == graph.inputs[1]
