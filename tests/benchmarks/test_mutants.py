"""Mutants: what each operator makes of a line, what none of them touches, and draws that can be repeated."""

import ast
from functools import cache
from pathlib import Path

import pytest

from benchmarks.mutants import OPERATORS, draw, every, mutated
from benchmarks.mutations import equivalents

LINES = {
    "x = a < b": {"x = a <= b", "x = a >= b"},
    "x = a <= b < c": {"x = a < b < c", "x = a > b < c", "x = a <= b <= c", "x = a <= b >= c"},
    "x = a == b": {"x = a != b"},
    "x = a is not b": {"x = a is b"},
    "x = a not in b": {"x = a in b"},
    "x = a + b": {"x = a - b"},
    "x = [a] + b": {"x = b + [a]", "x = [] + b"},
    "x = [a] * b": {"x = [] * b"},
    "x = a - b": {"x = a + b", "x = b - a"},
    "x = a * (b + c)": {"x = a / (b + c)", "x = a * (b - c)"},
    "x = a // b": {"x = b // a", "x = -(-a // b)"},
    "x = a - a": {"x = a + a"},
    "x = a and b": {"x = a or b", "x = a", "x = b"},
    "x = not a": {"x = a"},
    "x = -a": {"x = a"},
    "x = 3": {"x = 4", "x = 2"},
    "x = 4096": {"x = 8192"},
    "x = 2.5": {"x = 5.0"},
    "x = 0.0": {"x = 1.0"},
    "x = True": {"x = False"},
    "x = min(a, b)": {"x = max(a, b)"},
    "x = reduce(np.minimum, a)": {"x = reduce(np.maximum, a)"},
    "x = any(a)": {"x = all(a)"},
    "x = sorted(a, key=b)": {"x = list(a)", "x = sorted(a)"},
    "x = range(n)": {"x = range(n - 1)", "x = range(1, n)"},
    "x = sum(a, b)": {"x = sum(a)"},
    "x = f(a, axis=b)": {"x = f(a)"},
    "x = a[b:]": {"x = a[b + 1:]"},
    "x = a[:-1]": {"x = a[:1]", "x = a[:-2]", "x = a[:-0]", "x = a[:-1 + 1]"},
    "x = [a for a in b if c]": {"x = [a for a in b]"},
    "x = a if b else c": {"x = a if not b else c", "x = a", "x = c"},
    "x = {a, b}": {"x = {a}", "x = {b}"},
    "x = {a: b, c: d}": {"x = {a: b}", "x = {c: d}"},
    "x += a": {"x -= a", "pass"},
    "x = f(x)": {"pass"},
    "x[a] = b": {"pass"},
    "x.append(a)": {"pass"},
    "while a: break": {"while not a:", "pass"},
}
"""All that may come of a line."""

FUNCTION = {
    "if a: return b": {"if not a:", "pass"},
    "for a in b:\n        continue": {"pass"},
    "return a, b": {"return (b, a)"},
    "match a:\n        case b if c: d = a": {"case b if not c:"},
}

UNTOUCHED = '''
"""A docstring of 1 module."""
from a import b
__all__ = ["a", "b"]
type Pair = tuple[int, int] | None

@dataclass(frozen=True)
class C(Base[1]):
    """A docstring."""
    field: tuple[float, ...] | None
    hidden: list[int] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        return min(a, b)

@lru_cache(maxsize=4096)
def f(a: int | None, *rest: "A | B") -> Literal[1, 2]:
    """A docstring."""
    assert a < 1, "a message"
    warn("a message", stacklevel=2)
    raise ValueError(f"wanted {a + 1}, got {-b}")
    x = C(a, name=b)
    y = zip(a, b, strict=True)
    return "all-gather"
'''

ROOT = Path(__file__).parents[2]
FILES = ("cost_model/collectives.py", "search/solver/pbqp.py")


