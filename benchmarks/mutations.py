"""Do the tests notice? Small changes of meaning in the sources, each judged by the tests of its room.

A mutant is a source file with one change: a comparison turned round, `min` for `max`, a statement left out, a constant
off by one (`benchmarks.mutants` has them all). As many are drawn in each room. A mutant is killed when a test of its
own room fails or hangs; the test modules named like the changed file run first. One that survives shows a question that
no test asks.

    .venv/bin/python -m benchmarks.mutations                                # every room: 150 mutants on all cores
    .venv/bin/python -m benchmarks.mutations --room solver --count 40 --seed 1 --jobs 2
    .venv/bin/python -m benchmarks.mutations --list                         # what would be drawn; runs nothing

Some mutants mean the same as the original. Those known are in `mutations_equivalent.toml`, with why. They run like all
others, and if a test kills one, the table is wrong. The share killed is that of the rest.

Every job works in a copy of the tree, so that the sources stay as they are; it imports once what no mutant changes (JAX
takes longer than most tests) and forks a process for each mutant. Hypothesis draws the same examples every time and
keeps none. Before any mutant each room's tests run on the sources as they are: a room whose tests fail then is not
judged, and the time they take says when a mutant hangs.
"""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import cache_from_source
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

from benchmarks.mutants import Mutant, draw, mutated

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = Path(__file__).with_name("mutations_equivalent.toml")
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__")
"""Of the tree, what a copy does without."""
UNCHANGED = (
    "jax",
    "flax.linen",
    "optax",
    "hypothesis.strategies",
    "ortools.math_opt.python.mathopt",
    "pytest",
)
"""What tests import and no mutant changes; none of it starts threads when it is imported."""
PYTEST = (
    "-x",
    "-n0",
    "-mslow or not slow",
    "-pno:cacheprovider",
    "-Wignore:Module already imported",
    "--hypothesis-profile=ci",
)
LOG = "pytest.log"
HEADER = ("room", "drawn", "killed", "of these hung", "survived", "equivalent", "share killed")


@dataclass(frozen=True, slots=True)
class Room:
    """Sources, and the tests that answer for them; each a folder or a file."""

    sources: str
    tests: str

    def files(self) -> list[str]:
        return _modules(self.sources, "*.py")

    def tests_of(self, file: str) -> list[str]:
        """The room's test modules, those named like a file first."""
        own = f"test_{Path(file).stem}"
        return sorted(_modules(self.tests, "test_*.py"), key=lambda test: not Path(test).stem.startswith(own))


