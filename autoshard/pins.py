"""Where arguments must rest: as users pin them, and as another step on the same state has them.

A pin names an argument by its pytree path, whose beginning may be left out, or several by a path that is folded as
`print(plan)` folds it. What it says is a `PartitionSpec`, or a plan's own text. A whole plan pins all that its step and this
one share, and so does a step that is planned already: whatever runs on the state of a training step, such as an evaluation,
then finds it where it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import AXIS_NAMES, divides, from_partition_spec, read_partition_spec
from autoshard.search.memory.offload import may_rest_on_host
from autoshard.search.plan.argument_paths import Counterparts, ending_in, unfolded
from autoshard.search.plan.decisions import ON_HOST
from autoshard.search.plan.plan import Plan

Pins = Mapping[str, PartitionSpec | str] | Plan

MAX_NAMES = 4
"""Arguments that a message names. Source: a choice of ours."""


@dataclass(frozen=True, slots=True)
class Resting:
    """Where some arguments must rest.

    Attributes:
      specs: by full path.
      on_host: those of them that rest in the host's memory.
      mesh: what the specs are for; None where any mesh with their axes will do.
    """

    specs: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec])
    on_host: tuple[str, ...] = ()
    mesh: tuple[int, ...] | None = None

    def then(self, others: "Resting") -> "Resting":
        """Those of others too, where nothing is said here."""
        on_host = (name for name in others.on_host if name not in self.specs)
        specs = {**others.specs, **self.specs}
        return Resting(specs, (*self.on_host, *on_host), self.mesh or others.mesh)

    def offload(self, asked: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        """What is on the host, as `Options` has it, with what was asked for besides.

        Raises:
          InputError: nothing shall be there.
        """
        if not self.on_host:
            return asked
        if isinstance(asked, str):
            raise InputError(
                f'pin {self.on_host[0]!r} rests on the host, and offload="{asked}" forbids it. Leave one of them out'
            )
        return (*(asked or ()), *self.on_host)


ANYWHERE = Resting()


@dataclass(frozen=True, slots=True)
class Rested:
    """A plan, and the shapes of its step's arguments by path, None where they are not known."""

    plan: Plan
    shapes: Mapping[str, tuple[int, ...] | None]

    @classmethod
    def by(cls, plan: Plan) -> "Rested":
        """What a plan alone says."""
        return cls(plan, dict.fromkeys(plan.decisions.arguments))


def pinned(step: Step, pin: Pins, num_devices: int) -> Resting:
    """What a user pins.

    Args:
      step: the traced step.
      pin: specs by path, or a plan.
      num_devices: of the cluster; the mesh of a plan for as many is kept.

    Raises:
      InputError: a path names no argument, or several; a spec cannot be read; two pins contradict each other.
    """
    if isinstance(pin, Plan):
        shared = as_in(step, Rested.by(pin))
        if not shared.specs:
            theirs, ours = _some(pin.decisions.arguments), _some([a.name for a in step.arguments])
            raise InputError(
                f"pin= is a plan for {pin.step!r}, which shares no argument with {step.name!r}: {theirs} there; {ours} here"
            )
        return shared if pin.num_devices == num_devices else Resting(shared.specs, shared.on_host)
    return _by_path(step, pin)


def allowed(step: Step, pin: Pins, mesh: tuple[int, ...]) -> tuple[Pins | None, tuple[str, ...]]:
    """The pins that another call of their step allows.

    Args:
      step: the call, traced.
      pin: as for `pinned`, which has read it for the first call.
      mesh: the mesh that the first call runs on.

    Returns:
      The pins of arguments that are there and split so, and for each of the others why not.
    """
    if isinstance(pin, Plan):
        return (pin if as_in(step, Rested.by(pin)).specs else None), ()
    shapes = dict(
        zip((a.name for a in step.arguments), (x.shape for x in step.abstract_inputs()), strict=True)
    )
    names = {key: ending_in(key, tuple(shapes)) or unfolded(key, tuple(shapes)) for key in pin}
    kept = {
        name: pin[key]
        for key in pin
        for name in names[key]
        if _may_rest(_read(key, pin[key])[0], shapes[name], mesh)
    }
    lost = [(key, name) for key in pin for name in names[key] if name not in kept]
    return kept, tuple(f"{name} of shape {shapes[name]} does not split as {pin[key]}" for key, name in lost)


def as_in(step: Step, rested: Rested) -> Resting:
    """How another step rests what this one shares with it; what is in doubt, or does not split so, is left out.

    Args:
      step: the traced step.
      rested: the other step's arguments.
    """
    decisions, others = rested.plan.decisions, Counterparts(rested.shapes)
    mesh = tuple(decisions.mesh.values())
    may_be_on_host = {step.arguments[i].name for i in may_rest_on_host(step)}
    specs: dict[str, PartitionSpec] = {}
    on_host: list[str] = []
    for argument, own in zip(step.arguments, step.abstract_inputs(), strict=True):
        said = {decisions.arguments.get(other, "") for other in others.of(argument.name, own.shape)}
        text = said.pop() if len(said) == 1 else ""
        spec = read_partition_spec(text.removesuffix(ON_HOST)) if text else None
        if spec is not None and _may_rest(spec, own.shape, mesh):
            specs[argument.name] = spec
            on_host += [argument.name] * (text.endswith(ON_HOST) and argument.name in may_be_on_host)
    return Resting(specs, tuple(on_host), mesh)


def _may_rest(spec: PartitionSpec, shape: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    return len(spec) <= len(shape) and divides(from_partition_spec(spec, AXIS_NAMES[len(mesh)]), shape, mesh)


def _by_path(step: Step, pin: Mapping[str, Any]) -> Resting:
    names = [a.name for a in step.arguments]
    specs: dict[str, PartitionSpec] = {}
    on_host: list[str] = []
    for key, said in pin.items():
        spec, is_on_host = _read(key, said)
        for name in _named(key, names):
            if specs.setdefault(name, spec) != spec:
                raise InputError(
                    f"pin {key!r} says {spec} of {name}, and another pin says {specs[name]}. Keep one of them"
                )
            on_host += [name] * (is_on_host and name not in on_host)
    return Resting(specs, tuple(on_host))


def _read(key: str, said: Any) -> tuple[PartitionSpec, bool]:
    """A spec, and whether it is on the host."""
    if isinstance(said, PartitionSpec):
        return said, False
    try:
        if not isinstance(said, str):
            raise PlanError(f"got {said!r:.60}")
        return read_partition_spec(said.removesuffix(ON_HOST)), said.endswith(ON_HOST)
    except PlanError as e:
        raise InputError(
            f"pin {key!r}: wanted a jax.sharding.PartitionSpec, or its text as in a plan; {e}"
        ) from e


def _named(key: str, names: Sequence[str]) -> tuple[str, ...]:
    """The arguments that a pin is for: one, or those that its folded path stands for."""
    hits = ending_in(key, names)
    if len(hits) > 1:
        raise InputError(f"pin {key!r} matches {_some(hits)}. Name one argument by its pytree path")
    if found := hits or unfolded(key, names):
        return found
    raise InputError(
        f"pin {key!r} matches no argument; they are named like {names[0]}. Name one argument by its pytree path, or several "
        "as print(plan) shows them, such as ['layers'][*]['w*']"
    )


def _some(names: Any) -> str:
    shown = list(names)
    return ", ".join(shown[:MAX_NAMES]) + ", ..." * (len(shown) > MAX_NAMES)
