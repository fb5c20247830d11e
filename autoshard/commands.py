"""The commands of the command line that need JAX, each a function from its options to an exit status."""

import argparse
import contextlib
import functools
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard import api, terminal
from autoshard.calibrate import calibrate as measured
from autoshard.cost_model.errors import InputError, PlanError, first_line
from autoshard.cost_model.hardware import parse_hardware
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.whole_file import destination, write_whole
from autoshard.display import say, shown
from autoshard.no_device import use_no_device as use_no_device
from autoshard.options import Options, among
from autoshard.pipeline_request import are_allowed
from autoshard.planning import limit_bytes
from autoshard.progress import Progress
from autoshard.search.ir.spec import read_partition_spec
from autoshard.search.pipeline import timeline
from autoshard.search.plan import profile_trace
from autoshard.search.plan.json_file import text_of
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.spec_check import check_specs
from autoshard.sweep.command import swept
from autoshard.target import target
from autoshard.verification.judge import target_config_text

PLANS_DIFFER = 1
"""The exit status of `show --against --exit-code` for plans that differ."""


def search(options: argparse.Namespace) -> int:
    """Plans a step."""
    if options.out is not None:
        _check_writable(options.out, "--out")
    keywords = among(vars(options)) | {"pin": _pins(options.pin)}
    keywords["cluster"] = _checked(keywords)
    with shown() as progress, _loaded(options, progress) as (step, args):
        searched = functools.partial(api.search, step, *args, **keywords, progress=progress)
        plan = terminal.interruptible(searched)
    if options.out is not None:
        plan.save(options.out)
    return _print(plan, options.json)


def _checked(keywords: Mapping[str, Any]) -> AnyCluster:
    """The cluster, once all options that need no step are checked: the step may load and be traced slowly."""
    hardware, asked = parse_hardware(keywords["cluster"]), Options.of(keywords)
    limit_bytes(hardware, asked)
    are_allowed(asked)
    target_config_text(asked.target_config)
    return hardware


@contextlib.contextmanager
def _loaded(
    options: argparse.Namespace, progress: Progress = lambda line: None
) -> Generator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A context in which a command has its step and the step's arguments. All that they print goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        progress(f"loading {options.target}")
        with target(options.target) as loaded, terminal.native_stdout_dropped():
            yield loaded


