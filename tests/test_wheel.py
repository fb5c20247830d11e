"""Packages: the wheel has one name on the user's path, `autoshard`, and the source distribution makes that wheel."""

import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

import autoshard

pytestmark = pytest.mark.devices

ROOT = Path(__file__).parents[1]

TRAIN = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
import search, executors, cost_model
from autoshard.search.ir import graph  # before autoshard.search, the function, is asked for
import autoshard

assert (search.MINE, executors.MINE, cost_model.MINE) == (1, 2, 3)
assert graph.__file__.startswith(autoshard.__file__.removesuffix("__init__.py"))
assert autoshard.InputError.__module__ == "autoshard"

def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss

w, x = jnp.ones((8, 4)), jnp.ones((16, 8))
print(autoshard.search(step, w, x, cluster="8xH100-80GB").meshes)
w, loss = autoshard.parallelize(step)(w, x)
print(float(loss))
"""


def built(source: Path, folder: Path, *targets: str) -> list[Path]:
    """The packages that are made from a folder of sources."""
    asked = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *asked, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> list[Path]:
    return built(ROOT, tmp_path_factory.mktemp("packages"), "sdist", "wheel")


@pytest.fixture(scope="module")
def wheel(packages) -> Path:
    return packages[0]


def test_packages_have_the_version_of_the_module(packages):
    of_this = f"autoshard-{autoshard.__version__}"
    assert [package.name for package in packages] == [f"{of_this}-py3-none-any.whl", f"{of_this}.tar.gz"]


def test_the_source_distribution_is_the_repository_and_makes_the_same_wheel(packages, tmp_path):
    wheel, sources = packages
    with tarfile.open(sources) as packed:
        packed.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    for folder in ("search", "executors", "cost_model"):
        assert (unpacked / "autoshard" / folder).readlink() == Path("..", folder)
    for file in ("examples/train_gpt.py", "tests/test_wheel.py", "docs/conf.py", "uv.lock"):
        assert (unpacked / file).read_bytes() == (ROOT / file).read_bytes()
    (again,) = built(unpacked, tmp_path / "again", "wheel")
    assert again.read_bytes() == wheel.read_bytes()


def test_a_wheel_installs_one_package(wheel):
    with ZipFile(wheel) as packed:
        names = {name.partition("/")[0] for name in packed.namelist()}
        sources = {name for name in packed.namelist() if name.endswith(".py")}
        pages = {name for name in packed.namelist() if name.startswith("autoshard/report/page.")}
    assert {name for name in names if not name.endswith(".dist-info")} == {"autoshard"}
    for folder in ("search", "executors", "cost_model"):
        own = {f"autoshard/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
        assert own <= sources
    assert pages == {f"autoshard/report/page.{ending}" for ending in ("py", "html", "css", "js")}


def test_a_users_files_may_have_our_folders_names(wheel, tmp_path):
    """Beside an installed wheel; the dependencies are this environment's, without what is installed to be edited."""
    installed, project = tmp_path / "installed", tmp_path / "project"
    with ZipFile(wheel) as packed:
        packed.extractall(installed)
    (project / "executors").mkdir(parents=True)
    (project / "search.py").write_text("MINE = 1")
    (project / "executors" / "__init__.py").write_text("MINE = 2")
    (project / "cost_model.py").write_text("MINE = 3")
    (project / "train.py").write_text(TRAIN)
    path = f"{installed}:{sysconfig.get_path('purelib')}"
    done = subprocess.run(
        [sys.executable, "-S", project / "train.py"],
        env={"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) == 64.0
