"""Required layouts of arguments at rest: the user's pins, and the layout of a step that shares the state.

A pin names one argument by its pytree path, whose beginning may be omitted, or several: by a folded path as in
`print(plan)`, or by the path of a subtree. If several pins name an argument, the one that says most of its path decides. A
pin's value is a `PartitionSpec`, or the text of one in a plan. A whole plan, or a step with a plan, pins every argument that
both steps share. An evaluation then reads a training step's state without moving it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import AXIS_NAMES, divides, from_partition_spec, read_partition_spec
from autoshard.search.memory.offload import may_rest_on_host
from autoshard.search.plan.argument_paths import Counterparts, ending_in, near, pieces, unfolded, within
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.resting_places import is_on_host, without_place
from autoshard.search.plan.text_table import few

Pins = Mapping[str, PartitionSpec | str] | Plan

Precision = tuple[int, bool]
"""How much of an argument's path a pin says: up to which piece, and whether it names it without folding."""


@dataclass(frozen=True, slots=True)
class PinnedLayout:
    """The required layout of some arguments at rest.

    Attributes:
      specs: the arguments' specs, by full path.
      on_host: the paths among them whose arguments rest in the host's memory.
      mesh: the axis sizes that the specs are for; None if any mesh with their axes is allowed.
    """

    specs: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec])
    on_host: tuple[str, ...] = ()
    mesh: tuple[int, ...] | None = None

    def then(self, others: "PinnedLayout") -> "PinnedLayout":
        """This layout, completed by that of `others` for arguments that have no spec here."""
        on_host = (name for name in others.on_host if name not in self.specs)
        specs = {**others.specs, **self.specs}
        return PinnedLayout(specs, (*self.on_host, *on_host), self.mesh or others.mesh)

    def offload(self, asked: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        """The value of `Options.offload`: the user's choice, and the arguments that rest on the host.

        Raises:
          InputError: the user's choice forbids offloading.
        """
        if not self.on_host:
            return asked
        if isinstance(asked, str):
            raise InputError(
                f'pin {self.on_host[0]!r} rests on the host, and offload="{asked}" forbids it. Leave one of them out'
            )
        return (*(asked or ()), *self.on_host)


ANYWHERE = PinnedLayout()


@dataclass(frozen=True, slots=True)
class Rested:
    """A plan, and the shapes of its step's arguments by path; None for unknown shapes."""

    plan: Plan
    shapes: Mapping[str, tuple[int, ...] | None]

    @classmethod
    def by(cls, plan: Plan) -> "Rested":
        """A plan without its step, so that the shapes are unknown."""
        return cls(plan, dict.fromkeys(plan.decisions.arguments))


def pinned(step: Step, pin: Pins, num_devices: int) -> PinnedLayout:
    """The layout that the user's pins require.

    Args:
      step: the traced step.
      pin: specs by path, or a plan.
      num_devices: devices of the cluster; a pinned plan for this number also fixes the mesh.

    Raises:
      InputError: a path is ambiguous or names no argument, a spec is invalid, two pins contradict each other, or a plan
        shares no argument with the step.
    """
    if isinstance(pin, Plan):
        shared = as_in(step, Rested.by(pin))
        if not shared.specs:
            raise InputError(_apart("pin", step, Rested.by(pin)))
        return shared if pin.num_devices == num_devices else PinnedLayout(shared.specs, shared.on_host)
    return _by_path(step, pin)


def allowed(step: Step, pin: Pins, mesh: tuple[int, ...]) -> tuple[Pins | None, tuple[str, ...]]:
    """The pins of a step's first call that a later call allows.

    Args:
      step: the later call, traced.
      pin: the pins, which `pinned` has read for the first call.
      mesh: the mesh of the first call.

    Returns:
      The pins whose argument exists and can be split as they say, and a reason for each argument that cannot.
    """
    if isinstance(pin, Plan):
        return (pin if as_in(step, Rested.by(pin)).specs else None), ()
    shapes = dict(
        zip((a.name for a in step.arguments), (x.shape for x in step.abstract_inputs()), strict=True)
    )
    deciding = _deciding({key: _named(key, tuple(shapes)) for key in pin})
    asked = [(name, key) for name, keys in deciding.items() for key in keys]
    kept = {name: pin[key] for name, key in asked if _may_rest(_read(key, pin[key])[0], shapes[name], mesh)}
    lost = [(key, name) for name, key in asked if name not in kept]
    return kept, tuple(f"{name} of shape {shapes[name]} does not split as {pin[key]}" for key, name in lost)


def resting_like(step: Step, rested: Rested) -> PinnedLayout:
    """The layout in which the step of `like=` keeps the arguments that both share (see `as_in`).

    Raises:
      InputError: both share no argument.
    """
    others, own = Counterparts(rested.shapes), zip(step.arguments, step.abstract_inputs(), strict=True)
    if not any(others.of(argument.name, x.shape) for argument, x in own):
        raise InputError(_apart("like", step, rested))
    return as_in(step, rested)


def _apart(option: str, step: Step, rested: Rested) -> str:
    """The message about another step that shares no argument with this one; with shapes, where they are known."""
    theirs = [name if shape is None else f"{name} {shape}" for name, shape in rested.shapes.items()]
    shapes = zip(step.arguments, step.abstract_inputs(), strict=True)
    ours = [a.name if None in rested.shapes.values() else f"{a.name} {x.shape}" for a, x in shapes]
    return (
        f"{option}= is a plan for {rested.plan.step!r}, which shares no argument with {step.name!r}: {few(theirs)} there; "
        f"{few(ours)} here"
    )


def as_in(step: Step, rested: Rested) -> PinnedLayout:
    """The layout in which another step keeps the arguments that both share. Arguments with an ambiguous counterpart, or that
    cannot be split so, are omitted.

    Args:
      step: the traced step.
      rested: the other step's plan, with its arguments' shapes.
    """
    decisions, others = rested.plan.decisions, Counterparts(rested.shapes)
    mesh = tuple(decisions.mesh.values())
    may_be_on_host = {step.arguments[i].name for i in may_rest_on_host(step)}
    specs: dict[str, PartitionSpec] = {}
    on_host: list[str] = []
    for argument, own in zip(step.arguments, step.abstract_inputs(), strict=True):
        texts = {decisions.arguments.get(other, "") for other in others.of(argument.name, own.shape)}
        text = texts.pop() if len(texts) == 1 else ""
        spec = read_partition_spec(without_place(text)) if text else None
        if spec is not None and _may_rest(spec, own.shape, mesh):
            specs[argument.name] = spec
            on_host += [argument.name] * (is_on_host(text) and argument.name in may_be_on_host)
    return PinnedLayout(specs, tuple(on_host), mesh)


def _may_rest(spec: PartitionSpec, shape: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
    return len(spec) <= len(shape) and divides(from_partition_spec(spec, AXIS_NAMES[len(mesh)]), shape, mesh)


def _by_path(step: Step, pin: Mapping[str, Any]) -> PinnedLayout:
    names = [a.name for a in step.arguments]
    read = {key: _read(key, spec) for key, spec in pin.items()}
    deciding = _deciding({key: _checked(key, names) for key in pin})
    specs: dict[str, PartitionSpec] = {}
    on_host: list[str] = []
    for name, keys in deciding.items():
        specs[name], is_on_host = read[keys[0]]
        for key in keys[1:]:
            if read[key][0] != specs[name]:
                raise InputError(
                    f"pin {key!r} says {pin[key]} of {name}, and pin {keys[0]!r} says {pin[keys[0]]}. Keep one of them"
                )
            is_on_host |= read[key][1]
        on_host += [name] * is_on_host
    return PinnedLayout(specs, tuple(on_host))


def _deciding(named: Mapping[str, Mapping[str, Precision]]) -> dict[str, list[str]]:
    """The pins that decide on each argument: those that say most of its path."""
    found: dict[str, list[str]] = {}
    for key, hits in named.items():
        for name, precision in hits.items():
            most = named[found[name][0]][name] if name in found else precision
            if precision >= most:
                found[name] = [*(found.get(name, []) if precision == most else []), key]
    return found


def _read(key: str, spec: Any) -> tuple[PartitionSpec, bool]:
    """The spec of a pin, and True if it places the argument on the host."""
    if isinstance(spec, PartitionSpec):
        return spec, False
    try:
        if not isinstance(spec, str):
            raise PlanError(f"got {spec!r:.60}")
        return read_partition_spec(without_place(spec)), is_on_host(spec)
    except PlanError as e:
        raise InputError(
            f"pin {key!r}: wanted a jax.sharding.PartitionSpec, or its text as in a plan; {e}"
        ) from e


def _named(key: str, names: Sequence[str]) -> dict[str, Precision]:
    """The arguments that a pin names: one, all that its folded path stands for, or all of a subtree."""
    if hits := ending_in(key, names):
        return {name: (len(pieces(name)), True) for name in hits}
    if hits := unfolded(key, names):
        return {name: (len(pieces(name)), False) for name in hits}
    above = {name: "".join(path) for name, path in within(key, names).items()}
    return {name: (len(pieces(path)), bool(ending_in(key, (path,)))) for name, path in above.items()}


def _checked(key: str, names: Sequence[str]) -> dict[str, Precision]:
    """The arguments that a pin names.

    Raises:
      InputError: the pin names none, or does not say which of several arguments or subtrees it means.
    """
    found = _named(key, names)
    if not found:
        likely = near(key, names)
        hint = f" (did you mean {' or '.join(likely)}?)" if likely else f"; they are named like {names[0]}"
        raise InputError(
            f"pin {key!r} matches no argument{hint}. Name one argument or a part of them by its pytree path, or several as "
            "print(plan) shows them, such as ['layers'][*]['w*']",
            section="a-wrong-name",
        )
    meant = list(dict.fromkeys("".join(pieces(name)[:length]) for name, (length, _) in found.items()))
    if len(meant) > 1 and all(is_exact for _, is_exact in found.values()):
        raise InputError(
            f"pin {key!r} matches {few(meant)}. Name one of them by its whole pytree path",
            section="a-wrong-name",
        )
    return found
