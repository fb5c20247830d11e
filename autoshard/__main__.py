"""`python -m autoshard`, and the program `autoshard`.

It handles Ctrl-C from the start, while JAX still loads: an interrupted import would print a traceback.
"""

import os
import signal
import sys
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C: 128 + SIGINT, the shells' convention."""


def main() -> int:
    """Runs one command; returns the exit status."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a background process ignores it
        signal.signal(signal.SIGINT, _leave)
    from autoshard import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()


def _leave(*_: Any) -> NoReturn:
    print("autoshard: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
