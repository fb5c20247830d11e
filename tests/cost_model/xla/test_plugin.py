"""Where the compiler's process finds NVIDIA's plugin, and how it comes there."""

import pwd
import shlex
import sys
import tempfile
from pathlib import Path

import pytest

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.xla import plugin, process

SUITING = {"jaxlib": "0.12.1", "jax-cuda13-plugin": "0.12.1", "jax-cuda13-pjrt": "0.12.1"}
OF_CUDA_12 = {"jaxlib": "0.12.1", "jax-cuda12-plugin": "0.12.0", "jax-cuda12-pjrt": "0.12.0"}
BARE = {"jaxlib": "0.12.1"}
OF_AN_OLDER_JAX = SUITING | {"jax-cuda13-plugin": "0.11.2"}
HALF = {name: version for name, version in SUITING.items() if "pjrt" not in name}


@pytest.fixture
def world(monkeypatch, tmp_path):
    """An environment with these distributions, and with code in place of pip: the folder where plugins are kept."""

    def made(versions, installer=""):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(plugin, "_version", versions.get)
        monkeypatch.setattr(plugin, "_installer", lambda: [sys.executable, "-c", installer])
        return tmp_path / "autoshard"

    return made


FILLS = """
import sys, pathlib
folder = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
(folder / "wheels").write_text(" ".join(sys.argv[-2:]))
"""
FAILS = "import sys; sys.exit('Looking.\\nERROR: No matching distribution found for it.')"


@pytest.mark.parametrize("versions", [SUITING, OF_CUDA_12])
def test_a_plugin_of_the_users_environment_is_used_as_it_is(world, versions):
    kept = world(versions, FAILS)
    assert plugin.provided() is None
    assert not kept.exists()


@pytest.mark.devices
@pytest.mark.parametrize("versions", [BARE, OF_AN_OLDER_JAX, HALF], ids=["none", "another JAX's", "half"])
def test_without_one_it_is_installed_once_beside_the_environment(world, versions):
    kept, told = world(versions, FILLS), list[str]()
    folder = plugin.provided(told.append)
    assert [*kept.iterdir()] == [folder]
    assert (folder / "wheels").read_text() == "jax-cuda13-plugin==0.12.1 jax-cuda13-pjrt==0.12.1"
    assert told == [
        f"installing NVIDIA's compiler, once, into {folder} (0.14 GB to download, 0.4 GB on disk)"
    ]
    world(versions, FAILS)
    assert plugin.provided(told.append) == folder
    assert len(told) == 1


def test_only_the_compilers_process_sees_the_folder(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/users")
    path = process._environment("", "/tmp", Path("/cache/plugin"))["PYTHONPATH"].split(":")
    assert path[1:] == ["/cache/plugin", "/users"]
    assert "/cache/plugin" not in sys.path


@pytest.mark.devices
def test_where_nothing_can_be_installed_the_error_has_the_command(world):
    kept = world(BARE, FAILS)
    with pytest.raises(InputError) as caught:
        plugin.provided()
    assert not any(kept.iterdir())
    said, _, command = str(caught.value).partition(". Where there is a network, run: ")
    assert said.endswith("could not be installed: ERROR: No matching distribution found for it")
    assert shlex.split(command) == [
        *["python", "-m", "pip", "install", "--no-deps", "--target", str(plugin.own_folder())],
        *["jax-cuda13-plugin==0.12.1", "jax-cuda13-pjrt==0.12.1"],
    ]


def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")


def test_a_user_without_a_home_has_a_folder_among_temporary_files(monkeypatch, tmp_path):
    """As in a container whose user the system does not know."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    folder = plugin.own_folder()
    assert folder.parent.parent == tmp_path
    begun, partial = plugin._begun()
    assert begun == folder
    assert partial.is_dir()
    assert folder.parent.stat().st_mode & 0o077 == 0


@pytest.mark.devices
def test_a_home_that_cannot_be_written_is_passed_over(world, monkeypatch, tmp_path):
    world(BARE, FILLS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    folder = plugin.provided()
    assert (tmp_path / "tmp") in folder.parents
    assert (folder / "wheels").exists()
    assert plugin.is_there()


def test_where_no_folder_can_be_written_the_error_says_which(world, monkeypatch, tmp_path):
    world(BARE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert not plugin.is_there()
    with pytest.raises(
        InputError, match=r"file/autoshard and .*cannot be written \(XDG_CACHE_HOME names another\)"
    ):
        plugin.provided()


def test_a_folder_of_another_user_is_not_ours(world, monkeypatch, tmp_path):
    world(BARE)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(plugin.os, "getuid", lambda: 12345)
    theirs = plugin._places()[-1]
    theirs.mkdir(parents=True)
    assert theirs.parent.name == "autoshard-12345"
    assert not plugin.is_there()
    with pytest.raises(InputError, match="cannot be written"):
        plugin.provided()


def test_without_pip_and_uv_the_error_says_so(monkeypatch):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(plugin.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="cannot be installed, as neither pip nor uv is here"):
        plugin._installer()
