"""The step's arguments as a tree: where each rests, its role, and its bytes on one device.

Layers are many and mostly alike. Siblings whose paths differ in a number, and that hold arguments of equal type, role and
spec, are one node: `['block_0-11']`, twelve times. A node says the bytes of all that it stands for. If a tree has
more leaves than a page can hold, the largest are shown, and the page says what is left out.
"""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.cost_model.units import format_bytes
from autoshard.report.markup import Html, element, joined
from autoshard.report.spec_shares import local_bytes
from autoshard.search.plan.argument_paths import pieces
from autoshard.search.plan.number_ranges import ranges
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import PlanValues

MAX_LEAVES = 500
"""Leaves on a page: each takes about 300 bytes, and a page has at most 300 KB."""

BOX = ".value"
"""The end of the path of an NNX variable, which says nothing."""

_NUMBER = re.compile(r"\d+")

OPEN = 12
"""A node opens by itself if it has no more children than this, near the root."""


@dataclass(frozen=True, slots=True)
class ArgumentNode:
    """An argument, or a subtree of arguments.

    Attributes:
      label: its piece of the path; of several alike, with their numbers as ranges.
      described: of an argument: its type, its role and its spec.
      num_bytes: on one device, of one of those that it stands for; None if no type's size is known.
      count: number of arguments below it, or one.
      copies: number of siblings that it stands for.
      children: the subtree.
    """

    label: str
    described: tuple[str, str, str] | None = None
    num_bytes: int | None = 0
    count: int = 1
    copies: int = 1
    children: tuple["ArgumentNode", ...] = ()

    @property
    def shape(self) -> object:
        """Equal for nodes that hold the same arguments but for the number in their own label."""
        return self.described or tuple((child.label, child.copies, child.shape) for child in self.children)

    @property
    def all_bytes(self) -> int | None:
        """On one device, of all those that it stands for."""
        return None if self.num_bytes is None else self.copies * self.num_bytes


Branch = dict[str, "Branch | ArgumentNode"]
"""Arguments by piece of their path."""


def argument_tree(plan: PlanValues) -> Html:
    """The tree, with a field that filters it and a choice of its order."""
    root = tree(plan)
    smallest = sorted(_leaves(root), key=lambda leaf: -(leaf.num_bytes or 0))[MAX_LEAVES:]
    left_out = sum(leaf.copies for leaf in smallest)
    root = _without(root, {id(leaf) for leaf in smallest})
    tools = element(
        "form",
        element("label", "Filter", for_="filter"),
        element("input", type="search", id="filter", placeholder="a path, a role, a spec, a type"),
        element("label", "Order", for_="order"),
        element(
            "select",
            *(element("option", word, value=value) for value, word in _ORDERS.items()),
            id="order",
        ),
        element("output", "", for_="filter", aria_live="polite"),
        class_="tools",
    )
    head = element(
        "div",
        *(element("span", word) for word in ("path", "type", "role", "spec", "bytes")),
        class_="head",
        aria_hidden="true",
    )
    more = f"{plural(left_out, 'smaller argument')} left out: the plan's file has all." if left_out else None
    note = element("p", more, class_="note") if more else None
    drawn = (_drawn(child, len(root.children) <= OPEN) for child in root.children)
    return element("div", tools, head, element("div", *drawn, class_="tree", id="argument-tree"), note)


_ORDERS = {"place": "as in the step", "bytes": "by bytes", "name": "by name"}


def tree(plan: PlanValues) -> ArgumentNode:
    """The arguments of a plan, folded."""
    specs = {name: spec for sharding in reversed(plan.shardings) for name, spec in sharding.arguments.items()}
    types = plan.outline.arguments if plan.outline else {}
    root: Branch = {}
    for name, spec in specs.items():
        _insert(root, name, types.get(name, ""), spec, plan.shardings[0].mesh)
    return _parent("", root)


def _insert(root: Branch, name: str, described: str, spec: str, mesh: Mapping[str, int]) -> None:
    """Puts an argument where its path leads; beside all others if an argument is in its way."""
    *path, last = pieces(name)
    branch = root
    for label in path:
        below = branch.setdefault(label, {})
        if isinstance(below, ArgumentNode):
            branch, last = root, name
            break
        branch = below
    last = name if last in branch else last
    (root if last == name else branch)[last] = _leaf(last, described, spec, mesh)


def _leaf(label: str, described: str, spec: str, mesh: Mapping[str, int]) -> ArgumentNode:
    kind, _, role = described.rpartition(" ")
    return ArgumentNode(
        label, (kind or "-", role.replace("_", " ") or "-", spec), local_bytes(kind, spec, mesh)
    )


def _folded(label: str, below: "Branch | ArgumentNode") -> ArgumentNode:
    """A node, and its only child in its place if it has one."""
    if isinstance(below, ArgumentNode):
        return below
    parent = _parent(label, below)
    only = parent.children[0]
    return (
        replace(only, label=label + only.label) if parent.children == (only,) and only.copies == 1 else parent
    )


def _parent(label: str, below: Branch) -> ArgumentNode:
    """A node whose children that are alike are one."""
    alike: dict[object, list[ArgumentNode]] = {}
    for child in (_folded(name, part) for name, part in below.items()):
        alike.setdefault(_kind(child), []).append(child)
    children = tuple(map(_one, alike.values()))
    known = [child.all_bytes for child in children if child.all_bytes is not None]
    count = sum(child.copies * child.count for child in children)
    return ArgumentNode(label, None, sum(known) if known else None, count, 1, children)


def _kind(node: ArgumentNode) -> object:
    """Equal for siblings that are alike: their labels differ in one number, as it is written without zeros before it."""
    numbers = _NUMBER.findall(node.label)
    is_numbered = len(numbers) == 1 and numbers[0] == str(int(numbers[0]))
    return (_NUMBER.sub("*", node.label), node.shape) if is_numbered else node.label


def _one(alike: Sequence[ArgumentNode]) -> ArgumentNode:
    """One node for several that are alike."""
    if len(alike) == 1:
        return alike[0]
    numbers = sorted(int(_NUMBER.findall(node.label)[0]) for node in alike)
    return replace(alike[0], label=_NUMBER.sub(ranges(numbers), alike[0].label), copies=len(alike))


def _leaves(node: ArgumentNode) -> Iterator[ArgumentNode]:
    if node.described:
        yield node
    for child in node.children:
        yield from _leaves(child)


def _without(node: ArgumentNode, left_out: Container[int]) -> ArgumentNode:
    """A node without some of its leaves, by identity; its numbers stay those of all."""
    kept = tuple(_without(child, left_out) for child in node.children if id(child) not in left_out)
    return replace(node, children=kept) if node.children else node


# --- drawing


def _drawn(node: ArgumentNode, is_open: bool) -> Html:
    label = element(
        "code",
        node.label.removesuffix(BOX),
        element("small", f" x {node.copies}") if node.copies > 1 else None,
    )
    num_bytes = node.all_bytes
    size = element("span", "-" if num_bytes is None else format_bytes(num_bytes), class_="number")
    if node.described:
        kind, role, spec = node.described
        return element(
            "div",
            label,
            element("span", kind),
            element("span", role),
            element("code", spec),
            size,
            class_="leaf",
            data_bytes=num_bytes or 0,
        )
    count = element("span", plural(node.copies * node.count, "array"))
    children = joined(_drawn(child, False) for child in node.children)
    return element(
        "details",
        element("summary", label, count, size),
        children,
        open=is_open and len(node.children) <= OPEN,
        data_bytes=num_bytes or 0,
    )
