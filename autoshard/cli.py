"""The command line: `autoshard search`, `verify`, `show`, `clusters` and `calibrate`.

Results go to stdout; progress, warnings and errors to stderr. Exit status: 0, 1 when a verified plan differs
from what it predicts, 2 for a user's mistake or a compiler that fails, 3 when nothing fits the memory cap or the
compiled program does not, 4 for a plan that is damaged or foreign, 130 after Ctrl-C.

What takes long runs in a thread of its own, so that Ctrl-C is heard at once: the solver's native code would only
hand it over when it is done. What the solver or the user's module writes to stdout is kept away from the
result.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import shlex
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard import api, clusters
from autoshard.calibrate import calibrate
from autoshard.target import target
from cost_model.errors import AutoshardError, InputError, PlanError, first_line
from cost_model.whole_file import destination
from search.ir.spec import read_partition_spec
from search.plan.plan import Plan

_INTERRUPTED = 128 + 2
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; by default the process's.

    Returns:
      The exit status.
    """
    try:
        options = _parser().parse_args(argv)
    except SystemExit as e:  # argparse has said what is wrong
        return int(e.code or 0)
    if not jax.config.jax_platforms and not options.uses_devices:
        jax.config.update("jax_platforms", "cpu")
    with _one_line_warnings():
        try:
            return options.run(options)
        except AutoshardError as e:
            _say(f"error: {e}")
            return e.exit_status
        except KeyboardInterrupt:
            _say("interrupted")
            return _INTERRUPTED
        except BrokenPipeError:  # the reader of our output has gone: nothing more to write, not even at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autoshard",
        description="Finds the fastest way to run a one-device JAX training step on a cluster.",
    )
    parser.set_defaults(uses_devices=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    search = commands.add_parser("search", help="plan a training step for a cluster; needs no device")
    search.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function; the function takes nothing and returns "
        "(train_step, args), args a tuple of arrays or jax.ShapeDtypeStructs",
    )
    search.add_argument("--cluster", required=True, help="such as 64xH100-80GB, or a JSON file")
    search.add_argument("--memory", help="the cap per device, such as 70GiB; by default what the device has")
    search.add_argument("--mesh", type=_mesh, help="sizes of the mesh axes, such as 2x4; by default searched")
    search.add_argument(
        "--pin",
        type=_pin,
        action="append",
        default=[],
        metavar="PATH=SPEC",
        help="such as \"params['emb']=P('model')\"",
    )
    search.add_argument(
        "--remat", choices=["never"], help="recompute nothing for memory's sake; by default it is searched"
    )
    search.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="how many a step goes through; by default it is searched",
    )
    search.add_argument(
        "--offload",
        type=_kinds,
        metavar="WHAT",
        help="what is in the host's memory: never, or some of optimizer_state,parameters,residuals and paths of "
        "arguments; by default it is searched",
    )
    search.add_argument("--time-limit", type=_seconds, metavar="S", help="processor seconds for the solver")
    search.add_argument("--out", type=Path, metavar="FILE", help="save the plan")
    search.add_argument(
        "--verify",
        action="store_true",
        help="let XLA's GPU compiler judge if the plan fits, and search on where it does not",
    )
    search.set_defaults(run=_search)
    verify = commands.add_parser("verify", help="compile a plan's program, without a GPU, and compare")
    verify.add_argument("target", metavar="TARGET", help="as for search")
    verify.add_argument("plan", metavar="PLAN", help="what search --out wrote")
    verify.add_argument(
        "--full", action="store_true", help="compile all equal blocks instead of extrapolating from a few"
    )
    verify.add_argument("--timeout", type=_seconds, metavar="S", help="seconds for the compiler")
    verify.set_defaults(run=_verify)
    for command in (search, verify):
        command.add_argument(
            "--target-config",
            type=Path,
            metavar="FILE",
            help="for a GPU that is no preset: XLA's GpuTargetConfigProto in text",
        )
    show = commands.add_parser("show", help="sum up a saved plan")
    show.add_argument("plan", metavar="PLAN")
    show.add_argument("target", nargs="?", metavar="TARGET", help="as for search; for --choices")
    show.add_argument(
        "--choices",
        metavar="NAME",
        help="list what a decision, such as 'forward dot_general', may be edited to",
    )
    show.add_argument("--against", metavar="PLAN", help="show what differs from this plan instead")
    show.set_defaults(run=_show)
    listing = commands.add_parser("clusters", help="list the presets, or show a cluster with its sources")
    listing.add_argument("cluster", nargs="?", metavar="CLUSTER", help="a preset, 64xH100-80GB or a file")
    listing.add_argument("--json", action="store_true", help="print it as a cluster file, to be edited")
    listing.set_defaults(run=_clusters)
    _add_calibrate(commands)
    for command in (search, verify, show):
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_calibrate(commands: Any) -> None:
    command = commands.add_parser("calibrate", help="measure the attached devices, for a cluster file")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the cluster file to write")
    command.add_argument("--name", help="of the cluster; by default the file's")
    command.add_argument(
        "--devices", type=int, metavar="N", help="the first N; without a GPU, N simulated ones"
    )
    command.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    command.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes, as jax.distributed.initialize() finds them; run it in each",
    )
    command.set_defaults(run=_calibrate, uses_devices=True)


# --- commands


