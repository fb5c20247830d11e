"""What cuBLAS and cuDNN ask for, by the defaults of XLA:GPU, and which arrays a product reads in part."""

from itertools import product as every

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.device.workspace import Workspaces
from autoshard.search.ir.trace import trace
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.reshard_paths import ReshardPaths
from autoshard.search.problem.workspaces import workspaces
from autoshard.search.step_problem import StepProblem

MIB = 2**20
NHWC = ("NHWC", "HWIO", "NHWC")


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def on_one_axis(step, *args, gpu="H100-80GB", mesh=1, **pins) -> MeshProblem:
    cluster = parse_cluster(f"{mesh}x{gpu}")
    traced = trace(step, *args)
    ground = StepProblem.of(traced, [str(pins.get(a.name)) for a in traced.arguments], cluster.device)
    return ground.on(cluster, (mesh,))


def placed(step, *args, gpu="H100-80GB", mesh=1, **pins) -> Workspaces:
    """A step on a mesh of one axis; arguments rest as pinned, everything else as is cheapest."""
    on_mesh = on_one_axis(step, *args, gpu=gpu, mesh=mesh, **pins)
    chosen = on_mesh.solve(on_mesh.pinned(pins), 1 << 45, 5.0).labels
    return Workspaces(ReshardPaths(on_mesh.memory.costed, chosen), on_mesh.live_ranges.fusion)


def of_ops(name: str, step, *args, **where) -> list[float]:
    """The workspaces of a primitive's ops, in MiB."""
    found = placed(step, *args, **where)
    return [found.num_bytes(i) / MIB for i, op in enumerate(found.paths.program.ops) if op.name == name]


def product(x, w):
    return jnp.tanh(x @ w)


def test_a_product_takes_a_workspace_and_nothing_else_does():
    args = array(64, 32), array(32, 16)
    assert of_ops("dot_general", product, *args) == [4]
    assert of_ops("dot_general", product, *args, gpu="A100-80GB") == [4]
    for name in ("tanh", "input", "output"):
        assert set(of_ops(name, product, *args)) == {0}


def test_a_look_up_multiplies_nothing():
    assert of_ops("gather", lambda t, i: t[i], array(64, 32), jax.ShapeDtypeStruct((8,), jnp.int32)) == [0]


def test_simulated_devices_take_none():
    assert of_ops("dot_general", product, array(64, 32), array(32, 16), gpu="CPU") == [0]
    convolution = convolved("SAME")
    assert of_ops("conv_general_dilated", convolution, IMAGES, KERNEL, gpu="CPU") == [0]


# --- products that read a part of an array in place


def stacked(x, weights):
    return lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]


@pytest.mark.parametrize(("gpu", "mib"), [("H100-80GB", 32), ("B200", 32), ("A100-80GB", 4)])
def test_a_product_that_reads_a_loop_s_part_of_a_stack_takes_more_since_hopper(gpu, mib):
    assert of_ops("dot_general", stacked, array(64, 32), array(4, 32, 32), gpu=gpu) == [mib]


def test_a_view_of_a_part_is_a_part():
    def step(x, weights):
        return lax.scan(lambda y, w: (jnp.tanh(y @ w.reshape(32, 32).T), None), x, weights)[0]

    assert of_ops("dot_general", step, array(64, 32), array(4, 16, 2, 32)) == [32]


def test_what_is_computed_from_a_part_is_none():
    def step(x, weights):
        return lax.scan(lambda y, w: (jnp.tanh(y @ jnp.sin(w)), None), x, weights)[0]

    assert of_ops("dot_general", step, array(64, 32), array(4, 32, 32)) == [4]


def test_the_parts_of_a_gathered_stack_are_copied():
    args = array(1 << 14, 256), array(4, 256, 256)
    split, whole = P(None, "data"), P()
    assert of_ops("dot_general", stacked, *args, mesh=8, x=P("data"), weights=whole) == [32]
    assert of_ops("dot_general", stacked, *args, mesh=8, x=P("data"), weights=split) == [4]


def test_under_every_assignment_a_part_is_read_in_place_only_as_the_stack_rests():
    """Whoever reads it otherwise reads what a collective wrote, before the loop or in it."""
    pins = {"x": P("data"), "weights": P(None, "data")}
    on_mesh = on_one_axis(stacked, array(64, 32), array(4, 32, 32), mesh=8, **pins)
    mib_as_it_rests = set()
    for chosen in every(*on_mesh.pinned(pins)):
        found = Workspaces(ReshardPaths(on_mesh.memory.costed, chosen), on_mesh.live_ranges.fusion)
        paths = found.paths
        (i,) = [i for i, op in enumerate(paths.program.ops) if op.name == "dot_general"]
        if paths.spec(paths.graph.ports[paths.folded.class_of[i], 1, False]) == (0,):
            mib_as_it_rests.add(found.num_bytes(i) / MIB)
        else:
            assert found.num_bytes(i) / MIB == 4
    assert 32 in mib_as_it_rests


