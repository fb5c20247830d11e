"""A plan as a file of plain JAX: the choice of its form, and the sentences that say how far it holds."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.units import format_bytes, format_mesh
from autoshard.cost_model.whole_file import write_whole
from autoshard.cost_model.xla.compiler import can_compile_for, check, options_for_cap
from autoshard.cost_model.xla.gpu_targets import attempts, scheduler_options
from autoshard.cost_model.xla.plugin import is_there
from autoshard.cost_model.xla.process import Compiler
from autoshard.cost_model.xla.stats import CompiledStats
from autoshard.ejection.inside import constraints
from autoshard.ejection.layout import ProgramLayout, arguments
from autoshard.ejection.proof import Beside, Oracle, loaded
from autoshard.ejection.shardings_file import shardings_file
from autoshard.ejection.whole_files import printed, usage, wrapper_file, written_file
from autoshard.ejection.written import PrintedProgram
from autoshard.executors.jit import Program
from autoshard.options import ALWAYS, NEVER
from autoshard.progress import Progress
from autoshard.search.ir.graph import Step
from autoshard.search.ir.sharding import OperandReshard, StepSharding
from autoshard.search.ir.spec import partition_spec
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from autoshard.verification.records import Footprint, Moved

WRAPPER, WRITTEN, SHARDINGS = "wrapper", "written", "shardings"
"""The forms of a file."""

WRAPPER_FORM = (
    "The step is the function for one device, with the plan's shardings of arguments and results. XLA's partitioner finds "
    "those of the values inside."
)
WRITTEN_FORM = (
    "The step is the program that the plan decides, with its gradients, one call of JAX for each operation. `constrained` "
    "names the sharding of a value."
)

STORED = " Its long constants are in the `.npz` of its name beside it."

TRIED = "`jax.jit` of the function for one device with these shardings alone differs:"

Constants = Mapping[str, np.ndarray]
"""The arrays in a file's `.npz`, by name."""

Compare = Callable[[str, Constants], Beside]
"""Compiles the step of a file's text beside the plan's program."""

DIFFERS = 1
"""Exit status if the file's step is not the plan's program."""