def _search(options: argparse.Namespace) -> int:
    if options.out is not None:
        _check_writable(options.out)
    with _progress() as progress, contextlib.redirect_stdout(sys.stderr):
        progress(f"loading {options.target}")
        with target(options.target) as (step, args), _native_stdout_dropped():
            progress("tracing and folding the step")
            search = functools.partial(
                api.search,
                step,
                *args,
                cluster=options.cluster,
                memory=options.memory,
                mesh=options.mesh,
                pin=_pins(options.pin),
                remat=options.remat,
                microbatches=options.microbatches,
                offload=options.offload,
                time_limit_s=options.time_limit,
                verify=options.verify,
                target_config=options.target_config,
                progress=progress,
            )
            plan = _interruptible(search)
    if options.out is not None:
        plan.save(options.out)
    _print(plan, options.json)
    return 0


def _verify(options: argparse.Namespace) -> int:
    Plan.load(options.plan)  # before the target, which may take its time
    with _progress() as progress, contextlib.redirect_stdout(sys.stderr):
        progress(f"loading {options.target}")
        with target(options.target) as (step, args), _native_stdout_dropped():
            proof = api.verify(
                step,
                *args,
                plan=options.plan,
                full=options.full,
                target_config=options.target_config,
                timeout_s=options.timeout,
                progress=progress,
            )
    print(json.dumps(proof.to_json(), indent=1) if options.json else proof, flush=True)
    return proof.exit_status


def _show(options: argparse.Namespace) -> int:
    plan = Plan.load(options.plan)
    if options.choices is not None:
        return _show_choices(options)
    if options.against is None:
        _print(plan, options.json)
        return 0
    comparison = plan.compare(Plan.load(options.against))
    print(json.dumps(comparison.to_json(), indent=1) if options.json else comparison, flush=True)
    return 0


def _show_choices(options: argparse.Namespace) -> int:
    if options.target is None:
        raise InputError(
            "--choices needs the step: a plan says what is decided, and not what could be. Give its TARGET too: "
            f"autoshard show {options.plan} train.py:target --choices {shlex.quote(options.choices)}"
        )
    with contextlib.redirect_stdout(sys.stderr), target(options.target) as (step, args):
        found = api.choices(step, *args, plan=options.plan, name=options.choices)
    print(json.dumps(found, indent=1) if options.json else "\n".join(found), flush=True)
    return 0


def _clusters(options: argparse.Namespace) -> int:
    if options.cluster is None:
        shown = {name: cluster.to_json() for name, cluster in clusters.presets().items()}
        print(json.dumps(shown, indent=1) if options.json else clusters.preset_table(), flush=True)
        return 0
    cluster = clusters.named(options.cluster)
    print(
        json.dumps(cluster.to_json(), indent=1) if options.json else clusters.description(cluster), flush=True
    )
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    _check_writable(options.out)
    if options.devices is not None and options.devices > 0:
        jax.config.update("jax_num_cpu_devices", options.devices)
    if options.distributed:
        _join_processes()
    with _progress() as progress, _native_stdout_dropped():
        name = options.name or options.out.stem
        found = _interruptible(
            functools.partial(calibrate, name, options.quick, options.devices, progress=progress)
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


def _print(plan: Plan, as_json: bool) -> None:
    if as_json:
        data = plan.to_json() | ({"search_s": dict(plan.search_s)} if plan.search_s else {})
        print(json.dumps(data, indent=1, allow_nan=False), flush=True)
    else:
        print(plan, flush=True)


def _check_writable(path: Path) -> None:
    """Before the work, not after it."""
    folder = destination(path, "--out").parent
    if not folder.is_dir():
        raise InputError(f"--out {path}: there is no folder {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        raise InputError(f"--out {path}: the folder {folder} cannot be written to") from None


# --- options


def _mesh(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted sizes such as 2x4, got {text!r}") from None


def _kinds(text: str) -> tuple[str, ...] | str:
    return text if text == "never" else tuple(text.split(","))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"wanted a positive number of seconds, got {text!r}")
    return seconds


def _pin(text: str) -> tuple[str, PartitionSpec]:
    path, _, spec = text.partition("=")
    try:
        return path.strip(), read_partition_spec(spec)
    except PlanError:
        message = f"wanted PATH=SPEC such as \"params['emb']=P('model')\", got {text!r}"
        raise argparse.ArgumentTypeError(message) from None


def _pins(pairs: Sequence[tuple[str, PartitionSpec]]) -> dict[str, PartitionSpec]:
    pins: dict[str, PartitionSpec] = {}
    for path, spec in pairs:
        if pins.setdefault(path, spec) != spec:
            raise InputError(f"--pin {path} is given twice: as {pins[path]} and as {spec}. Keep one of them")
    return pins


# --- the terminal


def _say(line: str) -> None:
    print(f"autoshard: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda line: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("") as status:
        yield lambda line: status.update(escape(line))


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, api.AutoshardWarning):
            _say(f"warning: {message}")
        else:
            ordinary(message, category, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("always", api.AutoshardWarning)
        ordinary, warnings.showwarning = warnings.showwarning, show
        yield


@contextlib.contextmanager
def _native_stdout_dropped() -> Iterator[None]:
    """What native code writes to stdout (the solver has notes of its own) must not stand in the result."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _interruptible[T](work: Callable[[], T]) -> T:
    """Does the work in a thread and waits for it; Ctrl-C ends the wait at once, and the process with it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001  (handed on to the thread that waits)
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if (
            not future.done()
        ):  # the solver still runs, and cannot be told: leave without tearing down beneath it
            _say("interrupted")
            os._exit(_INTERRUPTED)
        raise
