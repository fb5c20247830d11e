"""The trace's side of the table: a device's kernels in one step, added up by kind, and the time that no kernel covers."""

from collections.abc import Iterable, Sequence

from autoshard.traces.kernel import TracedKernel
from autoshard.traces.kernel_names import OTHER_PROGRAMS, class_of, computes
from autoshard.traces.predictions import COMPUTATION, EXPOSED, IDLE, Time
from autoshard.traces.steps import TracedStep


def parts(step: TracedStep, module: str) -> dict[str, float]:
    """The parts of a step that follow one another."""
    computing = [k for k in step.kernels if computes(kind_of(k, module))]
    computing_s, busy_s = covered_s(computing, step), covered_s(step.kernels, step)
    return {COMPUTATION: computing_s, EXPOSED: busy_s - computing_s, IDLE: step.seconds - busy_s}


def kinds(step: TracedStep, module: str) -> dict[str, Time]:
    """The kernels of a step by kind."""
    found = dict[str, Time]()
    for kernel in step.kernels:
        so_far = found.get(kind := kind_of(kernel, module), Time(0.0))
        found[kind] = Time(so_far.seconds + kernel.end_s - kernel.start_s, so_far.runs + 1)
    return found


def kind_of(kernel: TracedKernel, module: str) -> str:
    """The class of a kernel of the step's program; kernels of other programs are one."""
    is_other = module and kernel.module not in (module, "")
    return OTHER_PROGRAMS if is_other else class_of(kernel)


def covered_s(kernels: Iterable[TracedKernel], step: TracedStep) -> float:
    """Seconds of a step in which at least one of the kernels runs."""
    total_s, until_s = 0.0, step.start_s
    for kernel in kernels:  # in time
        total_s += max(0.0, min(kernel.end_s, step.end_s) - max(kernel.start_s, until_s))
        until_s = max(until_s, kernel.end_s)
    return total_s


def mean(found: Sequence[dict[str, Time]]) -> dict[str, Time]:
    """The mean of devices."""
    names = dict.fromkeys(name for one in found for name in one)
    return {
        name: Time(
            sum(one[name].seconds for one in found if name in one) / len(found),
            sum(one[name].runs for one in found if name in one) / len(found),
        )
        for name in names
    }