def _compiling(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """The keywords of calls that compile a plan."""
    return {
        "plan": options.plan,
        "state": options.state,
        "target_config": options.target_config,
        "timeout_s": options.timeout,
        "progress": progress,
    }


def what_if(options: argparse.Namespace) -> int:
    """Plans a step for several clusters."""
    if options.html is not None:
        _check_writable(options.html, "--html")
    return swept(options)


def verify(options: argparse.Namespace) -> int:
    """Compiles a plan's program and compares it with the plan."""
    api.loaded(options.plan)  # before the target, which may load slowly
    target_config_text(options.target_config)
    with shown() as progress, _loaded(options, progress) as (step, args):
        proof = api.verify(step, *args, full=options.full, **_compiling(options, progress))
    print(json.dumps(proof.to_json(), indent=1) if options.json else proof, flush=True)
    return proof.exit_status


def eject(options: argparse.Namespace) -> int:
    """Writes a plan down as plain JAX."""
    if options.out is not None:
        _check_writable(options.out, "--out")
    api.loaded(options.plan)  # before the target, which may load slowly
    with shown() as progress, _loaded(options, progress) as (step, args):
        kind = {"only": options.only, "form": options.form, "verify": options.verify}
        ejected = api.eject(step, *args, **kind, **_compiling(options, progress))
    for difference in ejected.differences:
        say(f"differs: {difference}")
    if options.out is None:
        if ejected.constants:
            say("the file reads long constants from an .npz beside it, which is written with --out FILE only")
        print(ejected, end="", flush=True)
    else:
        ejected.save(options.out)
        print(f"saved {options.out}: {ejected.verdict}", flush=True)
    return ejected.exit_status


def show(options: argparse.Namespace) -> int:
    """Prints the summary of a saved plan, its choices, its schedule, or its differences from another plan."""
    if options.trace is not None:
        _check_writable(options.trace, "--trace")
    plan = _read(options.plan)
    other = None if options.against is None else _read(options.against)
    _check_is_of(plan, options)
    if options.choices is not None:
        return _show_choices(options)
    if other is not None:
        _check_comparable(plan, other, options)
    if options.target is not None:
        plan, other = _priced(options)
    if other is not None:
        return _show_comparison(plan, other, options)
    return _show_schedule(plan, options) if options.timeline or options.trace else _print(plan, options.json)


def _read(path: str) -> Plan:
    """A plan whose specs can be, as far as that is known without its step."""
    plan, place = api.loaded(path)
    for sharding in plan.shardings:
        check_specs(sharding, place)
    return plan


def _check_is_of(plan: Plan, options: argparse.Namespace) -> None:
    """Refuses options that a plan of this kind does not have."""
    if options.against is None and (options.exit_code or options.markdown):
        raise InputError(
            f"--exit-code and --markdown are for a comparison. Name the other plan too: autoshard show {options.plan} "
            "--against other.json"
        )
    if options.json and options.markdown:
        raise InputError("--json and --markdown are two forms of the same comparison. Keep one of them")
    if not plan.is_pipeline and options.timeline:
        raise InputError(
            f"{options.plan} is a plan of one program, without the schedule of a pipeline. Draw its streams with "
            "--trace, or with autoshard report"
        )


def _check_comparable(plan: Plan, other: Plan, options: argparse.Namespace) -> None:
    if plan.fingerprint != other.fingerprint:
        raise PlanError(
            f"{options.plan} is a plan of the step {plan.step!r} ({plan.fingerprint}), and --against {options.against} one "
            f"of {other.step!r} ({other.fingerprint}): only plans of one step are compared"
        )
    edited = [path for path, one in ((options.plan, plan), (options.against, other)) if one.is_edited]
    if edited and options.target is None:
        raise InputError(
            f"{edited[0]} was edited by hand, and its estimates were made before. To compare, give the step too: autoshard "
            f"show {options.plan} train.py:target --against {options.against}"
        )


def explain(options: argparse.Namespace) -> int:
    """Prints why a plan decides something as it does."""
    api.loaded(options.plan)  # before the target, which may load slowly
    with _loaded(options) as (step, args):
        explained = functools.partial(
            api.explain, step, *args, plan=options.plan, name=options.name, state=options.state
        )
        found = terminal.interruptible(explained)
    print(json.dumps(found.to_json(), indent=1) if options.json else found, flush=True)
    return 0


def _priced(options: argparse.Namespace) -> tuple[Plan, Plan | None]:
    """The plan, and the one to compare it with, with new estimates: made of their decisions and the step."""
    paths = [path for path in (options.plan, options.against) if path is not None]
    with _loaded(options) as (step, args):
        plans = [api.priced(step, *args, plan=path, state=options.state) for path in paths]
    return plans[0], next(iter(plans[1:]), None)


def _show_comparison(plan: Plan, other: Plan, options: argparse.Namespace) -> int:
    comparison = plan.compare(other)
    if options.json:
        print(json.dumps(comparison.to_json(), indent=1), flush=True)
    elif options.markdown:
        print(comparison.to_markdown(), flush=True)
    else:
        print(terminal.with_signs_coloured(str(comparison)), flush=True)
    return PLANS_DIFFER if options.exit_code and plan != other else 0


def _show_schedule(plan: Plan, options: argparse.Namespace) -> int:
    """Draws a pipeline's schedule, or writes a step's streams or stages over time to a file."""
    if plan.is_edited:
        raise InputError(
            f"{options.plan} was edited by hand, and its estimates were made before. To draw its schedule, give the step "
            f"too: autoshard show {options.plan} train.py:target --timeline"
        )
    if options.trace is not None:
        write_whole(options.trace, json.dumps(_trace(plan, options.plan)) + "\n", "the trace")
    if not options.timeline:
        return _print(plan, options.json)
    print(timeline.text(timeline.simulated(plan)), flush=True)
    return 0


def _trace(plan: Plan, place: str) -> dict[str, Any]:
    """A step over time as trace events: stages of a pipeline, or streams of one program."""
    if plan.is_pipeline:
        return timeline.trace_events(timeline.simulated(plan))
    if plan.estimates.profile is None:
        raise InputError(
            f"{place} has no profile of its step over time: it is of an earlier version. Give the step too, and it is made "
            f"anew: autoshard show {place} train.py:target --trace trace.json"
        )
    return profile_trace.trace_events(plan.estimates.profile)


def _show_choices(options: argparse.Namespace) -> int:
    if options.target is None:
        raise InputError(
            "--choices needs the step: a plan says what is decided, and not what could be. Give its TARGET too: "
            f"autoshard show {options.plan} train.py:target --choices {shlex.quote(options.choices)}"
        )
    with _loaded(options) as (step, args):
        found = api.choices(step, *args, plan=options.plan, name=options.choices, state=options.state)
    print(json.dumps(found, indent=1) if options.json else "\n".join(found), flush=True)
    return 0


def trace_compare(options: argparse.Namespace) -> int:
    """Prints a plan's predictions beside the trace of a run."""
    found = api.trace_compare(options.plan, options.profile)
    print(json.dumps(found.to_json(), indent=1) if options.json else found, flush=True)
    return 0


def calibrate(options: argparse.Namespace) -> int:
    """Measures the attached devices."""
    _check_writable(options.out, "--out")
    if options.devices is not None and options.devices > 0:
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.distributed:
        _join_processes()
    with shown() as progress, terminal.native_stdout_dropped():
        name = options.name or options.out.stem
        found = terminal.interruptible(
            functools.partial(measured, name, options.quick, options.devices, progress=progress)
        )
    if jax.process_index() == 0:
        found.save(options.out)
        print(f"{found}\nsaved {options.out}: pass it as --cluster or cluster=", flush=True)
    return 0


def _join_processes() -> None:
    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as e:
        raise InputError(
            f"--distributed: {first_line(e)} Start it in each process of a launcher that JAX knows, such as srun or mpirun"
        ) from None


def _print(plan: Plan, as_json: bool) -> int:
    if as_json:
        data = plan.to_json() | ({"search_s": dict(plan.search_s)} if plan.search_s else {})
        print(text_of(data), flush=True)
    else:
        print(plan, flush=True)
    return 0


def _check_writable(path: Path, option: str) -> None:
    """Refuses a path that cannot be written, before the work instead of after it."""
    folder = destination(path, option).parent
    if not folder.is_dir():
        raise InputError(f"{option} {path}: there is no folder {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        raise InputError(f"{option} {path}: the folder {folder} cannot be written to") from None


def _pins(pairs: Sequence[tuple[str, str]]) -> dict[str, PartitionSpec]:
    pins: dict[str, PartitionSpec] = {}
    for path, text in pairs:
        spec = _spec(path, text)
        if pins.setdefault(path, spec) != spec:
            raise InputError(f"--pin {path} is given twice: as {pins[path]} and as {spec}. Keep one of them")
    return pins


def _spec(path: str, text: str) -> PartitionSpec:
    try:
        return read_partition_spec(text)
    except PlanError:
        raise InputError(
            f"--pin: wanted PATH=SPEC such as \"params['emb']=P('model')\", got {f'{path}={text}'!r}"
        ) from None
