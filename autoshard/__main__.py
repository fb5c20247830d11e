"""`python -m autoshard`, and the program `autoshard`."""

# PYTHON_ARGCOMPLETE_OK  (argcomplete's global activation looks for this mark)

import sys

from autoshard.interrupts import leaving


def main() -> int:
    """Runs one command; returns the exit status."""
    with leaving():
        from autoshard import cli
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