@dataclass(frozen=True, slots=True)
class Ejected:
    """A plan as a file of plain JAX.

    Attributes:
      text: the file.
      form: `wrapper`, the user's own step, jitted with the plan's shardings; `written`, the plan's program, printed; or
        `shardings`, the arguments' specs alone.
      differences: what the file's step does otherwise than the plan's program, a sentence each.
      planned: the compiled footprint of the plan's program; None if XLA's GPU compiler was not asked.
      compiled: the compiled footprint of the file's step; None if the compiler was not asked.
      collectives: each kind over each set of axes, as compiled: of the plan's program (`predicted`) and of the file's step.
      tried: the differences of the wrapper, if it was compiled and not taken.
      constants: by name, the long arrays that the file reads from the `.npz` beside it.
    """

    text: str
    form: str
    differences: tuple[str, ...] = ()
    planned: Footprint | None = None
    compiled: Footprint | None = None
    collectives: tuple[Moved, ...] = ()
    tried: tuple[str, ...] = ()
    constants: Constants = field(default_factory=dict[str, np.ndarray])

    @property
    def is_compiled(self) -> bool:
        """Whether XLA's GPU compiler has compiled both."""
        return self.compiled is not None

    @property
    def exit_status(self) -> int:
        """0, or 1 if the file's step differs from the plan's program."""
        return DIFFERS if self.differences else 0

    @property
    def verdict(self) -> str:
        """How far the file's step is the plan's program, in a clause."""
        if self.form == SHARDINGS:
            return "the arguments' shardings"
        if self.differences:
            return f"the {self.form} form, which differs from the plan's program"
        if self.is_compiled:
            return (
                f"the {self.form} form, which compiles to the collectives and the peak of the plan's program"
            )
        return f"the {self.form} form, not compiled"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, and beside it the `.npz` with its long constants, if it has any.

        Raises:
          InputError: the path cannot be written.
        """
        write_whole(Path(path), self.text, "the ejected step")
        if self.constants:
            arrays: dict[str, Any] = dict(self.constants)
            np.savez(Path(path).with_suffix(".npz"), **arrays)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, eq=False)
class Ejection:
    """A plan on its step, ready to be ejected.

    Attributes:
      found: the plan on its step.
      program: its program, over an abstract mesh.
      step: the user's function, of positional arguments.
      args: the shapes of its arguments, NNX objects among them.
      names: of its arguments.
      cluster: the plan's cluster.
    """

    found: Any
    program: Program
    step: Any
    args: Sequence[Any]
    names: Sequence[str]
    cluster: Cluster

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    def shardings(self) -> Ejected:
        """The arguments' specs alone."""
        trees = arguments(self.program, self.names)
        return Ejected(shardings_file(self.plan, dict(self.program.mesh.shape), trees), SHARDINGS)

    def whole(self, form: str | None, oracle: Oracle | None) -> Ejected:
        """The whole step.

        Args:
          form: `wrapper` or `written`; None for the wrapper if it compiles to the plan's program, and otherwise for the
            written program, if each of its equations has a source.
          oracle: the compiler; None to compile nothing.

        Raises:
          InputError: the written form is asked for, and an equation has no source.
        """
        layout = ProgramLayout.of(self.program, self.names)
        compare = None if oracle is None else self._comparison(oracle)
        if form == WRAPPER:
            return self._wrapper(layout, compare)
        tried: tuple[str, ...] = ()
        if form is None and compare is not None and not list(_inner_decisions(self.plan)):
            wrapper = self._wrapper(layout, compare)
            if not wrapper.differences:
                return wrapper
            tried = wrapper.differences
        program = printed(layout)
        if not program.fault:
            return self._written(layout, program, compare, tried)
        if form == WRITTEN:
            raise InputError(f"the plan's program cannot be written: {program.fault}. Take form={WRAPPER!r}")
        return self._wrapper(layout, compare, f"the plan's program cannot be written: {program.fault}")

    def _written(
        self, layout: ProgramLayout, program: PrintedProgram, compare: Compare | None, tried: Sequence[str]
    ) -> Ejected:
        file = partial(written_file, layout, program, self.gpu_options)
        sentence = f"{WRITTEN_FORM}{STORED * bool(program.stored)}"
        draft = _Draft(WRITTEN, file, sentence, tried=tuple(tried), constants=program.stored)
        return self._judged(draft, layout, compare)

    def _wrapper(self, layout: ProgramLayout, compare: Compare | None, *unsaid: str) -> Ejected:
        is_one = isinstance(self.found, SearchResult)
        read = _read(self.found.step, self.found.sharding, layout) if is_one else {}
        file = partial(wrapper_file, layout, read, self.gpu_options)
        inside = constraints(self.found.step, self.found.sharding) if is_one else []
        unplaced = (*unsaid, *_inner_decisions(self.plan))
        return self._judged(_Draft(WRAPPER, file, WRAPPER_FORM, unplaced, tuple(inside)), layout, compare)

    def _judged(self, draft: "_Draft", layout: ProgramLayout, compare: Compare | None) -> Ejected:
        """A file whose docstring says how it differs from the plan's program."""
        beside = None if compare is None else compare(draft.file([]), draft.constants)
        compiled = () if beside is None else beside.differences
        differences = (*draft.differences, *_donations(layout), *compiled)
        mesh = format_mesh(tuple(layout.mesh.values()))
        paragraphs = (
            f"`{layout.step}` on {self.cluster.name}, a mesh of {mesh} devices.",
            usage(layout),
            draft.sentence,
            *([_listed(TRIED, draft.tried)] if draft.tried else []),
            *(_remedies(differences, draft.inside) if differences else [self._judgement(beside)]),
            f"Ejected by autoshard from the plan with the fingerprint {self.plan.fingerprint}.",
        )
        ejected = Ejected(
            draft.file(paragraphs), draft.form, differences, tried=draft.tried, constants=draft.constants
        )
        if beside is None:
            return ejected
        planned, compiled = beside.footprints
        return replace(ejected, planned=planned, compiled=compiled, collectives=beside.collectives)

    def _judgement(self, beside: Beside | None) -> str:
        """A sentence on a file's step without known differences."""
        if beside is None:
            return f"It was not compiled beside the plan's program for {self.cluster.name}."
        return (
            f"Compiled for {self.cluster.name}, it has the collectives and the peak memory of the plan's program, "
            f"{format_bytes(beside.planned.peak_bytes)} a device."
        )

    def _comparison(self, oracle: Oracle) -> Compare:
        """A function that compiles a file's step beside the plan's program, which it compiles once."""
        planned: list[CompiledStats] = []

        def compare(text: str, constants: Constants) -> Beside:
            ours = [(self.program.fn, self.program.args)] * (not planned)
            programs = [*ours, loaded(text, constants, self.step, self.args, self.program)]
            *first, ejected = oracle.stats(programs, self.program.resting_bytes)
            planned.extend(first)
            return Beside(planned[0], ejected)

        return compare

    @property
    def gpu_options(self) -> dict[str, str]:
        """The compiler's options for the program on GPUs."""
        device = self.cluster.device
        if device.name == "CPU":
            return {}
        plan, resting_bytes = self.plan, self.program.resting_bytes
        for_cap = options_for_cap(plan.memory_bytes, resting_bytes, device.memory_bytes, plan.overlap)
        return {**for_cap, **scheduler_options(device.name), **self._as_planned}

    @property
    def _as_planned(self) -> Mapping[str, str]:
        """The plan's options of the compiler."""
        return attempts(self.plan.overlap)[0]

    def oracle(self, verify: str | None, compiler: Compiler, progress: Progress) -> Oracle | None:
        """The compiler, or None if it is not to be asked.

        Args:
          verify: "always", "never", or "auto" to ask it if it is installed.
          compiler: how to ask it.
          progress: called with a line per stage.

        Raises:
          InputError: it is to be asked, and does not know the cluster's devices.
        """
        if verify == ALWAYS:
            check(self.cluster, compiler.target_config)
        if verify == NEVER or not can_compile_for(self.cluster, compiler.target_config):
            return None
        if verify != ALWAYS and not is_there():
            return None
        asked = compiler.with_options(self._as_planned)
        mesh, plan = dict(self.program.mesh.shape), self.plan
        return Oracle(self.cluster, plan.memory_bytes, plan.overlap, mesh, asked, progress)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A file before it is compiled.

    Attributes:
      form: its form.
      file: makes its text from the paragraphs of its docstring.
      sentence: a paragraph on its form.
      differences: those that are known without the compiler.
      inside: the plan's shardings of values inside, which the file does not impose.
      tried: the differences of the wrapper that was not taken.
      constants: the arrays that it reads from the `.npz` beside it.
    """

    form: str
    file: Callable[[Sequence[str]], str]
    sentence: str
    differences: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    constants: Constants = field(default_factory=dict[str, np.ndarray])


def _remedies(differences: Sequence[str], inside: Sequence[str]) -> Iterator[str]:
    """Paragraphs on the differences, and on constraints that the user may write into the step."""
    yield _listed("It differs from the plan's program:", differences)
    if inside:
        yield _listed(
            "In the plan, the step's products lie so; `with_sharding_constraint` there comes nearer:", inside
        )


def _listed(head: str, items: Sequence[str]) -> str:
    return "\n".join([head, "", *(f"  * {item}" for item in items)])


def _donations(layout: ProgramLayout) -> Iterator[str]:
    """A sentence on arguments of which the plan's program donates a part."""
    if layout.partly_donated:
        yield (
            f"the plan's program donates some arrays of {', '.join(layout.partly_donated)}, and `jax.jit` donates whole "
            "arguments only"
        )


