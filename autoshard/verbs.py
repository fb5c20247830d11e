"""The verbs of the command line with their options: a function each. This module imports no JAX."""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autoshard import argument_parser, completion
from autoshard.argument_parser import Parser
from autoshard.interrupts import INTERRUPTED, leaving


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
        1: "the compiled program fits the memory cap, but differs from the prediction; an ejected step differs from its "
        "plan; with --exit-code, plans differ",
        2: "a mistake in the command line, the step or a file; or the compiler failed",
        3: "no plan fits the memory cap, or the given plan does not",
        4: "the plan is damaged, impossible, or for another step",
        INTERRUPTED: "interrupted by Ctrl-C",
    }
)
"""The meaning of each exit status."""


def ending(example: str, *statuses: int) -> str:
    """The last lines of a command's help."""
    lines = [f"  {status:<4} {EXIT_STATUSES[status]}" for status in (0, *statuses, INTERRUPTED)]
    return "\n".join(["example:", f"  {example}", "", "exit status:", *lines])


def add_all(subparsers: Any) -> None:
    """Adds all verbs to a parser, in the order of its help."""
    for add in _VERBS:
        add(subparsers)


def _search(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "search",
        help="plan a training step for a cluster; needs no device",
        epilog=ending("autoshard search train.py:target --cluster 64xH100-80GB --out plan.json", 2, 3),
    )
    command.add_argument(
        "target",
        metavar="TARGET",
        help="file.py:function or package.module:function; the function has no parameters and returns "
        "(train_step, args), where args is a tuple of arrays or jax.ShapeDtypeStructs",
    )
    cluster = command.add_argument(
        "--cluster", required=True, help="the cluster: a preset such as 64xH100-80GB, or a JSON file"
    )
    completion.completes_clusters(cluster)
    command.add_argument(
        "--memory",
        help="memory cap per device, such as 70GiB or 90%%; default: all memory but the runtime's own",
    )
    command.add_argument(
        "--mesh",
        type=argument_parser.mesh,
        help="sizes of the mesh axes, such as 2x4 or 2,4; default: searched",
    )
    command.add_argument(
        "--pin",
        type=argument_parser.pin,
        action="append",
        default=[],
        metavar="PATH=SPEC",
        help="fix the sharding of an argument, such as \"params['emb']=P('model')\"; may be repeated",
    )
    command.add_argument(
        "--remat", choices=["never"], help="recompute no activations to save memory; default: searched"
    )
    command.add_argument(
        "--stages",
        type=argument_parser.stages,
        metavar="N",
        help="number of pipeline stages, or auto; default: a pipeline is searched if it may be faster",
    )
    command.add_argument(
        "--schedule", metavar="NAME", help="pipeline schedule, such as 1f1b; default: searched"
    )
    command.add_argument(
        "--executor",
        metavar="NAME",
        help="jit (no pipeline), mpmd (a program per stage) or spmd (one program for all stages); by default the one with "
        "the shortest predicted step",
    )
    command.add_argument(
        "--microbatches",
        type=argument_parser.count,
        metavar="N",
        help="number of microbatches per step; default: searched",
    )
    command.add_argument(
        "--offload",
        type=argument_parser.kinds,
        metavar="WHAT",
        help="keep in host memory: a list of optimizer_state,parameters,residuals and argument paths; or never; "
        "default: searched",
    )
    command.add_argument(
        "--time-limit",
        dest="time_limit_s",
        type=argument_parser.seconds,
        metavar="S",
        help="processor seconds for the search; default: a fixed amount of work",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="save the plan")
    _takes_verify(
        command,
        "compile plans for the GPU, without one, and search again if one does not fit: always (meant without a value), "
        "never, or auto: those that may exceed the cap, if the compiler is installed; default: auto",
    )
    _takes_config(command)
    _takes_state(command)
    _takes_json(command)
    command.set_defaults(run=_with_jax("search"))


def _verify(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "verify",
        help="compile a plan for the GPU, without one, and compare memory and collectives",
        epilog=ending("autoshard verify train.py:target plan.json", 1, 2, 3, 4),
    )
    command.add_argument("target", metavar="TARGET", help="as for search")
    command.add_argument("plan", metavar="PLAN", help="a plan's file, as search --out writes it")
    command.add_argument(
        "--full", action="store_true", help="compile all layers; default: a few equal layers, extrapolated"
    )
    _takes_timeout(command)
    _takes_config(command)
    _takes_state(command)
    _takes_json(command)
    command.set_defaults(run=_with_jax("verify"))


