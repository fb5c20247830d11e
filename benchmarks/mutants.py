"""Mutants: a source file with one small change of meaning, drawn at random.

Every operator is a function from a node of the syntax tree to the nodes that could stand in its place. A place with at
least one of them is a site; a draw takes sites evenly from all files, and one replacement at each. The same seed draws
the same mutants, and a longer draw begins with a shorter one's.

Never drawn is what a test could not or should not notice: docstrings, messages, annotations, decorators, imports,
`__all__`, `__repr__`, asserts and `strict=`. Nor, where that can be seen, what merely crashes: a constructor without
its argument kills itself, and says nothing about the tests.
"""

import ast
import random
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
ORDERED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
SEQUENCES = (ast.List, ast.Tuple, ast.ListComp, ast.JoinedStr)
MOST_COUNT = 16
"""A larger number is no count but a quantity: off by one it means the same, so it is doubled."""

BUILTINS = {"min": "max", "max": "min", "any": "all", "all": "any", "prod": "sum", "ceil": "int"}
"""One name for another that needs no import."""
ATTRIBUTES = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "prod": "sum", "sum": "prod"},
    **{"minimum": "maximum", "maximum": "minimum", "argmin": "argmax", "argmax": "argmin"},
    **{"ceil": "floor", "floor": "ceil", "zeros": "ones", "ones": "zeros"},
    **{"union": "intersection", "intersection": "union", "startswith": "endswith", "endswith": "startswith"},
}
WRAPPERS = {"sorted", "reversed"}
DEFAULTED = {"sum", "enumerate", "round", "get", "pop", "next", "array", "zeros", "ones"}
"""These take their last argument or leave it."""

EXITS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
UNDRAWN_FIELDS = {"annotation", "returns", "decorator_list", "bases", "type_params"}
UNDRAWN_CALLS = {"warn", "cast", "field", "TypeVar"}
UNDRAWN_KEYWORDS = {"strict", "stacklevel"}
UNDRAWN_FUNCTIONS = {"__repr__", "__str__"}

WIDTH = 160
"""Characters shown of a line."""

