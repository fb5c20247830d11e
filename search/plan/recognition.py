"""Whether a plan is for a step: by the fingerprint; and if not, how the step differs, by the outline."""

from collections import Counter

from autoshard.cost_model.errors import PlanError
from autoshard.search.ir.graph import Step, Value, walk
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.values import PlanValues
from autoshard.search.problem.fingerprint import fingerprint


def outlined(step: Step) -> Outline:
    """The outline of a traced step."""
    graph = step.graph
    ends = zip(step.results, graph.outputs, step.replaces, strict=True)
    ops = Counter(op.name for _, inner in walk(graph) for op in inner.ops)
    return Outline(
        {argument.name: f"{_type(graph.values[v])} {argument.role}" for v, argument in step.inputs},
        {name: _type(graph.value(atom)) for name, atom, replaced in ends if replaced is None},
        dict(sorted(ops.items())),
    )


def check_is_for(plan: PlanValues, step: Step, place: str) -> None:
    """Checks that a plan was made for a step.

    Raises:
      PlanError: the plan was made for another step; the message says how this one differs.
    """
    if plan.fingerprint == fingerprint(step):
        return
    other = "another step" if plan.step == step.name else f"another step, {plan.step!r}"
    how = "the plan has no outline of that one to compare it with"
    if plan.outline is not None:
        how = outlined(step).difference(plan.outline)
    raise PlanError(f"{place} was made for {other}. In {step.name!r}, {how}. Search again for this step")


def _type(value: Value) -> str:
    """A value's type: `float32[64,16]`."""
    return f"{value.dtype.name}[{','.join(map(str, value.shape))}]"
