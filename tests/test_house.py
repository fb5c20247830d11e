"""The house: four packages in rooms, each importing only those below it, and any module can be the first."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("autoshard", "cost_model", "executors", "search")

MAY_IMPORT = {
    "cost_model": (),
    "search.solver": (),
    "search.ir": ("cost_model.errors", "cost_model.units"),
    "search.problem": ("cost_model", "search.ir", "search.solver"),
    "search.memory": ("cost_model", "search.ir", "search.solver", "search.problem"),
    "search.device": ("cost_model", "search.ir", "search.solver", "search.problem"),
    "search.plan": (
        "cost_model",
        "search.ir",
        "search.solver",
        "search.problem",
        "search.memory",
        "search.device",
    ),
    "search.pipeline": (
        "cost_model",
        "search.ir",
        "search.solver",
        "search.problem",
        "search.memory",
        "search.device",
        "search.plan",
        "search.solver.clock",
        "search.garbage",
        "search.mesh_problem",
        "search.options",
        "search.stopwatch",
        "search.tightening",
    ),
    "search": ("cost_model", "search"),
    "executors": ("cost_model", "search.ir", "search.plan"),
    "autoshard": ("cost_model", "search", "executors"),
}
"""What each room may import of ours beside itself. A file is in the room with the longest name that fits it."""

DOORS = {"cost_model.xla._jax", "search.ir._jax", "search.ir._jax_kernels"}
"""The modules that may use what JAX does not promise."""

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def is_in(name: str, room: str) -> bool:
    return f"{name}.".startswith(f"{room}.")


def room_of(name: str) -> str:
    return max((room for room in MAY_IMPORT if is_in(name, room)), key=len)


@functools.cache
def imports(
    module: str, walk: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk
) -> tuple[tuple[str, str], ...]:
    """What a module imports, by default wherever in it: full names, each with its statement."""
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        source = ""
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package) + "."
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [(source + alias.name, ast.unparse(node)) for alias in node.names]
    return tuple(found)


def is_ours(name: str) -> bool:
    return any(is_in(name, package) for package in PACKAGES)


# --- what is imported


def test_each_room_of_the_search_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / "search").glob("*/__init__.py")}
    assert folders == {room.removeprefix("search.") for room in MAY_IMPORT if room.startswith("search.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_stands_below_it(room):
    allowed = (room, *MAY_IMPORT[room])
    upwards = [
        f"{module} imports {name}"
        for module in FILES
        if room_of(module) == room
        for name, _ in imports(module)
        if is_ours(name) and not any(is_in(name, below) for below in allowed)
    ]
    assert not upwards


def test_three_modules_touch_the_internals_of_jax():
    internal = ("jax._src", "jaxlib")
    touching = {m for m in FILES for name, _ in imports(m) if any(is_in(name, i) for i in internal)}
    assert touching == DOORS


def test_the_solver_knows_nothing_of_jax():
    solver = [m for m in FILES if is_in(m, "search.solver")]
    assert not [m for m in solver for name, _ in imports(m) if is_in(name, "jax")]


# --- that it can be


def waits_for(module: str) -> set[str]:
    """What of ours must be imported before a module is: what it names outside of functions, and the packages around that.

    The packages around the module itself are begun before it.
    """
    named = {name for name, _ in imports(module, walk=at_once) if is_ours(name)}
    files = {name if name in FILES else name.rpartition(".")[0] for name in named}
    around = {package for file in files for package in FILES if is_in(file, package)}
    return {m for m in around if not is_in(module, m)}


def at_once(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are run where a module is imported."""
    yield tree
    is_later = isinstance(tree, ast.FunctionDef) or (
        isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"
    )
    for node in () if is_later else ast.iter_child_nodes(tree):
        yield from at_once(node)


def test_any_module_can_be_imported_first():
    """None waits for one that waits for it: if one order is good, all are."""
    for module in TopologicalSorter({module: waits_for(module) for module in FILES}).static_order():
        importlib.import_module(module)


WHAT_COMES_WITH_IT = """
import sys, autoshard
assert "jax" not in sys.modules
import jax
before = {name.partition(".")[0] for name in sys.modules} - {"autoshard", "cost_model", "executors", "search"}
autoshard.parallelize
print(*{name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names)
"""


def test_importing_autoshard_loads_nothing_heavy_beside_jax():
    """JAX is imported with the first name, OR-Tools where a program is solved, rich where there is a terminal."""
    done = subprocess.run(
        [sys.executable, "-c", WHAT_COMES_WITH_IT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == set(PACKAGES)
