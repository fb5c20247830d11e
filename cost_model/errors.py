"""The errors that a user can cause, in one small class hierarchy.

Each message states the expected value, the value received (with units), the place, and the remedy. Violations of internal
invariants are assertions, not these errors. A message quotes the `first_line` of a foreign exception. For an unknown
name it suggests the `closest` known one.

Each error carries a link to its section of the documentation, as a note (PEP 678): tracebacks and the command line show it
below the message, and `str(error)` is the message alone, so that one error can quote another.
"""

import math
from collections.abc import Sequence
from difflib import get_close_matches

PAGE = "docs/when-it-says-no.md"
"""The page of the documentation that has a section for each error."""


class AutoshardError(Exception):
    """Base of every error that autoshard raises for a user's mistake.

    Attributes:
      link: the section of the documentation that explains the error.
    """

    exit_status = 2
    section = "an-argument-that-cannot-be-used"

    def __init__(self, message: str = "", *, section: str = "") -> None:
        super().__init__(message)
        self.link = f"{PAGE}#{section or self.section}"
        self.add_note(f"See {self.link}")


class InputError(AutoshardError, ValueError):
    """A step, an argument, an option or a file that autoshard cannot use."""


class ClusterError(InputError):
    """An unknown cluster, unit or device, or a cluster file that does not make sense."""

    section = "a-cluster-that-cannot-be-used"


class InfeasibleError(AutoshardError):
    """No strategy fits the memory cap.

    Attributes:
      smallest_bytes: the smallest peak found; infinite if none was found.
    """

    exit_status = 3
    section = "nothing-fits"

    def __init__(self, message: str = "", smallest_bytes: float = math.inf, *, section: str = "") -> None:
        super().__init__(message, section=section)
        self.smallest_bytes = smallest_bytes


class CompilerError(AutoshardError):
    """XLA's compiler failed on a program, ran out of memory or took too long."""

    section = "the-compiler-fails"


class PlanError(AutoshardError, ValueError):
    """A plan that is malformed, stale, or made for another step, cluster, JAX or schema."""

    exit_status = 4
    section = "a-plan-is-refused"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def closest(name: str, known: Sequence[str]) -> str:
    """A hint such as ` (did you mean 'memory'?)`, or an empty text if no known name is close."""
    longer = [candidate for candidate in known if name and candidate.lower().startswith(name.lower())]
    matches = longer or get_close_matches(name.lower(), [candidate.lower() for candidate in known], n=1)
    meant = [candidate for candidate in known if candidate in matches or candidate.lower() in matches]
    return f" (did you mean {' or '.join(repr(candidate) for candidate in meant)}?)" if meant else ""
