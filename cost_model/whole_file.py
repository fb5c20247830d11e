"""Files that are whole or not there: written beside their place, and then moved to it."""

import contextlib
import os
from pathlib import Path

from cost_model.errors import InputError


def write_whole(path: Path, text: str, what: str) -> None:
    """Writes a text file; where that fails, what was there before stays.

    Args:
      path: of the file.
      text: all of it.
      what: it is, for the message.

    Raises:
      InputError: the path cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as e:
        raise InputError(f"{what} cannot be written to {path}: {e.strerror}") from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
