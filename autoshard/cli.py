"""The command line, `autoshard VERB`: search, verify, eject, show, explain, report, trace-compare, what-if, schema,
clusters, calibrate.

Results go to stdout; progress, warnings and errors to stderr. `verbs.EXIT_STATUSES` has the meaning of each exit status.

`autoshard.verbs` defines the verbs and their options. Neither it nor this module imports JAX: a wrong command line is
refused at once. `autoshard.commands` and `autoshard.listings` run the verbs.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from autoshard import __version__, completion, verbs
from autoshard.argument_parser import Parser
from autoshard.cost_model.errors import AutoshardError
from autoshard.display import say
from autoshard.interrupts import INTERRUPTED
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
            commands = parser()
            completion.offer(commands)
            options = commands.parse_args(sys.argv[1:] if argv is None else list(argv))
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


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = Parser(
        prog="autoshard",
        description="Finds the fastest way to run a one-device JAX training step on a cluster.",
        epilog=verbs.ending(
            "autoshard search train.py:target --cluster 64xH100-80GB --out plan.json", 1, 2, 3, 4
        ),
    )
    parser.add_argument("--version", action="version", version=f"autoshard {__version__}")
    verbs.add_all(parser.add_subparsers(required=True, metavar="COMMAND"))
    return parser
