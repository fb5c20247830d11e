"""Files that are whole or not there: written beside their place, on the disk, and then moved to it.

Otherwise what is written is what an ordinary write would make: a symbolic link stays one, and the file that it leads to is
replaced; a new file has the permissions that the process gives to files, and an old one keeps its own. What is no regular
file (a device, a pipe, a folder) cannot be replaced whole, and is refused.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from autoshard.cost_model.errors import InputError


def write_whole(path: Path, text: str, what: str) -> None:
    """Writes a text file; where that fails, what was there before stays.

    Args:
      path: of the file, or of a symbolic link to it.
      text: all of it.
      what: it is, for the message.

    Raises:
      InputError: the path cannot be written, or is no regular file.
    """
    with _said_of(path, what):
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
    """The file that is written for a path, at the end of its symbolic links.

    Raises:
      InputError: it is there, and no regular file; or links lead nowhere.
    """
    with _said_of(path, what):
        place = Path(os.path.realpath(path))
        if os.path.lexists(place) and not stat.S_ISREG(place.stat().st_mode):
            kind = "a folder; name a file in it" if place.is_dir() else "no regular file"
            raise InputError(f"{what} cannot be written to {path}: it is {kind}")
        return place


@contextlib.contextmanager
def _said_of(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise InputError(f"{what} cannot be written to {path}: {e.strerror}") from e