def _show(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "show",
        help="print a saved plan; with its step, price it anew",
        epilog=ending("autoshard show plan.json --against other.json", 1, 2, 3, 4),
    )
    command.add_argument("plan", metavar="PLAN", help="a plan's file")
    command.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="the plan's step, as for search: the estimates are made anew from the decisions",
    )
    command.add_argument(
        "--choices",
        metavar="NAME",
        help="list the possible values of a decision, such as 'forward dot_general'; needs TARGET",
    )
    command.add_argument(
        "--against", metavar="PLAN", help="print the differences from this plan of the same step"
    )
    command.add_argument(
        "--exit-code", action="store_true", help="with --against: exit with status 1 if the plans differ"
    )
    command.add_argument(
        "--markdown", action="store_true", help="with --against: print Markdown, for a pull request"
    )
    command.add_argument("--timeline", action="store_true", help="draw a pipeline's schedule over time")
    command.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the step over time, its streams or the stages of a pipeline, as a trace for ui.perfetto.dev",
    )
    _takes_state(command)
    _takes_json(command)
    command.set_defaults(run=_with_jax("show"))


def _explain(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "explain",
        help="tell why a plan decides something as it does, and what another choice would cost",
        epilog=ending("autoshard explain train.py:target plan.json \"state['params']['up']\"", 2, 3, 4),
    )
    command.add_argument("target", metavar="TARGET", help="the plan's step, as for search")
    command.add_argument("plan", metavar="PLAN", help="a plan's file")
    command.add_argument(
        "name",
        metavar="NAME",
        help="a decision's name in the plan: the path of an argument, or the name of an op; of a pipeline, stages, "
        "schedule, microbatches, or the path of an argument",
    )
    _takes_state(command)
    _takes_json(command)
    command.set_defaults(run=_with_jax("explain"))


def _report(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "report",
        help="write a saved plan as an HTML page, to be opened in a browser",
        epilog=ending("autoshard report plan.json -o plan.html", 2, 4),
    )
    command.add_argument("plan", metavar="PLAN", help="a plan's file")
    command.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the page to write")
    command.set_defaults(run=_without_jax("report"))


def _trace_compare(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "trace-compare",
        help="put a plan's predictions beside a profile of a real run",
        epilog=ending("autoshard trace-compare plan.json profile/", 2, 4),
    )
    command.add_argument("plan", metavar="PLAN", help="a plan's file")
    command.add_argument(
        "profile", type=Path, metavar="PROFILE", help="the folder that was given to jax.profiler.trace"
    )
    _takes_json(command)
    command.set_defaults(run=_with_jax("trace_compare"))


def _what_if(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "what-if",
        help="plan a training step for several clusters, and compare time and price",
        epilog=ending(
            "autoshard what-if train.py:target --clusters 8xH100-80GB,16xL4 --price h100=2.5 --price l4=0.7",
            2,
            3,
        ),
    )
    command.add_argument("target", metavar="TARGET", help="as for search")
    clusters = command.add_argument(
        "--clusters",
        type=argument_parser.names,
        required=True,
        help="clusters separated by commas, each as for search; a preset alone is a full node",
    )
    completion.completes_clusters(clusters)
    command.add_argument(
        "--memory",
        type=argument_parser.names,
        help="memory caps per device separated by commas; default, and at most: all memory but the runtime's own",
    )
    command.add_argument(
        "--devices",
        type=argument_parser.counts,
        metavar="N,N",
        help="numbers of devices, with which each preset is tried instead of its own",
    )
    command.add_argument(
        "--steps", type=argument_parser.count, metavar="N", help="number of steps to price; default: 1000"
    )
    command.add_argument(
        "--tokens",
        type=argument_parser.count,
        metavar="N",
        help="number of tokens to price, instead of steps",
    )
    command.add_argument(
        "--price",
        type=argument_parser.price,
        action="append",
        default=[],
        metavar="KIND=X",
        help="price of a GPU hour, such as h100=2.5; may be repeated",
    )
    command.add_argument(
        "--time-limit", type=argument_parser.seconds, metavar="S", help="as for search, for each combination"
    )
    command.add_argument("--html", type=Path, metavar="FILE", help="write a plot of time and price")
    _takes_state(command)
    _takes_json(command)
    command.set_defaults(run=_with_jax("what_if"))