# --- products that are merged


def scores(x, wq, wk):
    """Two products with one left operand, and one that reads both."""
    return jnp.einsum("bqd,bkd->bqk", x @ wq, x @ wk)


def of_scores(batch=1, width=64, step=scores, **where) -> float:
    return of_ops("dot_general", step, array(batch, 32, width), array(width, 64), array(width, 64), **where)[
        -1
    ]


def test_a_part_of_a_merged_product_is_read_in_place():
    assert of_scores() == 32
    assert of_scores(gpu="A100-80GB") == 4


def test_of_several_examples_a_part_is_not_of_one_piece():
    assert of_scores(batch=2) == 4
    assert of_scores(batch=8, mesh=8, x=P("data")) == 32
    assert of_scores(batch=16, mesh=8, x=P("data")) == 4
    assert of_scores(batch=8, mesh=8, wq=P(None, "data"), wk=P(None, "data")) == 4  # columns are split


def test_large_products_are_not_merged():
    """Left operand, right operand and result of one come to 64 MiB at most."""
    half = 32 * MIB // 4 // (32 + 64)  # columns of x and rows of w that come to 32 MiB, less the result
    assert of_scores(width=2 * half - 32 * 64 // (32 + 64) - 1) == 32
    assert of_scores(width=2 * half) == 4


@pytest.mark.parametrize(
    "other",
    [
        lambda x, wq, wk: (jnp.sin(x) @ wq, x @ wk),
        lambda x, wq, wk: (x @ wq, (x.mT @ wk[:32]).mT[:, :32]),
        lambda x, wq, wk: (x @ wq, jnp.sin(x) * wk[0]),
    ],
)
def test_products_are_merged_that_sum_one_operand_over_one_dimension(other):
    def step(x, wq, wk):
        return jnp.einsum("bqd,bkd->bqk", *other(x, wq, wk))

    assert of_scores(step=step) == 4


# --- convolutions


IMAGES, KERNEL = array(4, 64, 64, 8), array(3, 3, 8, 16)


def convolved(padding, strides=(2, 2), dilation=(1, 1), flip=False):
    def step(x, w):
        w = jnp.flip(w, (0, 1)) if flip else w
        return lax.conv_general_dilated(x, w, strides, padding, lhs_dilation=dilation, dimension_numbers=NHWC)

    return step


def padded(step, *args, operator=0, **where) -> float:
    """Bytes of what a step's convolution pads by hand, of an element four."""
    found = placed(step, *args, **where)
    at = [i for i, op in enumerate(found.paths.program.ops) if op.name == "conv_general_dilated"]
    return found.copied_bytes(at[operator], 0) / 4


def test_a_convolution_has_no_workspace():
    assert of_ops("conv_general_dilated", convolved("SAME"), IMAGES, KERNEL) == [0]


def test_uneven_padding_is_written_out():
    assert padded(convolved(((0, 1), (0, 1))), IMAGES, KERNEL) == 4 * 65 * 65 * 8
    assert padded(convolved(((1, 1), (0, 1))), IMAGES, KERNEL) == 4 * 66 * 65 * 8
    assert padded(convolved(((1, 0), (1, 1))), IMAGES, KERNEL) == 4 * 65 * 66 * 8
    assert padded(convolved(((1, 1), (1, 1))), IMAGES, KERNEL) == 0
    assert padded(convolved("VALID"), IMAGES, KERNEL) == 0
    assert padded(convolved(((0, 1), (0, 1))), IMAGES, KERNEL, gpu="CPU") == 0


def test_of_negative_padding_nothing_is_written():
    assert padded(convolved(((-2, 1), (0, 0))), IMAGES, KERNEL) == 4 * 65 * 64 * 8
    assert padded(convolved(((1, -2), (0, 0))), IMAGES, KERNEL) == 4 * 65 * 64 * 8


def test_a_convolution_that_reads_a_loop_s_part_has_no_workspace():
    def step(x, kernels):
        def body(y, w):
            return lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=NHWC), None

        return lax.scan(body, x, kernels)[0]

    assert of_ops("conv_general_dilated", step, IMAGES, array(2, 3, 3, 8, 8)) == [0]


def test_each_device_pads_its_part():
    found = padded(convolved(((0, 1), (0, 1))), IMAGES, KERNEL, mesh=4, x=P("data"))
    assert found == 65 * 65 * 8


