"""The process of XLA's GPU compiler. `cost_model.xla.process` starts it as `python -m autoshard.cost_model.xla.child`.

The process reads its jobs from its standard input: a line of JSON (`cuda_folder`, and `jobs`, each with `topology`,
`target_config` and `module_bytes`), then the lowered programs. For each job it writes a line of JSON to its standard
output: the fields of `compiler.Compiled`, or `error` with the compiler's message. The first error ends the run. The user's
code never runs here.

Standard input stays open during the work, as a sign that the parent lives. When it closes, for whatever reason, this
process removes the folder for the compiler's temporary files, then kills itself and all processes that the compiler has
started.
"""

import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main() -> None:
    """Compiles the jobs from standard input and writes the answers to standard output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # native code's output must not mix with the answer
    asked = json.loads(sys.stdin.buffer.readline())
    modules = [sys.stdin.buffer.read(job["module_bytes"]) for job in asked["jobs"]]
    threading.Thread(target=_end_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
    _offer_to_the_kernel()
    with answer:
        for job, module in zip(asked["jobs"], modules, strict=True):
            found = _compiled(job, module, asked["cuda_folder"])
            answer.write(json.dumps(found) + "\n")
            answer.flush()
            if "error" in found:
                return


def _compiled(job: dict[str, Any], module: bytes, cuda_folder: str) -> dict[str, Any]:
    import jax  # this takes seconds, and the parent may be gone by then

    from autoshard.cost_model.xla import compiler

    try:
        devices = compiler.described_devices(job["topology"], job["target_config"])
        return asdict(compiler.compile_module(module, devices, cuda_folder))
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as e:
        return {"error": str(e)}


def _end_with_parent(line: int) -> None:
    os.read(line, 1)  # nothing more is sent: the read returns when the other end closes
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _offer_to_the_kernel() -> None:
    """Makes the kernel kill this process, not the user's, when the host's memory runs out."""
    score = Path("/proc/self/oom_score_adj")
    if score.exists():
        score.write_text("1000")


if __name__ == "__main__":
    main()
