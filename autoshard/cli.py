"""The command line: `autoshard search`, `verify`, `show`, `schema`, `clusters` and `calibrate`.

Results go to stdout; progress, warnings and errors to stderr. Exit status: 0 for success, 1 if a verified plan differs
from its prediction, 2 for a user's mistake or a compiler that fails, 3 if no plan fits the memory cap or the compiled
program does not, 4 for a damaged plan or a plan of another step, 130 after Ctrl-C.

This module defines commands and options, and imports no JAX: a wrong command line is refused at once. `autoshard.commands`
and `autoshard.listings` run the commands.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autoshard import __version__, argument_parser
from autoshard.argument_parser import Parser
from autoshard.cost_model.errors import AutoshardError
from autoshard.display import say
from autoshard.interrupts import INTERRUPTED, leaving
from autoshard.terminal import AbandonedError, one_line_warnings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; by default the process's.

    Returns:
      The exit status.
    """
    with one_line_warnings():
        try:
            options = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
            return options.run(options)
        except SystemExit as e:  # argparse has printed the error
            return int(e.code or 0)
        except AutoshardError as e:
            say(f"error: {e} (see {e.link})")
            return e.exit_status
        except KeyboardInterrupt as e:
            say("interrupted")
            if isinstance(e, AbandonedError):
                os._exit(INTERRUPTED)
            return INTERRUPTED
        except BrokenPipeError:  # the reader closed the pipe: write nothing more, not even at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0


def _with_jax(command: str, uses_devices: bool = False) -> Callable[[argparse.Namespace], int]:
    """A command of `autoshard.commands`; JAX is imported when it runs."""

    def run(options: argparse.Namespace) -> int:
        with leaving():
            from autoshard import commands
        if not uses_devices:
            commands.use_no_device()
        return getattr(commands, command)(options)

    return run


def _without_jax(command: str) -> Callable[[argparse.Namespace], int]:
    """A command of `autoshard.listings`."""

    def run(options: argparse.Namespace) -> int:
        with leaving():
            from autoshard import listings
        return getattr(listings, command)(options)

    return run


EXIT_STATUSES = MappingProxyType(
    {
        0: "done",
        1: "the compiled program fits, and differs from the prediction",
        2: "a mistake in the arguments, the step or a file, or the compiler failed",
        3: "nothing fits the memory cap, or the compiled program does not",
        4: "the plan is damaged, or for another step",
        INTERRUPTED: "interrupted by Ctrl-C",
    }
)
"""The meaning of each exit status."""


