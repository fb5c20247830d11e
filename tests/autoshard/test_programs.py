"""On GPUs a plan's program is compiled before it runs; here simulated devices stand in for them, and XLA:CPU's peaks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard import InfeasibleError, compiled_peaks, programs
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla.gpu_targets import AS_PLANNED, ATTEMPTS, UNHIDDEN
from autoshard.executors import jit
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from tests.search.chain import chain

pytestmark = pytest.mark.devices

MIB = 1 << 20
SHAPES = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4, jax.ShapeDtypeStruct((4096, 512), jnp.float32)


@pytest.fixture
def on_gpus(monkeypatch):
    monkeypatch.setattr(programs, "_are_gpus", lambda devices: True)


def searched(cap_bytes):
    cluster = parse_cluster("8xH100-80GB")
    options = Options(cap_bytes, (8,), remat="never", microbatches=1)
    built = programs.searched(trace(chain, *SHAPES), cluster, options, jax.devices(), lambda: None)
    return built.found, built.program


def compiled_peak(program):
    return compiler.read(program.fn.lower(*program.args).compile()).peak_bytes


@pytest.fixture(scope="module")
def roomy():
    """As predicted and as compiled, without a cap to speak of."""
    found, program = searched(1 << 34)
    return found.plan.estimates.peak_bytes, compiled_peak(program)


@pytest.fixture
def peaks(monkeypatch):
    """Of what is compiled, where the first programs hold more than they do: so many, and what all came to."""
    read, made, num_larger = compiler.read, list[int](), [0]

    def holding_more(executable):
        found = read(executable)
        if len(made) < num_larger[0]:
            found = replace(found, temporary_bytes=int(1.5 * found.temporary_bytes))
        made.append(found.peak_bytes)
        return found

    monkeypatch.setattr(compiler, "read", holding_more)
    return num_larger, made


@pytest.fixture
def besides(monkeypatch):
    """What the compiler is told of each program that not all are told."""
    build, told, names = jit.build, list[dict[str, str]](), {name for one in ATTEMPTS for name in one}

    def telling(step, sharding, devices, on_retrace, options, given_up):
        told.append({name: value for name, value in options(0).items() if name in names})
        return build(step, sharding, devices, on_retrace, options, given_up)

    monkeypatch.setattr(jit, "build", telling)
    return told


@pytest.mark.usefixtures("on_gpus")
def test_a_plan_that_compiles_to_more_than_the_cap_is_searched_again(roomy, peaks, besides):
    num_larger, made = peaks
    num_larger[0], cap_bytes = 3, roomy[0]
    with pytest.warns(autoshard.AutoshardWarning, match=r"above the cap .* it was searched again"):
        found, program = searched(cap_bytes)
    assert min(made[:3]) > cap_bytes >= compiled_peak(program) == found.plan.estimates.compiled_peak_bytes
    assert found.plan.memory_bytes == cap_bytes
    assert besides[:3] == [*ATTEMPTS]
    assert all(told == AS_PLANNED for told in besides[3:])


@pytest.mark.usefixtures("on_gpus")
@pytest.mark.parametrize("num_attempts", [2, 3])
def test_where_only_so_the_program_keeps_to_the_cap_it_is_compiled_otherwise(
    roomy, peaks, besides, num_attempts
):
    num_larger, made = peaks
    num_larger[0], cap_bytes = num_attempts - 1, int(1.05 * max(roomy))
    _, program = searched(cap_bytes)
    assert min(made[:-1]) > cap_bytes >= made[-1] == compiled_peak(program)
    assert besides == [*ATTEMPTS[:num_attempts]]


@pytest.mark.usefixtures("on_gpus")
def test_a_plan_found_before_is_compiled_likewise(roomy, peaks, besides):
    found, _ = searched(int(1.05 * max(roomy)))
    num_larger, made = peaks
    num_larger[0] = len(made) + 1
    besides.clear()
    programs.applied(found, parse_cluster("8xH100-80GB"), jax.devices(), lambda: None, frozenset())
    assert besides == [AS_PLANNED, UNHIDDEN]


@pytest.mark.usefixtures("on_gpus")
def test_the_program_of_a_plan_without_overlap_turns_the_scheduler_off(roomy, besides):
    found, _ = searched(int(1.05 * max(roomy)))
    besides.clear()
    without = found.with_plan(overlap=0.0)
    for one in (found, without):
        programs.built(one, parse_cluster("8xH100-80GB"), jax.devices())
    assert besides == [AS_PLANNED, UNHIDDEN]


@pytest.mark.usefixtures("on_gpus")
def test_a_plan_that_compiles_to_the_cap_is_kept(roomy):
    found, program = searched(int(1.05 * max(roomy)))
    assert compiled_peak(program) == roomy[1]
    assert found.plan.search_s["compiler"] > 0


@pytest.mark.usefixtures("on_gpus")
def test_the_program_is_that_of_the_plan_and_not_the_last_that_was_compiled(monkeypatch, roomy):
    def kept(search, judge, cap_bytes, progress, *_, **__):
        if judge is None:
            return search(cap_bytes, None, progress)
        first, last = (search(limit_bytes, None, progress) for limit_bytes in (cap_bytes, roomy[0] - 1))
        judge(first, None), judge(last, None)
        return first

    monkeypatch.setattr(compiled_peaks, "kept", kept)
    found, program = searched(1 << 34)
    assert found.plan.estimates.peak_bytes == roomy[0]
    assert compiled_peak(program) == roomy[1]


def test_the_scheduler_is_told_of_the_cap():
    """It plans with a share of the device's memory, less what rests there, times the factor: that must be a little less than
    the cap's room."""
    cap_bytes, resting_bytes, device_bytes = 40 << 30, 12 << 30, 80 << 30
    (factor,) = compiler.options_for_cap(cap_bytes, resting_bytes, device_bytes).values()
    room_bytes = (0.8 * device_bytes - resting_bytes) * int(factor) / 100
    assert room_bytes == pytest.approx(0.9 * (cap_bytes - resting_bytes), rel=0.02)
    (half,) = compiler.options_for_cap(cap_bytes, resting_bytes, device_bytes, overlap=0.5).values()
    assert int(half) == int(factor) // 2


def test_a_cap_that_is_the_devices_own_changes_nothing():
    assert compiler.options_for_cap(78 << 30, 12 << 30, 80 << 30) == {}
    assert compiler.options_for_cap(78 << 30, 79 << 30, 80 << 30) == {}


def test_running_out_of_memory_says_what_to_do():
    found, _ = searched(1 << 34)
    with (
        pytest.raises(
            InfeasibleError, match=r"chain ran out of device memory .* cap of 16 GiB.*lower memory="
        ),
        programs.room_for(found.plan),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")


def test_other_failures_are_left_as_they_are():
    found, _ = searched(1 << 34)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), programs.room_for(found.plan):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