ROOMS = {
    "solver": Room("search/solver", "tests/search/solver"),
    "ir": Room("search/ir", "tests/search/ir"),
    "memory": Room("search/memory", "tests/search/memory"),
    "problem": Room("search/problem", "tests/search/problem"),
    "device": Room("search/device", "tests/search/device"),
    "plan": Room("search/plan", "tests/search/plan"),
    "collectives": Room("cost_model/collectives.py", "tests/cost_model/test_collectives.py"),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a mutant.

    Attributes:
      outcome: "killed"; "hung", which counts as killed; "survived"; or "equivalent", a survivor that is known.
      why: it means the same as the original, by the table; empty for what is not listed.
    """

    room: str
    mutant: Mutant
    outcome: str
    time_s: float
    why: str

    def __str__(self) -> str:
        why = f"\n    {self.why}" if self.why else ""
        return f"{self.outcome} in {self.time_s:.1f} s: {described(self.mutant)}{why}"


def main() -> None:
    options = _options()
    drawn = {room: drawn_in(room, options.count, options.seed) for room in options.room}
    if options.list:
        print(*(described(mutant) for mutants in drawn.values() for mutant in mutants), sep="\n")
        return
    found: list[Verdict] = []
    with tempfile.TemporaryDirectory() as scratch:
        context, arguments = get_context("spawn"), (scratch, options.jobs)
        with ProcessPoolExecutor(options.jobs, context, initializer=_settle, initargs=arguments) as pool:
            for verdict in verdicts(pool, drawn):
                print(verdict, flush=True)
                found.append(verdict)
    print(*report(found), sep="\n")


def drawn_in(room: str, count: int, seed: int) -> list[Mutant]:
    """A room's mutants; another room's leave them as they are."""
    return draw(ROOT, ROOMS[room].files(), count, f"{seed} {room}")


def described(mutant: Mutant) -> str:
    """Where a mutant differs, and how."""
    where = f" in {mutant.function}" if mutant.function else ""
    return f"{mutant.file}:{mutant.line}{where}\n  - {mutant.before}\n  + {mutant.after}"


def verdicts(pool: ProcessPoolExecutor, drawn: dict[str, list[Mutant]]) -> Iterator[Verdict]:
    """Of all mutants, in the rooms whose tests pass without any."""
    known, asked = equivalents(), []
    for name, (time_s, failure) in zip(drawn, pool.map(unmutated, drawn), strict=True):
        print(f"{name}: its tests take {time_s:.0f} s{failure}", flush=True)
        for mutant in drawn[name] if not failure else ():
            limit_s, why = 2 * time_s + 60, known.get(mutant.key, "")
            asked.append(pool.submit(judged, name, mutant, limit_s, why))
    yield from (answer.result() for answer in asked)


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Why each mutant listed, by its key, means the same as the original."""
    entries = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    return {(e["file"], e["function"], e["before"], e["after"]): e["why"] for e in entries}


def _settle(scratch: str, jobs: int) -> None:
    """Gives this process its copy of the tree, its share of memory and what every test imports."""
    home = tempfile.mkdtemp(dir=scratch)
    shutil.copytree(ROOT, home, symlinks=True, ignore=LEFT_OUT, dirs_exist_ok=True)
    os.chdir(home)
    sys.path[:] = [home, *(folder for folder in sys.path if Path(folder).resolve() != ROOT)]
    os.environ.update(PYTHONPATH=home, TMPDIR=scratch)
    share = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jobs
    resource.setrlimit(resource.RLIMIT_DATA, (share, share))
    for name in UNCHANGED:
        import_module(name)


def unmutated(room: str) -> tuple[float, str]:
    """The seconds that a room's tests take on the sources as they are, and how they fail, if they do."""
    start_s = perf_counter()
    exit_status = _exit_status(ROOMS[room].tests_of(""), None)
    failure = f" and fail:\n{Path(LOG).read_text()[-2000:]}" if exit_status else ""
    return perf_counter() - start_s, failure


def judged(room: str, mutant: Mutant, limit_s: float, why: str) -> Verdict:
    """What the room's tests say of a mutant, in this process' copy of the tree."""
    path, start_s = Path(mutant.file), perf_counter()
    source = path.read_text()
    try:
        _write(path, mutated(source, mutant))
        exit_status = _exit_status(ROOMS[room].tests_of(mutant.file), limit_s)
    finally:
        _write(path, source)
    survivor = "equivalent" if why else "survived"
    outcome = {None: "hung", 0: survivor}.get(exit_status, "killed")
    return Verdict(room, mutant, outcome, perf_counter() - start_s, why)


def _write(path: Path, source: str) -> None:
    """Writes a module, and forgets what was compiled of it: by second and size two mutants may look alike."""
    path.write_text(source)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def _exit_status(tests: Sequence[str], limit_s: float | None) -> int | None:
    """Of test modules run in a forked process; None if they did not end in time. Nothing that they started is left."""
    process = get_context("fork").Process(target=_pytest, args=(tests,))
    process.start()
    process.join(limit_s)
    exit_status = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return exit_status


def _pytest(tests: Sequence[str]) -> None:
    """Ends this process as pytest would; without tests, in failure."""
    os.setsid()
    log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os._exit(import_module("pytest").main([*PYTEST, *tests]) if tests else 1)


def report(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The table, then every mutant that no test killed."""
    rooms = {name: [v for v in verdicts if v.room == name] for name in ROOMS}
    yield from ("", _line(HEADER), _line(["---"] * len(HEADER)))
    yield from (_line(_counts(name, those)) for name, those in {**rooms, "all": verdicts}.items() if those)
    yield from _listed("Survived", [v for v in verdicts if v.outcome == "survived"])
    yield from _listed("Equivalent", [v for v in verdicts if v.outcome == "equivalent"])
    wrong = [v for v in verdicts if v.why and v.outcome != "equivalent"]
    yield from _listed("Not equivalent, whatever the table says", wrong)


def _counts(name: str, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """A row of the table."""
    count = Counter(verdict.outcome for verdict in verdicts)
    num_killed = count["killed"] + count["hung"]
    share = num_killed / max(len(verdicts) - count["equivalent"], 1)
    counts = len(verdicts), num_killed, count["hung"], count["survived"], count["equivalent"]
    return name, *map(str, counts), f"{share:.0%}"


def _listed(title: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
    if verdicts:
        yield from ("", f"{title}:", "", *map(str, verdicts))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _modules(path: str, pattern: str) -> list[str]:
    """The modules at or under a path of the tree."""
    return [path] if Path(path).is_file() else sorted(map(str, Path(path).rglob(pattern)))


def _options() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--room", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--count", type=int, default=25, metavar="N", help="mutants drawn in each room")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another seed draws others")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="mutants at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
