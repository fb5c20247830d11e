"""A parser that refuses a wrong command line in one sentence, which names the argument and its correction.

It differs from `argparse` in four ways. The usage is printed on request only. A value may start with a hyphen, such as
-1GiB: `argparse` would take it for an option and complain that a value is missing. An option given twice is refused; the
second value would silently win. An unknown option is reported first, by the command that does not know it, with similar
ones.
"""

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from autoshard.cost_model.errors import AutoshardError, closest
from autoshard.display import say


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one sentence."""

    def __init__(self, **options: Any) -> None:
        self._options: dict[str, argparse.Action] = {}
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("action", None, _Once)

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an argument."""
        action = super().add_argument(*names, **options)
        self._options.update(dict.fromkeys(action.option_strings, action))
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses all arguments; there are no unknown ones, as these are refused."""
        arguments = self._with_values(args)
        self._check_options(arguments)
        namespace, others = super().parse_known_args(arguments, namespace)
        if others:
            self.error(f"unexpected argument: {' '.join(others)}")
        return namespace, []

    def error(self, message: str) -> NoReturn:
        """Ends the process with the status of a user's mistake."""
        say(f"error: {message} (see {self.prog} --help)")
        self.exit(AutoshardError.exit_status)

    def _with_values(self, arguments: Sequence[str]) -> list[str]:
        """The arguments, with a value that starts with a hyphen joined to its option."""
        joined: list[str] = []
        for argument in arguments:
            is_value = re.match("-[^-]", argument) and argument not in self._options
            if is_value and joined and any(self._takes_value(one) for one in self._meant(joined[-1])):
                joined[-1] += f"={argument}"
            else:
                joined.append(argument)
        return joined

    def _check_options(self, arguments: Sequence[str]) -> None:
        """Refuses options that do not exist, and values of options without one."""
        for argument in arguments:
            if argument == "--" or (self._subparsers and not argument.startswith("-")):
                return  # the rest is the command's
            name, has_value, value = argument.partition("=")
            if not name.startswith("-") or name == "-":
                continue
            if not (meant := self._meant(name)):
                self.error(f"there is no option {name}{self._hint(name)}")
            if has_value and not any(map(self._takes_value, meant)):
                self.error(f"{name} takes no value, got {value!r}")

    def _hint(self, name: str) -> str:
        if self._subparsers:
            return ". Options of a command stand behind it"
        return closest(name, list(self._options))

    def _meant(self, name: str) -> list[str]:
        """The options that a name, perhaps abbreviated, may stand for."""
        if name in self._options:
            return [name]
        return [known for known in self._options if name.startswith("--") and known.startswith(name)]

    def _takes_value(self, option: str) -> bool:
        return self._options[option].nargs is None


class _Once(argparse.Action):
    """Stores an option's value and refuses a second one, which would silently replace it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(
                self, f"it is given twice, the second time as {values}. Keep one of them"
            )
        setattr(namespace, self.dest, values)


# --- types of arguments


def mesh(text: str) -> tuple[int, ...]:
    """Sizes of mesh axes: 2x4 or 2,4."""
    try:
        return tuple(count(size) for size in re.split("[x,]", text.lower()))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"wanted sizes such as 2x4, got {text!r}") from None


def count(text: str) -> int:
    """A whole number, at least one."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"wanted a whole number, at least 1, got {text!r}")
    return number


def stages(text: str) -> int | str:
    """A number of stages, or auto."""
    try:
        return text if text == "auto" else count(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"wanted a number of stages, or auto, got {text!r}") from None


def kinds(text: str) -> tuple[str, ...] | str:
    """Kinds and paths of what may be on the host; or never."""
    named = tuple(name.strip() for name in text.split(","))
    if named == ("never",):
        return "never"
    if "never" in named or not all(named):
        raise argparse.ArgumentTypeError(
            f"wanted never, or names separated by commas such as optimizer_state,residuals, got {text!r}"
        )
    return named


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"wanted a positive number of seconds, got {text!r}")
    return number


def pin(text: str) -> tuple[str, str]:
    """The path of an argument, and its spec as text."""
    path, is_pair, spec = text.partition("=")
    if not (path.strip() and is_pair):
        raise argparse.ArgumentTypeError(
            f"wanted PATH=SPEC such as \"params['emb']=P('model')\", got {text!r}"
        )
    return path.strip(), spec


def names(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    named = tuple(name.strip() for name in text.split(","))
    if not all(named):
        raise argparse.ArgumentTypeError(f"wanted names separated by commas, got {text!r}")
    return named


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    return tuple(map(count, text.split(",")))


def price(text: str) -> tuple[str, float]:
    """A kind of GPU, and its price per hour."""
    kind, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (kind.strip() and math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"wanted KIND=PRICE such as h100=2.5, got {text!r}")
    return kind.strip(), value
