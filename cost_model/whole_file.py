"""Atomic writes: the text is synced to the disk in a temporary file beside the target, which then replaces it.

In all other respects the result is that of an ordinary write. A symbolic link stays a link, and its target is replaced.
A new file has the process's default permissions, and an old file keeps its own. A path that is not a regular file (a
device, a pipe, a folder) cannot be replaced and is refused.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from autoshard.cost_model.errors import InputError


def write_whole(path: Path, text: str, what: str) -> None:
    """Writes a text file; on failure the previous file stays.

    Args:
      path: the file, or a symbolic link to it.
      text: its whole content.
      what: the name of the content, for the message.

    Raises:
      InputError: the path cannot be written, or is not a regular file.
    """
    with _named_in_errors(path, what):
        place = destination(path, what)
        part = place.with_name(f".autoshard-{secrets.token_hex(8)}.part")
        try:
            with part.open("x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if place.exists():
                part.chmod(stat.S_IMODE(place.stat().st_mode))
            part.replace(place)
        finally:
            with contextlib.suppress(OSError):
                part.unlink()


def destination(path: Path, what: str) -> Path:
    """The file that a path leads to through its symbolic links.

    Raises:
      InputError: the path exists and is not a regular file, or its links form a loop.
    """
    with _named_in_errors(path, what):
        place = Path(os.path.realpath(path))
        if os.path.lexists(place) and not stat.S_ISREG(place.stat().st_mode):
            kind = "a folder; name a file in it" if place.is_dir() else "no regular file"
            raise InputError(f"{what} cannot be written to {path}: it is {kind}")
        return place


@contextlib.contextmanager
def _named_in_errors(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise InputError(f"{what} cannot be written to {path}: {e.strerror}") from e
