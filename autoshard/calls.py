"""A call of a step in pure form: a function of pytrees of arrays, ready to be traced, planned and run.

`jax.jit` accepts looser calls, and so does autoshard. Keyword arguments that have a position are passed by it, so that both
spellings have one signature. Static arguments are bound into the step; other values are another signature. NNX objects are
split into a static graph and arrays (`autoshard.nnx_objects`). The leaves of Equinox modules that are no arrays become part
of the arguments' structure (`autoshard.equinox_modules`). The remaining arguments are arrays.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard import equinox_modules, nnx_objects
from autoshard.cost_model.errors import InputError
from autoshard.search.ir import _jax
from autoshard.search.ir.in_place import InPlace
from autoshard.search.ir.trace import step_name


@dataclass(frozen=True, slots=True)
class Call:
    """A call in pure form.

    Attributes:
      step: the function to trace; it returns an `InPlace` if there are objects among the arguments.
      args: its positional arguments.
      kwargs: its keyword arguments.
      static: the static arguments, with their positions or names.
      apart: the arguments with their objects split into graph and arrays; None without objects.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static: tuple[tuple[int | str, Any], ...]
    apart: nnx_objects.Apart | None

    @property
    def positional(self) -> tuple[Any, ...]:
        """The arguments as a `Program` takes them."""
        return (*self.args, *(self.kwargs[k] for k in sorted(self.kwargs)))

    @property
    def whole(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the user's function, static ones included."""
        args = list(self.args)
        for key, value in self.static:
            if isinstance(key, int):
                args.insert(key, value)
        return tuple(args), {**self.kwargs, **{k: v for k, v in self.static if isinstance(k, str)}}

    @property
    def is_as_given(self) -> bool:
        """True if a program takes the caller's positional arguments as they are."""
        is_split = self.apart is not None or equinox_modules.are_in(self.args)
        return not (self.kwargs or self.static or is_split)

    @property
    def form(self) -> nnx_objects.ObjectsForm | None:
        """The static part of the objects; None without objects."""
        return None if self.apart is None else self.apart.form

    def with_static_ones(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Values of the `positional` arguments, with None for each static argument that was passed by position."""
        whole = list(values)
        for position in (key for key, _ in self.static if isinstance(key, int)):
            whole.insert(position, None)
        return tuple(whole)

    def result(self, returned: Any, given: Sequence[Any]) -> Any:
        """The call's result; the caller's objects are updated in place.

        Args:
          returned: the result of `step`.
          given: the arguments of the program, perhaps moved to its devices.
        """
        if not isinstance(returned, InPlace):
            return equinox_modules.whole(returned)
        assert self.apart is not None
        own = zip(jax.tree.leaves(self.positional), jax.tree.leaves(given), strict=True)
        held = [x if _is_spread(x) else there for x, there in own]
        return nnx_objects.put_together(returned, held, self.apart.references)


def _is_spread(x: Any) -> bool:
    """True if an array is on several devices. An object keeps such an array if the step only reads it."""
    return isinstance(x, jax.Array) and len(x.sharding.device_set) > 1


@dataclass(frozen=True, slots=True)
class Callee:
    """A step and its parameters.

    Attributes:
      step: the user's function.
      parameters: its own signature, not that of a wrapped function (see `_parameters`); None if it has none.
      static_positions: the positions of static arguments.
      static_names: the names of static arguments.
    """

    step: Callable[..., Any]
    parameters: inspect.Signature | None
    static_positions: frozenset[int] = frozenset()
    static_names: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        step: Callable[..., Any],
        static_argnums: int | Iterable[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
    ) -> "Callee":
        """A step's parameters; those are static that `jax.jit` around it or the arguments here name.

        Raises:
          InputError: a static argument is no parameter of the step.
        """
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames or ())
        is_one = isinstance(static_argnums, int | np.integer)
        positions = (int(static_argnums),) if is_one else tuple(static_argnums or ())
        parameters = _parameters(step)
        known = [] if parameters is None else [p.name for p in parameters.parameters.values()]
        is_open = parameters is None or any(
            p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.parameters.values()
        )
        unknown = [repr(n) for n in names if n not in known]
        unknown += [str(i) for i in positions if not -len(known) <= i < len(known)]
        if unknown and not is_open:
            raise InputError(
                f"{step_name(step)} has no argument {unknown[0]} to be static; it takes {', '.join(known)}"
            )
        positions = tuple(i + len(known) if i < 0 else i for i in positions)
        named = {
            *names,
            *_jax.static_names(nnx_objects.jitted(step)),
            *(known[i] for i in positions if i < len(known)),
        }
        return cls(
            step,
            parameters,
            frozenset({*positions, *(known.index(n) for n in named if n in known)}),
            frozenset(named),
        )

    def call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        like: nnx_objects.ObjectsForm | None = None,
        is_bound: bool = False,
    ) -> Call:
        """A call of the step.

        Args:
          args: positional arguments.
          kwargs: keyword arguments.
          like: a form that the objects probably have.
          is_bound: whether the first argument is the instance of a method; it is static if it is no pytree.

        Raises:
          InputError: a static argument cannot be hashed.
        """
        args, kwargs = self.by_position(args, kwargs)
        positions = self.static_positions
        if is_bound and jax.tree_util.all_leaves(args[:1]) and not nnx_objects.holds_objects(args[0]):
            positions = positions | {0}
        static = (
            *((i, args[i]) for i in sorted(positions) if i < len(args)),
            *((k, kwargs[k]) for k in sorted(self.static_names & kwargs.keys())),
        )
        step = self.step if not static else _bound(self, static)
        args = tuple(x for i, x in enumerate(args) if i not in positions)
        kwargs = {k: x for k, x in kwargs.items() if k not in self.static_names}
        if not nnx_objects.holds_objects((args, kwargs)):
            args, kwargs = equinox_modules.apart((args, kwargs))
            step = equinox_modules.pure(step) if equinox_modules.are_in((args, kwargs)) else step
            return Call(step, args, kwargs, static, None)
        apart = nnx_objects.apart((args, kwargs), like)
        args, kwargs = apart.pure
        return Call(nnx_objects.pure(step, apart.form), args, kwargs, static, apart)

    def refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError | None:
        """The error of a call that the step's own signature refuses; None for a call that it accepts."""
        if self.parameters is None:
            return None
        try:
            self.parameters.bind(*args, **kwargs)
        except TypeError as e:
            return e
        return None

    def filled(
        self, values: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments: `kwargs`, and `values` for the first parameters that these leave, keyword-only
        ones included."""
        parameters = () if self.parameters is None else self.parameters.parameters.values()
        free = [p for p in parameters if p.name not in kwargs and p.kind is not p.VAR_KEYWORD]
        if len(values) > len(free) or any(p.kind is p.VAR_POSITIONAL for p in free):
            return values, dict(kwargs)
        pairs = list(zip(free, values, strict=False))
        first = tuple(value for p, value in pairs if p.kind is p.POSITIONAL_ONLY)
        named = {p.name: value for p, value in pairs if p.kind is not p.POSITIONAL_ONLY}
        return self.by_position(first, {**named, **kwargs})

    def by_position(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, each keyword that has a position moved to it."""
        if not kwargs or self.parameters is None:
            return args, kwargs
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError:  # the step's own error is clearer
            return args, kwargs
        return bound.args, bound.kwargs


def _parameters(step: Callable[..., Any]) -> inspect.Signature | None:
    """A step's own signature. A wrapper may use keywords as it likes, so only `jax.jit` and `nnx.jit` are looked through."""
    while (inner := getattr(step, "__wrapped__", None)) is not None and (
        _jax.is_jitted(step) or nnx_objects.jitted(step) is not step
    ):
        step = inner
    try:
        return inspect.signature(step, follow_wrapped=False)
    except (ValueError, TypeError):
        return None


def _bound(callee: Callee, static: Sequence[tuple[int | str, Any]]) -> Callable[..., Any]:
    """The step with its static arguments bound."""
    for key, value in static:
        try:
            hash(value)
        except TypeError as e:
            raise InputError(
                f"the static argument {key!r} of {step_name(callee.step)} must be hashable, got {type(value).__name__} "
                f"{value!r:.60}"
            ) from e
    by_position = [(i, value) for i, value in static if isinstance(i, int)]
    by_name = {k: value for k, value in static if isinstance(k, str)}

    @functools.wraps(callee.step, updated=())
    def step(*args: Any, **kwargs: Any) -> Any:
        whole = list(args)
        for i, value in by_position:
            whole.insert(i, value)
        return callee.step(*whole, **kwargs, **by_name)

    step.__name__ = step_name(callee.step)
    if callee.parameters is not None:
        left = [
            p
            for i, p in enumerate(callee.parameters.parameters.values())
            if i not in {i for i, _ in by_position} and p.name not in by_name
        ]
        step.__signature__ = callee.parameters.replace(parameters=left)  # type: ignore[attr-defined]
    return step
