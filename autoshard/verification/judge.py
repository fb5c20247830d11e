"""Verification by the compiler, and the search that tightens its limit until the compiled program fits.

A program is lowered here, over an abstract mesh, and compiled in a process of its own. The compiler gets the description
of a device whose memory makes its scheduler aim at the plan's cap.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import CompilerError, InputError, first_line
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_seconds
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla._jax import lower, module_bytes
from autoshard.cost_model.xla.gpu_targets import attempts
from autoshard.cost_model.xla.plugin import provided
from autoshard.cost_model.xla.process import Compiler, compile_apart
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.executors import jit
from autoshard.executors.jit import Program
from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Step, walk
from autoshard.search.result import SearchResult
from autoshard.search.stopwatch import Stopwatch
from autoshard.verification.extrapolation import extrapolated, is_long, kept_blocks, omitted, to_compile
from autoshard.verification.pipeline_result import PipelineVerification
from autoshard.verification.records import Extent
from autoshard.verification.result import Verification, compared
from autoshard.verification.shorten import ShortPrograms

Progress = Callable[[str], None]
Proof = Verification | PipelineVerification

_CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})
"""JAX's primitives that call Python."""


@dataclass(frozen=True, slots=True)
class CompilerVerifier:
    """Verifies plans by the compiler.

    Attributes:
      cluster: the cluster to compile for.
      compiler: how to ask the compiler.
      progress: called with one line per stage of the verification, and every second while the compiler works.
    """

    cluster: AnyCluster
    compiler: Compiler
    progress: Progress

    def __post_init__(self) -> None:
        for group in self.cluster.groups:
            compiler.check(group, self.compiler.target_config)
        provided(self.progress)

    @property
    def _cluster(self) -> Cluster:
        """The cluster of a plan of one program; it has one kind of node."""
        (cluster,) = self.cluster.groups
        return cluster

    def verified(self, found: SearchResult, full: bool = False) -> Verification:
        """A plan's predictions beside the statistics of its compiled program.

        Args:
          full: whether to compile all blocks, however many are alike.
        """

        def compiled(besides: Mapping[str, str]) -> Verification:
            return replace(self, compiler=self.compiler.with_options(besides))._compiled(found, full)

        return first_fitting(compiled, lambda proof: proof, found.plan.overlap)

    def _compiled(self, found: SearchResult, full: bool) -> Verification:
        step, watch = found.step, Stopwatch(found.step.trace_s)
        tell = telling(self.progress, "", watch)
        if full or not is_long(step):
            extent = Extent()
        else:
            tell("shortening")
            cut = to_compile(step, found.sharding)
            watch.lap("shorten")
            if isinstance(cut, ShortPrograms):
                return self._extrapolated(step, found, cut, watch)
            extent = cut
        program = jit.build(step, found.sharding, None)
        plan = found.plan
        stats = self.stats(step, program, plan.memory_bytes, watch, tell, plan.overlap)
        return compared(plan, self._cluster, stats, watch.seconds, extent)

    def _extrapolated(
        self, step: Step, found: SearchResult, cut: ShortPrograms, watch: Stopwatch
    ) -> Verification:
        """Verifies a plan by shortened programs. The cap of each leaves the scheduler as much memory as the whole
        program's."""
        programs, kept = (cut.short, *cut.less), kept_blocks(cut)
        whole_bytes = _argument_bytes(jit.build(step, found.sharding, None))
        stats = []
        for i, ((short, sharding), omitted_bytes) in enumerate(
            zip(programs, omitted(found, cut), strict=True)
        ):
            program = jit.build(short, sharding, None)
            arguments_bytes = whole_bytes - _argument_bytes(program)
            which = f"{i + 1} of {len(programs)} ({kept[i]} of {cut.num_blocks} blocks)"
            tell = telling(self.progress, which, watch)
            cap_bytes = found.plan.memory_bytes - arguments_bytes - omitted_bytes
            stats.append(self.stats(short, program, cap_bytes, watch, tell, found.plan.overlap))
        whole, extent = extrapolated(cut, stats[0], stats[1:]), Extent(kept[0], cut.num_blocks)
        return compared(found.plan, self._cluster, whole, watch.seconds, extent)

    def stats(
        self,
        step: Step,
        program: Program,
        cap_bytes: int,
        watch: Stopwatch,
        tell: Progress,
        overlap: float = 1.0,
    ) -> CompiledStats:
        """Lowers and compiles one program of a step for all devices, and reads its memory and traffic.

        Args:
          overlap: the plan's share of the scheduler's budget.

        Raises:
          CompilerError: it cannot be lowered without devices, or the compiler failed on it.
        """
        tell("lowering")
        module = module_bytes(lowered(step, program))
        memory_bytes = compiler.memory_for_cap(cap_bytes, program.resting_bytes, overlap)
        watch.lap("lower")
        compiled = compile_apart(module, self._cluster, memory_bytes, self.compiler, tell)
        stats = CompiledStats.of(compiled, dict(program.mesh.shape))
        watch.lap("compile")
        return stats


