"""Times of kernels: rates by hand, and what XLA's scheduler takes them for."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from cost_model.collectives import MeshModel
from cost_model.hardware import parse_cluster
from search.device.kernel_times import KernelTime, Times, of_collective
from search.ir.trace import trace
from search.mesh_problem import StepProblem

H100 = parse_cluster("8xH100-80GB")
HBM_BYTES_PER_S = 3.35e12


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def of_ops(step, *args, mesh=(1,), strategy=0):
    """By primitive: its kernel's time, where one moves a megabyte and every node takes the same strategy."""
    graph = StepProblem.of(trace(step, *args), (), H100.device)
    costed = graph.on(H100, mesh).memory.costed
    times = Times(costed, [strategy % len(s) for s in costed.strategies])
    folded = costed.graph.folded
    return {folded.op(k).name: times.of_op(k, 1e6) for k in range(len(folded.members))}


def test_runs_take_as_often_as_long():
    assert KernelTime(2.0, 3.0) * 4 == KernelTime(8.0, 12.0)


def test_a_collective_between_nodes_may_hide_behind_anything():
    mesh = MeshModel(parse_cluster("16xH100-80GB"), (2, 8))
    inside, between = (of_collective(mesh, "all-gather", (axis,), 1e6) for axis in (1, 0))
    assert inside.seconds == mesh.time_s("all-gather", (1,), 1e6)
    assert inside.scheduled_s == pytest.approx(1.3 * inside.seconds)
    assert between.seconds == mesh.time_s("all-gather", (0,), 1e6)
    assert between.scheduled_s == 5e-3


def test_a_product_is_known_to_the_scheduler():
    size = 16384
    time = of_ops(lambda x, w: x @ w, array(size, size), array(size, size))["dot_general"]
    assert time.seconds == pytest.approx(2 * size**3 / (0.8 * 989.5e12), rel=0.1)
    assert time.scheduled_s == time.seconds


def test_a_product_takes_what_its_strategy_takes():
    sizes = array(4096, 8192), array(8192, 4096)
    whole, *split = (
        of_ops(lambda x, w: x @ w, *sizes, mesh=(8,), strategy=n)["dot_general"].seconds for n in range(4)
    )
    assert all(one == pytest.approx(whole / 8, rel=0.3) for one in split)


def test_each_product_has_its_own_time():
    def step(x, w, v):
        return x @ w, x @ v

    graph = StepProblem.of(trace(step, array(4096, 4096), array(4096, 4096), array(4096, 8)), (), H100.device)
    costed = graph.on(H100, (1,)).memory.costed
    folded, times = costed.graph.folded, Times(costed, [0] * len(costed.strategies))
    products = [k for k in range(len(folded.members)) if folded.is_heavy[k]]
    small, large = sorted(times.of_op(k, 0.0).seconds for k in products)
    assert large > 3 * small


def test_a_convolution_is_guessed():
    def step(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    time = of_ops(step, array(64, 56, 56, 256), array(3, 3, 256, 256))["conv_general_dilated"]
    assert time.seconds > 2 * 64 * 56 * 56 * 256 * 256 * 9 / 989.5e12
    assert time.scheduled_s == 10e-6


@pytest.mark.parametrize("name", ["tanh", "output", "input"])
def test_what_only_moves_takes_the_memory_s_time_and_its_launch_is_not_seen(name):
    cluster = StepProblem.of(trace(jnp.tanh, array(8, 8)), (), H100.device).on(H100, (1,))
    costed = cluster.memory.costed
    folded, times = costed.graph.folded, Times(costed, [0] * len(costed.strategies))
    (op_class,) = [k for k in range(len(folded.members)) if folded.op(k).name == name]
    for num_bytes in (1e9, 1e8):
        time = times.of_op(op_class, num_bytes)
        assert time.seconds == pytest.approx(num_bytes / (0.9 * HBM_BYTES_PER_S), rel=1e-3)
        assert time.scheduled_s == pytest.approx(num_bytes / HBM_BYTES_PER_S, rel=1e-3)
    nothing = times.of_op(op_class, 8.0)
    assert (nothing.seconds, nothing.scheduled_s) == (H100.device.launch_s, pytest.approx(0.0, abs=1e-9))
