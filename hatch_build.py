"""Packs the source distribution as the repository is: folders at the top level, and links to them inside of `autoshard/`.

Hatchling follows links. It would pack the folders as parts of `autoshard/` and leave them out at the top level, where the
tests and the documentation look for them. So `pyproject.toml` excludes the links, and this hook adds them to the archive.
"""

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Links(BuildHookInterface):
    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        packed = Path(artifact_path)
        content = io.BytesIO(gzip.decompress(packed.read_bytes()))
        with tarfile.open(fileobj=content, mode="a") as archive:
            for link in sorted(path for path in Path(self.root, "autoshard").iterdir() if path.is_symlink()):
                entry = tarfile.TarInfo(f"{packed.name.removesuffix('.tar.gz')}/autoshard/{link.name}")
                entry.type, entry.linkname = tarfile.SYMTYPE, str(link.readlink())
                archive.addfile(entry)
        packed.write_bytes(gzip.compress(content.getvalue(), mtime=0))
