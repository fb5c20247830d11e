"""The specs of a plan, checked without its step: each must be well formed, and name axes of its mesh, each once.

Shapes are not known without the step: it says if a dimension divides. A plan that was edited by hand is refused sooner by
this check, and by whoever has no step at hand.
"""

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.spec import parse_spec
from autoshard.search.plan.decisions import SPEC
from autoshard.search.plan.resting_places import without_place
from autoshard.search.plan.values import Sharding


def check_specs(decisions: Sharding, place: str) -> None:
    """Checks all specs.

    Raises:
      PlanError: a spec that cannot be; names its decision.
    """
    for name, text in decisions.arguments.items():
        _check(without_place(text), True, decisions, f"{place}: {name}")
    for table in (decisions.ops, decisions.copies):
        for name, text in table.items():
            _check(text, False, decisions, f"{place}: {name}")


def _check(text: str, is_one: bool, decisions: Sharding, where: str) -> None:
    """A text that is one spec, or has specs in it."""
    specs, rest = SPEC.findall(text), SPEC.sub("", text).strip()
    if not specs or "(" in rest or (is_one and (rest or len(specs) > 1)):
        raise PlanError(
            f"{where}: wanted {'a spec' if is_one else 'specs'} such as P('data', None), got {text!r}"
        )
    try:
        for spec in specs:
            parse_spec(f"P({spec})", tuple(decisions.mesh))
    except PlanError as e:
        raise PlanError(f"{where}: {e}") from None
