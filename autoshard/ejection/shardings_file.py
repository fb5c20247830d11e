"""The file with the shardings alone: a dict of specs by pytree path, for those who have a training loop of their own."""

import textwrap
from collections.abc import Mapping, Sequence

from autoshard.cost_model.units import format_mesh
from autoshard.ejection import source
from autoshard.ejection.layout import Tree
from autoshard.search.plan.plan import Plan

IMPORT_SPEC = "from jax.sharding import PartitionSpec as P"
HOST = "pinned_host"


def shardings_file(plan: Plan, mesh: Mapping[str, int], arguments: Sequence[Tree]) -> str:
    """The file's text."""
    shape = format_mesh(tuple(mesh.values()))
    paragraphs = [
        f"The shardings of the arguments of `{plan.step}` on {plan.cluster['name']}, a mesh of {shape} devices.",
        "`SPECS[argument]` has a spec for each array by its path, "
        '`jax.tree_util.keystr(path, simple=True, separator="/")`. State that the step returns has the specs of the state '
        "that it replaces. Arrays in `MEMORY_KINDS` rest in their host's memory.",
        f"Ejected by autoshard from the plan with the fingerprint {plan.fingerprint}.",
    ]
    parts = [docstring(paragraphs), IMPORT_SPEC, constants(mesh, arguments)]
    return "\n\n".join(parts) + "\n"


def docstring(paragraphs: Sequence[str]) -> str:
    """A module's docstring of these paragraphs; the first line stands alone."""
    lines = [
        textwrap.fill(p, source.MAX_WIDTH - 5, break_on_hyphens=False) if "\n" not in p else p
        for p in paragraphs
    ]
    body = "\n\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{body}\n"""'


def constants(mesh: Mapping[str, int], trees: Sequence[Tree]) -> str:
    """The assignments of `MESH`, `SPECS` and `MEMORY_KINDS`."""
    specs = {
        tree.name: {path: source.text(leaf.spec) for path, leaf in tree.leaves.items()} for tree in trees
    }
    kinds = {tree.name: dict.fromkeys(tree.hosted, source.quoted(HOST)) for tree in trees if tree.hosted}
    assigned = [
        f"MESH = {{{', '.join(f'{source.quoted(name)}: {size}' for name, size in mesh.items())}}}",
        source.dictionary("SPECS", specs),
        source.dictionary("MEMORY_KINDS", kinds),
    ]
    return "\n".join(assigned)
