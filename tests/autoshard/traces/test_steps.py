"""Steps of a device: a marker begins each, wherever the trace begins and ends."""

from hypothesis import given
from hypothesis import strategies as st

from autoshard.traces.kernel import TracedKernel
from autoshard.traces.steps import steps

LOOP = ("enter", *("body", "body", "sum") * 3, "loss", "update")
"""The kernels of a step with a loop of three runs, one a second, and a pause of a second behind them."""

PERIOD = len(LOOP) + 1


def run(num_steps, skipped=0, left_out=0):
    """The kernels of steps, without some at either end of the trace."""
    kernels = [
        TracedKernel("gpu", name, at + PERIOD * n, at + PERIOD * n + 1.0)
        for n in range(num_steps)
        for at, name in enumerate(LOOP)
    ]
    return kernels[skipped : len(kernels) - left_out]


@given(st.integers(4, 7), st.integers(0, len(LOOP) - 1), st.integers(0, len(LOOP) - 1))
def test_steps_are_whole_wherever_the_trace_begins_and_ends(num_steps, skipped, left_out):
    kernels = run(num_steps, skipped, left_out)
    found = steps(kernels, kernels)
    assert len(found) >= num_steps - 3
    for step in found:
        assert step.seconds == PERIOD
        assert sorted(kernel.name for kernel in step.kernels) == sorted(LOOP)


def test_a_trace_of_one_step_lasts_from_its_first_kernel_to_its_last():
    (step,) = steps(run(1), run(1))
    assert len(step.kernels) == len(LOOP)
    assert abs(step.seconds - len(LOOP)) < 1e-9