def _ending(example: str, *statuses: int) -> str:
    """The last lines of a command's help."""
    lines = [f"  {status:<4} {EXIT_STATUSES[status]}" for status in (0, *statuses, INTERRUPTED)]
    return "\n".join(["example:", f"  {example}", "", "exit status:", *lines])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="autoshard",
        description="Finds the fastest way to run a one-device JAX training step on a cluster.",
    )
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    search = subparsers.add_parser(
        "search",
        help="plan a training step for a cluster; needs no device",
        epilog=_ending("autoshard search train.py:target --cluster 64xH100-80GB --out plan.json", 2, 3),
    )
    search.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function; the function takes nothing and returns "
        "(train_step, args), args a tuple of arrays or jax.ShapeDtypeStructs",
    )
    search.add_argument("--cluster", required=True, help="such as 64xH100-80GB, or a JSON file")
    search.add_argument(
        "--memory",
        help="the cap per device, such as 70GiB, or 90%% of its memory; by default all but what the runtime needs",
    )
    search.add_argument(
        "--mesh",
        type=argument_parser.mesh,
        help="sizes of the mesh axes, such as 2x4 or 2,4; by default searched",
    )
    search.add_argument(
        "--pin",
        type=argument_parser.pin,
        action="append",
        default=[],
        metavar="PATH=SPEC",
        help="such as \"params['emb']=P('model')\"",
    )
    search.add_argument(
        "--remat", choices=["never"], help="recompute nothing for memory's sake; by default it is searched"
    )
    search.add_argument(
        "--stages",
        type=argument_parser.stages,
        metavar="N",
        help="how many stages a pipeline has, or auto; by default a pipeline is searched where it may pay",
    )
    search.add_argument(
        "--schedule", metavar="NAME", help="of a pipeline, such as 1f1b; by default it is searched"
    )
    search.add_argument(
        "--executor",
        metavar="NAME",
        help="jit (no pipeline), mpmd (a program per stage) or spmd (one program for all stages); by default the one with "
        "the shortest predicted step",
    )
    search.add_argument(
        "--microbatches",
        type=argument_parser.count,
        metavar="N",
        help="how many a step goes through; by default it is searched",
    )
    search.add_argument(
        "--offload",
        type=argument_parser.kinds,
        metavar="WHAT",
        help="what is in the host's memory: never, or some of optimizer_state,parameters,residuals and paths of "
        "arguments; by default it is searched",
    )
    search.add_argument(
        "--time-limit",
        type=argument_parser.seconds,
        metavar="S",
        help="processor seconds for the solver; by default a fixed amount of work",
    )
    search.add_argument("--out", type=Path, metavar="FILE", help="save the plan")
    search.add_argument(
        "--verify",
        action="store_true",
        help="let XLA's GPU compiler judge if the plan fits, and search on where it does not",
    )
    search.set_defaults(run=_with_jax("search"))
    verify = subparsers.add_parser(
        "verify",
        help="compile a plan's program, without a GPU, and compare",
        epilog=_ending("autoshard verify train.py:target plan.json", 1, 2, 3, 4),
    )
    verify.add_argument("target", metavar="TARGET", help="as for search")
    verify.add_argument("plan", metavar="PLAN", help="what search --out wrote")
    verify.add_argument(
        "--full", action="store_true", help="compile all equal blocks instead of extrapolating from a few"
    )
    verify.add_argument(
        "--timeout", type=argument_parser.seconds, metavar="S", help="seconds for the compiler"
    )
    verify.set_defaults(run=_with_jax("verify"))
    for command in (search, verify):
        command.add_argument(
            "--target-config",
            type=Path,
            metavar="FILE",
            help="for a GPU that is no preset: XLA's GpuTargetConfigProto in text",
        )
    show = subparsers.add_parser(
        "show",
        help="sum up a saved plan",
        epilog=_ending("autoshard show plan.json --against other.json", 2, 4),
    )
    show.add_argument("plan", metavar="PLAN")
    show.add_argument("target", nargs="?", metavar="TARGET", help="as for search; for --choices")
    show.add_argument(
        "--choices",
        metavar="NAME",
        help="list what a decision, such as 'forward dot_general', may be edited to",
    )
    show.add_argument("--against", metavar="PLAN", help="show what differs from this plan instead")
    show.add_argument("--timeline", action="store_true", help="draw a pipeline's schedule in time")
    show.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a pipeline's schedule for ui.perfetto.dev"
    )
    show.set_defaults(run=_with_jax("show"))
    listing = subparsers.add_parser(
        "clusters",
        help="list the presets, or show a cluster with its sources",
        epilog=_ending("autoshard clusters 8xH100-80GB --json > node.json", 2),
    )
    listing.add_argument("cluster", nargs="?", metavar="CLUSTER", help="a preset, 64xH100-80GB or a file")
    listing.add_argument("--json", action="store_true", help="print it as a cluster file, to be edited")
    listing.set_defaults(run=_without_jax("clusters"))
    schema = subparsers.add_parser(
        "schema",
        help="print the JSON Schema of a file, for editors",
        epilog=_ending("autoshard schema plan > plan.schema.json", 2),
    )
    schema.add_argument("file", choices=["cluster", "plan"], help="which file's")
    schema.set_defaults(run=_without_jax("schema"))
    _add_calibrate(subparsers)
    for command in (search, verify, show):
        command.add_argument(
            "--state",
            action="append",
            metavar="PATH",
            help="an argument, or a part of one, that comes back as a result, where that is not evident",
        )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_calibrate(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "calibrate",
        help="measure the attached devices, for a cluster file",
        epilog=_ending("autoshard calibrate --out node.json", 2),
    )
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the cluster file to write")
    command.add_argument("--name", help="of the cluster; by default the file's")
    command.add_argument(
        "--devices",
        type=argument_parser.count,
        metavar="N",
        help="the first N; without a GPU, N simulated ones",
    )
    command.add_argument("--quick", action="store_true", help="fewer and smaller sizes")
    command.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes, as jax.distributed.initialize() finds them; run it in each",
    )
    command.set_defaults(run=_with_jax("calibrate", uses_devices=True))
