"""How ops are called in plans: by phase, name scope and primitive."""

import re

from autoshard.search.ir.graph import Op

_TRANSFORM = re.compile(r"(?:transpose|jvp|vmap|remat|checkpoint)\(([^()]*)\)")


def scoped_name(op: Op, is_several: bool) -> str:
    """An op's scope, without the names of transformations, and its primitive; numbers become `*` where it stands for
    several."""
    scope = op.scope
    while _TRANSFORM.search(scope):
        scope = _TRANSFORM.sub(r"\1", scope)
    scope = "/".join(filter(None, scope.split("/")))
    scope = re.sub(r"\d+", "*", scope) if is_several else scope
    return f"{scope + '/' if scope else ''}{op.name}"


def unique(name: str, seen: dict[str, int]) -> str:
    """The name, numbered from its second time on."""
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name} #{seen[name]}"
