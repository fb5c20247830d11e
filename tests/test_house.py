"""The house: rooms, each importing only those below it; and any module can be the first."""

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
FOLDERS = ("autoshard", "cost_model", "executors", "search")
"""The last three are packages inside the first."""

UP_TO_PLANS = (
    "autoshard.cost_model",
    "autoshard.search.ir",
    "autoshard.search.solver",
    "autoshard.search.problem",
    "autoshard.search.memory",
    "autoshard.search.device",
    "autoshard.search.plan",
)
"""The rooms on the floors up to that of plans."""

MAY_IMPORT = {
    "autoshard.cost_model": (),
    "autoshard.search.solver": (),
    "autoshard.search.ir": ("autoshard.cost_model.errors", "autoshard.cost_model.units"),
    "autoshard.search.problem": ("autoshard.cost_model", "autoshard.search.ir", "autoshard.search.solver"),
    "autoshard.search.memory": (
        "autoshard.cost_model",
        "autoshard.search.ir",
        "autoshard.search.solver",
        "autoshard.search.problem",
    ),
    "autoshard.search.device": (
        "autoshard.cost_model",
        "autoshard.search.ir",
        "autoshard.search.solver",
        "autoshard.search.problem",
    ),
    "autoshard.search.plan": UP_TO_PLANS[:-1],
    "autoshard.search.pipeline.schedules": ("autoshard.cost_model.errors", "autoshard.search.plan"),
    "autoshard.search.pipeline.simulator": ("autoshard.search.plan",),
    "autoshard.search.pipeline.timeline": (
        "autoshard.cost_model.units",
        "autoshard.search.plan",
        "autoshard.search.pipeline.schedules",
        "autoshard.search.pipeline.simulator",
    ),
    "autoshard.report": (
        "autoshard.cost_model",
        "autoshard.search.plan",
        "autoshard.search.pipeline.schedules",
        "autoshard.search.pipeline.simulator",
        "autoshard.search.pipeline.timeline",
    ),
    "autoshard.search.plan.plan": ("autoshard.cost_model", "autoshard.search.plan", "autoshard.report"),
    "autoshard.search.pipeline": (
        *UP_TO_PLANS,
        "autoshard.search.solver.clock",
        "autoshard.search.garbage",
        "autoshard.search.mesh_problem",
        "autoshard.search.step_problem",
        "autoshard.search.options",
        "autoshard.search.stopwatch",
        "autoshard.search.tightening",
    ),
    "autoshard.search": UP_TO_PLANS,
    "autoshard.search.space": ("autoshard.cost_model", "autoshard.search"),
    "autoshard.search.result": ("autoshard.cost_model", "autoshard.search"),
    "autoshard.search.applying": ("autoshard.cost_model", "autoshard.search"),
    "autoshard.search.driver": ("autoshard.cost_model", "autoshard.search"),
    "autoshard.search.explained_memory": ("autoshard.cost_model", "autoshard.search"),
    "autoshard.search.explanation": ("autoshard.cost_model", "autoshard.search"),
    "autoshard.executors": ("autoshard.cost_model", "autoshard.search.ir", "autoshard.search.plan"),
    "autoshard": ("autoshard.cost_model", "autoshard.search", "autoshard.executors"),
}
"""What each room may import of ours beside itself, lower rooms first but for those around others. A file is in the room with
the longest name that fits it."""

DOORS = {"autoshard.cost_model.xla._jax", "autoshard.search.ir._jax", "autoshard.search.ir._jax_kernels"}
"""The modules that may use what JAX does not promise."""


def name_of(path: Path) -> str:
    """The full name of a module."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if is_in(name, "autoshard") else f"autoshard.{name}"


def is_in(name: str, room: str) -> bool:
    return f"{name}.".startswith(f"{room}.")


FILES = {
    name_of(path): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.parent.is_symlink()
}


@functools.cache
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
    return is_in(name, "autoshard")


# --- what is imported


def test_each_room_of_the_search_is_in_the_table():
    folders = {path.parent.name for path in (ROOT / "search").glob("*/__init__.py")}
    rooms = [room.removeprefix("autoshard.search.") for room in MAY_IMPORT if is_in(room, "autoshard.search")]
    assert folders <= {*rooms}
    paths = [ROOT.joinpath("search", *room.split(".")) for room in rooms if room != "autoshard.search"]
    assert all(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


def test_rooms_stand_on_floors():
    """No room needs itself by way of others, the imports inside functions included."""
    above = {room: set[str]() for room in MAY_IMPORT}
    for module in FILES:
        above[room_of(module)] |= {room_of(name) for name in files_named_by(module)} - {room_of(module)}
    TopologicalSorter(above).prepare()


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
    solver = [m for m in FILES if is_in(m, "autoshard.search.solver")]
    assert not [m for m in solver for name, _ in imports(m) if is_in(name, "jax")]


# --- that it can be


def waits_for(module: str) -> set[str]:
    """What of ours must be imported before a module is: what it names outside of functions, and the packages around that.

    The packages around the module itself are begun before it.
    """
    around = {
        package for file in files_named_by(module, at_once) for package in FILES if is_in(file, package)
    }
    return {m for m in around if not is_in(module, m)}


def files_named_by(module: str, walk: Callable[[ast.AST], Iterable[ast.AST]] = ast.walk) -> set[str]:
    named = {name for name, _ in imports(module, walk) if is_ours(name)}
    files = {name if name in FILES else name.rpartition(".")[0] for name in named}
    return files - {module}


def at_once(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are run where a module is imported."""
    yield tree
    match tree:
        case ast.FunctionDef() | ast.expr() | ast.If(test=ast.Name("TYPE_CHECKING")):
            return
    for node in ast.iter_child_nodes(tree):
        yield from at_once(node)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_no_circle_of_imports_inside_a_room(room):
    """Imports inside functions count too."""
    inside = [module for module in FILES if room_of(module) == room]
    TopologicalSorter({module: files_named_by(module) & {*inside} for module in inside}).prepare()


def test_any_module_can_be_imported_first():
    """None waits for one that waits for it: if one order is good, all are."""
    for module in TopologicalSorter({module: waits_for(module) for module in FILES}).static_order():
        importlib.import_module(module)


WHAT_COMES_WITH_IT = """
import sys, autoshard
assert "jax" not in sys.modules
import jax
before = {name.partition(".")[0] for name in sys.modules} - {"autoshard"}
autoshard.parallelize
print(*{name.partition(".")[0] for name in sys.modules} - before - sys.stdlib_module_names)
"""


@pytest.mark.devices
def test_importing_autoshard_loads_nothing_heavy_beside_jax():
    """JAX is imported with the first name, OR-Tools and Numba where a program is solved, rich where there is a terminal."""
    done = subprocess.run(
        [sys.executable, "-c", WHAT_COMES_WITH_IT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["autoshard"]
