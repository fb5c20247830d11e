"""Runs the compiler in a process of its own, so that the user's JAX, flags and memory stay untouched.

The child (`cost_model.xla.child`) receives the lowered programs through a pipe, and the environment that the compiler
needs, with the plugin on its path (`cost_model.xla.plugin`). It leads its own process group. So Ctrl-C does not reach it,
the whole group is killed if the parent stops waiting early, and the group kills itself when its parent ends. The side that
ends the child removes the compiler's temporary folder.

XLA needs an assembler and a linker from the CUDA toolkit for its kernels. These kernels never run, and neither tool
affects fusions, buffers or collectives. So stand-ins that write a dummy file replace both, and an empty library
replaces that of the mathematical functions. This needs no toolkit, works for GPUs that the toolkit no longer supports,
and saves time (a 7B model, scanned: 16 s instead of 27 s, with equal HLO and sizes to the byte).
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import CompilerError
from autoshard.cost_model.xla.compiler import ENVIRONMENT, Compiled, check, topology
from autoshard.cost_model.xla.gpu_targets import scheduler_options, target_config
from autoshard.cost_model.xla.plugin import provided

_ROOT = Path(__file__).parents[3]
_COMMAND = (sys.executable, "-P", "-m", "autoshard.cost_model.xla.child")
_TICK_S = 1.0
"""Seconds between two progress lines."""
_MESSAGE_CHARS = 300
"""Most characters of the compiler's message that are shown. Source: a choice of ours, some three lines."""

