"""The files of a profiled run, in the folder that was given to `jax.profiler.trace`.

The profiler writes `plugins/profile/<time>/<host>.xplane.pb`, and beside it `<host>.trace.json.gz`; hosts that share a disk
write into one folder. Of several runs, the last one counts.
"""

from itertools import chain
from pathlib import Path

from autoshard.cost_model.errors import InputError
from autoshard.traces import trace_json, xplane
from autoshard.traces.kernel import TracedKernel

_READERS = {".xplane.pb": xplane.kernels, trace_json.ENDING: trace_json.kernels}
"""By ending, the better file first."""


def traced_kernels(path: Path) -> list[TracedKernel]:
    """The kernels of the last run in a folder, or of one file.

    Raises:
      InputError: there is no run, it cannot be read, or it has no kernels.
    """
    if not path.exists():
        raise InputError(f"there is no {path}: name the folder that was given to jax.profiler.trace")
    for ending, read in _READERS.items():
        if files := _last_run(path, ending):
            found = list(chain.from_iterable(map(read, files)))
            return found or _none(files[0])
    raise InputError(
        f"{path} holds no profile: wanted {' or '.join(f'*{ending}' for ending in _READERS)}, which jax.profiler.trace "
        "writes when its with block ends, or jax.profiler.stop_trace is called"
    )


def _last_run(path: Path, ending: str) -> list[Path]:
    """The files of all hosts of the last run; folders of runs are named by their time."""
    found = [path] if path.is_file() and path.name.endswith(ending) else sorted(path.rglob(f"*{ending}"))
    return [file for file in found if file.parent == found[-1].parent]


def _none(file: Path) -> list[TracedKernel]:
    raise InputError(
        f"{file} has no kernels of a GPU: profile a process that owns GPUs, while it runs the step, and see its first lines "
        "for a complaint of CUPTI, the library that sees kernels"
    )