def _inner_decisions(plan: Plan) -> Iterator[str]:
    """The decisions for which a wrapper has no place, a sentence each."""
    if plan.is_pipeline:
        yield f"the plan is a pipeline of {len(plan.stages)} stages"
    if plan.microbatches > 1:
        yield f"the plan goes through the batch in {plan.microbatches} microbatches"
    if plan.retention:
        yield f"the plan recomputes or offloads residuals of {len(plan.retention)} kinds of operations"


def _read(
    step: Step, sharding: StepSharding, layout: ProgramLayout
) -> Mapping[str, Mapping[str, PartitionSpec]]:
    """Per argument and path, the spec in which an array is first read, if not as it rests."""
    first: dict[int, tuple[PartitionSpec, ...]] = {}
    for i, op in enumerate(step.graph.ops):
        for n, v in enumerate(op.inputs):
            if isinstance(v, int):
                reshard = sharding.reshards.get(("operand", (i,), n), OperandReshard(()))
                constrained = (s.after for s in reshard.path if s.is_constrained)
                first.setdefault(v, tuple(partition_spec(s, sharding.axis_names) for s in constrained))
    leaves = [(tree.name, path) for tree in layout.arguments for path in tree.leaves]
    found: dict[str, dict[str, PartitionSpec]] = {}
    for v, (name, path) in zip(step.graph.inputs, leaves, strict=True):
        if specs := first.get(v):
            found.setdefault(name, {})[path] = specs[-1]
    return found
