"""TARGET: the command line's name for a step and its arguments.

`file.py:function` or `package.module:function`, a function without arguments that returns `(train_step, args)`. Any error
in it is a mistake in the user's code, and is reported in one line.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autoshard import api
from autoshard.cost_model.errors import AutoshardError, InputError
from autoshard.cost_model.xla.gpu_targets import NEWEST, compute_capability
from autoshard.search.ir._jax_kernels import cudnn_for
from autoshard.search.ir.trace import TRACE_ERRORS


@contextlib.contextmanager
def target(text: str) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The step and its arguments from a TARGET; the TARGET's folder is on `sys.path` inside the context."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(f"wanted TARGET as file.py:function or package.module:function, got {text!r}")
    path = Path(place)
    is_file = place.endswith(".py") or path.is_file() or os.sep in place
    if is_file and not path.is_file():
        raise InputError(f"TARGET {text}: there is no file {place}")
    saved = list(sys.path)
    sys.path.insert(0, str(path.resolve().parent) if is_file else os.getcwd())
    try:
        module = _file_module(path, text) if is_file else _named_module(place, text)
        yield _step_and_args(_function(module, name, text), text)
    finally:
        sys.path[:] = saved


def _file_module(path: Path, text: str) -> types.ModuleType:
    name = path.stem if path.stem not in sys.modules else f"autoshard_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"TARGET {text}: {path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _user_code(functools.partial(spec.loader.exec_module, module), text)
    return module


def _named_module(name: str, text: str) -> types.ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        found = None
    if found is None:
        raise InputError(f"TARGET {text}: there is no module {name!r} to import from {os.getcwd()}")
    return _user_code(lambda: importlib.import_module(name), text)


def _function(module: types.ModuleType, name: str, text: str) -> Callable[[], Any]:
    if not hasattr(module, name):
        own = [
            k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        raise InputError(f"TARGET {text}: there is no {name!r}; functions there: {', '.join(own) or 'none'}")
    function = getattr(module, name)
    if not callable(function):
        raise InputError(f"TARGET {text}: {name} is no function but {type(function).__name__}")
    parameters = inspect.signature(function).parameters.values()
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if wanted:
        raise InputError(
            f"TARGET {text}: {name} must take no arguments and return (train_step, args), but it takes "
            f"{', '.join(wanted)}"
        )
    return function


def _step_and_args(function: Callable[[], Any], text: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    with cudnn_for(compute_capability(NEWEST)):  # the state's shapes may need a model's attention
        made = _user_code(function, text)
    wanted = f"TARGET {text} must return (train_step, args)"
    if not isinstance(made, tuple) or len(made) != 2:
        size = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise InputError(f"{wanted}; it returned {type(made).__name__}{size}")
    step, args = made
    if not callable(step):
        raise InputError(f"{wanted}; its train_step is {type(step).__name__}, not a function")
    if not isinstance(args, tuple | list):
        raise InputError(f"{wanted}; its args are {type(args).__name__}, not a tuple")
    step = step.__wrapped__ if isinstance(step, api.Parallelized) else step  # type: ignore[attr-defined]

    @functools.wraps(step, updated=())
    def traced(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except TRACE_ERRORS:
            raise  # tracing words these
        except Exception as e:  # the user's code may raise anything
            raise _raised(e, "it") from e

    traced.__name__ = getattr(step, "__name__", type(step).__name__)
    return traced, tuple(args)


def _user_code[T](call: Callable[[], T], text: str) -> T:
    """Calls the user's function; any exception becomes an `InputError` of one line."""
    try:
        return call()
    except AutoshardError:
        raise
    except (Exception, SystemExit) as e:
        raise _raised(e, f"TARGET {text}") from e


def _raised(error: BaseException, who: str) -> InputError:
    """An error of one line: the exception, and the innermost line of the user's code in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith("<")]
    own = [f for f in own if f.filename != __file__]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    reason = (str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines() or [""])[0]
    return InputError(f"{who} raised {type(error).__name__}{': ' if reason else ''}{reason}{where}")