def test_holes_are_written_out_unless_it_is_the_gradient_of_a_strided_convolution():
    holes = {"padding": ((1, 1), (1, 1)), "strides": (1, 1), "dilation": (2, 3)}
    assert padded(convolved(**holes), IMAGES, KERNEL) == 4 * (127 + 2) * (190 + 2) * 8
    assert padded(convolved(**holes, flip=True), IMAGES, KERNEL) == 0
    in_one = holes | {"dilation": (1, 3)}
    assert padded(convolved(**in_one), IMAGES, KERNEL) == 4 * (64 + 2) * (190 + 2) * 8
    for padding in (
        ((1, 2), (1, 2)),
        ((2, 1), (2, 1)),
    ):  # as XLA does, with the one it writes more and takes a part
        assert padded(convolved(**holes | {"padding": padding}, flip=True), IMAGES, KERNEL) == 0


def test_the_kernel_s_gradient_of_an_even_convolution_is_even():
    """Rows that a stride leaves over are padding that its gradient does without: of 64 rows, 1 + 64 + 1 - 3 is odd."""

    def of(padding):
        def step(w, x):
            return jax.grad(lambda w: jnp.sum(convolved(padding)(x, w) ** 2))(w)

        found = placed(step, KERNEL, IMAGES)
        ops = found.paths.program.ops
        (gradient,) = [i for i, op in enumerate(ops) if op.op and op.op.params.get("rhs_dilation") == (2, 2)]
        return found.copied_bytes(gradient, 0) / 4

    assert of(((1, 1), (1, 1))) == 0
    assert of(((2, 2), (0, 0))) == 0
    assert of(((0, 1), (1, 1))) == 4 * 65 * 65 * 8
    assert of(((3, 1), (1, 1))) == 4 * (3 + 64) * 65 * 8


# --- operands in another order


def experts(w, x):
    def loss(w):
        hidden = jnp.einsum("ebcm,emf->ebcf", jnp.tanh(jnp.einsum("ebcm,emf->ebcf", x, w)), w)
        return jnp.sum(hidden**2)

    return w - jax.grad(loss)(w)


@pytest.mark.parametrize(("mesh", "is_copied"), [(1, True), (8, False)])
def test_an_operand_is_copied_where_a_devices_part_of_it_lies_otherwise_than_wanted(mesh, is_copied):
    args = array(8, 256, 256), array(8, 16, 32, 256)
    pins = {"w": P("data"), "x": P("data")} if mesh > 1 else {}
    found = placed(experts, *args, mesh=mesh, **pins)
    products = [(i, op) for i, op in enumerate(found.paths.program.ops) if op.name == "dot_general"]
    copies = [found.copied_as(i, n) for i, op in products for n in range(len(op.operands))]
    assert any(copies) == is_copied


def pooled(x):
    window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
    y, back = jax.vjp(lambda x: lax.reduce_window(jnp.sin(x), -jnp.inf, lax.max, window, strides, "SAME"), x)
    return back(jnp.cos(y))


def test_the_gradient_of_a_max_pooling_keeps_the_place_of_each_result():
    images = array(4, 64, 64, 64)  # 4 x 32 x 32 x 64 results, in 4 dimensions
    assert of_ops("select_and_scatter_add", pooled, images) == [4]
    assert of_ops("select_and_scatter_add", pooled, images, mesh=4, x=P("data")) == [1]


def trained(w, v, x):
    def loss(w, v):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
        pooled = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.sum((pooled.reshape(len(x), -1) @ v) ** 2)

    dw, dv = jax.grad(loss, (0, 1))(w, v)
    return w - dw, v - dv


@pytest.mark.parametrize("gpu", ["H100-80GB", "A100-80GB"])
def test_rows_know_the_workspaces_that_products_need_in_any_case(gpu):
    """Kernels never need less, and nothing but products needs these."""
    found = placed(trained, array(3, 3, 4, 8), array(8 * 8 * 8, 16), array(4, 16, 16, 4), gpu=gpu)
    program = found.paths.program
    known = workspaces(found.paths.folded, found.device)
    assert {program.ops[i].name for i in known} == {"dot_general"}
    assert known.keys() == {i for i, op in enumerate(program.ops) if op.name == "dot_general"}
    assert all(0 < num_bytes <= found.num_bytes(i) for i, num_bytes in known.items())


def test_simulated_devices_have_no_workspaces():
    cluster = parse_cluster("1xCPU")
    step_problem = StepProblem.of(trace(product, array(64, 32), array(32, 16)), ["", ""], cluster.device)
    assert step_problem.on(cluster, (1,)).memory.workspaces == {}