def first_fitting[Made](
    compiled: Callable[[Mapping[str, str]], Made],
    proof_of: Callable[[Made], Verification],
    overlap: float,
) -> Made:
    """A program compiled as planned; or with other options, if only these keep it to its cap. If none does, the program with
    the smallest peak: its overshoot is what a plan has to save.

    Args:
      compiled: makes and compiles the program with the given options of the compiler.
      proof_of: the verification of a compiled program.
      overlap: the plan's share of the scheduler's budget.
    """
    tried = list[Made]()
    for options in attempts(overlap):
        tried.append(compiled(options))
        if proof_of(tried[-1]).fits:
            return tried[-1]
    return min(tried, key=lambda made: proof_of(made).compiled.peak_bytes)


def verified_here(found: SearchResult, cluster: Cluster, program: Program) -> Verification:
    """A plan's predictions beside the statistics of its program, compiled on the devices that it is built for. JAX
    compiles it once, for this call and for the first step."""
    watch = Stopwatch(found.step.trace_s)
    with _jax.no_mesh():
        here = program.fn.lower(*program.args)
    watch.lap("lower")
    compiled = compiler.read(here.compile())
    watch.lap("compile")
    stats = CompiledStats.of(compiled, found.plan.decisions.mesh)
    return compared(found.plan, cluster, stats, watch.seconds, Extent())


def target_config_text(given: str | os.PathLike[str] | None) -> str | None:
    """XLA's description of a GPU: the given text, or the text of the file with this name.

    Raises:
      InputError: the file cannot be read.
    """
    if given is None or (isinstance(given, str) and "{" in given):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"the target config {os.fspath(given)} cannot be read: {e}") from e


def lowered(step: Step, program: Program) -> Any:
    """A program of a step, lowered for GPUs.

    Raises:
      CompilerError: it cannot be lowered without devices.
    """
    try:
        return lower(program.fn, program.args)
    except (ValueError, NotImplementedError) as e:
        callback = next(
            (op for _, graph in walk(step.graph) for op in graph.ops if op.name in _CALLBACKS), None
        )
        if callback is not None:
            raise CompilerError(
                f"{callback.name} ({callback.source}) calls Python on the host, which cannot be compiled without the "
                "devices. Verify the step without it"
            ) from e
        raise CompilerError(f"{step.name} cannot be lowered for GPUs: {first_line(e)}") from e


def _argument_bytes(program: Program) -> int:
    return sum(map(jit.shard_bytes, jax.tree.leaves(program.args)))


def telling(progress: Progress, which: str, watch: Stopwatch) -> Progress:
    """Progress lines that also name the program, and the seconds of each part so far."""

    def tell(line: str) -> None:
        verb, _, elapsed = line.partition(" ")
        done = (f"{part} {format_seconds(s)}" for part, s in watch.seconds.items())
        progress(", ".join((" ".join(filter(None, (verb, which, elapsed))), *done)))

    return tell