@pytest.mark.parametrize("line", LINES)
def test_what_comes_of_a_line(tmp_path, line):
    (tmp_path / "m.py").write_text(line)
    assert {mutant.after for mutant in every(tmp_path, "m.py")} == LINES[line]


@pytest.mark.parametrize("line", FUNCTION)
def test_what_comes_of_a_line_in_a_function(tmp_path, line):
    (tmp_path / "m.py").write_text(f"class C:\n  def f():\n    {line}\n")
    mutants = list(every(tmp_path, "m.py"))
    assert {mutant.after for mutant in mutants} == FUNCTION[line]
    assert {mutant.function for mutant in mutants} == {"C.f"}


def test_the_lines_show_every_operator():
    shown = "\n".join([*LINES, "def f():", *(f"    {line}" for line in FUNCTION)])
    assert {type(node) for node in ast.walk(ast.parse(shown))} >= set(OPERATORS)


def test_what_means_nothing_is_never_drawn(tmp_path):
    (tmp_path / "m.py").write_text(UNTOUCHED)
    assert list(every(tmp_path, "m.py")) == []


@cache
def drawn():
    return draw(ROOT, FILES, 10, "0")


def test_a_mutant_is_its_file_but_for_one_line():
    sources = {file: (ROOT / file).read_text() for file in FILES}
    originals = {file: ast.unparse(ast.parse(source)).splitlines() for file, source in sources.items()}
    for mutant in drawn():
        original = originals[mutant.file]
        changed = ast.unparse(ast.parse(mutated(sources[mutant.file], mutant))).splitlines()
        [(before, after)] = [pair for pair in zip(original, changed, strict=True) if pair[0] != pair[1]]
        assert mutant.before in before
        assert mutant.after in after
        assert mutant.before != mutant.after


def test_a_filter_stands_where_its_statement_does(tmp_path):
    (tmp_path / "m.py").write_text("def f():\n    x = a\n    return [a for a in b if c]\n")
    assert [(m.line, m.after) for m in every(tmp_path, "m.py")] == [(3, "return [a for a in b]")]


def test_of_a_long_line_the_difference_is_shown(tmp_path):
    names = ", ".join(f"name_{i}" for i in range(100))
    (tmp_path / "m.py").write_text(f"x = ({names}, a < b, {names})")
    assert {m.after.count("a <= b") + m.after.count("a >= b") for m in every(tmp_path, "m.py")} == {1}
    assert all(len(m.after) < 200 for m in every(tmp_path, "m.py"))


def test_an_attribute_is_set_at_first(tmp_path):
    (tmp_path / "m.py").write_text(
        "class C:\n  def __init__(self):\n    self.x = a\n  def f(self):\n    self.x = b"
    )
    assert [m.before for m in every(tmp_path, "m.py")] == ["self.x = b"]


def test_a_seed_draws_the_same_again():
    assert drawn() == draw(ROOT, FILES, 10, "0")
    assert drawn() != draw(ROOT, FILES, 10, "1")


def test_a_longer_draw_holds_the_shorter():
    longer = {mutant.key for mutant in draw(ROOT, FILES, 20, "0")}
    assert {mutant.key for mutant in drawn()} <= longer


def test_a_mutant_stands_at_its_line_of_the_file(tmp_path):
    (tmp_path / "m.py").write_text("x = (  # a comment\n    a,\n    2 <\n        b,\n)\n")
    assert {(m.line, m.after) for m in every(tmp_path, "m.py")} == {
        (3, "x = (a, 2 <= b)"),
        (3, "x = (a, 2 >= b)"),
        (3, "x = (a, 3 < b)"),
        (3, "x = (a, 1 < b)"),
    }


def test_the_equivalents_are_mutants_of_what_stands():
    listed = equivalents()
    assert all(listed.values())
    files = {file for file, *_ in listed}
    assert set(listed) <= {mutant.key for file in files for mutant in every(ROOT, file)}
