"""Where the compiler's process finds NVIDIA's plugin, and how it comes there."""

import shlex
import sys
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


def test_without_pip_and_uv_the_error_says_so(monkeypatch):
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(plugin.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="cannot be installed, as neither pip nor uv is here"):
        plugin._installer()
