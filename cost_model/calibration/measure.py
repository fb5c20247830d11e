"""Times the probes on the attached devices.

Each probe becomes one program of many rounds. A round takes the previous round's result, so that the compiler
can neither hoist nor fold nor overlap the rounds. The program is compiled ahead, run once to warm up, and then
timed as a whole, to its end. It has enough rounds to make the host's part negligible (launching a program on the
devices takes some 0.1 ms). The time of a round is the median of several runs.

All devices run one program at once, by `shard_map` over the mesh (nodes, devices of a node). Processes that share
the devices run in lock-step. Decisions that depend on a measured time (the number of rounds, the probes to leave
out) use the first process's measurement.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.calibration.machine import AXES
from autoshard.cost_model.calibration.probes import (
    FLOAT32_BYTES,
    VECTOR_ADDS,
    CollectiveProbe,
    HostCopyProbe,
    LaunchProbe,
    Probe,
    ProductProbe,
    StreamProbe,
    Timing,
    VectorProbe,
)
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import ClusterError, first_line

_CHAIN = 32
"""Kernels in one round of the launch probe. Source: a choice of ours; more take long to compile."""

_MAX_ROUNDS = 20_000
"""Most rounds in one run: a tenth of a second for the quickest kernels."""

_MIN_REPEATS = 3
"""Timed runs of the slowest probes: the fewest whose median differs from their mean."""

_COPIES_AT_ONCE = 8
"""Most host copies in flight at once."""


@dataclass(frozen=True, slots=True)
class Effort:
    """The time to spend on measurements.

    Attributes:
      run_s: least seconds of one timed run.
      round_s: most seconds of a round; longer probes are left out.
      repeats: most timed runs per probe.
    """

    run_s: float
    round_s: float
    repeats: int


FULL = Effort(run_s=10e-3, round_s=200e-3, repeats=15)
QUICK = Effort(run_s=3e-3, round_s=100e-3, repeats=5)


def measure_all(
    probes: Sequence[Probe],
    expected: Cluster,
    mesh: Mesh,
    effort: Effort,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Timing, ...]:
    """Times the probes, without those that would take too long and those after a failed probe of their group.

    Args:
      probes: small ones first in each group, as in `probes.ladder`.
      expected: a first guess at the hardware, such as the nearest preset.
      mesh: the result of `machine.attached_mesh`.
      effort: the time to spend.
      progress: called with one line per probe.

    Raises:
      ClusterError: all probes fail, for example because another program holds the devices' memory.
    """
    failure, timings = "", list[Timing]()
    slowdowns: dict[str, float] = {}
    for i, probe in enumerate(probes):
        guess_s = probe.model_s(expected) * slowdowns.get(probe.group, 1.0)
        if guess_s > effort.round_s:
            continue
        progress(f"{probe} ({i + 1} of {len(probes)})")
        try:
            seconds = measure(probe, guess_s, mesh, effort)
        except jax.errors.JaxRuntimeError as error:  # such as a dtype that the device does not know
            failure, slowdowns[probe.group] = f"{probe}: {first_line(error)}", math.inf
            continue
        slowdowns[probe.group] = seconds / probe.model_s(expected)
        timings.append(Timing(probe, seconds))
    if not timings:
        raise ClusterError(f"nothing could be measured on these devices. The last failure: {failure}")
    return tuple(timings)


def measure(probe: Probe, guess_s: float, mesh: Mesh, effort: Effort) -> float:
    """Seconds of one round of a probe; `guess_s` is a first estimate."""
    if isinstance(probe, HostCopyProbe):
        return _host_copy_s(probe, guess_s, mesh, effort)
    with jax.enable_x64(isinstance(probe, ProductProbe) and probe.dtype == "float64"):
        program = program_of(probe, mesh)
        rounds = _rounds(effort, guess_s * program.num_units)
        run_s = _run_s(_compiled(program, rounds, mesh), effort)
        if run_s < effort.run_s / 2:
            rounds = _rounds(effort, run_s / rounds)
            run_s = _run_s(_compiled(program, rounds, mesh), effort)
    return run_s / rounds / program.num_units


# --- the programs, as one device sees them


@dataclass(frozen=True, slots=True)
class ProbeProgram:
    """A round, which maps a value and constants to the next value of equal shape.

    Attributes:
      step: (value, *constants) -> value.
      operands: shapes of the value and the constants on one device.
      num_units: units of the probe, such as launches, in a round.
      unroll: rounds in the loop's body, for rounds that the compiler cannot fuse; the loop itself costs a kernel.
    """

    step: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    num_units: int = 1
    unroll: int = 1


def _launches(probe: LaunchProbe, mesh: Mesh) -> ProbeProgram:
    def step(x: jax.Array) -> jax.Array:
        for _ in range(_CHAIN):
            x = lax.optimization_barrier(x * 0.5 + 1)
        return x

    return ProbeProgram(step, (_floats(128),), num_units=_CHAIN + 1)  # with the loop's counter


def _stream(probe: StreamProbe, mesh: Mesh) -> ProbeProgram:
    vector = _floats(probe.num_bytes // FLOAT32_BYTES)
    if probe.kind == "scale":
        return ProbeProgram(lambda x, c: c * x, (vector, _floats(1)))
    if probe.kind == "triad":
        return ProbeProgram(lambda x, a, c: a + c * x, (vector, vector, _floats(1)))
    return ProbeProgram(lambda x: _touched(x, x.sum(keepdims=True)), (vector,))


def _vector(probe: VectorProbe, mesh: Mesh) -> ProbeProgram:
    def step(x: jax.Array, c: jax.Array) -> jax.Array:
        for _ in range(VECTOR_ADDS):
            x = x * x + c
        return x

    return ProbeProgram(step, (_floats(probe.num_bytes // FLOAT32_BYTES), _floats(1)))


def _product(probe: ProductProbe, mesh: Mesh) -> ProbeProgram:
    b, m, k, n = probe.batch, probe.m, probe.k, probe.n
    dtype = jnp.dtype("float8_e4m3fn" if probe.dtype == "float8" else probe.dtype)
    shapes = ((b, m, k), (b, k, n))
    operands = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        return _touched(x, jnp.matmul(x, y, preferred_element_type=jnp.dtype(probe.result_dtype)))

    return ProbeProgram(step, operands, unroll=4)


def _collective(probe: CollectiveProbe, mesh: Mesh) -> ProbeProgram:
    axes = tuple(AXES[axis] for axis in probe.axes)
    size = math.prod(mesh.shape[axis] for axis in axes)
    num_elements = probe.num_bytes // FLOAT32_BYTES

    def step(x: jax.Array) -> jax.Array:
        if probe.kind == "all-gather":
            return _touched(x, lax.all_gather(x, axes, tiled=True))
        if probe.kind == "reduce-scatter":
            return _touched(x, lax.psum_scatter(x, axes, tiled=True))
        if probe.kind == "all-reduce":
            return lax.psum(x, axes).at[0].set(lax.axis_index(axes))
        if probe.kind == "all-to-all":
            return lax.all_to_all(x, axes, 0, 0, tiled=True).at[0].set(lax.axis_index(axes))
        ring = [(i, (i + 1) % size) for i in range(size)]
        return lax.ppermute(x, axes, ring).at[0].set(lax.axis_index(axes))

    operand = _floats(num_elements // size if probe.kind == "all-gather" else num_elements)
    return ProbeProgram(step, (operand,), unroll=4)


def _touched(x: jax.Array, result: jax.Array) -> jax.Array:
    """The next value: the last one with one element of the result in it, so that the whole result must be computed."""
    first = (0,) * x.ndim
    return x.at[first].set(lax.optimization_barrier(result)[first].astype(x.dtype))


def _floats(num_elements: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_elements,), jnp.float32)


_PROGRAMS: dict[type, Callable[[Any, Mesh], ProbeProgram]] = {
    LaunchProbe: _launches,
    StreamProbe: _stream,
    VectorProbe: _vector,
    ProductProbe: _product,
    CollectiveProbe: _collective,
}


def program_of(probe: Probe, mesh: Mesh) -> ProbeProgram:
    """The program of one round of a probe that is not a host copy."""
    return _PROGRAMS[type(probe)](probe, mesh)


# --- timing


def looped(program: ProbeProgram, rounds: int, mesh: Mesh) -> Any:
    """The rounds as one jitted function of the operands of all devices; it donates the value's buffer."""

    def local(value: Any, *constants: Any) -> Any:
        def body(_: Any, x: Any) -> Any:
            return program.step(x, *constants)

        return lax.fori_loop(0, rounds, body, value, unroll=min(program.unroll, rounds))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def _compiled(program: ProbeProgram, rounds: int, mesh: Mesh) -> Callable[[], None]:
    """A function that runs the rounds and waits for their end."""
    everywhere = NamedSharding(mesh, P(AXES))
    operands = [_values(shape, mesh.size, everywhere) for shape in program.operands]
    run = looped(program, rounds, mesh).lower(*operands).compile()
    value, *constants = operands

    def once() -> None:
        nonlocal value
        value = jax.block_until_ready(run(value, *constants))

    return once


