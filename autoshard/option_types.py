"""The types of options, checked where the user passes them, before the step is traced.

Without this check a wrong type would surface at the first call, inside the search, as a `TypeError` in a line of this
library. The table `OPTION_TYPES` has a phrase and a predicate for each option. None passes: it stands for an omitted
option. The range of a value (a mesh of as many devices as the cluster, a known schedule) is checked by the code that uses
it.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.mixed_cluster import MixedCluster
from autoshard.options import ALWAYS, AUTO, IN_DOUBT, NEVER
from autoshard.parallelized import Parallelized
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.text_table import WIDTH


@dataclass(frozen=True, slots=True)
class OptionType:
    """The type of an option.

    Attributes:
      phrase: the option and its type in words: "wanted <phrase>, got ...".
      is_met: whether a value has that type.
    """

    phrase: str
    is_met: Callable[[Any], bool]


def check(**options: Any) -> None:
    """Refuses options of a wrong type.

    Raises:
      InputError: an option has a wrong type; the message names the wanted one.
    """
    for name, value in options.items():
        if value is not None and not is_met(name, value):
            raise InputError(f"wanted {OPTION_TYPES[name].phrase}, got {_in_a_line(value)}")


def is_met(name: str, value: Any) -> bool:
    """True if a value has the type of an option."""
    return OPTION_TYPES[name].is_met(value)


def _in_a_line(value: Any) -> str:
    """A value's `repr`, as far as it fits a line."""
    return f"{' '.join(repr(value).split()):.{WIDTH}}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_file(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_row_of(is_member: Callable[[Any], bool], value: Any) -> bool:
    """True for an ordered sequence of such members: a list, a tuple, a one-dimensional array; no text."""
    is_row = isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim == 1)
    return is_row and not _is_text(value) and all(map(is_member, value))


def _are_of(is_member: Callable[[Any], bool], value: Any) -> bool:
    """True for a collection of such members that is no mapping."""
    return isinstance(value, Collection) and not isinstance(value, Mapping) and all(map(is_member, value))


def _are_names(value: Any) -> bool:
    return _is_text(value) or _are_of(_is_text, value)


def _are_positions(value: Any) -> bool:
    return _is_count(value) or _are_of(_is_count, value)


def _are_pins(value: Any) -> bool:
    return isinstance(value, Plan) or (isinstance(value, Mapping) and all(map(_is_text, value)))


def _are_devices(value: Any) -> bool:
    return _is_row_of(lambda one: isinstance(one, jax.Device), value) and 0 < len(value) == len(set(value))


OPTION_TYPES = MappingProxyType(
    {
        "cluster": OptionType(
            "a cluster as '<count>x<GPU>', a JSON file or a Cluster",
            lambda v: _is_file(v) or isinstance(v, Cluster | MixedCluster),
        ),
        "memory": OptionType(
            "memory as text with a unit, such as '70GiB', or a whole number of bytes",
            lambda v: _is_text(v) or _is_number(v),
        ),
        "mesh": OptionType("a mesh as sizes of its axes, such as (2, 4)", lambda v: _is_row_of(_is_count, v)),
        "pin": OptionType("pin as specs by pytree path, such as {'w': P('data')}, or a plan", _are_pins),
        "state": OptionType("state as the pytree path of an argument, or several", _are_names),
        "donate": OptionType("donate as the pytree path of an argument, or several", _are_names),
        "remat": OptionType('remat="never", or nothing to have it searched', _is_text),
        "stages": OptionType(
            f"stages as a whole number, or {AUTO!r} to have it searched",
            lambda v: _is_count(v) or (_is_text(v) and v == AUTO),
        ),
        "schedule": OptionType("schedule as the name of one, such as '1f1b'", _is_text),
        "microbatches": OptionType("microbatches as a whole number", _is_count),
        "executor": OptionType("executor as the name of one, such as 'spmd'", _is_text),
        "offload": OptionType(
            "offload=\"never\", or names of what rests on the host in a tuple, such as ('optimizer_state',)",
            _are_names,
        ),
        "plan": OptionType("plan as a plan or its file", lambda v: _is_file(v) or isinstance(v, Plan)),
        "like": OptionType(
            "like as a parallelized step, or its plan (of one program) or that one's file",
            lambda v: _is_file(v) or isinstance(v, Parallelized | Plan),
        ),
        "time_limit_s": OptionType("time_limit_s as a number of seconds", _is_number),
        "timeout_s": OptionType("timeout_s as a number of seconds", _is_number),
        "devices": OptionType(
            "devices as different devices of JAX in a list, such as jax.devices()[:4]", _are_devices
        ),
        "static_argnums": OptionType(
            "static_argnums as the position of an argument, or several", _are_positions
        ),
        "static_argnames": OptionType("static_argnames as the name of an argument, or several", _are_names),
        "verify": OptionType(
            f"verify as {NEVER!r}, {IN_DOUBT!r} or {ALWAYS!r}",
            lambda v: _is_text(v) and v in (NEVER, IN_DOUBT, ALWAYS),
        ),
        "only": OptionType('only="shardings", or nothing for the whole step', lambda v: v == "shardings"),
        "form": OptionType(
            'form as "wrapper" or "written"', lambda v: _is_text(v) and v in ("wrapper", "written")
        ),
        "full": OptionType("full as True or False", lambda v: isinstance(v, bool | np.bool)),
        "target_config": OptionType("target_config as a text or its file", _is_file),
        "name": OptionType("name as the name of a decision in the plan", _is_text),
        "progress": OptionType("progress as a function that takes a line, such as print", callable),
    }
)
"""By option name. `search`, `emit`, `verify`, `eject`, `choices` and `explain` share some options of `parallelize`."""
