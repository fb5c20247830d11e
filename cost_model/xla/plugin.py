"""NVIDIA's two wheels with the compiler: found in the user's environment, or kept in a folder of their own.

In an environment with `jax-cuda13-plugin` and without cuDNN, JAX finds the plugin at every start and prints some twenty
lines. So the wheels need not be where the user's programs run: the compiler has a process of its own, and only that
process has their folder on its path. The folder lies in the user's cache directory, with JAX's version in its name. It is
filled once, by pip or uv, at the first verification. A user without a home that can be written, as in a container, has it
among the temporary files.

An environment that has the plugin, such as one with `jax[cuda13]`, needs no second copy.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from autoshard.cost_model.errors import InputError

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""The wheels that hold the compiler's kernels, each with its `-pjrt` half, in the order in which JAX takes them."""

SIZE = "0.14 GB to download, 0.4 GB on disk"
"""Size of both wheels. Source: those of JAX 0.12.0.1 for CUDA 13."""


def provided(progress: Callable[[str], None] = lambda line: None) -> Path | None:
    """The folder with the plugin, filled if need be; None if the user's own environment has the plugin.

    Args:
      progress: called with a line before anything is installed.

    Raises:
      InputError: the plugin is not there and cannot be installed.
    """
    if is_installed():
        return None
    if own_folder().is_dir():
        return own_folder()
    folder, partial = _begun()
    progress(f"installing NVIDIA's compiler, once, into {folder} ({SIZE})")
    _install(folder, partial)
    return folder


def is_there() -> bool:
    """True if nothing needs to be installed: the plugin is in this environment or in its own folder."""
    return is_installed() or own_folder().is_dir()


def is_installed() -> bool:
    """True if this environment has both halves of a plugin for its jaxlib."""
    jaxlib = _minor(_version("jaxlib"))
    return any(
        all(_minor(_version(name)) == jaxlib for name in (plugin, _pjrt(plugin))) for plugin in PLUGINS
    )


def own_folder() -> Path:
    """The plugin's folder for this jaxlib and this Python: where it is there, or else the first place for it."""
    there = (place for place in _places() if place.is_dir() and _is_safe(place.parent))
    return next(there, _places()[0])


def _places() -> list[Path]:
    """The folders that the plugin may be in: below `$XDG_CACHE_HOME`, by default `~/.cache`, if there is a home; and below
    a folder of this user's for temporary files."""
    python = f"{sys.implementation.cache_tag}-{platform.machine()}"
    name = f"{PLUGINS[0]}-{_version('jaxlib')}-{python}"
    return [folder / name for folder in (*_cache_of_home(), _temporary())]


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"autoshard-{os.getuid()}"


def _is_safe(folder: Path) -> bool:
    """False for a folder for temporary files that another user has made under our name."""
    return folder != _temporary() or folder.stat().st_uid == os.getuid()


def _cache_of_home() -> list[Path]:
    try:
        return [Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "autoshard"]
    except RuntimeError:  # HOME is not set, and the system does not know the user
        return []


def _begun() -> tuple[Path, Path]:
    """The first place that can be written, and an empty folder beside it to be filled.

    Raises:
      InputError: no place can be written.
    """
    for folder in _places():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(folder.parent):
                partial.mkdir()
                return folder, partial
        except OSError:
            continue
    tried = " and ".join(str(folder.parent) for folder in _places())
    raise _missing(
        f"has no folder to be in: {tried} cannot be written (XDG_CACHE_HOME names another)", own_folder()
    )


def _install(folder: Path, partial: Path) -> None:
    """Fills the folder as a whole: another process sees all of it or nothing."""
    try:
        _run([*_installer(), *_wheels(partial)], folder)
        with contextlib.suppress(OSError):  # another process was faster
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run(command: Sequence[str], folder: Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode:
        lines = (ended.stderr.strip() or ended.stdout.strip()).splitlines() or ["it gave no reason"]
        raise _missing(f"could not be installed: {lines[-1].strip(' .')}", folder)


def _installer() -> list[str]:
    """The command that installs wheels: pip's, or uv's, whose environments have no pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    raise _missing("cannot be installed, as neither pip nor uv is here", own_folder())


def _wheels(folder: Path) -> list[str]:
    jaxlib = _version("jaxlib")
    names = [f"{name}=={jaxlib}" for name in (PLUGINS[0], _pjrt(PLUGINS[0]))]
    return ["--no-deps", "--target", str(folder), *names]


def _missing(why: str, folder: Path) -> InputError:
    by_hand = shlex.join(["python", "-m", "pip", "install", *_wheels(folder)])
    return InputError(
        f"compiling for GPUs that are not there needs NVIDIA's JAX plugin, which {why}. Where there is a network, run: "
        f"{by_hand}"
    )


def _pjrt(plugin: str) -> str:
    return plugin.replace("-plugin", "-pjrt")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str | None) -> list[str]:
    return (version or "").split(".")[:2]