def _values(shape: jax.ShapeDtypeStruct, num_devices: int, sharding: NamedSharding) -> jax.Array:
    """Numbers of many digits, scaled so that repeated matrix products neither overflow nor vanish.

    The operands' digits decide the power that a unit draws."""
    size = math.prod(shape.shape)
    scale = math.sqrt(2 / shape.shape[-2]) if len(shape.shape) > 1 else 1.0
    whole = (num_devices * shape.shape[0], *shape.shape[1:])

    def make() -> jax.Array:
        waves = jnp.sin(jnp.arange(num_devices * size, dtype=jnp.float32)) * scale
        return waves.reshape(whole).astype(shape.dtype)

    return jax.jit(make, out_shardings=sharding)()


def _rounds(effort: Effort, round_s: float) -> int:
    return max(1, min(_MAX_ROUNDS, math.ceil(effort.run_s / round_s)))


def _run_s(run: Callable[[], None], effort: Effort) -> float:
    """Median seconds of a run; a slow run is repeated less often."""
    run()
    first_s = _agreed(_seconds(run))
    repeats = min(effort.repeats, max(_MIN_REPEATS, math.ceil(effort.repeats * effort.run_s / first_s)))
    return _agreed(statistics.median([first_s, *(_seconds(run) for _ in range(repeats - 1))]))


def _seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _agreed(value: float) -> float:
    """The first process's value, so that all processes decide equally."""
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


def _host_copy_s(probe: HostCopyProbe, guess_s: float, mesh: Mesh, effort: Effort) -> float:
    """Seconds of one host copy. Several copies are issued at once, as there is no loop to hide the time of issuing them."""
    on_device = NamedSharding(mesh, P(AXES))
    on_host = on_device.with_memory_kind("pinned_host")
    shape = _floats(probe.num_bytes // FLOAT32_BYTES)
    value = jax.device_put(_values(shape, mesh.size, on_device), on_device if probe.to_host else on_host)
    target = on_host if probe.to_host else on_device
    copies = min(_COPIES_AT_ONCE, _rounds(effort, guess_s))

    def run() -> None:
        jax.block_until_ready([jax.device_put(value, target) for _ in range(copies)])

    return _run_s(run, effort) / copies