type Replacements = Iterator[ast.AST]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a syntax tree, and what could stand there instead.

    Attributes:
      statement: the innermost that holds the node.
      function: the qualified name of what the place lies in; empty at a module's top level.
    """

    node: ast.AST
    statement: ast.stmt
    function: str
    replacements: tuple[ast.AST, ...]

    @property
    def line(self) -> int:
        return getattr(self.node, "lineno", self.statement.lineno)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of a file.

    Attributes:
      before: the line that differs, as `ast.unparse` writes it; of a long one, what lies around the difference.
      after: the same line of the mutant.
      site: which of the file's sites it changes.
      choice: which of the site's replacements it takes.
    """

    file: str
    line: int
    function: str
    before: str
    after: str
    site: int
    choice: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names it for as long as the line stands."""
        return self.file, self.function, self.before, self.after


def draw(root: Path, files: Iterable[str], count: int, seed: str) -> list[Mutant]:
    """At most `count` mutants of the files under `root`, no two at one site, in order of file and line."""
    rng = random.Random(seed)
    by_site = [list(same) for file in files for _, same in groupby(every(root, file), lambda m: m.site)]
    rng.shuffle(by_site)
    return sorted((rng.choice(same) for same in by_site[:count]), key=lambda m: (m.file, m.site))


def every(root: Path, file: str) -> Iterator[Mutant]:
    """All mutants of a file, site by site."""
    for index, site in enumerate(sites(ast.parse((root / file).read_text()))):
        for choice, new in enumerate(site.replacements):
            yield Mutant(file, site.line, site.function, *_differing(site, new), index, choice)


def mutated(source: str, mutant: Mutant) -> str:
    """The text of a mutant, from that of its file."""
    tree = ast.parse(source)
    site = list(sites(tree))[mutant.site]
    return ast.unparse(_replaced(tree, site.node, site.replacements[mutant.choice])) + "\n"


def sites(tree: ast.Module) -> Iterator[Site]:
    """The sites of a module, in the order of its text."""
    for statement in tree.body:
        yield from _sites(statement, statement, ())


def _sites(node: ast.AST, statement: ast.stmt, scope: tuple[str, ...]) -> Iterator[Site]:
    if _is_undrawn(node):
        return
    statement = node if isinstance(node, ast.stmt) else statement
    scope = (*scope, node.name) if isinstance(node, ast.FunctionDef | ast.ClassDef) else scope
    found = [new for operator in OPERATORS.get(type(node), ()) for new in operator(node)]
    if scope[-1:] == ("__init__",):  # what is never set only crashes
        found = [new for new in found if not isinstance(new, ast.Pass)]
    changes = tuple(new for new in found if ast.dump(new) != ast.dump(node))
    if changes:
        yield Site(node, statement, ".".join(scope), changes)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in UNDRAWN_FIELDS:
                yield from _sites(child, statement, scope)


def _replaced[N: ast.AST](tree: N, node: ast.AST, new: ast.AST) -> N:
    """A copy of a tree with another node at one place."""
    return deepcopy(tree, {id(node): new})


def _differing(site: Site, new: ast.AST) -> tuple[str, str]:
    """The one line of the site's statement that a replacement changes, before and after."""
    statements = site.statement, _replaced(site.statement, site.node, new)
    pairs = zip(*(ast.unparse(statement).splitlines() for statement in statements), strict=True)
    before, after = next((old.strip(), new.strip()) for old, new in pairs if old != new)
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    start = max(0, min(same - WIDTH // 2, len(before) - WIDTH))
    return before[start : start + WIDTH], after[start : start + WIDTH]


def _is_undrawn(node: ast.AST) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr() | ast.TypeAlias() | ast.Raise():
            return True
        case ast.Call():
            return _callee(node) in UNDRAWN_CALLS
        case ast.FunctionDef():
            return node.name in UNDRAWN_FUNCTIONS
        case ast.keyword():
            return node.arg in UNDRAWN_KEYWORDS
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def _callee(node: ast.Call) -> str:
    """The last part of a called function's name."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _with[N: ast.AST](node: N, **changed) -> N:
    """A copy of a node with some of its fields changed; the others are shared."""
    return type(node)(**{**dict(ast.iter_fields(node)), **changed})


def _without(elements: list, index: int) -> list:
    return [*elements[:index], *elements[index + 1 :]]


def _compared(node: ast.Compare) -> Replacements:
    for index, op in enumerate(node.ops):
        for other in COMPARISONS[type(op)]:
            yield _with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])


def _calculated(node: ast.BinOp) -> Replacements:
    is_sequence = isinstance(node.left, SEQUENCES) or isinstance(node.right, SEQUENCES)
    if isinstance(node.op, ast.Add if is_sequence else ORDERED):
        yield _with(node, left=node.right, right=node.left)
    if is_sequence:
        return
    if isinstance(node.op, ast.FloorDiv):  # rounded up
        yield ast.UnaryOp(ast.USub(), _with(node, left=ast.UnaryOp(ast.USub(), node.left)))
    yield from _reckoned(node)


def _reckoned(node: ast.BinOp | ast.AugAssign) -> Replacements:
    if type(node.op) in ARITHMETIC:
        yield _with(node, op=ARITHMETIC[type(node.op)]())


def _joined(node: ast.BoolOp) -> Replacements:
    yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    for index in range(len(node.values)):
        rest = _without(node.values, index)
        yield rest[0] if len(rest) == 1 else _with(node, values=rest)


def _unsigned(node: ast.UnaryOp) -> Replacements:
    yield node.operand


def _off_by_one(node: ast.Constant) -> Replacements:
    match node.value:
        case bool():
            yield ast.Constant(not node.value)
        case int() if abs(node.value) <= MOST_COUNT:
            yield ast.Constant(node.value + 1)
            yield ast.Constant(node.value - 1)
        case int() | float():
            yield ast.Constant(2 * node.value or 1.0)


def _renamed(node: ast.Name) -> Replacements:
    if node.id in BUILTINS and isinstance(node.ctx, ast.Load):
        yield _with(node, id=BUILTINS[node.id])


def _reached(node: ast.Attribute) -> Replacements:
    if node.attr in ATTRIBUTES:
        yield _with(node, attr=ATTRIBUTES[node.attr])


def _called(node: ast.Call) -> Replacements:
    name, args = _callee(node), node.args
    if name in WRAPPERS:
        yield _with(node, func=ast.Name("list", ast.Load()), args=args[:1], keywords=[])
    if name == "abs":
        yield args[0]
    if name == "range" and len(args) == 1:
        yield _with(node, args=[ast.BinOp(args[0], ast.Sub(), ast.Constant(1))])
        yield _with(node, args=[ast.Constant(1), *args])
    if name in DEFAULTED and len(args) > 1:
        yield _with(node, args=args[:-1])


def _called_without(node: ast.Call) -> Replacements:
    if _callee(node)[:1].isupper():
        return
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in UNDRAWN_KEYWORDS:
            yield _with(node, keywords=_without(node.keywords, index))


def _sliced(node: ast.Slice) -> Replacements:
    for name in ("lower", "upper"):
        bound = getattr(node, name)
        if bound is not None and not isinstance(bound, ast.Constant):
            yield _with(node, **{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))})


def _negated(node: ast.If | ast.While | ast.IfExp | ast.match_case) -> Replacements:
    """A condition turned round; comparisons and `not` have operators of their own."""
    name = "guard" if isinstance(node, ast.match_case) else "test"
    match getattr(node, name):
        case None | ast.Compare() | ast.Constant() | ast.UnaryOp(op=ast.Not()):
            return
        case test:
            yield _with(node, **{name: ast.UnaryOp(ast.Not(), test)})


def _unfiltered(node: ast.comprehension) -> Replacements:
    for index in range(len(node.ifs)):
        yield _with(node, ifs=_without(node.ifs, index))


def _one_branch(node: ast.IfExp) -> Replacements:
    yield from (node.body, node.orelse)


def _fallen_through(node: ast.If) -> Replacements:
    """An early exit that does not happen."""
    if isinstance(node.body[-1], EXITS) and not node.orelse:
        yield _with(node, body=[*node.body[:-1], ast.Pass()])


def _deleted(node: ast.stmt) -> Replacements:
    yield ast.Pass()


def _deleted_call(node: ast.Expr) -> Replacements:
    if isinstance(node.value, ast.Call) and not _is_undrawn(node.value):
        yield ast.Pass()


def _unassigned(node: ast.Assign) -> Replacements:
    """What is stored, or computed from its own old value, keeps the old one."""
    read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    target = node.targets[0]
    if isinstance(target, ast.Attribute | ast.Subscript) or getattr(target, "id", None) in read:
        yield ast.Pass()


def _returned(node: ast.Return) -> Replacements:
    if isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
        yield _with(node, value=_with(node.value, elts=node.value.elts[::-1]))


def _shorter(node: ast.List | ast.Set) -> Replacements:
    for index in range(len(node.elts)):
        yield _with(node, elts=_without(node.elts, index))


def _shorter_dict(node: ast.Dict) -> Replacements:
    for index in range(len(node.keys)):
        yield _with(node, keys=_without(node.keys, index), values=_without(node.values, index))


OPERATORS: dict[type[ast.AST], tuple[Callable[..., Replacements], ...]] = {
    ast.Compare: (_compared,),
    ast.BinOp: (_calculated,),
    ast.BoolOp: (_joined,),
    ast.UnaryOp: (_unsigned,),
    ast.Constant: (_off_by_one,),
    ast.Name: (_renamed,),
    ast.Attribute: (_reached,),
    ast.Call: (_called, _called_without),
    ast.Slice: (_sliced,),
    ast.comprehension: (_unfiltered,),
    ast.IfExp: (_negated, _one_branch),
    ast.If: (_negated, _fallen_through),
    ast.While: (_negated,),
    ast.match_case: (_negated,),
    ast.AugAssign: (_reckoned, _deleted),
    ast.Assign: (_unassigned,),
    ast.Expr: (_deleted_call,),
    ast.Continue: (_deleted,),
    ast.Break: (_deleted,),
    ast.Return: (_returned,),
    ast.List: (_shorter,),
    ast.Set: (_shorter,),
    ast.Dict: (_shorter_dict,),
}