_STAND_IN = """\
#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in
    --version) echo "Cuda compilation tools, release 13.0, V13.0.88";;
    -o) shift; echo nothing > "$1";;
  esac
  shift
done
"""
"""A stand-in for `ptxas` and `nvlink`: XLA only asks for a version and then for a file. Source: the command lines of XLA
of 2026, `xla/stream_executor/cuda/subprocess_compilation.cc`."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """The compiler's settings.

    Attributes:
      target_config: XLA's description of the GPU in text, for a GPU that is not among the presets.
      timeout_s: time limit for one program; None for no limit.
      until_s: the time, by `time.monotonic`, when all compiling must have ended; None for no end.
      flags: options added to `XLA_FLAGS`.
    """

    target_config: str | None = None
    timeout_s: float | None = None
    until_s: float | None = None
    flags: str = ""

    def with_options(self, options: Mapping[str, str]) -> "Compiler":
        """The settings with further options of XLA, by name."""
        flags = (self.flags, *(f"--{name}={value}" for name, value in options.items()))
        return replace(self, flags=" ".join(filter(None, flags)))

    def left_s(self, elapsed_s: float) -> float:
        """Seconds that are left for a program that has taken so many."""
        of_program = math.inf if self.timeout_s is None else self.timeout_s - elapsed_s
        of_all = math.inf if self.until_s is None else self.until_s - time.monotonic()
        return min(of_program, of_all)


@dataclass(frozen=True, slots=True)
class Job:
    """A lowered program to compile.

    Attributes:
      module: the bytecode (`_jax.module_bytes`) of a program over all devices of the cluster, in its order.
      cluster: a cluster of GPUs.
      memory_bytes: memory of each device in its description (see `compiler.memory_for_cap`); by default the GPU's own.
    """

    module: bytes
    cluster: Cluster
    memory_bytes: int | None = None


def compile_apart(
    module: bytes,
    cluster: Cluster,
    memory_bytes: int | None = None,
    compiler: Compiler = Compiler(),
    progress: Callable[[str], None] = lambda line: None,
) -> Compiled:
    """Compiles one lowered program in a process of its own; see `Job` and `compile_all_apart` for arguments and errors."""
    (compiled,) = compile_all_apart([Job(module, cluster, memory_bytes)], compiler, progress)
    return compiled


def compile_all_apart(
    jobs: Sequence[Job],
    compiler: Compiler = Compiler(),
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Compiled, ...]:
    """Compiles lowered programs one after another, in one process of their own.

    Args:
      jobs: the programs to compile, for GPUs of one kind.
      compiler: the compiler's settings.
      progress: called about once a second with a line that names the current program and its elapsed time.

    Raises:
      InputError: the compiler cannot be installed, or cannot compile for this cluster.
      CompilerError: the compiler failed, ran out of memory or took too long.
    """
    (name,) = {job.cluster.device.name for job in jobs}
    for job in jobs:
        check(job.cluster, compiler.target_config)
    plugin = provided(progress)
    hiding = (f"--{k}={v}" for k, v in scheduler_options(name).items())
    flags = " ".join(filter(None, (*hiding, compiler.flags)))
    with (
        tempfile.TemporaryDirectory(prefix="autoshard-", ignore_cleanup_errors=True) as folder,
        open(os.path.join(folder, "answer"), "w+b") as answer,
        open(os.path.join(folder, "errors"), "w+b") as errors,
    ):
        _write_stand_ins(Path(folder))
        child = subprocess.Popen(
            _COMMAND,
            env=_environment(flags, folder, plugin),
            stdin=subprocess.PIPE,
            stdout=answer,
            stderr=errors,
            process_group=0,
        )
        try:
            asked = {"cuda_folder": folder, "jobs": [_described(job, compiler) for job in jobs]}
            _send(child, json.dumps(asked).encode() + b"\n")
            for job in jobs:
                _send(child, job.module)
            _wait(child, Path(answer.name), len(jobs), compiler, progress)
        finally:
            _end(child)
        return _answers(child.returncode, _text(answer), _text(errors))


def _described(job: Job, compiler: Compiler) -> dict[str, Any]:
    return {
        "topology": topology(job.cluster),
        "target_config": target_config(job.cluster.device.name, job.memory_bytes, compiler.target_config),
        "module_bytes": len(job.module),
    }


def _write_stand_ins(folder: Path) -> None:
    tools, libdevice = folder / "bin", folder / "nvvm" / "libdevice"
    tools.mkdir()
    for tool in ("ptxas", "nvlink"):
        (tools / tool).write_text(_STAND_IN)
        (tools / tool).chmod(0o700)
    libdevice.mkdir(parents=True)
    (libdevice / "libdevice.10.bc").write_text("; an empty LLVM module\n")


def _environment(flags: str, folder: str, plugin: Path | None = None) -> dict[str, str]:
    own = [str(path) for path in (_ROOT, plugin) if path is not None]
    path = os.pathsep.join(filter(None, (*own, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "TMPDIR": folder}
    environment["XLA_FLAGS"] += f" {flags}"
    return environment


def _send(child: "subprocess.Popen[bytes]", data: bytes) -> None:
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child has ended already: its exit status says why
        child.stdin.write(data)
        child.stdin.flush()


def _wait(
    child: "subprocess.Popen[bytes]",
    answer: Path,
    num_jobs: int,
    compiler: Compiler,
    progress: Callable[[str], None],
) -> None:
    """Waits until the child has ended; each line of its answer is a finished program."""
    start_s, num_done = time.monotonic(), 0
    while child.poll() is None:
        if (done := answer.read_bytes().count(b"\n")) > num_done:
            start_s, num_done = time.monotonic(), done
        elapsed_s = time.monotonic() - start_s
        which = f"{min(num_done + 1, num_jobs)} of {num_jobs} " if num_jobs > 1 else ""
        progress(f"compiling {which}({elapsed_s:.0f} s)")
        left_s = min(_TICK_S, compiler.left_s(elapsed_s))
        if left_s <= 0:
            limit_s = round(elapsed_s) if compiler.timeout_s is None else compiler.timeout_s
            raise CompilerError(
                f"the compiler was stopped after {limit_s:g} s, the time limit. Give it more time, or a smaller program"
            )
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(left_s)


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Kills the child's process group if the child still runs, and closes its pipe."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _answers(status: int, answer: str, errors: str) -> tuple[Compiled, ...]:
    if status == -signal.SIGKILL:
        raise CompilerError(
            "the compiler was killed, as happens when the host's memory runs out. Close other programs, or compile on a "
            "machine with more memory"
        )
    if status != 0:
        raise CompilerError(f"the compiler ended with status {status}: {shortened(errors)}")
    answers: list[dict[str, Any]] = [json.loads(line) for line in answer.splitlines()]
    for one in answers:
        if "error" in one:
            raise CompilerError(f"the compiler refused the program: {shortened(one['error'])}")
    return tuple(Compiled(**one) for one in answers)


_NOISE = re.compile(r"^(\s*@|\s*$|\*\*\*|[WI]\d{4} |WARNING|Traceback|\s+File |-+$)")
_GLOG = re.compile(r"^[EF]\d{4} [\d:.]+\s+\d+ [\w./-]+:\d+\] ")
_STATUS = re.compile(r"^(?:[\w.]*JaxRuntimeError: )?(?:[A-Z]+(?:_[A-Z]+)*: )?")
_OP = re.compile(r'op_name="([^"]+)"')
_SOURCES = (
    re.compile(r'source_file="([^"]+)" source_line=(\d+)'),
    re.compile(r'"([^"\s]+\.py)":(\d+)'),
)


def shortened(message: str) -> str:
    """The most useful line of the compiler's message, with the op and the source line if the message names them."""
    lines = [line for line in message.splitlines() if not _NOISE.match(line)] or ["it gave no reason"]
    last = lines[-1] if "Traceback (most recent call last)" in message else lines[0]
    fatal = next((line for line in lines if re.match(r"F\d{4} ", line)), last)
    text = _STATUS.sub("", _GLOG.sub("", fatal.strip()))[:_MESSAGE_CHARS]
    op = _OP.search(message)
    source = next((found for pattern in _SOURCES if (found := pattern.search(message))), None)
    where = [op[1]] if op and op[1] not in text else []
    where += [f"{source[1]}:{source[2]}"] if source else []
    return f"{text} ({', '.join(where)})" if where else text