def _eject(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "eject",
        help="write a plan down as plain JAX, which needs no autoshard",
        epilog=ending("autoshard eject train.py:target plan.json -o sharded_step.py", 1, 2, 3, 4),
    )
    command.add_argument("target", metavar="TARGET", help="as for search")
    command.add_argument("plan", metavar="PLAN", help="a plan's file, as search --out writes it")
    command.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="the file to write; default: print it"
    )
    command.add_argument(
        "--only",
        choices=["shardings"],
        help="only a dict of the arguments' PartitionSpecs by pytree path; default: the whole step",
    )
    command.add_argument(
        "--form",
        choices=["wrapper", "written"],
        help="wrapper: the step itself, jitted with the plan's shardings; written: the plan's program, an operation a line; "
        "default: the wrapper if it compiles to the plan's program",
    )
    _takes_verify(
        command,
        "compile the step for the GPU, without one, beside the plan's program: always (meant without a value), never, "
        "or auto: if the compiler is installed; default: auto",
    )
    _takes_timeout(command)
    _takes_config(command)
    _takes_state(command)
    command.set_defaults(run=_with_jax("eject"))


def _clusters(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "clusters",
        help="list the presets, or print a cluster's numbers with their sources",
        epilog=ending("autoshard clusters 8xH100-80GB --json > node.json", 2),
    )
    of_listing = command.add_argument(
        "cluster",
        nargs="?",
        metavar="CLUSTER",
        help="a preset, COUNTxPRESET such as 64xH100-80GB, or a JSON file",
    )
    completion.completes_clusters(of_listing)
    command.add_argument("--json", action="store_true", help="print a cluster file, to be edited")
    command.set_defaults(run=_without_jax("clusters"))


def _schema(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "schema",
        help="print the JSON Schema of a file, for editors",
        epilog=ending("autoshard schema plan > plan.schema.json", 2),
    )
    command.add_argument("file", choices=["cluster", "plan"], help="the kind of file")
    command.set_defaults(run=_without_jax("schema"))


def _calibrate(subparsers: Any) -> None:
    command = subparsers.add_parser(
        "calibrate",
        help="measure the attached devices and write a cluster file",
        epilog=ending("autoshard calibrate --out node.json", 2),
    )
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="the cluster file to write")
    command.add_argument("--name", help="the cluster's name; default: the file's")
    command.add_argument(
        "--devices",
        type=argument_parser.count,
        metavar="N",
        help="measure the first N devices; without a GPU, N simulated ones",
    )
    command.add_argument("--quick", action="store_true", help="measure fewer and smaller sizes")
    command.add_argument(
        "--distributed",
        action="store_true",
        help="measure across processes: run it in each, under a launcher that jax.distributed.initialize() knows",
    )
    command.set_defaults(run=_with_jax("calibrate", uses_devices=True))


def _takes_verify(command: Parser, meaning: str) -> None:
    command.add_argument(
        "--verify", nargs="?", choices=["auto", "always", "never"], const="always", help=meaning
    )


def _takes_timeout(command: Parser) -> None:
    command.add_argument(
        "--timeout",
        type=argument_parser.seconds,
        metavar="S",
        help="seconds for each program; default: no limit",
    )


def _takes_config(command: Parser) -> None:
    command.add_argument(
        "--target-config",
        type=Path,
        metavar="FILE",
        help="XLA's GpuTargetConfigProto as text, for a GPU without a preset",
    )


def _takes_state(command: Parser) -> None:
    command.add_argument(
        "--state",
        action="append",
        metavar="PATH",
        help="path of an argument that the step returns updated, if results do not make it evident; may be repeated",
    )


def _takes_json(command: Parser) -> None:
    command.add_argument("--json", action="store_true", help="print the result as JSON")


_VERBS = (
    _search,
    _verify,
    _show,
    _explain,
    _report,
    _trace_compare,
    _what_if,
    _eject,
    _clusters,
    _schema,
    _calibrate,
)
