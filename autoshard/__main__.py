"""`python -m autoshard`: the command line."""

import sys

from autoshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
