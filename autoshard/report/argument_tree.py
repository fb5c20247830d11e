"""The step's arguments as a tree: where each rests, its role, and its bytes on one device.

Layers are many and mostly alike. Siblings whose paths differ in a number, and that hold arguments of equal type, role and
spec, are one node: `['block_0-11']`, twelve times. A node says the bytes of all that it stands for. If a tree has
more leaves than a page can hold, the largest are shown, and the page says what is left out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autoshard.cost_model.units import format_bytes
from autoshard.report.markup import Html, element, joined
from autoshard.report.spec_shares import local_bytes
from autoshard.search.plan.argument_lines import ranges
from autoshard.search.plan.argument_paths import pieces
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import PlanValues

MAX_LEAVES = 500
"""Leaves on a page: each takes about 300 bytes, and a page has at most 300 KB."""

OPEN = 12
"""A node opens by itself if it has no more children than this, near the root."""


@dataclass(slots=True)
class Node:
    """An argument, or a subtree of arguments.

    Attributes:
      label: its piece of the path; of several alike, with their numbers as ranges.
      said: of an argument: its type, its role and its spec.
      num_bytes: on one device, of one of those that it stands for; None if a type's size is not known.
      count: number of arguments below it, or one.
      copies: number of siblings that it stands for.
      children: the subtree.
    """

    label: str
    said: tuple[str, str, str] | None = None
    num_bytes: int | None = 0
    count: int = 1
    copies: int = 1
    children: list["Node"] = field(default_factory=list["Node"])

    @property
    def shape(self) -> object:
        """Equal for nodes that hold the same arguments but for numbers in their paths."""
        return self.said or tuple((child.label, child.copies, child.shape) for child in self.children)

    @property
    def leaves(self) -> int:
        """Leaves that are drawn for it."""
        return sum(child.leaves for child in self.children) or 1


def argument_tree(plan: PlanValues) -> Html:
    """The tree, with a field that filters it and a choice of its order."""
    root = tree(plan)
    left_out = _pruned(root)
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


def tree(plan: PlanValues) -> Node:
    """The arguments of a plan, folded."""
    specs = {name: spec for sharding in reversed(plan.shardings) for name, spec in sharding.arguments.items()}
    types = plan.outline.arguments if plan.outline else {}
    mesh = plan.shardings[0].mesh
    root = Node("")
    for name, spec in specs.items():
        _insert(root, name, _leaf(types.get(name, ""), spec, mesh))
    return _folded(root)


def _leaf(said: str, spec: str, mesh: Mapping[str, int]) -> Node:
    kind, _, role = said.rpartition(" ")
    return Node("", (kind or "-", role.replace("_", " ") or "-", spec), local_bytes(kind, spec, mesh))


def _insert(root: Node, name: str, leaf: Node) -> None:
    node, path = root, pieces(name.removesuffix(".value"))
    for label in path[:-1]:
        found = next((c for c in node.children[-1:] if c.label == label and not c.said), None)
        found = found or next((c for c in node.children if c.label == label and not c.said), None)
        if found is None:
            found = Node(label)
            node.children.append(found)
        node = found
    leaf.label = path[-1]
    node.children.append(leaf)


def _folded(node: Node) -> Node:
    """A node whose children that are alike are one; and that has no single child but an argument."""
    if node.said:
        return node
    groups: dict[object, list[Node]] = {}
    for child in map(_folded, node.children):
        number = len(re.findall(r"\d+", child.label)) == 1
        key = (re.sub(r"\d+", "*", child.label), child.shape) if number else (child.label, id(child))
        groups.setdefault(key, []).append(child)
    children = [_one(group) for group in groups.values()]
    sizes = [None if c.num_bytes is None else c.copies * c.num_bytes for c in children]
    total = None if None in sizes else sum(s for s in sizes if s is not None)
    count = sum(child.copies * child.count for child in children)
    found = Node(node.label, None, total, count, 1, children)
    (only,) = children if len(children) == 1 and node.label else (None,)
    if only is None or only.copies > 1:
        return found
    only.label = node.label + only.label
    return only


def _one(group: list[Node]) -> Node:
    """One node for several that are alike."""
    first = group[0]
    if len(group) > 1:
        numbers = sorted(int(re.findall(r"\d+", child.label)[0]) for child in group)
        first.label = re.sub(r"\d+", ranges(numbers), first.label)
        first.copies = len(group)
    return first


def _pruned(root: Node) -> int:
    """Leaves out the smallest arguments of a tree that is too large; returns how many."""
    leaves = [*_all_leaves(root)]
    smallest = sorted(leaves, key=lambda pair: -(pair[1].num_bytes or 0))[MAX_LEAVES:]
    for parent, leaf in smallest:
        parent.children.remove(leaf)
    return sum(leaf.copies for _, leaf in smallest)


def _all_leaves(node: Node) -> Iterable[tuple[Node, Node]]:
    for child in node.children:
        yield from [(node, child)] if child.said else _all_leaves(child)


# --- drawing


def _drawn(node: Node, is_open: bool) -> Html:
    label = element("code", node.label, element("small", f" x {node.copies}") if node.copies > 1 else None)
    num_bytes = None if node.num_bytes is None else node.copies * node.num_bytes
    size = element("span", "-" if num_bytes is None else format_bytes(num_bytes), class_="number")
    if node.said:
        kind, role, spec = node.said
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
