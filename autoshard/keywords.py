"""Keyword arguments of `search`, `emit`, `verify`, `eject`, `choices` and `explain`: options, or arguments of the step.

A step's arguments may be given by keyword, and keyword-only ones cannot be given otherwise. Some names are options, too: a
step may have an argument `state`, as `search` has an option `state=`. The value tells which one is meant. A value of the
option's type is the option: `state="average"`. Another value is the step's argument, if the step has one of that name:
`state={"w": ...}`. If an option takes the value and the step lacks its argument then, that is an error.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from autoshard import option_types
from autoshard.calls import Callee
from autoshard.cost_model.errors import InputError, closest
from autoshard.search.ir.trace import step_name


def split_keywords(
    function: str, callee: Callee, num_args: int, keywords: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The step's keyword arguments, and the options; None for an option whose value is the step's argument.

    Args:
      function: the name of the function that is called.
      callee: the step.
      num_args: number of the step's arguments that are given by position.
      keywords: keywords that are no option.
      options: the function's options.

    Raises:
      InputError: a keyword is neither an option nor an argument of the step, an option has a wrong type, or it has taken the
        value of an argument.
    """
    _check_known(function, callee, keywords, options)
    open_ones = _by_keyword(callee, num_args)
    ours = {
        name: value
        for name, value in options.items()
        if name in open_ones and value is not None and not option_types.is_met(name, value)
    }
    own = {name: None if name in ours else value for name, value in options.items()}
    option_types.check(**own)
    for name, parameter in open_ones.items():
        if _is_given(own.get(name)) and parameter.default is parameter.empty:
            raise InputError(
                f"{name}= is an option of {function}, and {step_name(callee.step)} lacks its argument of that name. Give "
                "the argument by position, or rename it"
            )
    return {**keywords, **ours}, own


def _check_known(
    function: str, callee: Callee, keywords: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuses a keyword that is neither an option nor an argument of the step."""
    if callee.parameters is None or _is_open(callee.parameters):
        return
    for name in keywords:
        if name not in callee.parameters.parameters:
            raise InputError(
                f"{function} has no option {name!r}{closest(name, [*options])}, and {step_name(callee.step)} no argument of "
                f"that name. Options are {', '.join(options)}"
            )


def _by_keyword(callee: Callee, num_args: int) -> dict[str, inspect.Parameter]:
    """The step's parameters that may be given by keyword, beside arguments by position."""
    if callee.parameters is None:
        return {}
    signature = inspect.signature(callee.step) if _is_open(callee.parameters) else callee.parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: p
        for i, p in enumerate(signature.parameters.values())
        if p.kind in named and not (i < num_args and p.kind is p.POSITIONAL_OR_KEYWORD)
    }


def _is_given(value: Any) -> bool:
    """True if an option is not left out."""
    return value is not None and value is not False


def _is_open(signature: inspect.Signature) -> bool:
    """True if a function takes keywords of any name, as a wrapper does."""
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
