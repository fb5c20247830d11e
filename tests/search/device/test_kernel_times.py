"""Times of kernels: rates by hand, and what XLA's scheduler takes them for."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.device.kernel_times import KernelTime, Times, of_collective
from autoshard.search.ir.trace import trace
from autoshard.search.step_problem import StepProblem

H100 = parse_cluster("8xH100-80GB")
HBM_BYTES_PER_S = 3.35e12


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def times_of(step, *args, mesh=(1,), strategy=0):
    """Per op of a step: its name and its kernel's time, where one that hands arrays on moves a megabyte.

    Every node takes the same strategy, as far as it has so many.
    """
    costed = StepProblem.of(trace(step, *args), (), H100.device).on(H100, mesh).memory.costed
    times = Times(costed, [strategy % len(s) for s in costed.strategies])
    return [(op.name, times.of_op(i, 1e6)) for i, op in enumerate(costed.graph.folded.program.ops)]


def time_of(name: str, step, *args, **where) -> KernelTime:
    (found,) = [time for other, time in times_of(step, *args, **where) if other == name]
    return found


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
    time = time_of("dot_general", jnp.matmul, array(size, size), array(size, size))
    assert time.seconds == pytest.approx(2 * size**3 / (0.8 * 989.5e12), rel=0.1)
    assert time.scheduled_s == time.seconds


def test_a_product_takes_what_its_strategy_takes():
    sizes = array(4096, 8192), array(8192, 4096)
    whole, *split = (
        time_of("dot_general", jnp.matmul, *sizes, mesh=(8,), strategy=n).seconds for n in range(4)
    )
    assert all(one == pytest.approx(whole / 8, rel=0.3) for one in split)


def test_each_product_has_its_own_time():
    times = times_of(lambda x, w, v: (x @ w, x @ v), array(4096, 4096), array(4096, 4096), array(4096, 8))
    large, small = (time.seconds for name, time in times if name == "dot_general")
    assert large > 3 * small


def test_a_convolution_is_guessed():
    def step(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    time = time_of("conv_general_dilated", step, array(64, 56, 56, 256), array(3, 3, 256, 256))
    assert time.seconds > 2 * 64 * 56 * 56 * 256 * 256 * 9 / 989.5e12
    assert time.scheduled_s == 10e-6


@pytest.mark.parametrize("name", ["input", "output"])
def test_what_hands_an_array_on_takes_what_it_moves(name):
    time = time_of(name, jnp.tanh, array(8, 8))
    assert time.seconds == H100.device.launch_s
    assert time.scheduled_s == pytest.approx(1e6 / HBM_BYTES_PER_S, rel=1e-3)


def test_a_fused_kernel_reads_and_writes_once():
    large = time_of("tanh", jnp.tanh, array(1 << 14, 1 << 14))
    assert large.seconds == pytest.approx(2 * 2 * 2**28 / (0.9 * HBM_BYTES_PER_S), rel=1e-3)
    assert time_of("tanh", jnp.tanh, array(8, 8)).seconds == H100.device.launch_s


def test_the_scheduler_sees_what_an_array_alone_moves_and_no_launch():
    time = time_of("tanh", jnp.tanh, array(8, 8))
    assert time.scheduled_s == pytest.approx(1e6 / HBM_BYTES_PER_S, rel=1e-3)


def test_each_fused_kernel_has_its_own_time_and_a_device_computes_its_part():
    def step(x, y):
        return jnp.tanh(x), jnp.sin(y)

    sizes = array(1 << 14, 1 << 12), array(1 << 14, 1 << 14)
    for strategy, devices in ((0, 1), (1, 8)):
        times = dict(times_of(step, *sizes, mesh=(8,), strategy=strategy))
        tanh_s = 2 * 2 * 2**26 / devices / (0.9 * HBM_BYTES_PER_S)
        assert times["tanh"].seconds == pytest.approx(tanh_s, rel=1e-3)
        assert times["sin"].seconds == pytest.approx(4 * tanh_s, rel=1e-3)


def test_ops_whose_results_one_kernel_stores_share_its_time():
    """x is read once; its sine, and the cosine of that, are written."""

    def step(x):
        y = jnp.sin(x)
        return y, jnp.cos(y)

    times = dict(times_of(step, array(1 << 14, 1 << 12)))
    assert times["sin"].seconds == times["cos"].seconds
    both_s = times["sin"].seconds + times["cos"].seconds
    assert both_s == pytest.approx(3 * 2 * 2**26 / (0.9 * HBM_BYTES_PER_S), rel=1e-3)
